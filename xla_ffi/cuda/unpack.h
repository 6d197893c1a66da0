#ifndef DAFJAX_CUDA_UNPACK_H_
#define DAFJAX_CUDA_UNPACK_H_

#include <cstdint>

#include "cuda/device.h"
#include "cuda/encode.h"
#include "cuda/packed_places.h"
#include "cuda/parameters.h"
#include "cuda/planes.h"
#include "cuda/tile_values.h"
#include "format/affine.h"
#include "format/float_type.h"
#include "format/noise.h"
#include "format/packed.h"

namespace dafjax {

inline constexpr int kUnpackThreads = 128;
inline constexpr int kUnpackTiles = kUnpackThreads / kTileThreads;  // of a launch block

struct UnpackJob {
  MutableFloatArray y;
  int64_t num_rows;
  int64_t row_elements;
  int64_t tiles_per_row;
  int64_t blocks_per_row;
  int log2_block_size;
  int64_t width;  // of a folded row, if blocks are of columns
  const uint32_t* seeds = nullptr;  // of noise that is subtracted, one for each row
};

DAFJAX_DEVICE bool IsFlagged(uint32_t joined) { return joined >> 31 != 0; }

// One rounding, as if the product were exact.
DAFJAX_DEVICE float Decode(float steps, uint32_t joined, float of_step = 1.0f) {
  const float scale = __uint_as_float(joined & 0x7fff0000) * of_step;
  const float minimum = __uint_as_float(joined << 16);
  return fmaf(steps, scale, minimum);
}

// What the codes of a thread's part of a tile stand for, row by row. All bits are there.
struct AllBits {
  DAFJAX_DEVICE void Start(const UnpackJob&, int64_t, int64_t, uint32_t, int) {}
  DAFJAX_DEVICE void GoToNextRow() {}
  template <bool kMayBeFlagged>
  DAFJAX_DEVICE float ValueOf(int, uint32_t code, uint32_t joined) const {
    return Decode(static_cast<float>(code), joined);
  }
};

// Planes are lost (README.md section 5). Exact.
struct BitsLeft {
  DAFJAX_DEVICE void Start(const UnpackJob&, int64_t, int64_t, uint32_t, int) {}
  DAFJAX_DEVICE void GoToNextRow() {}
  template <bool kMayBeFlagged>
  DAFJAX_DEVICE float ValueOf(int, uint32_t code, uint32_t joined) const {
    return Decode(fmaf(static_cast<float>(code), step, first), joined);
  }
  float step;
  float first;  // what code 0 stands for
};

// All bits are there, and noise is to be subtracted.
template <int kBits>
struct Dithered {
  DAFJAX_DEVICE void Start(const UnpackJob& job, int64_t row, int64_t tile,
                           uint32_t checksum, int first_lane) {
    noise.Start(job.seeds[row], tile, checksum, first_lane);
    limit = LargestDecoded(job.y.type);
  }
  DAFJAX_DEVICE void GoToNextRow() { noise.GoToNextRow(); }

  template <bool kMayBeFlagged>
  DAFJAX_DEVICE float ValueOf(int lane, uint32_t code, uint32_t joined) const {
    const int flag = kMayBeFlagged && IsFlagged(joined) ? 1 : 0;
    const int fraction = 16 - kBits + flag;
    const int steps =
        DitheredSteps(static_cast<int>(code), fraction,
                      static_cast<uint16_t>(noise.words[lane] >> 16));
    const float value =
        Decode(static_cast<float>(steps), joined, PowerOfTwo(-fraction));
    return fmaxf(fminf(value, limit), -limit);
  }

  LaneNoise noise;
  float limit;
};

// Bits of what a code with its top bit set stands for in a flagged block.
template <int kBits>
DAFJAX_DEVICE uint32_t NonFiniteBits(FloatType type, uint32_t code) {
  const bool plus = kBits >= 3 && code == uint32_t{kCodeOfPlusInfinity} >> (8 - kBits);
  const bool minus = kBits >= 3 && code == uint32_t{kCodeOfMinusInfinity} >> (8 - kBits);
  const uint32_t bits = plus ? 0x7f800000 : minus ? 0xff800000 : 0x7fc00000;
  switch (type) {
    case FloatType::kFloat32: return bits;
    case FloatType::kBFloat16: return bits >> 16;
    default: return plus ? 0x7c00 : minus ? 0xfc00 : 0x7e00;
  }
}

// Decodes what a thread has of a tile: no padding, of blocks that are not flagged.
// `reader` has loaded the codes, of which `kBits` are left; `left` says what that stands
// for. `parameters_of(row, joined)` sets the parameters of the thread's lanes; all lanes of
// the warp ask together.
template <int kBits, FloatType kType, typename Left, typename ParametersOfRow>
DAFJAX_DEVICE void DecodeTileAs(const CodeReader<kBits>& reader, const Piece& piece,
                                Left left, const ParametersOfRow& parameters_of,
                                const MutableFloatArray& y) {
  DAFJAX_UNROLL
  for (int row = 0; row < kTileRows; ++row) {
    uint32_t joined[kThreadLanes];
    parameters_of(row, joined);
    const uint2 codes = reader.Row(row);
    const float v[kThreadLanes] = {
        left.template ValueOf<false>(0, codes.x & 0xffff, joined[0]),
        left.template ValueOf<false>(1, codes.x >> 16, joined[1]),
        left.template ValueOf<false>(2, codes.y & 0xffff, joined[2]),
        left.template ValueOf<false>(3, codes.y >> 16, joined[3])};
    StoreFour<kType>(y, row * piece.stride, v);
    left.GoToNextRow();
  }
}

template <int kBits, typename... Arguments>
DAFJAX_DEVICE void DecodeTile(FloatType type, const Arguments&... arguments) {
  switch (type) {
    case FloatType::kFloat32:
      return DecodeTileAs<kBits, FloatType::kFloat32>(arguments...);
    case FloatType::kBFloat16:
      return DecodeTileAs<kBits, FloatType::kBFloat16>(arguments...);
    default: return DecodeTileAs<kBits, FloatType::kFloat16>(arguments...);
  }
}

// Whether what is left of a code of a flagged block is that of no finite number.
template <int kBits>
DAFJAX_DEVICE bool IsNonFinite(uint32_t code) {
  if constexpr (kBits == 0) return true;
  return code >> (kBits > 0 ? kBits - 1 : 0) != 0;
}

// DecodeTile for whatever there is, a row at a time: rare, and not to cost registers.
template <int kBits, typename Row, typename Left, typename ParametersOfRow>
DAFJAX_DEVICE void DecodeTileWithFlags(const CodesOfThread<Row>& from,
                                       const Piece& piece, Left left,
                                       const ParametersOfRow& parameters_of,
                                       const MutableFloatArray& y) {
  DAFJAX_NO_UNROLL
  for (int row = 0; row < kTileRows; ++row) {
    uint32_t joined[kThreadLanes];
    parameters_of(row, joined);
    const int present = piece.NumPresent(row);
    if (present == 0) continue;
    const uint2 codes = LoadCodes<kBits>(row, from);
    DAFJAX_UNROLL
    for (int i = 0; i < kThreadLanes; ++i) {
      if (i >= present) continue;
      const uint32_t code = (i < 2 ? codes.x : codes.y) >> i % 2 * 16 & 0xffff;
      const int64_t place = row * piece.stride + i;
      if (IsFlagged(joined[i]) && IsNonFinite<kBits>(code)) {
        StoreBits(y, place, NonFiniteBits<kBits>(y.type, code));
      } else {
        StoreValue(y, place, left.template ValueOf<true>(i, code, joined[i]));
      }
    }
    left.GoToNextRow();
  }
}

// The part of a thread in decoding a batch of rows. `decode(row, tile, first_lane, exists,
// piece, parameters_of, y, is_plain, checksum)` decodes its part of tile `tile` of row
// `row`; `is_plain()` tells whether that has no padding and no flags, and waits for
// parameters; `checksum()` is what noise depends on that is subtracted.
// All lanes of the warp ask together. `kColumns`: blocks are of columns.
template <bool kColumns, typename Codes, typename DecodePart>
DAFJAX_DEVICE void UnpackPart(const UnpackJob& job, const Codes& codes,
                              const DecodePart& decode) {
  const int lane_of_warp = static_cast<int>(threadIdx.x % kWarpLanes);
  const int part = lane_of_warp % kTileThreads;
  const int first_lane = part * kThreadLanes;
  const int64_t slot =
      int64_t{blockIdx.x} * kUnpackTiles + static_cast<int>(threadIdx.x / kTileThreads);
  const TilePlace place = PlaceOfSlot(slot, job.tiles_per_row, job.num_rows);
  const int64_t row = place.row;
  const int64_t tile = place.tile;
  const bool exists = row < job.num_rows && tile < job.tiles_per_row;

  const int64_t lane_groups = kColumns ? job.width / kTileLanes : 1;
  const int64_t stride = kColumns ? job.width : kTileLanes;
  const int64_t tile_row = kColumns ? Quotient(tile, lane_groups) : tile;
  const int64_t lane_of_row = (tile - tile_row * lane_groups) * kTileLanes + first_lane;
  const int64_t first = tile_row * kTileRows * stride + lane_of_row;
  const Piece piece = {stride, exists ? job.row_elements - first : 0};
  const bool all_whole = __all_sync(kAllLanes, piece.IsWhole());

  uint32_t own[kThreadLanes] = {};  // row blocks: of strip `part` alone
  const int64_t first_block = row * job.blocks_per_row;
  if (exists) {
    if constexpr (kColumns) {
      const int64_t block = first_block +
                            (tile_row * kTileRows >> job.log2_block_size) * job.width +
                            lane_of_row;
      const uint2 scale = LoadWords(codes.Scale(block), codes.aligned);
      const uint2 minimum = LoadWords(codes.Minimum(block), codes.aligned);
      own[0] = JoinParameters(scale.x & 0xffff, minimum.x & 0xffff);
      own[1] = JoinParameters(scale.x >> 16, minimum.x >> 16);
      own[2] = JoinParameters(scale.y & 0xffff, minimum.y & 0xffff);
      own[3] = JoinParameters(scale.y >> 16, minimum.y >> 16);
    } else {
      const int64_t block =
          (tile * kTileElements + part * kMinBlockSize) >> job.log2_block_size;
      // The padding of a last tile may be in blocks that are not stored.
      if (block < job.blocks_per_row) {
        own[0] = JoinParameters(*codes.Scale(first_block + block),
                                *codes.Minimum(first_block + block));
      }
    }
  }
  const int first_thread = lane_of_warp - part;
  const auto parameters_of = [&](int r, uint32_t(&joined)[kThreadLanes]) {
    if constexpr (kColumns) {
      DAFJAX_UNROLL
      for (int i = 0; i < kThreadLanes; ++i) joined[i] = own[i];
    } else {
      constexpr int kStripRows = kMinBlockSize / kTileLanes;
      const uint32_t of_strip =
          __shfl_sync(kAllLanes, own[0], first_thread + r / kStripRows);
      DAFJAX_UNROLL
      for (int i = 0; i < kThreadLanes; ++i) joined[i] = of_strip;
    }
  };
  const MutableFloatArray y = job.y.From(row * job.row_elements + first);
  const auto is_plain = [&] {
    bool flagged = false;
    DAFJAX_UNROLL
    for (int i = 0; i < kThreadLanes; ++i) flagged = flagged || IsFlagged(own[i]);
    return !__any_sync(kAllLanes, flagged) && all_whole && y.aligned;
  };
  const auto checksum = [&] {
    return DitherChecksum(__shfl_sync(kAllLanes, own[0], first_thread),
                          __shfl_sync(kAllLanes, own[0], first_thread + kLastDither));
  };
  decode(row, tile, first_lane, exists, piece, parameters_of, y, is_plain, checksum);
}

// Decodes a thread's part of a tile of which `kBits` are left.
template <int kBits, typename Codes, typename Left, typename ParametersOfRow,
          typename IsPlain, typename Checksum>
DAFJAX_DEVICE void DecodePart(const UnpackJob& job, const Codes& codes, Left left,
                              int64_t row, int64_t tile, int first_lane, bool exists,
                              const Piece& piece, const ParametersOfRow& parameters_of,
                              const MutableFloatArray& y, const IsPlain& is_plain,
                              const Checksum& checksum) {
  using Row = decltype(codes.template Row<kBits>(row, tile, job.tiles_per_row));
  const CodesOfThread<Row> from = {
      exists ? codes.template Row<kBits>(row, tile, job.tiles_per_row) : Row{}, tile,
      first_lane, exists};
  // Codes and parameters are waited for together, not one after the other.
  CodeReader<kBits> reader = {};
  if (exists) reader.Load(from);
  if (job.seeds != nullptr) {
    const uint32_t of_tile = checksum();
    if (exists) left.Start(job, row, tile, of_tile, first_lane);
  }
  if (is_plain()) {
    DecodeTile<kBits>(y.type, reader, piece, left, parameters_of, y);
  } else {
    DecodeTileWithFlags<kBits>(from, piece, left, parameters_of, y);
  }
}

template <int kBits, bool kColumns, typename Left>
DAFJAX_KERNEL(kUnpackThreads)
UnpackKernel(const UnpackJob job, const CodesInArrays<const uint16_t> codes) {
  UnpackPart<kColumns>(job, codes, [&](const auto&... part) {
    DecodePart<kBits>(job, codes, Left{}, part...);
  });
}

}  // namespace dafjax

#endif  // DAFJAX_CUDA_UNPACK_H_
