#ifndef DAFJAX_CUDA_UNPACK_H_
#define DAFJAX_CUDA_UNPACK_H_

#include <cstdint>

#include "cuda/device.h"
#include "cuda/planes.h"
#include "cuda/tile_values.h"
#include "format/affine.h"
#include "format/float_type.h"
#include "format/packed.h"

namespace dafjax {

inline constexpr int kUnpackThreads = 128;
inline constexpr int kUnpackTiles = kUnpackThreads / kTileThreads;  // of a launch block

struct UnpackJob {
  const uint16_t* codes;
  const uint16_t* scale;
  const uint16_t* minimum;
  void* y;
  int64_t num_rows;
  int64_t row_elements;
  int64_t tiles_per_row;
  int64_t blocks_per_row;
  int64_t block_size;
  int64_t width;  // of a folded row, if blocks are of columns
  bool aligned_y;
  bool aligned_codes;  // and scales and minima
};

// Two stored parameters in one word: the scale, with its flag, above the minimum.
DAFJAX_DEVICE uint32_t JoinParameters(uint32_t scale, uint32_t minimum) {
  return scale << 16 | minimum;
}

DAFJAX_DEVICE bool IsFlagged(uint32_t joined) { return joined >> 31 != 0; }

// One rounding, as if the product were exact.
DAFJAX_DEVICE float Decode(uint32_t code, uint32_t joined) {
  const float scale = __uint_as_float(joined & 0x7fff0000);
  const float minimum = __uint_as_float(joined << 16);
  return fmaf(static_cast<float>(code), scale, minimum);
}

// Bits of what a code with its top bit set stands for in a flagged block.
template <FloatType kType, int kBits>
DAFJAX_DEVICE uint32_t NonFiniteBits(uint32_t code) {
  constexpr uint32_t kInfinity = kType == FloatType::kFloat32    ? 0x7f800000
                                 : kType == FloatType::kBFloat16 ? 0x7f80
                                                                 : 0x7c00;
  constexpr uint32_t kNan = kType == FloatType::kFloat32    ? 0x7fc00000
                            : kType == FloatType::kBFloat16 ? 0x7fc0
                                                            : 0x7e00;
  constexpr uint32_t kSign = kType == FloatType::kFloat32 ? 0x80000000 : 0x8000;
  if constexpr (kBits >= 3) {
    if (code == uint32_t{kCodeOfPlusInfinity} >> (8 - kBits)) return kInfinity;
    if (code == uint32_t{kCodeOfMinusInfinity} >> (8 - kBits)) return kInfinity | kSign;
  }
  return kNan;
}

template <FloatType kType, int kBits, bool kAnyFlagged>
DAFJAX_DEVICE FourValues<kType> DecodeRow(uint2 codes,
                                          const uint32_t (&joined)[kThreadLanes]) {
  float v[kThreadLanes];
  uint32_t code[kThreadLanes] = {codes.x & 0xffff, codes.x >> 16, codes.y & 0xffff,
                                 codes.y >> 16};
  DAFJAX_UNROLL
  for (int i = 0; i < kThreadLanes; ++i) v[i] = Decode(code[i], joined[i]);
  FourValues<kType> four = FourValues<kType>::Narrowed(v);
  if constexpr (kAnyFlagged) {
    DAFJAX_UNROLL
    for (int i = 0; i < kThreadLanes; ++i) {
      if (IsFlagged(joined[i]) && code[i] >> (kBits - 1) != 0) {
        four.SetBits(i, NonFiniteBits<kType, kBits>(code[i]));
      }
    }
  }
  return four;
}

// Decodes what a thread has of a tile. `parameters_of(row, joined)` sets the parameters
// of the thread's lanes; all lanes of the warp ask together.
template <FloatType kType, int kBits, bool kAnyFlagged, typename ParametersOfRow>
DAFJAX_DEVICE void DecodeTile(const PlaneReader<kBits>& reader, const Piece& piece,
                              bool all_whole, bool aligned,
                              const ParametersOfRow& parameters_of, void* y) {
  DAFJAX_UNROLL
  for (int row = 0; row < kTileRows; ++row) {
    uint32_t joined[kThreadLanes];
    parameters_of(row, joined);
    const FourValues<kType> four =
        DecodeRow<kType, kBits, kAnyFlagged>(reader.Row(row), joined);
    if (all_whole) {
      StoreFour(y, row * piece.stride, aligned, four);
    } else {
      StoreSome(y, row * piece.stride, piece.NumPresent(row), four);
    }
  }
}

// `kColumns`: blocks are of columns.
template <FloatType kType, int kBits, bool kColumns>
DAFJAX_KERNEL(kUnpackThreads)
UnpackKernel(const UnpackJob job) {
  const int lane_of_warp = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int part = lane_of_warp % kTileThreads;
  const int first_lane = part * kThreadLanes;
  const int64_t slot =
      int64_t{blockIdx.x} * kUnpackTiles + static_cast<int>(threadIdx.x) / kTileThreads;
  const int64_t row = slot / job.tiles_per_row;
  const int64_t tile = slot % job.tiles_per_row;
  const bool exists = row < job.num_rows;

  const int64_t lane_groups = kColumns ? job.width / kTileLanes : 1;
  const int64_t stride = kColumns ? job.width : kTileLanes;
  const int64_t tile_row = tile / lane_groups;
  const int64_t lane_of_row = tile % lane_groups * kTileLanes + first_lane;
  const int64_t first = tile_row * kTileRows * stride + lane_of_row;
  const Piece piece = {stride, exists ? job.row_elements - first : 0};
  const bool all_whole = __all_sync(kAllLanes, piece.IsWhole());

  PlaneReader<kBits> reader = {};
  uint32_t own[kThreadLanes] = {};  // row blocks: of strip `part` alone
  const int64_t first_block = row * job.blocks_per_row;
  if (exists) {
    reader.Load({{job.codes + row * WordsOfTiles(job.tiles_per_row, kBits),
                  job.tiles_per_row, job.aligned_codes},
                 tile,
                 first_lane,
                 true});
    if constexpr (kColumns) {
      const int64_t block = first_block +
                            tile_row * kTileRows / job.block_size * job.width +
                            lane_of_row;
      const uint2 scale = LoadWords(job.scale + block, job.aligned_codes);
      const uint2 minimum = LoadWords(job.minimum + block, job.aligned_codes);
      own[0] = JoinParameters(scale.x & 0xffff, minimum.x & 0xffff);
      own[1] = JoinParameters(scale.x >> 16, minimum.x >> 16);
      own[2] = JoinParameters(scale.y & 0xffff, minimum.y & 0xffff);
      own[3] = JoinParameters(scale.y >> 16, minimum.y >> 16);
    } else {
      const int64_t block =
          (tile * kTileElements + part * kMinBlockSize) / job.block_size;
      // The padding of a last tile may be in blocks that are not stored.
      if (block < job.blocks_per_row) {
        own[0] = JoinParameters(job.scale[first_block + block],
                                job.minimum[first_block + block]);
      }
    }
  }
  bool flagged = false;
  DAFJAX_UNROLL
  for (int i = 0; i < kThreadLanes; ++i) flagged = flagged || IsFlagged(own[i]);
  const bool any_flagged = __any_sync(kAllLanes, flagged);

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
  char* const y = static_cast<char*>(job.y) +
                  (row * job.row_elements + first) * ElementNbytes(kType);
  if (any_flagged) {
    DecodeTile<kType, kBits, true>(reader, piece, all_whole, job.aligned_y,
                                   parameters_of, y);
  } else {
    DecodeTile<kType, kBits, false>(reader, piece, all_whole, job.aligned_y,
                                    parameters_of, y);
  }
}

}  // namespace dafjax

#endif  // DAFJAX_CUDA_UNPACK_H_
