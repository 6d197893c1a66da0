#ifndef DAFJAX_CUDA_PACKED_PLACES_H_
#define DAFJAX_CUDA_PACKED_PLACES_H_

#include <cstdint>

#include "cuda/device.h"
#include "cuda/planes.h"
#include "format/packed.h"

namespace dafjax {

// Where a batch of rows is that is encoded: in three arrays, or in pages
// (cuda/entry_pages.h, which has the same functions). `Word` is uint16_t, const or not.
template <typename Word>
struct CodesInArrays {
  // Of block `block`, counted over all rows.
  DAFJAX_DEVICE Word* Scale(int64_t block) const { return scale + block; }
  DAFJAX_DEVICE Word* Minimum(int64_t block) const { return minimum + block; }

  // What CodesOfThread needs of tile `tile` of row `row`. Requires that the tile exists.
  template <int kBits>
  DAFJAX_DEVICE CodesOfRow<Word> Row(int64_t row, int64_t, int64_t tiles_per_row) const {
    return {codes + row * WordsOfTiles(tiles_per_row, kBits), tiles_per_row, aligned};
  }

  // Whether there are codes, and not scales and minima alone.
  static constexpr bool has_planes = true;
  Word* codes;
  Word* scale;
  Word* minimum;
  bool aligned;  // to four words
};

}  // namespace dafjax

#endif  // DAFJAX_CUDA_PACKED_PLACES_H_
