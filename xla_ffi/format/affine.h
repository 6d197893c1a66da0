#ifndef DAFJAX_FORMAT_AFFINE_H_
#define DAFJAX_FORMAT_AFFINE_H_

#include <cstdint>

#include "format/columns.h"
#include "format/float_type.h"
#include "format/packed.h"

namespace dafjax {

// Affine codes, README.md section 2.
//
// A block of `block_size` consecutive elements (or elements of a column: columns.h) shares
// two bfloat16: `minimum` (the least finite value, rounded down) and `scale` (the step,
// rounded up). A code decodes
// to `minimum + code * |scale|`. If the sign bit of `scale` is set the block is
// flagged: it has values that are not finite, and the top bit of a code is 1 for those.
inline constexpr int64_t kMinBlockSize = 64;
inline constexpr int64_t kMaxBlockSize = 1024;

constexpr bool IsBlockSize(int64_t block_size) {
  return block_size >= kMinBlockSize && block_size <= kMaxBlockSize &&
         (block_size & (block_size - 1)) == 0;
}

constexpr int64_t NumBlocks(int64_t num_elements, int64_t block_size) {
  return CeilDiv(num_elements, block_size);
}

// Sign bit of a stored scale.
inline constexpr uint16_t kFlaggedBit = 0x8000;

inline constexpr float kMaxBFloat16 = 0x1.fep127f;

// No decoded value is greater than this.
constexpr float LargestDecoded(FloatType type) {
  return type == FloatType::kFloat16 ? 65504.0f : kMaxBFloat16;
}

// `-bf16_down(LargestDecoded(type))`: no stored minimum is less than this.
constexpr float LowestMinimum(FloatType type) {
  return type == FloatType::kFloat16 ? -65280.0f : -kMaxBFloat16;
}

// A block whose step would be smaller counts as constant, so that `1 / scale` is finite.
inline constexpr float kSmallestScale = 0x1p-100f;

// Codes of values that are not finite, for 8 bits; n bits keep the n top ones. With
// fewer than three bits only the top bit is kept, and the value decodes to NaN.
inline constexpr int kCodeOfNan = 0x80;
inline constexpr int kCodeOfPlusInfinity = 0xc0;
inline constexpr int kCodeOfMinusInfinity = 0xe0;

// What describes an encoded batch of rows, apart from its data.
struct AffineShape {
  FloatType type;
  int bits;
  int64_t block_size;
  int64_t num_rows;
  int64_t row_elements;
  int64_t columns = 0;  // 0: blocks are of consecutive elements

  // Of one row.
  constexpr int64_t NumTiles() const {
    return columns == 0 ? dafjax::NumTiles(row_elements)
                         : ColumnLayout(row_elements, columns).NumTiles();
  }
  constexpr int64_t NumBlocks() const {
    return columns == 0 ? dafjax::NumBlocks(row_elements, block_size)
                         : ColumnLayout(row_elements, columns).NumBlocks(block_size);
  }
  constexpr int64_t NumWords() const { return WordsOfTiles(NumTiles(), bits); }

  // Of the scales and minima of all rows.
  constexpr int64_t ParametersNbytes() const {
    constexpr int64_t kNbytesOfBlock = 2 * sizeof(uint16_t);
    return kNbytesOfBlock * num_rows * NumBlocks();
  }
};

}  // namespace dafjax

#endif  // DAFJAX_FORMAT_AFFINE_H_
