#ifndef DAFJAX_CUDA_SCAN_H_
#define DAFJAX_CUDA_SCAN_H_

#include <cstdint>

#include "cuda/device.h"
#include "cuda/parameters.h"
#include "cuda/tile_values.h"
#include "format/affine.h"
#include "format/float_type.h"

namespace dafjax {

// Takes the finite ones of a thread's values into ranges, and into its part of the tile's
// checksum. `range_of(row, i)` is where value `i` of row `row` belongs, and
// `unusual(row, i)` is called where there is one that is not finite.
template <FloatType kType, typename RangeOf, typename Unusual>
DAFJAX_DEVICE uint32_t ScanTile(const TileValues<kType>& values, const Piece& piece,
                                bool all_whole, const RangeOf& range_of,
                                const Unusual& unusual) {
  uint32_t checksum = 0;
  DAFJAX_UNROLL
  for (int row = 0; row < kTileRows; ++row) {
    const int present = all_whole ? kThreadLanes : piece.NumPresent(row);
    DAFJAX_UNROLL
    for (int i = 0; i < kThreadLanes; ++i) {
      const float v = values.rows[row].Widened(i);
      const bool finite = IsFinite(v);
      if (i < present) {
        if (finite) {
          range_of(row, i).Add({v, v});
          if (row % 2 == 0) checksum += __float_as_uint(v);
        } else {
          unusual(row, i);
        }
      }
    }
  }
  return checksum;
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
