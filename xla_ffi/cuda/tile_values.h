#ifndef DAFJAX_CUDA_TILE_VALUES_H_
#define DAFJAX_CUDA_TILE_VALUES_H_

#include <cstdint>

#include "cuda/device.h"
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

// Four neighboring values as they are in memory.
template <FloatType kType>
struct FourValues {
  static constexpr int kWords = kType == FloatType::kFloat32 ? 4 : 2;

  // Exact.
  DAFJAX_DEVICE float Widened(int i) const {
    if constexpr (kType == FloatType::kFloat32) {
      return __uint_as_float(words[i]);
    } else if constexpr (kType == FloatType::kBFloat16) {
      return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16
                                        : words[i / 2] & 0xffff0000);
    } else {
      return WidenFloat16(i % 2 == 0 ? words[i / 2] & 0xffff : words[i / 2] >> 16);
    }
  }

  // Rounds to nearest, ties to even. `v` are finite.
  DAFJAX_DEVICE static FourValues Narrowed(const float (&v)[kThreadLanes]) {
    FourValues four;
    if constexpr (kType == FloatType::kFloat32) {
      DAFJAX_UNROLL
      for (int i = 0; i < 4; ++i) four.words[i] = __float_as_uint(v[i]);
    } else if constexpr (kType == FloatType::kBFloat16) {
      DAFJAX_UNROLL
      for (int i = 0; i < 2; ++i) {
        four.words[i] = RoundToBFloat16(v[2 * i]) | RoundToBFloat16(v[2 * i + 1]) << 16;
      }
    } else {
      DAFJAX_UNROLL
      for (int i = 0; i < 2; ++i) {
        four.words[i] = RoundToFloat16(v[2 * i]) | RoundToFloat16(v[2 * i + 1]) << 16;
      }
    }
    return four;
  }

  // Replaces value `i` by a number of the type whose bits are given.
  DAFJAX_DEVICE void SetBits(int i, uint32_t bits) {
    if constexpr (kType == FloatType::kFloat32) {
      words[i] = bits;
    } else {
      const uint32_t other = words[i / 2] & (i % 2 == 0 ? 0xffff0000 : 0xffff);
      words[i / 2] = other | (i % 2 == 0 ? bits : bits << 16);
    }
  }

  uint32_t words[kWords];
};

// Loads four values from element `index` on. `aligned`: they are as one word of theirs.
template <FloatType kType>
DAFJAX_DEVICE FourValues<kType> LoadFour(const void* x, int64_t index, bool aligned) {
  FourValues<kType> four;
  if constexpr (kType == FloatType::kFloat32) {
    const auto* const from = static_cast<const uint32_t*>(x) + index;
    if (aligned) {
      const uint4 all = *reinterpret_cast<const uint4*>(from);
      four.words[0] = all.x;
      four.words[1] = all.y;
      four.words[2] = all.z;
      four.words[3] = all.w;
    } else {
      DAFJAX_UNROLL
      for (int i = 0; i < 4; ++i) four.words[i] = from[i];
    }
  } else {
    const auto* const from = static_cast<const uint16_t*>(x) + index;
    if (aligned) {
      const uint2 all = *reinterpret_cast<const uint2*>(from);
      four.words[0] = all.x;
      four.words[1] = all.y;
    } else {
      four.words[0] = from[0] | uint32_t{from[1]} << 16;
      four.words[1] = from[2] | uint32_t{from[3]} << 16;
    }
  }
  return four;
}

template <FloatType kType>
DAFJAX_DEVICE uint32_t LoadOne(const void* x, int64_t index) {
  if constexpr (kType == FloatType::kFloat32) {
    return static_cast<const uint32_t*>(x)[index];
  } else {
    return static_cast<const uint16_t*>(x)[index];
  }
}

template <FloatType kType>
DAFJAX_DEVICE void StoreFour(void* y, int64_t index, bool aligned,
                             const FourValues<kType>& four) {
  if constexpr (kType == FloatType::kFloat32) {
    auto* const to = static_cast<uint32_t*>(y) + index;
    if (aligned) {
      *reinterpret_cast<uint4*>(to) =
          make_uint4(four.words[0], four.words[1], four.words[2], four.words[3]);
    } else {
      DAFJAX_UNROLL
      for (int i = 0; i < 4; ++i) to[i] = four.words[i];
    }
  } else {
    auto* const to = static_cast<uint16_t*>(y) + index;
    if (aligned) {
      *reinterpret_cast<uint2*>(to) = make_uint2(four.words[0], four.words[1]);
    } else {
      DAFJAX_UNROLL
      for (int i = 0; i < 4; ++i) {
        to[i] = static_cast<uint16_t>(four.words[i / 2] >> (i % 2 * 16));
      }
    }
  }
}

// Stores the first `count` of four values.
template <FloatType kType>
DAFJAX_DEVICE void StoreSome(void* y, int64_t index, int count,
                             const FourValues<kType>& four) {
  DAFJAX_UNROLL
  for (int i = 0; i < kThreadLanes; ++i) {
    if (i >= count) continue;
    if constexpr (kType == FloatType::kFloat32) {
      static_cast<uint32_t*>(y)[index + i] = four.words[i];
    } else {
      static_cast<uint16_t*>(y)[index + i] =
          static_cast<uint16_t>(four.words[i / 2] >> (i % 2 * 16));
    }
  }
}

// What a thread holds of a tile. Padding holds zeros.
template <FloatType kType>
struct TileValues {
  // `x`: the thread's first element.
  DAFJAX_DEVICE void Load(const void* x, const Piece& piece, bool all_whole,
                          bool aligned) {
    if (all_whole) {
      DAFJAX_UNROLL
      for (int row = 0; row < kTileRows; ++row) {
        rows[row] = LoadFour<kType>(x, row * piece.stride, aligned);
      }
      return;
    }
    DAFJAX_UNROLL
    for (int row = 0; row < kTileRows; ++row) {
      const int present = piece.NumPresent(row);
      DAFJAX_UNROLL
      for (int i = 0; i < FourValues<kType>::kWords; ++i) rows[row].words[i] = 0;
      DAFJAX_UNROLL
      for (int i = 0; i < kThreadLanes; ++i) {
        if (i < present) {
          rows[row].SetBits(i, LoadOne<kType>(x, row * piece.stride + i));
        }
      }
    }
  }

  FourValues<kType> rows[kTileRows];
};

DAFJAX_DEVICE bool IsFinite(float v) { return fabsf(v) < __uint_as_float(0x7f800000); }

}  // namespace dafjax

#endif  // DAFJAX_CUDA_TILE_VALUES_H_
