#ifndef DAFJAX_CUDA_ENCODE_H_
#define DAFJAX_CUDA_ENCODE_H_

#include <cstdint>

#include "cuda/device.h"
#include "cuda/kernels.h"
#include "cuda/parameters.h"
#include "cuda/planes.h"
#include "cuda/tile_values.h"
#include "format/affine.h"
#include "format/noise.h"

namespace dafjax {

// The thread of a tile that has the last block that noise depends on which is subtracted,
// among its strips or its lanes. The first thread has the first one.
inline constexpr int kLastDither = kTileThreads - 1;
static_assert(kLastDitherRow * kTileLanes / kMinBlockSize == kLastDither);
static_assert(kLastDitherLane / kThreadLanes == kLastDither);
static_assert(kLastDitherLane % kThreadLanes == 0);

// The noise of a thread's lanes, in the upper halves of words: there products are modulo
// 2^16 by themselves. Both roundings are the same arithmetic: a lane's word is multiplied
// from row to row; rounding to nearest starts with the middle, times one.
struct LaneNoise {
  // `checksum`: that of the tile. `first_lane` is even.
  DAFJAX_DEVICE void Start(const DeviceRounding& rounding, int64_t tile,
                           uint32_t checksum, int first_lane) {
    if (rounding.stochastic) return Start(*rounding.seed, tile, checksum, first_lane);
    factor = 1;
    DAFJAX_UNROLL
    for (int i = 0; i < kThreadLanes; ++i) words[i] = 0x80000000;
  }

  DAFJAX_DEVICE void Start(uint32_t seed, int64_t tile, uint32_t checksum,
                           int first_lane) {
    factor = kNoiseFactor;
    const uint32_t key =
        NoiseKey(NoiseStream(seed), static_cast<uint32_t>(tile), checksum);
    DAFJAX_UNROLL
    for (int i = 0; i < kThreadLanes; i += 2) {
      const uint32_t pair = FirstNoiseOfPair(key, (first_lane + i) / 2);
      words[i] = pair << 16;
      words[i + 1] = pair & 0xffff0000;
    }
  }

  // What is added to a fixed point of `fraction` bits.
  DAFJAX_DEVICE uint32_t Of(int lane, int fraction) const {
    return words[lane] >> (32 - fraction);
  }

  DAFJAX_DEVICE void GoToNextRow() {
    DAFJAX_UNROLL
    for (int i = 0; i < kThreadLanes; ++i) words[i] *= factor;
  }

  uint32_t factor;
  uint32_t words[kThreadLanes];
};

// What the elements of a row of a tile are encoded with, for the thread's lanes.
struct RowParameters {
  float negative_start[kThreadLanes];
  float inverse[kThreadLanes];
  uint32_t flagged;  // a bit for each lane
};

// Codes come in the top bits of 16; what is below them counts for nothing.

DAFJAX_DEVICE uint32_t CodeOfFinite(float v, float negative_start, float inverse,
                                    uint32_t noise, int fraction) {
  const uint32_t fixed = FixedPoint(v, negative_start, inverse);
  const uint32_t most = GreatestFixed(fraction);
  return (fixed < most ? fixed : most) + noise;
}

template <int kBits>
DAFJAX_DEVICE uint32_t CodeOfNonFinite(float v) {
  if constexpr (kBits < 3) {
    return 0x8000;
  } else {
    const int code = v != v     ? kCodeOfNan
                     : v > 0.0f ? kCodeOfPlusInfinity
                                : kCodeOfMinusInfinity;
    return static_cast<uint32_t>(code << 8);
  }
}

// Requires codes of 16 bits. Written as multiplying and adding is done, off the unit that
// has most to do.
DAFJAX_DEVICE uint2 JoinCodes(const uint32_t (&codes)[kThreadLanes]) {
  return make_uint2(codes[1] * 0x10000 + codes[0], codes[3] * 0x10000 + codes[2]);
}

// Encodes what a thread has of a tile: finite values of blocks that are not flagged and
// that fit, no padding. `parameters_of(row)` gives RowParameters; all lanes of the warp
// ask together. `Values` is TileValues or TilePairs.
template <int kBits, typename Values, typename ParametersOfRow, typename Row>
DAFJAX_DEVICE void EncodeTile(const Values& values,
                              const ParametersOfRow& parameters_of, LaneNoise noise,
                              const CodesOfThread<Row>& to) {
  typename Row::template Writer<kBits> writer;
  DAFJAX_UNROLL
  for (int row = 0; row < kTileRows; ++row) {
    const RowParameters of_row = parameters_of(row);
    float v[kThreadLanes];
    values.GiveRow(row, v);
    uint32_t codes[kThreadLanes];
    DAFJAX_UNROLL
    for (int i = 0; i < kThreadLanes; ++i) {
      codes[i] = FixedPoint(v[i], of_row.negative_start[i], of_row.inverse[i]) +
                 noise.Of(i, 16 - kBits);
    }
    writer.AddRow(row, JoinCodes(codes), to);
    noise.GoToNextRow();
  }
}

// EncodeTile for whatever there is: values that are not finite, blocks that do not fit,
// padding. Loads again, row by row: this is rare, but for batches of rows that are no
// whole tiles, and is not to cost code or registers. `x` begins with the thread's first
// element.
template <int kBits, typename ParametersOfRow, typename Row>
DAFJAX_DEVICE void EncodeTileWithFlags(const ConstFloatArray& x, const Piece& piece,
                                       const ParametersOfRow& parameters_of,
                                       LaneNoise noise,
                                       const CodesOfThread<Row>& to) {
  typename Row::template Writer<kBits> writer;
  DAFJAX_NO_UNROLL
  for (int row = 0; row < kTileRows; ++row) {
    const RowParameters of_row = parameters_of(row);
    const int present = piece.NumPresent(row);
    uint32_t codes[kThreadLanes];
    DAFJAX_UNROLL
    for (int i = 0; i < kThreadLanes; ++i) {
      codes[i] = 0;
      if (i < present) {
        const float v = LoadValue(x, row * piece.stride + i);
        const int flag = static_cast<int>(of_row.flagged >> i & 1);
        const int fraction = 16 - kBits + flag;
        const uint32_t of_finite =
            CodeOfFinite(v, of_row.negative_start[i], of_row.inverse[i],
                         noise.Of(i, fraction), fraction);
        codes[i] = IsFinite(v) ? of_finite >> flag : CodeOfNonFinite<kBits>(v);
      }
    }
    writer.AddRow(row, JoinCodes(codes), to);
    noise.GoToNextRow();
  }
}

}  // namespace dafjax

#endif  // DAFJAX_CUDA_ENCODE_H_
