#ifndef DAFJAX_CUDA_SCAN_H_
#define DAFJAX_CUDA_SCAN_H_

#include <cstdint>

#include "cuda/device.h"
#include "cuda/parameters.h"
#include "cuda/tile_values.h"

namespace dafjax {

// Takes the finite ones of a thread's values into the ranges `range_of(row, i)`. Returns
// their part of the tile's checksum. Calls `unusual(row, i)` for all others, padding too.
template <typename RangeOf, typename Unusual>
DAFJAX_DEVICE uint32_t ScanTile(const TileValues& values, const RangeOf& range_of,
                                const Unusual& unusual) {
  uint32_t checksum = 0;
  DAFJAX_UNROLL
  for (int row = 0; row < kTileRows; ++row) {
    DAFJAX_UNROLL
    for (int i = 0; i < kThreadLanes; ++i) {
      const float v = values.v[row][i];
      if (IsFinite(v)) {
        range_of(row, i).Add({v, v});
        if (row % 2 == 0) checksum += __float_as_uint(v);
      } else {
        unusual(row, i);
      }
    }
  }
  return checksum;
}

// Calls `unusual(row, i)` for values that are not finite, apart from padding. Loads again,
// as EncodeTileWithFlags does.
template <typename Unusual>
DAFJAX_DEVICE void FindUnusual(const ConstFloatArray& x, const Piece& piece,
                               const Unusual& unusual) {
  DAFJAX_NO_UNROLL
  for (int row = 0; row < kTileRows; ++row) {
    const int present = piece.NumPresent(row);
    DAFJAX_NO_UNROLL
    for (int i = 0; i < present; ++i) {
      if (!IsFinite(LoadValue(x, row * piece.stride + i))) unusual(row, i);
    }
  }
}

// The sum over the threads of a tile.
DAFJAX_DEVICE uint32_t TileSum(uint32_t value) {
  DAFJAX_UNROLL
  for (int step = 1; step < kTileThreads; step *= 2) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  return value;
}

DAFJAX_DEVICE Range ShuffleXor(const Range& range, int lanes) {
  return {__shfl_xor_sync(kAllLanes, range.lo, lanes),
          __shfl_xor_sync(kAllLanes, range.hi, lanes)};
}

}  // namespace dafjax

#endif  // DAFJAX_CUDA_SCAN_H_
