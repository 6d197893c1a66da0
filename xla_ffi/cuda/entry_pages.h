#ifndef DAFJAX_CUDA_ENTRY_PAGES_H_
#define DAFJAX_CUDA_ENTRY_PAGES_H_

#include <cstdint>

#include "cuda/device.h"
#include "cuda/planes.h"
#include "format/packed.h"

namespace dafjax {

// Pages of 64 KiB, as of pool/tables.h.
inline constexpr int kLog2EntryPageNbytes = 16;
inline constexpr int64_t kEntryPageNbytes = int64_t{1} << kLog2EntryPageNbytes;

// Where an entry of a page pool is, as the device sees it. Its pages are the host's, and
// each time that one is read takes a microsecond or two; what leads there is the device's.
struct EntryPages {
  // Of the metadata: scales, then minima.
  DAFJAX_DEVICE uint16_t* Parameter(int64_t index) const {
    const int64_t place = 2 * index;
    return reinterpret_cast<uint16_t*>(list[place >> kLog2EntryPageNbytes] +
                                       (place & (kEntryPageNbytes - 1)));
  }

  // The words of a plane of `kWidth` bits, in a tile that is counted over all rows.
  template <int kWidth>
  DAFJAX_DEVICE uint16_t* Tile(int plane, int64_t tile) const {
    constexpr int kNbytes = kTileLanes * 2 * kWidth;
    constexpr int64_t kPageTiles = kEntryPageNbytes / kNbytes;
    return reinterpret_cast<uint16_t*>(list[first_pages[plane] + tile / kPageTiles] +
                                       tile % kPageTiles * kNbytes);
  }

  // Addresses of the pages, those of the metadata first, then plane after plane.
  uint8_t** list;
  int64_t num_blocks;  // of all rows
  // Of each plane, the place on the list.
  int32_t first_pages[kMaxPlanes];
};

// As CodesInArrays, for an entry.
template <typename Word>
struct CodesInPages {
  DAFJAX_DEVICE Word* Scale(int64_t block) const { return pages.Parameter(block); }
  DAFJAX_DEVICE Word* Minimum(int64_t block) const {
    return pages.Parameter(pages.num_blocks + block);
  }

  template <int kBits>
  DAFJAX_DEVICE CodesOfTile<Word> Row(int64_t row, int64_t tile,
                                      int64_t tiles_per_row) const {
    const int64_t of_all = row * tiles_per_row + tile;
    CodesOfTile<Word> codes = {};
    if constexpr (kBits >= 1) codes.planes[0] = pages.template Tile<1>(0, of_all);
    if constexpr (kBits >= 2) codes.planes[1] = pages.template Tile<1>(1, of_all);
    if constexpr (kBits >= 4) codes.planes[2] = pages.template Tile<2>(2, of_all);
    if constexpr (kBits >= 8) codes.planes[3] = pages.template Tile<4>(3, of_all);
    return codes;
  }

  static constexpr bool aligned = true;
  bool has_planes;
  EntryPages pages;
};

// As CodesInPages, but codes go as bytes to where the CPU takes them from.
struct CodesInSlot {
  DAFJAX_DEVICE uint16_t* Scale(int64_t block) const { return pages.Parameter(block); }
  DAFJAX_DEVICE uint16_t* Minimum(int64_t block) const {
    return pages.Parameter(pages.num_blocks + block);
  }

  template <int kBits>
  DAFJAX_DEVICE BytesOfTile Row(int64_t row, int64_t tile, int64_t tiles_per_row) const {
    return {slot + (row * tiles_per_row + tile) * (kTileElements / 2)};
  }

  static constexpr bool has_planes = true;
  uint16_t* slot;
  EntryPages pages;
};

}  // namespace dafjax

#endif  // DAFJAX_CUDA_ENTRY_PAGES_H_
