#ifndef DAFJAX_FORMAT_COLUMNS_H_
#define DAFJAX_FORMAT_COLUMNS_H_

#include <cstdint>

#include "format/packed.h"

namespace dafjax {

// Column blocks, README.md section 4.
//
// A row of `n` elements is seen as a matrix `[n / columns, columns]`. Some of the
// matrix's rows, one after another, make a folded row of `width` lanes, the least
// multiple of 32 possible; the last folded row may be short. Tile
// `r * LaneGroups() + g` holds folded rows 16r .. 16r + 15 in lanes 32g .. 32g + 31. A
// block is `block_size` folded rows of one lane.
//
// Requires IsNumberOfColumns(columns, num_elements) and columns > 0.
struct ColumnLayout {
  constexpr ColumnLayout(int64_t num_elements, int64_t columns)
      : width(columns * (kTileLanes / CommonDivisor(columns))),
        num_rows(CeilDiv(num_elements, width)) {}

  constexpr int64_t LaneGroups() const { return width / kTileLanes; }
  constexpr int64_t NumTiles() const {
    return CeilDiv(num_rows, kTileRows) * LaneGroups();
  }
  constexpr int64_t NumBlocks(int64_t block_size) const {
    return CeilDiv(num_rows, block_size) * width;
  }

  // Of `columns` and 32: the lowest bit that is set in either.
  static constexpr int64_t CommonDivisor(int64_t columns) {
    const int64_t either = columns | kTileLanes;
    return either & -either;
  }

  int64_t width;     // lanes of a folded row
  int64_t num_rows;  // folded rows
};

// So that no size overflows.
inline constexpr int64_t kMaxColumns = int64_t{1} << 48;

// 0 stands for blocks of consecutive elements.
constexpr bool IsNumberOfColumns(int64_t columns, int64_t num_elements) {
  return columns == 0 ||
         (columns > 0 && columns <= kMaxColumns && num_elements % columns == 0);
}

static_assert(ColumnLayout(0, 64).NumTiles() == 0);
static_assert(ColumnLayout(960, 3).width == 96 && ColumnLayout(960, 3).num_rows == 10);
static_assert(ColumnLayout(816, 48).width == 96 && ColumnLayout(816, 48).num_rows == 9);

}  // namespace dafjax

#endif  // DAFJAX_FORMAT_COLUMNS_H_
