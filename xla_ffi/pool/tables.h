#ifndef DAFJAX_POOL_TABLES_H_
#define DAFJAX_POOL_TABLES_H_

#include <cstdint>

#include "format/packed.h"

namespace dafjax::pool {

// A page holds a stretch of one plane, or of the metadata, of one entry. It is aligned to
// 1 KiB. The last page of a stream may be shorter in memory (whole slots of 1 KiB); what
// lies behind a stream's end is not to be touched.
inline constexpr int kLog2PageNbytes = 16;
inline constexpr int64_t kPageNbytes = int64_t{1} << kLog2PageNbytes;

// Bytes of one tile in a plane of `width` bits (format/packed.h).
constexpr int64_t TileNbytes(int width) { return kTileLanes * 2 * width; }

// Where the tiles of one plane are. A page holds `1 << log2_page_tiles` whole tiles, one
// after another as in format/packed.h; no tile straddles two pages.
template <typename Byte>
struct PlaneTable {
  Byte* const* pages = nullptr;
  int64_t num_pages = 0;
  int log2_page_tiles = 0;
  int width = 0;

  // The `width * 32` uint16 of a tile. Those of the tiles behind it follow, up to the
  // end of the page.
  Byte* Tile(int64_t tile) const {
    const int64_t place = tile & ((int64_t{1} << log2_page_tiles) - 1);
    return pages[tile >> log2_page_tiles] + place * TileNbytes(width);
  }
};

// Where the metadata (scales and minima) are. They are given through a table too, for
// an entry may be spread over any pages: byte `offset` is followed by its neighbors up
// to the next multiple of kPageNbytes, so that metadata of at most kPageNbytes are
// contiguous, and so is any stretch that crosses no multiple of kPageNbytes.
template <typename Byte>
struct MetadataTable {
  Byte* const* pages = nullptr;
  int64_t num_pages = 0;
  int64_t nbytes = 0;

  Byte* At(int64_t offset) const {
    return pages[offset >> kLog2PageNbytes] + (offset & (kPageNbytes - 1));
  }
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_TABLES_H_
