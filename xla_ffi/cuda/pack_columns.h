#ifndef DAFJAX_CUDA_PACK_COLUMNS_H_
#define DAFJAX_CUDA_PACK_COLUMNS_H_

#include <cstdint>
#include <type_traits>

#include "cuda/device.h"
#include "cuda/divisor.h"
#include "cuda/encode.h"
#include "cuda/kernels.h"
#include "cuda/packed_places.h"
#include "cuda/parameters.h"
#include "cuda/planes.h"
#include "cuda/scan.h"
#include "cuda/tile_values.h"
#include "format/affine.h"
#include "format/columns.h"
#include "format/float_type.h"
#include "format/packed.h"

namespace dafjax {

// Column blocks: the warps of a launch block have the blocks of 32 neighboring lanes, one
// below the other, so that every value is read once and stays in a register.
inline constexpr int kWarpRows = kWarpTiles * kTileRows;
inline constexpr int kMaxPackColumnsWarps = kMaxBlockSize / kWarpRows;
inline constexpr int kPackColumnsThreads = kMaxPackColumnsWarps * kWarpLanes;  // at most

// With fewer, compilers store registers in memory.
template <typename Values>
constexpr int PackColumnsRegisters(int bits) {
  if (Values::kRegisters == kThreadLanes) return 128;
  return PlanesOf(bits).count <= 3 ? 72 : 88;
}

template <typename Codes>
struct PackColumnsJob {
  ConstFloatArray x;
  Codes codes;
  BlockSums sums;
  DeviceRounding rounding;
  int64_t row_elements;
  int64_t block_size;
  int64_t width;      // of a folded row
  int64_t tile_rows;  // rows of tiles
  Divisor lane_groups;
  Divisor blocks_down;
};

// What the warps have found of their rows, and then what each lane is encoded with.
// DAFJAX_SHARED arrays of a launch block.
struct SharedLanes {
  float* lo;  // [warps][32]
  float* hi;
  uint32_t* unusual;  // [warps]: lanes with values that are not finite
  float* negative_start;  // [32]
  float* inverse;
  uint32_t* flagged;    // [1]
  uint32_t* all_plain;  // [1]: no block is flagged, and all values fit
  uint32_t* stored;     // [2]: what noise depends on that the decoder subtracts
};

// The sum of some values, and of their squares.
struct Sums {
  float sum;
  float square;

  DAFJAX_DEVICE void AddValue(float v) {
    sum += v;
    square = fmaf(v, v, square);
  }
  DAFJAX_DEVICE void Add(const Sums& other) {
    sum += other.sum;
    square += other.square;
  }
};

DAFJAX_DEVICE Sums ShuffleXor(const Sums& sums, int lanes) {
  return {__shfl_xor_sync(kAllLanes, sums.sum, lanes),
          __shfl_xor_sync(kAllLanes, sums.square, lanes)};
}

// Computes the parameters of the 32 blocks, one in each lane of the first warp.
template <int kBits>
DAFJAX_DEVICE void ComputeColumnParameters(FloatType type, bool dithered,
                                           const SharedLanes& shared, int num_warps,
                                           int lane, uint16_t* scale,
                                           uint16_t* minimum) {
  Range range = Range::Empty();
  uint32_t unusual = 0;
  for (int w = 0; w < num_warps; ++w) {
    range.Add({shared.lo[w * kWarpLanes + lane], shared.hi[w * kWarpLanes + lane]});
    unusual |= shared.unusual[w];
  }
  const bool flagged = (unusual >> lane & 1) != 0;
  const BlockParameters parameters =
      ParametersOf<kBits>(type, range, flagged, dithered);
  scale[lane] = static_cast<uint16_t>(parameters.scale);
  minimum[lane] = static_cast<uint16_t>(parameters.minimum);
  shared.negative_start[lane] = parameters.negative_start;
  shared.inverse[lane] = parameters.inverse;
  if (lane == kFirstDitherLane) {
    shared.stored[0] = JoinParameters(parameters.scale, parameters.minimum);
  }
  if (lane == kLastDitherLane) {
    shared.stored[1] = JoinParameters(parameters.scale, parameters.minimum);
  }
  const bool all_fit = __all_sync(kAllLanes, parameters.fits);
  if (lane == 0) {
    *shared.flagged = unusual;
    *shared.all_plain = unusual == 0 && all_fit;
  }
}

// Adds to a thread's ranges those of the same lanes in the warp's other tiles.
template <typename AnyRange, int kRanges>
DAFJAX_DEVICE void AddOtherTiles(AnyRange (&ranges)[kRanges]) {
  DAFJAX_UNROLL
  for (int step = kTileThreads; step < kWarpLanes; step *= 2) {
    DAFJAX_UNROLL
    for (int i = 0; i < kRanges; ++i) ranges[i].Add(ShuffleXor(ranges[i], step));
  }
}

// Sums what the launch block has of each lane, in the order of warps, and stores that for
// its 32 blocks, which begin at `block`. Takes the place of ranges in shared arrays, which
// nobody reads any longer.
template <typename Values>
DAFJAX_DEVICE void StoreSums(const Values& values, const ConstFloatArray& x,
                             const Piece& piece, bool all_finite,
                             const SharedLanes& shared, int num_warps, int64_t block,
                             const BlockSums& to) {
  const int lane = static_cast<int>(threadIdx.x % kWarpLanes);
  const int warp = static_cast<int>(threadIdx.x / kWarpLanes);
  Sums sums[kThreadLanes] = {};
  if (all_finite) {
    DAFJAX_UNROLL
    for (int row = 0; row < kTileRows; ++row) {
      float v[kThreadLanes];
      values.GiveRow(row, v);
      DAFJAX_UNROLL
      for (int i = 0; i < kThreadLanes; ++i) sums[i].AddValue(v[i]);
    }
  } else {
    VisitValues(x, piece, [&](int, int i, float v) { sums[i].AddValue(v); });
  }
  AddOtherTiles(sums);
  if (lane < kTileThreads) {
    DAFJAX_UNROLL
    for (int i = 0; i < kThreadLanes; ++i) {
      shared.lo[warp * kTileLanes + lane * kThreadLanes + i] = sums[i].sum;
      shared.hi[warp * kTileLanes + lane * kThreadLanes + i] = sums[i].square;
    }
  }
  __syncthreads();
  if (warp != 0) return;
  Sums of_block = {};
  for (int w = 0; w < num_warps; ++w) {
    of_block.Add({shared.lo[w * kTileLanes + lane], shared.hi[w * kTileLanes + lane]});
  }
  to.sum[block + lane] = of_block.sum;
  to.square[block + lane] = of_block.square;
}

template <int kBits, typename Values, typename Codes>
DAFJAX_KERNEL_OF_REGISTERS(kPackColumnsThreads, PackColumnsRegisters<Values>(kBits))
PackColumnsKernel(const PackColumnsJob<Codes> job) {
  DAFJAX_SHARED(float, shared_lo, kMaxPackColumnsWarps * kTileLanes);
  DAFJAX_SHARED(float, shared_hi, kMaxPackColumnsWarps * kTileLanes);
  DAFJAX_SHARED(uint32_t, shared_unusual, kMaxPackColumnsWarps);
  DAFJAX_SHARED(float, shared_negative_start, kTileLanes);
  DAFJAX_SHARED(float, shared_inverse, kTileLanes);
  DAFJAX_SHARED(uint32_t, shared_flagged, 1);
  DAFJAX_SHARED(uint32_t, shared_all_plain, 1);
  DAFJAX_SHARED(uint32_t, shared_stored, 2);
  const SharedLanes shared = {
      shared_lo,      shared_hi,      shared_unusual,   shared_negative_start,
      shared_inverse, shared_flagged, shared_all_plain, shared_stored};

  const int lane_of_warp = static_cast<int>(threadIdx.x % kWarpLanes);
  const int warp = static_cast<int>(threadIdx.x / kWarpLanes);
  const int num_warps = static_cast<int>(blockDim.x / kWarpLanes);
  const int part = lane_of_warp % kTileThreads;
  const int first_lane = part * kThreadLanes;

  const uint32_t of_rows = job.lane_groups.Quotient(blockIdx.x);
  const int64_t group = job.lane_groups.Remainder(blockIdx.x, of_rows);
  const uint32_t array_row = job.blocks_down.Quotient(of_rows);
  const int64_t down = job.blocks_down.Remainder(of_rows, array_row);
  const int64_t row = array_row;
  const int64_t tile_row = down * (job.block_size / kTileRows) + warp * kWarpTiles +
                           lane_of_warp / kTileThreads;
  const bool exists = tile_row < job.tile_rows;
  const int64_t first =
      tile_row * kTileRows * job.width + group * kTileLanes + first_lane;
  const Piece piece = {job.width, exists ? job.row_elements - first : 0};
  const bool all_whole = __all_sync(kAllLanes, piece.IsWhole());
  const ConstFloatArray x = job.x.From(row * job.row_elements + first);

  Values values;
  values.Load(x, piece, all_whole);

  typename Values::Range of_registers[Values::kRegisters];
  uint32_t checksum = ScanTile(values, [](int, int i) { return i; }, of_registers);
  AddOtherTiles(of_registers);
  Range ranges[kThreadLanes];
  Values::GiveLanes(of_registers, ranges);
  bool all_finite = true;  // and no padding
  DAFJAX_UNROLL
  for (int i = 0; i < kThreadLanes; ++i) {
    all_finite = all_finite && ranges[i].IsOfFinite();
  }
  all_finite = __all_sync(kAllLanes, all_finite);
  uint32_t unusual = 0;  // lanes with values that are not finite
  if (!all_finite) {
    DAFJAX_UNROLL
    for (int i = 0; i < kThreadLanes; ++i) ranges[i] = Range::Empty();
    checksum = 0;
    VisitValues(x, piece, [&](int r, int i, float v) {
      if (IsFinite(v)) {
        ranges[i].Add({v, v});
        if (r % 2 == 0) checksum += __float_as_uint(v);
      } else {
        unusual |= 1u << (first_lane + i);
      }
    });
    DAFJAX_UNROLL
    for (int step = 1; step < kWarpLanes; step *= 2) {
      unusual |= __shfl_xor_sync(kAllLanes, unusual, step);
    }
    AddOtherTiles(ranges);
  }
  if (lane_of_warp < kTileThreads) {
    DAFJAX_UNROLL
    for (int i = 0; i < kThreadLanes; ++i) {
      shared.lo[warp * kTileLanes + first_lane + i] = ranges[i].lo;
      shared.hi[warp * kTileLanes + first_lane + i] = ranges[i].hi;
    }
    if (lane_of_warp == 0) shared.unusual[warp] = unusual;
  }
  __syncthreads();
  const int64_t block =
      (row * job.blocks_down.Value() + down) * job.width + group * kTileLanes;
  if (warp == 0) {
    ComputeColumnParameters<kBits>(x.type, job.rounding.dithered, shared, num_warps,
                                   lane_of_warp, job.codes.Scale(block),
                                   job.codes.Minimum(block));
  }
  __syncthreads();
  if (job.sums.sum != nullptr) {
    // Of what goes into pools nobody asks for them.
    if constexpr (std::is_same_v<Codes, CodesInArrays<uint16_t>>) {
      StoreSums(values, x, piece, all_finite, shared, num_warps, block, job.sums);
    }
  }

  RowParameters of_lanes;
  DAFJAX_UNROLL
  for (int i = 0; i < kThreadLanes; ++i) {
    of_lanes.negative_start[i] = shared.negative_start[first_lane + i];
    of_lanes.inverse[i] = shared.inverse[first_lane + i];
  }
  const uint32_t flags = *shared.flagged;
  of_lanes.flagged = flags >> first_lane & 0xf;
  const int64_t tile = tile_row * job.lane_groups.Value() + group;
  const int64_t num_tiles = job.tile_rows * job.lane_groups.Value();
  LaneNoise noise;
  checksum = TileSum(checksum);
  if (job.rounding.dithered) {
    checksum = DitherChecksum(shared.stored[0], shared.stored[1]);
  }
  noise.Start(job.rounding, tile, checksum, first_lane);
  const auto parameters_of = [&](int) { return of_lanes; };
  const bool stores = exists && job.codes.has_planes;
  using Row = decltype(job.codes.template Row<kBits>(row, tile, num_tiles));
  const CodesOfThread<Row> to = {
      stores ? job.codes.template Row<kBits>(row, tile, num_tiles) : Row{}, tile,
      first_lane, stores};
  if (all_finite && *shared.all_plain != 0) {
    EncodeTile<kBits>(values, parameters_of, noise, to);
  } else {
    EncodeTileWithFlags<kBits>(x, piece, parameters_of, noise, to);
  }
}

}  // namespace dafjax

#endif  // DAFJAX_CUDA_PACK_COLUMNS_H_
