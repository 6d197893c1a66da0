#ifndef DAFJAX_CUDA_TILE_VALUES_H_
#define DAFJAX_CUDA_TILE_VALUES_H_

#include <cstdint>

#include "cuda/device.h"
#include "cuda/parameters.h"
#include "format/float_type.h"
#include "format/packed.h"

namespace dafjax {

// A thread has four neighboring lanes of a tile, in all 16 rows, in its registers: eight
// threads have a tile, a warp has four. Loads and stores are of four elements at a time,
// words of planes come out whole, and no values have to change hands.
inline constexpr int kThreadLanes = 4;
inline constexpr int kTileThreads = kTileLanes / kThreadLanes;
inline constexpr int kWarpTiles = kWarpLanes / kTileThreads;

// Which of a tile's elements a thread has, and where they are. Element `i` of row `r` is
// number `r * stride + i` counted from the first.
struct Piece {
  int64_t stride;  // from one row of the tile to the next
  int64_t left;    // elements from the thread's first one to the end of the array's row;
                   // 0 or less if the tile is not there

  DAFJAX_DEVICE bool IsWhole() const {
    return left >= (kTileRows - 1) * stride + kThreadLanes;
  }
  // How many of the thread's elements of row `row` are there; the others are padding.
  DAFJAX_DEVICE int NumPresent(int row) const {
    const int64_t of_row = left - row * stride;
    return of_row <= 0 ? 0 : of_row < kThreadLanes ? static_cast<int>(of_row)
                                                   : kThreadLanes;
  }
};

// Where a tile is in a batch of rows.
struct TilePlace {
  int64_t row;
  int64_t tile;  // of the row
};

// Of numbers that are not negative. Divisions of 64 bits take long, and most numbers have
// fewer.
DAFJAX_DEVICE int64_t Quotient(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) {
    return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  }
  return a / b;
}

// Of number `slot` among `slots_per_row` of each row. Divisions take long, and most
// batches are of one row: what is beyond that has a tile beyond it, and what is beyond
// several rows a row beyond them.
DAFJAX_DEVICE TilePlace PlaceOfSlot(int64_t slot, int64_t slots_per_row,
                                    int64_t num_rows) {
  if (num_rows == 1) return {0, slot};
  const int64_t row = Quotient(slot, slots_per_row);
  return {row, slot - row * slots_per_row};
}

// Values in memory. Dtypes are told apart while a kernel runs: compiled for each, there
// would be three times as many kernels, and they wait for memory anyway.
template <typename Byte>
struct FloatArray {
  Byte* data;
  FloatType type;
  bool aligned;  // four elements can be moved at a time, wherever a tile begins

  DAFJAX_DEVICE FloatArray From(int64_t element) const {
    return {data + element * ElementNbytes(type), type, aligned};
  }
};

using ConstFloatArray = FloatArray<const char>;
using MutableFloatArray = FloatArray<char>;

DAFJAX_DEVICE float WidenLower(FloatType type, uint32_t two) {
  return type == FloatType::kBFloat16 ? __uint_as_float(two << 16)
                                      : WidenFloat16(two & 0xffff);
}

DAFJAX_DEVICE float LoadValue(const ConstFloatArray& x, int64_t index) {
  if (x.type == FloatType::kFloat32) {
    return reinterpret_cast<const float*>(x.data)[index];
  }
  return WidenLower(x.type, reinterpret_cast<const uint16_t*>(x.data)[index]);
}

DAFJAX_DEVICE uint32_t Narrow(FloatType type, float v) {
  return type == FloatType::kBFloat16 ? RoundToBFloat16(v) : RoundToFloat16(v);
}

// Stores bits of a value of the array's type.
DAFJAX_DEVICE void StoreBits(const MutableFloatArray& y, int64_t index, uint32_t bits) {
  if (y.type == FloatType::kFloat32) {
    reinterpret_cast<uint32_t*>(y.data)[index] = bits;
  } else {
    reinterpret_cast<uint16_t*>(y.data)[index] = static_cast<uint16_t>(bits);
  }
}

// Rounds to nearest, ties to even. `v` is finite.
DAFJAX_DEVICE void StoreValue(const MutableFloatArray& y, int64_t index, float v) {
  StoreBits(y, index,
            y.type == FloatType::kFloat32 ? __float_as_uint(v) : Narrow(y.type, v));
}

// Stores four values of the array's type, `kType`. Requires y.aligned.
template <FloatType kType>
DAFJAX_DEVICE void StoreFour(const MutableFloatArray& y, int64_t index,
                             const float (&v)[kThreadLanes]) {
  if constexpr (kType == FloatType::kFloat32) {
    *reinterpret_cast<uint4*>(y.data + 4 * index) =
        make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                   __float_as_uint(v[3]));
  } else {
    constexpr auto kRoundTwo =
        kType == FloatType::kBFloat16 ? RoundTwoToBFloat16 : RoundTwoToFloat16;
    *reinterpret_cast<uint2*>(y.data + 2 * index) =
        make_uint2(kRoundTwo(v[0], v[1]), kRoundTwo(v[2], v[3]));
  }
}

// Requires x.aligned.
DAFJAX_DEVICE void LoadFour(const ConstFloatArray& x, int64_t index,
                            float (&v)[kThreadLanes]) {
  if (x.type == FloatType::kFloat32) {
    const uint4 four = *reinterpret_cast<const uint4*>(x.data + 4 * index);
    v[0] = __uint_as_float(four.x);
    v[1] = __uint_as_float(four.y);
    v[2] = __uint_as_float(four.z);
    v[3] = __uint_as_float(four.w);
  } else {
    const uint2 four = *reinterpret_cast<const uint2*>(x.data + 2 * index);
    v[0] = WidenLower(x.type, four.x);
    v[1] = WidenLower(x.type, four.x >> 16);
    v[2] = WidenLower(x.type, four.y);
    v[3] = WidenLower(x.type, four.y >> 16);
  }
}

// What a thread has of a tile, widened. Padding is NaN. TilePairs (tile_pairs.h) has the
// same members: kernels take either.
struct TileValues {
  // Of what a register has: one element.
  using Range = dafjax::Range;
  static constexpr int kRegisters = kThreadLanes;  // of a row

  // `x` begins with the thread's first element. `all_whole`: of the warp's pieces none
  // has padding.
  DAFJAX_DEVICE void Load(const ConstFloatArray& x, const Piece& piece, bool all_whole) {
    if (!all_whole || !x.aligned) {
      LoadOneByOne(x, piece);
    } else if (x.type == FloatType::kFloat32) {
      DAFJAX_UNROLL
      for (int row = 0; row < kTileRows; ++row) {
        const uint4 four =
            *reinterpret_cast<const uint4*>(x.data + row * piece.stride * 4);
        v[row][0] = __uint_as_float(four.x);
        v[row][1] = __uint_as_float(four.y);
        v[row][2] = __uint_as_float(four.z);
        v[row][3] = __uint_as_float(four.w);
      }
    } else {
      DAFJAX_UNROLL
      for (int row = 0; row < kTileRows; ++row) {
        const uint2 four =
            *reinterpret_cast<const uint2*>(x.data + row * piece.stride * 2);
        v[row][0] = WidenLower(x.type, four.x);
        v[row][1] = WidenLower(x.type, four.x >> 16);
        v[row][2] = WidenLower(x.type, four.y);
        v[row][3] = WidenLower(x.type, four.y >> 16);
      }
    }
  }

  DAFJAX_DEVICE void LoadOneByOne(const ConstFloatArray& x, const Piece& piece) {
    DAFJAX_UNROLL
    for (int row = 0; row < kTileRows; ++row) {
      const int present = piece.NumPresent(row);
      DAFJAX_UNROLL
      for (int i = 0; i < kThreadLanes; ++i) {
        v[row][i] = __uint_as_float(0x7fc00000);
        if (i < present) v[row][i] = LoadValue(x, row * piece.stride + i);
      }
    }
  }

  DAFJAX_DEVICE Range RangeOf(int row, int i) const { return {v[row][i], v[row][i]}; }

  // Adds what a register has to a sum, of which ChecksumOf makes a checksum.
  DAFJAX_DEVICE uint32_t AddBits(int row, int i, uint32_t sum) const {
    return sum + __float_as_uint(v[row][i]);
  }
  static DAFJAX_DEVICE uint32_t ChecksumOf(uint32_t sum) { return sum; }

  static DAFJAX_DEVICE Range Joined(const Range& of_register) { return of_register; }
  static DAFJAX_DEVICE void GiveLanes(const Range (&of_registers)[kRegisters],
                                      Range (&of_lanes)[kThreadLanes]) {
    DAFJAX_UNROLL
    for (int i = 0; i < kThreadLanes; ++i) of_lanes[i] = of_registers[i];
  }

  DAFJAX_DEVICE void GiveRow(int row, float (&of_row)[kThreadLanes]) const {
    DAFJAX_UNROLL
    for (int i = 0; i < kThreadLanes; ++i) of_row[i] = v[row][i];
  }

  float v[kTileRows][kThreadLanes];
};

}  // namespace dafjax

#endif  // DAFJAX_CUDA_TILE_VALUES_H_
