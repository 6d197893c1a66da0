#ifndef DAFJAX_CPU_KERNELS_H_
#define DAFJAX_CPU_KERNELS_H_

#include <cstdint>

#include "cpu/paged_words.h"
#include "format/affine.h"
#include "format/columns.h"
#include "format/packed.h"

namespace dafjax {

// Kernels work on groups of tiles: no block crosses their borders, and three of them fit
// into the L1 cache. Every row has its own groups; the last one may be short.
inline constexpr int kGroupTiles = 4;
inline constexpr int kGroupElements = kGroupTiles * kTileElements;
inline constexpr int kGroupBlocks = kGroupElements / kMinBlockSize;  // at most
static_assert(kGroupElements % kMaxBlockSize == 0);

constexpr int64_t NumGroups(int64_t row_elements) {
  return CeilDiv(row_elements, kGroupElements);
}

// Kernels that pack with column blocks work on panels: one block of (folded) rows, in so
// many lanes that a panel has at most kPanelTiles tiles. Two of them fit into the L2
// cache; with half as many tiles, pieces of rows are so short that memory is slower.
inline constexpr int kPanelTiles = 64;
inline constexpr int kMaxPanelLaneGroups = 16;
static_assert(kPanelTiles * kTileRows >= kMaxBlockSize);
static_assert(kMaxPanelLaneGroups * kMinBlockSize <= kPanelTiles * kTileRows);

// The panels of a row, numbered from left to right and then down.
struct PanelLayout {
  constexpr explicit PanelLayout(const AffineShape& shape) {
    const ColumnLayout layout(shape.row_elements, shape.columns);
    // Few rows make for wide panels.
    const int64_t few = CeilDiv(layout.num_rows, kMinBlockSize) * kMinBlockSize;
    const int64_t rows = few < shape.block_size ? few : shape.block_size;
    if (rows == 0) return;
    lanes = kPanelTiles * kTileRows / rows * kTileLanes;
    down = CeilDiv(layout.num_rows, shape.block_size);
    across = CeilDiv(layout.width, lanes);
  }

  constexpr int64_t PerRow() const { return down * across; }

  int64_t down = 0;
  int64_t across = 0;
  int64_t lanes = 0;  // of all panels but those at the right edge
};

struct Rounding {
  bool stochastic = false;
  uint32_t seed = 0;  // unused if not stochastic
  bool dithered = false;  // stochastic, and the decoder subtracts the noise
};

// The kernels of one instruction set. All sets give the same bytes. Groups, panels and
// tiles are counted over all rows: group `g` belongs to row
// `g / NumGroups(row_elements)`. Callers hold a FlushSubnormals. Arrays need no alignment
// beyond that of their elements.
struct Kernels {
  const char* name;

  // If shape.columns == 0.
  void (*pack_rows)(const AffineShape& shape, const Rounding& rounding, const void* x,
                    const AffineCodes& packed, int64_t first_group, int64_t last_group);

  // Otherwise.
  void (*pack_columns)(const AffineShape& shape, const Rounding& rounding,
                       const void* x, const AffineCodes& packed, int64_t first_panel,
                       int64_t last_panel);

  // Makes planes of codes that are there already: those of tiles, counted over all rows,
  // which count as one. Word `32 p + l` of a tile's 256 has the codes of rows 2p and
  // 2p + 1 in lane l, in the top bits of its lower and its upper byte.
  void (*pack_bytes)(const uint16_t* bytes, const AffineCodes& packed,
                     int64_t first_tile, int64_t last_tile);

  void (*unpack_rows)(const AffineShape& shape, const ConstAffineCodes& packed, void* y,
                      int64_t first_group, int64_t last_group);

  void (*unpack_columns)(const AffineShape& shape, const ConstAffineCodes& packed,
                         void* y, int64_t first_tile, int64_t last_tile);

  // One byte per boolean; any byte but 0 is true.
  void (*pack_bitmask)(int64_t row_elements, const uint8_t* x, uint16_t* words,
                       int64_t first_group, int64_t last_group);

  void (*unpack_bitmask)(int64_t row_elements, const uint16_t* words, uint8_t* y,
                         int64_t first_group, int64_t last_group);

  // Sum of `num_elements` values in an unspecified order: reads memory and does little
  // else, the roofline that the other kernels are compared with.
  float (*sum)(const float* x, int64_t num_elements);
};

}  // namespace dafjax

#endif  // DAFJAX_CPU_KERNELS_H_
