#ifndef DAFJAX_TESTS_CPP_VALUES_H_
#define DAFJAX_TESTS_CPP_VALUES_H_

// What the tests of kernels are made of: a check, grids of parameters, and values of kinds
// that kernels may trip over.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "format/affine.h"
#include "format/float_type.h"
#include "format/noise.h"

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) {                                                       \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);    \
      std::exit(1);                                                           \
    }                                                                         \
  } while (false)

namespace dafjax {

inline constexpr int kWidths[] = {1, 2, 3, 4, 8};
inline constexpr int64_t kBlockSizes[] = {64, 128, 256, 512, 1024};
inline constexpr FloatType kTypes[] = {FloatType::kFloat32, FloatType::kBFloat16,
                                       FloatType::kFloat16};

class Random {
 public:
  uint32_t Next() { return MixNoise(++counter_); }
  float Uniform() { return static_cast<float>(Next() >> 8) * 0x1p-24f; }

 private:
  uint32_t counter_ = 0;
};

enum Kind {
  kSmooth,
  kRectified,
  kConstant,
  kSubnormal,
  kZeros,
  kAnyFinite,
  kExtreme,
  kTiny,  // steps near the least that there are, and subnormals among them
  kSomeNotFinite,
  kAllNotFinite,
  kNumKinds
};

// Bits of one value; `ones` are the exponent bits of the type, at their place.
inline uint32_t Draw(Kind kind, FloatType type, int64_t e, Random* random) {
  const bool wide = type == FloatType::kFloat32;
  const uint32_t ones = wide                           ? 0x7f800000
                        : type == FloatType::kBFloat16 ? 0x7f80
                                                       : 0x7c00;
  const uint32_t sign = wide ? 0x80000000 : 0x8000;
  const uint32_t one = wide ? 0x3f800000 : type == FloatType::kBFloat16 ? 0x3f80 : 0x3c00;
  const uint32_t mantissa = (ones & (0 - ones)) - 1;
  const uint32_t r = random->Next();
  const uint32_t negative = r >> 31 != 0 ? sign : 0;
  const uint32_t smooth = one | (r & mantissa);
  const uint32_t chance = random->Next() % 64;
  switch (kind) {
    case kSmooth: return smooth | negative;
    case kRectified: return negative != 0 ? 0 : smooth;
    case kConstant: return e / 256 % 2 == 0 ? smooth ^ (r & mantissa) : sign | one;
    case kSubnormal: return (r & mantissa) | negative;
    case kZeros: return negative;
    case kAnyFinite: {
      const uint32_t any = r & (sign | ones | mantissa);
      return (any & ones) == ones ? any ^ (ones & (0 - ones)) : any;
    }
    case kExtreme: return chance < 32 ? (ones - 1) | negative : smooth | negative;
    case kTiny: {
      if (type == FloatType::kFloat16) return (r & mantissa) | negative;
      if (chance < 16) return (r & mantissa) | negative;
      const uint32_t exponent = 127 - 104 + chance % 8;
      return exponent * (mantissa + 1) | (r & mantissa) | negative;
    }
    case kSomeNotFinite:
      if (chance == 0) return ones;
      if (chance == 1) return ones | sign;
      return chance == 2 ? ones | 1 | negative : smooth | negative;
    default: return chance < 32 ? ones | negative : ones | 1;
  }
}

// Starts one element after an aligned address: nothing may rely on alignment.
inline std::vector<uint8_t> MakeValues(Kind kind, FloatType type, int64_t count,
                                       Random* random) {
  const int64_t nbytes = ElementNbytes(type);
  std::vector<uint8_t> bytes((count + 1) * nbytes);
  for (int64_t e = 0; e < count; ++e) {
    const uint32_t bits = Draw(kind, type, e, random);
    std::memcpy(bytes.data() + (e + 1) * nbytes, &bits, nbytes);
  }
  return bytes;
}

}  // namespace dafjax

#endif  // DAFJAX_TESTS_CPP_VALUES_H_
