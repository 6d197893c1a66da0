#ifndef DAFJAX_CPU_KERNELS_H_
#define DAFJAX_CPU_KERNELS_H_

#include <cstdint>

#include "format/affine.h"

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

// A batch of rows, encoded or to be encoded. Pointers are to the start of the batch.
struct AffineCodes {
  uint16_t* codes;    // [num_rows, NumWords(row_elements, bits)]
  uint16_t* scale;    // [num_rows, NumBlocks(row_elements, block_size)], bfloat16
  uint16_t* minimum;  // as `scale`
};

struct ConstAffineCodes {
  const uint16_t* codes;
  const uint16_t* scale;
  const uint16_t* minimum;
};

struct Rounding {
  bool stochastic;
  uint32_t seed;  // unused if not stochastic
};

// The kernels of one instruction set. All sets give the same bytes. Groups are counted
// over all rows: group `g` belongs to row `g / NumGroups(row_elements)`. Callers hold a
// FlushSubnormals. Arrays need no alignment beyond that of their elements.
struct Kernels {
  const char* name;

  void (*pack_affine)(const AffineShape& shape, const Rounding& rounding,
                      const void* x, const AffineCodes& packed, int64_t first_group,
                      int64_t last_group);

  void (*unpack_affine)(const AffineShape& shape, const ConstAffineCodes& packed,
                        void* y, int64_t first_group, int64_t last_group);

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
