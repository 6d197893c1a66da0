#ifndef DAFJAX_CUDA_TILE_PAIRS_H_
#define DAFJAX_CUDA_TILE_PAIRS_H_

#include <cstdint>

#include "cuda/device.h"
#include "cuda/parameters.h"
#include "cuda/tile_values.h"
#include "format/float_type.h"
#include "format/packed.h"

namespace dafjax {

// The ranges of two lanes of bfloat16, the first one in the lower halves.
struct RangeOfPair {
  uint32_t lo;
  uint32_t hi;

  DAFJAX_DEVICE void Add(const RangeOfPair& other) {
    lo = MinOrNanOfTwoBFloat16(lo, other.lo);
    hi = MaxOfTwoBFloat16(hi, other.hi);
  }
  DAFJAX_DEVICE Range Lower() const { return {WidenLowerHalf(lo), WidenLowerHalf(hi)}; }
  DAFJAX_DEVICE Range Upper() const { return {WidenUpperHalf(lo), WidenUpperHalf(hi)}; }

  static DAFJAX_DEVICE float WidenLowerHalf(uint32_t two) {
    return __uint_as_float(two << 16);
  }
  static DAFJAX_DEVICE float WidenUpperHalf(uint32_t two) {
    return __uint_as_float(two & 0xffff0000);
  }
};

// TileValues of bfloat16 as it is in memory, two lanes in a register: half as many
// registers, so that twice as many threads wait for memory at a time, and ranges in half
// as many instructions. Subnormals count as what they are until a range is known, which
// is that of zeros then.
struct TilePairs {
  using Range = RangeOfPair;
  static constexpr int kRegisters = kThreadLanes / 2;

  DAFJAX_DEVICE void Load(const ConstFloatArray& x, const Piece& piece, bool all_whole) {
    if (!all_whole || !x.aligned) {
      LoadOneByOne(x, piece);
      return;
    }
    DAFJAX_UNROLL
    for (int row = 0; row < kTileRows; ++row) {
      const uint2 four = *reinterpret_cast<const uint2*>(x.data + row * piece.stride * 2);
      two[row][0] = four.x;
      two[row][1] = four.y;
    }
  }

  DAFJAX_DEVICE void LoadOneByOne(const ConstFloatArray& x, const Piece& piece) {
    DAFJAX_UNROLL
    for (int row = 0; row < kTileRows; ++row) {
      const int present = piece.NumPresent(row);
      const uint16_t* of_row =
          reinterpret_cast<const uint16_t*>(x.data) + row * piece.stride;
      DAFJAX_UNROLL
      for (int i = 0; i < kRegisters; ++i) {
        two[row][i] = 0x7fc07fc0;
        if (2 * i < present) two[row][i] = 0x7fc00000 | of_row[2 * i];
        if (2 * i + 1 < present) {
          two[row][i] = (two[row][i] & 0xffff) | uint32_t{of_row[2 * i + 1]} << 16;
        }
      }
    }
  }

  DAFJAX_DEVICE Range RangeOf(int row, int i) const { return {two[row][i], two[row][i]}; }

  // Both halves are the upper ones of float32, and no carry goes down from there.
  DAFJAX_DEVICE uint32_t AddBits(int row, int i, uint32_t sum) const {
    return __dp2a_lo(two[row][i], 0x0101u, sum);
  }
  static DAFJAX_DEVICE uint32_t ChecksumOf(uint32_t sum) { return sum << 16; }

  static DAFJAX_DEVICE dafjax::Range Joined(const Range& of_register) {
    dafjax::Range of_both = of_register.Lower();
    of_both.Add(of_register.Upper());
    return of_both;
  }
  static DAFJAX_DEVICE void GiveLanes(const Range (&of_registers)[kRegisters],
                                      dafjax::Range (&of_lanes)[kThreadLanes]) {
    DAFJAX_UNROLL
    for (int i = 0; i < kRegisters; ++i) {
      of_lanes[2 * i] = of_registers[i].Lower();
      of_lanes[2 * i + 1] = of_registers[i].Upper();
    }
  }

  DAFJAX_DEVICE void GiveRow(int row, float (&of_row)[kThreadLanes]) const {
    DAFJAX_UNROLL
    for (int i = 0; i < kRegisters; ++i) {
      of_row[2 * i] = RangeOfPair::WidenLowerHalf(two[row][i]);
      of_row[2 * i + 1] = RangeOfPair::WidenUpperHalf(two[row][i]);
    }
  }

  uint32_t two[kTileRows][kRegisters];
};

}  // namespace dafjax

#endif  // DAFJAX_CUDA_TILE_PAIRS_H_
