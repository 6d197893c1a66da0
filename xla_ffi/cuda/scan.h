#ifndef DAFJAX_CUDA_SCAN_H_
#define DAFJAX_CUDA_SCAN_H_

#include <cstdint>

#include "cuda/device.h"
#include "cuda/parameters.h"
#include "cuda/tile_values.h"

namespace dafjax {

// Takes what a thread has into `ranges`, register `i` of row `row` into that of number
// `range_of(row, i)`. Returns its part of the tile's checksum. Both count only if the
// ranges are of finite values alone. `Values` is TileValues or TilePairs.
template <typename Values, int kRanges, typename RangeOf>
DAFJAX_DEVICE uint32_t ScanTile(const Values& values, const RangeOf& range_of,
                                typename Values::Range (&ranges)[kRanges]) {
  uint32_t sum = 0;
  bool has_begun[kRanges] = {};  // known after unrolling
  DAFJAX_UNROLL
  for (int row = 0; row < kTileRows; ++row) {
    DAFJAX_UNROLL
    for (int i = 0; i < Values::kRegisters; ++i) {
      const int number = range_of(row, i);
      if (has_begun[number]) {
        ranges[number].Add(values.RangeOf(row, i));
      } else {
        ranges[number] = values.RangeOf(row, i);
        has_begun[number] = true;
      }
      if (row % 2 == 0) sum = values.AddBits(row, i, sum);
    }
  }
  return Values::ChecksumOf(sum);
}

// Calls `visit(row, i, v)` for the values of a thread that are there. Loads again, as
// EncodeTileWithFlags does. `x` begins with the thread's first element.
template <typename Visit>
DAFJAX_DEVICE void VisitValues(const ConstFloatArray& x, const Piece& piece,
                               const Visit& visit) {
  DAFJAX_NO_UNROLL
  for (int row = 0; row < kTileRows; ++row) {
    const int present = piece.NumPresent(row);
    DAFJAX_UNROLL
    for (int i = 0; i < kThreadLanes; ++i) {
      if (i < present) visit(row, i, LoadValue(x, row * piece.stride + i));
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

// Of a Range, or of a RangeOfPair.
template <typename AnyRange>
DAFJAX_DEVICE AnyRange ShuffleXor(const AnyRange& range, int lanes) {
  return {__shfl_xor_sync(kAllLanes, range.lo, lanes),
          __shfl_xor_sync(kAllLanes, range.hi, lanes)};
}

}  // namespace dafjax

#endif  // DAFJAX_CUDA_SCAN_H_
