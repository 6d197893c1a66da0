#ifndef DAFJAX_CUDA_PACK_ROWS_H_
#define DAFJAX_CUDA_PACK_ROWS_H_

#include <cstdint>

#include "cuda/device.h"
#include "cuda/encode.h"
#include "cuda/packed_places.h"
#include "cuda/parameters.h"
#include "cuda/planes.h"
#include "cuda/scan.h"
#include "cuda/tile_values.h"
#include "format/affine.h"
#include "format/packed.h"

namespace dafjax {

inline constexpr int kPackRowsThreads = 128;
// Of a multiprocessor at the least. With one more, compilers store registers in memory.
template <typename Values>
constexpr int PackRowsBlocks(int bits) {
  if (Values::kRegisters == kThreadLanes) return PlanesOf(bits).count <= 2 ? 5 : 4;
  return 7;
}
inline constexpr int kPackRowsTiles = kPackRowsThreads / kTileThreads;  // of a launch block

// Row blocks: thread `i` of a tile has the range of the tile's strip `i`, then the
// parameters of the block that the strip belongs to.
inline constexpr int kStripElements = kMinBlockSize;
inline constexpr int kStripRows = kStripElements / kTileLanes;
inline constexpr int kMaxStrips = kMaxBlockSize / kStripElements;  // of a block
static_assert(kTileElements / kStripElements == kTileThreads);

template <typename Codes>
struct PackRowsJob {
  ConstFloatArray x;
  Codes codes;
  DeviceRounding rounding;
  int64_t num_rows;
  int64_t row_elements;
  int64_t tiles_per_row;
  int64_t slots_per_row;  // tiles, and one more if blocks have two and the number is odd
  int64_t blocks_per_row;
  int log2_strips;  // of a block
};

// Gives each thread of a tile the range of one strip out of those that all have found of
// their own lanes: every exchange halves the number of strips that a thread has.
template <typename AnyRange>
DAFJAX_DEVICE AnyRange RangeOfOwnStrip(AnyRange (&ranges)[kTileThreads], int part) {
  DAFJAX_UNROLL
  for (int step = kTileThreads / 2; step > 0; step /= 2) {
    const bool upper = (part & step) != 0;
    DAFJAX_UNROLL
    for (int i = 0; i < step; ++i) {
      const AnyRange keep = upper ? ranges[i + step] : ranges[i];
      const AnyRange give = upper ? ranges[i] : ranges[i + step];
      ranges[i] = keep;
      ranges[i].Add(ShuffleXor(give, step));
    }
  }
  return ranges[0];
}

// What a thread finds in one strip, value by value. `x` begins with the strip, of which
// `num_present` are there.
struct StripScan {
  Range range;  // of finite values
  bool all_finite;
};
DAFJAX_DEVICE StripScan ScanStrip(const ConstFloatArray& x, int64_t num_present) {
  StripScan scan = {Range::Empty(), true};
  DAFJAX_NO_UNROLL
  for (int i = 0; i < kStripElements && i < num_present; ++i) {
    const float v = LoadValue(x, i);
    if (IsFinite(v)) {
      scan.range.Add({v, v});
    } else {
      scan.all_finite = false;
    }
  }
  return scan;
}

template <int kBits, typename Values, typename Codes>
DAFJAX_KERNEL(kPackRowsThreads, PackRowsBlocks<Values>(kBits))
PackRowsKernel(const PackRowsJob<Codes> job) {
  const int lane_of_warp = static_cast<int>(threadIdx.x % kWarpLanes);
  const int part = lane_of_warp % kTileThreads;
  const int64_t slot = int64_t{blockIdx.x} * kPackRowsTiles +
                       static_cast<int>(threadIdx.x / kTileThreads);
  const TilePlace place = PlaceOfSlot(slot, job.slots_per_row, job.num_rows);
  const int64_t row = place.row;
  const int64_t tile = place.tile;
  const bool exists = row < job.num_rows && tile < job.tiles_per_row;
  const int first_lane = part * kThreadLanes;
  const int64_t first_of_tile = tile * kTileElements;
  const int64_t first = first_of_tile + first_lane;
  const Piece piece = {kTileLanes, exists ? job.row_elements - first : 0};
  const bool all_whole = __all_sync(kAllLanes, piece.IsWhole());
  const ConstFloatArray x = job.x.From(row * job.row_elements + first);

  Values values;
  values.Load(x, piece, all_whole);
  typename Values::Range ranges[kTileThreads];
  uint32_t checksum =
      ScanTile(values, [](int r, int) { return r / kStripRows; }, ranges);
  Range range = Values::Joined(RangeOfOwnStrip(ranges, part));
  const bool all_finite = __all_sync(kAllLanes, range.IsOfFinite());  // and no padding
  uint32_t unusual = 0;  // threads whose strip has values that are not finite
  if (!all_finite) {
    const int64_t first_of_strip = first_of_tile + part * kStripElements;
    const StripScan strip =
        ScanStrip(job.x.From(row * job.row_elements + first_of_strip),
                  exists ? job.row_elements - first_of_strip : 0);
    range = strip.range;
    unusual = __ballot_sync(kAllLanes, !strip.all_finite);
    checksum = 0;
    VisitValues(x, piece, [&](int r, int, float v) {
      if (r % 2 == 0 && IsFinite(v)) checksum += __float_as_uint(v);
    });
  }
  // A block has the strips of as many neighboring threads, of two tiles at most.
  const int strips = 1 << job.log2_strips;
  DAFJAX_UNROLL
  for (int step = 1; step < kMaxStrips; step *= 2) {
    if (step < strips) range.Add(ShuffleXor(range, step));
  }
  const uint32_t of_block = ((1u << strips) - 1) << (lane_of_warp & -strips);
  const bool flagged = (unusual & of_block) != 0;
  const BlockParameters parameters =
      ParametersOf<kBits>(x.type, range, flagged, job.rounding.dithered);

  const int64_t strip = tile * kTileThreads + part;
  const int64_t block = strip >> job.log2_strips;  // beyond all if the tile is
  if (row < job.num_rows && (strip & (strips - 1)) == 0 && block < job.blocks_per_row) {
    const int64_t of_all = row * job.blocks_per_row + block;
    *job.codes.Scale(of_all) = static_cast<uint16_t>(parameters.scale);
    *job.codes.Minimum(of_all) = static_cast<uint16_t>(parameters.minimum);
  }

  const int first_thread = lane_of_warp - part;
  checksum = TileSum(checksum);
  if (job.rounding.dithered) {
    const bool is_stored = block < job.blocks_per_row;
    const uint32_t own =
        is_stored ? JoinParameters(parameters.scale, parameters.minimum) : 0;
    checksum = DitherChecksum(__shfl_sync(kAllLanes, own, first_thread),
                              __shfl_sync(kAllLanes, own, first_thread + kLastDither));
  }
  LaneNoise noise;
  noise.Start(job.rounding, tile, checksum, first_lane);
  const uint32_t flags = __ballot_sync(kAllLanes, flagged);
  const auto parameters_of = [&](int r) {
    const int owner = first_thread + r / kStripRows;
    RowParameters of_row;
    of_row.negative_start[0] =
        __shfl_sync(kAllLanes, parameters.negative_start, owner);
    of_row.inverse[0] = __shfl_sync(kAllLanes, parameters.inverse, owner);
    DAFJAX_UNROLL
    for (int i = 1; i < kThreadLanes; ++i) {
      of_row.negative_start[i] = of_row.negative_start[0];
      of_row.inverse[i] = of_row.inverse[0];
    }
    of_row.flagged = (flags >> owner & 1) * 0xf;
    return of_row;
  };
  const bool stores = exists && job.codes.has_planes;
  using Row = decltype(job.codes.template Row<kBits>(row, tile, job.tiles_per_row));
  const CodesOfThread<Row> to = {
      stores ? job.codes.template Row<kBits>(row, tile, job.tiles_per_row) : Row{}, tile,
      first_lane, stores};
  if (all_finite && __all_sync(kAllLanes, parameters.fits)) {
    EncodeTile<kBits>(values, parameters_of, noise, to);
  } else {
    EncodeTileWithFlags<kBits>(x, piece, parameters_of, noise, to);
  }
}

}  // namespace dafjax

#endif  // DAFJAX_CUDA_PACK_ROWS_H_
