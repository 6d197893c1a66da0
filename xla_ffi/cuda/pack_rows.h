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
inline constexpr int kPackRowsTiles = kPackRowsThreads / kTileThreads;  // of a launch block

// Row blocks: thread `i` of a tile has the range of the tile's strip `i`, then the
// parameters of the block that the strip belongs to.
inline constexpr int kStripElements = kMinBlockSize;
inline constexpr int kStripRows = kStripElements / kTileLanes;
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
  int strips_per_block;
};

// Gives each thread of a tile the range of one strip out of those that all have found of
// their own lanes: every exchange halves the number of strips that a thread has.
DAFJAX_DEVICE Range RangeOfOwnStrip(Range (&ranges)[kTileThreads], int part) {
  DAFJAX_UNROLL
  for (int step = kTileThreads / 2; step > 0; step /= 2) {
    const bool upper = (part & step) != 0;
    DAFJAX_UNROLL
    for (int i = 0; i < step; ++i) {
      const Range keep = upper ? ranges[i + step] : ranges[i];
      const Range give = upper ? ranges[i] : ranges[i + step];
      ranges[i] = keep;
      ranges[i].Add(ShuffleXor(give, step));
    }
  }
  return ranges[0];
}

// The bits of all threads of a tile.
DAFJAX_DEVICE uint32_t TileUnion(uint32_t bits) {
  DAFJAX_UNROLL
  for (int step = 1; step < kTileThreads; step *= 2) {
    bits |= __shfl_xor_sync(kAllLanes, bits, step);
  }
  return bits;
}

template <int kBits, typename Codes>
DAFJAX_KERNEL(kPackRowsThreads)
PackRowsKernel(const PackRowsJob<Codes> job) {
  const int lane_of_warp = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int part = lane_of_warp % kTileThreads;
  const int64_t slot = int64_t{blockIdx.x} * kPackRowsTiles +
                       static_cast<int>(threadIdx.x) / kTileThreads;
  const int64_t row = slot / job.slots_per_row;
  const int64_t tile = slot % job.slots_per_row;
  const bool exists = row < job.num_rows && tile < job.tiles_per_row;
  const int first_lane = part * kThreadLanes;
  const int64_t first = tile * kTileElements + first_lane;
  const Piece piece = {kTileLanes, exists ? job.row_elements - first : 0};
  const bool all_whole = __all_sync(kAllLanes, piece.IsWhole());
  const ConstFloatArray x = job.x.From(row * job.row_elements + first);

  TileValues values;
  values.Load(x, piece, all_whole);

  Range ranges[kTileThreads];
  DAFJAX_UNROLL
  for (int i = 0; i < kTileThreads; ++i) ranges[i] = Range::Empty();
  uint32_t unusual = 0;  // strips with values that are not finite
  const auto mark_strip = [&](int r, int) { unusual |= 1u << r / kStripRows; };
  const uint32_t checksum = TileSum(ScanTile(
      values, [&](int r, int) -> Range& { return ranges[r / kStripRows]; },
      mark_strip));
  if (!all_whole) {
    unusual = 0;
    FindUnusual(x, piece, mark_strip);
  }
  unusual = TileUnion(unusual);

  Range range = RangeOfOwnStrip(ranges, part);
  const int strips = job.strips_per_block;
  DAFJAX_UNROLL
  for (int step = 1; step < kTileThreads; step *= 2) {
    if (step < strips) range.Add(ShuffleXor(range, step));
  }
  // The strips of this thread's block.
  uint32_t of_block = 0xff;
  if (strips < kTileThreads) of_block = ((1u << strips) - 1) << part / strips * strips;
  bool flagged = (unusual & of_block) != 0;
  if (strips > kTileThreads) {  // two tiles
    range.Add(ShuffleXor(range, kTileThreads));
    const bool other = __shfl_xor_sync(kAllLanes, static_cast<int>(flagged), kTileThreads);
    flagged = flagged || other;
  }
  const BlockParameters parameters = ParametersOf<kBits>(x.type, range, flagged);

  const int64_t strip = tile * kTileThreads + part;
  const int64_t block = strip / strips;
  if (row < job.num_rows && strip % strips == 0 && block < job.blocks_per_row) {
    const int64_t of_all = row * job.blocks_per_row + block;
    *job.codes.Scale(of_all) = static_cast<uint16_t>(parameters.scale);
    *job.codes.Minimum(of_all) = static_cast<uint16_t>(parameters.minimum);
  }

  LaneNoise noise;
  noise.Start(job.rounding, tile, checksum, first_lane);
  const int first_thread = lane_of_warp - part;
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
  if (all_whole && flags == 0) {
    EncodeTile<kBits>(values, parameters_of, noise, to);
  } else {
    EncodeTileWithFlags<kBits>(x, piece, parameters_of, noise, to);
  }
}

}  // namespace dafjax

#endif  // DAFJAX_CUDA_PACK_ROWS_H_
