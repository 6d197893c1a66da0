#ifndef DAFJAX_CUDA_PARAMETERS_H_
#define DAFJAX_CUDA_PARAMETERS_H_

#include <cstdint>

#include "cuda/device.h"
#include "format/affine.h"
#include "format/float_type.h"

namespace dafjax {

DAFJAX_DEVICE bool IsFinite(float v) { return fabsf(v) < __uint_as_float(0x7f800000); }

// The range of some values.
struct Range {
  float lo;  // +Inf if there is no value, NaN if one is
  float hi;  // -Inf if there is no value

  static DAFJAX_DEVICE Range Empty() {
    return {__uint_as_float(0x7f800000), __uint_as_float(0xff800000)};
  }
  DAFJAX_DEVICE void Add(const Range& other) {
    lo = MinOrNan(lo, other.lo);
    hi = fmaxf(hi, other.hi);
  }
  // Whether all values are finite. Requires that there is one.
  DAFJAX_DEVICE bool IsOfFinite() const { return IsFinite(lo) && IsFinite(hi); }
};

// What the elements of a block are encoded with, and what is stored.
struct BlockParameters {
  float negative_start;
  float inverse;
  uint32_t scale;  // bfloat16
  uint32_t minimum;
  bool fits;  // no finite value of the block is beyond GreatestFixed
};

// q of README.md section 2, but for its upper limit: a number of steps, with as many bits
// behind the point as `inverse` says.
DAFJAX_DEVICE uint32_t FixedPoint(float v, float negative_start, float inverse) {
  return __float2uint_rz((negative_start + v) * inverse);
}

// The greatest code, with a fraction of zero. A fixed point that is cut off here,
// before noise is added, has the code that it has if the sum is cut off at 65535.
constexpr uint32_t GreatestFixed(int fraction) { return 0x10000 - (1u << fraction); }

// `v` rounded to bfloat16 towards minus infinity.
DAFJAX_DEVICE float RoundDown(float v) {
  const uint32_t bits = __float_as_uint(v);
  return __uint_as_float((bits + (0xffff & (0 - (bits >> 31)))) & 0xffff0000);
}

// `v` rounded to bfloat16 towards plus infinity.
DAFJAX_DEVICE float RoundUp(float v) {
  const uint32_t bits = __float_as_uint(v);
  return __uint_as_float((bits + (0xffff & ((bits >> 31) - 1))) & 0xffff0000);
}

// 2^exponent, for normal numbers.
DAFJAX_DEVICE float PowerOfTwo(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// 2 / levels; 0 if there are none: the scale is then 0.
constexpr float InverseHalfLevels(int bits) {
  return bits == 0 ? 0.0f : static_cast<float>(2.0 / ((1 << bits) - 1));
}

// Two stored parameters in one word: the scale, with its flag, above the minimum.
DAFJAX_DEVICE uint32_t JoinParameters(uint32_t scale, uint32_t minimum) {
  return scale << 16 | minimum;
}

// README.md section 2, in its order. In a flagged block one bit less than `kBits` counts.
template <int kBits>
DAFJAX_DEVICE BlockParameters ParametersOf(FloatType type, const Range& range,
                                           bool flagged, bool dithered) {
  const float lowest = LowestMinimum(type);
  const float half_limit = 0.5f * LargestDecoded(type);
  constexpr float kInverse = InverseHalfLevels(kBits);
  constexpr float kFlaggedInverse = InverseHalfLevels(kBits - 1);
  const int fraction = 16 - kBits + (flagged ? 1 : 0);
  const float inverse_half_levels = flagged ? kFlaggedInverse : kInverse;
  const bool any = range.lo <= range.hi;
  // Adding 0 takes subnormals and -0 to +0.
  const float lo = any ? range.lo + 0.0f : 0.0f;
  const float hi = any ? range.hi + 0.0f : 0.0f;
  const float down = RoundDown(lo);
  const float zero = down > lowest ? down : lowest;
  const float half_zero = 0.5f * zero;
  const float widest = (half_limit - half_zero) * inverse_half_levels;
  const float cap = RoundDown(widest < kMaxBFloat16 ? widest : kMaxBFloat16);
  const float up = RoundUp((0.5f * hi - half_zero) * inverse_half_levels);
  const float wanted = up < cap ? up : cap;
  const bool constant = wanted < kSmallestScale;
  const float scale = constant ? 0.0f : wanted;
  BlockParameters parameters;
  parameters.inverse = constant ? 0.0f : __fdiv_rn(PowerOfTwo(fraction), wanted);
  const float half_ulp = dithered ? 0.0f : PowerOfTwo(-fraction - 1);
  parameters.negative_start = scale * half_ulp - zero;
  parameters.scale = __float_as_uint(scale) >> 16 | (flagged ? kFlaggedBit : 0);
  parameters.minimum = __float_as_uint(zero) >> 16;
  // Rounding is monotonic: if the greatest value fits, all do.
  parameters.fits = FixedPoint(hi, parameters.negative_start, parameters.inverse) <=
                    GreatestFixed(fraction);
  return parameters;
}

}  // namespace dafjax

#endif  // DAFJAX_CUDA_PARAMETERS_H_
