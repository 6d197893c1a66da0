#ifndef DAFJAX_CUDA_PACK_LAUNCH_H_
#define DAFJAX_CUDA_PACK_LAUNCH_H_

#include <cstdint>

#include "cuda/device.h"
#include "cuda/divisor.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/pack_columns.h"
#include "cuda/pack_rows.h"
#include "cuda/tile_pairs.h"
#include "cuda/tile_values.h"
#include "format/affine.h"
#include "format/columns.h"
#include "format/float_type.h"
#include "format/packed.h"

namespace dafjax {

// What a launch needs besides the shape. `Codes` is CodesInArrays or CodesInPages.
template <typename Codes>
struct Pack {
  Stream stream;
  DeviceRounding rounding;
  ConstFloatArray x;
  Codes codes;
  BlockSums sums = {};  // of column blocks
};

template <int kBits, typename Values, typename Codes>
Failure PackRows(const AffineShape& shape, const Pack<Codes>& pack) {
  const int64_t tiles = shape.NumTiles();
  const bool in_pairs = shape.block_size > kTileElements;
  const int64_t slots = in_pairs ? CeilDiv(tiles, 2) * 2 : tiles;
  const int64_t blocks = CeilDiv(shape.num_rows * slots, kPackRowsTiles);
  if (const Failure failure = CheckLaunch(blocks)) return failure;
  const PackRowsJob<Codes> job = {pack.x,
                                  pack.codes,
                                  pack.rounding,
                                  shape.num_rows,
                                  shape.row_elements,
                                  tiles,
                                  slots,
                                  shape.NumBlocks(),
                                  Log2(shape.block_size / kStripElements)};
  return DAFJAX_LAUNCH((PackRowsKernel<kBits, Values, Codes>),
                       static_cast<unsigned>(blocks), kPackRowsThreads, pack.stream, job);
}

template <int kBits, typename Values, typename Codes>
Failure PackColumns(const AffineShape& shape, const Pack<Codes>& pack) {
  const ColumnLayout layout(shape.row_elements, shape.columns);
  const int64_t down = CeilDiv(layout.num_rows, shape.block_size);
  const int64_t blocks = shape.num_rows * down * layout.LaneGroups();
  if (const Failure failure = CheckLaunch(blocks)) return failure;
  const PackColumnsJob<Codes> job = {pack.x,
                                     pack.codes,
                                     pack.sums,
                                     pack.rounding,
                                     shape.row_elements,
                                     shape.block_size,
                                     layout.width,
                                     CeilDiv(layout.num_rows, kTileRows),
                                     Divisor(static_cast<uint32_t>(layout.LaneGroups())),
                                     Divisor(static_cast<uint32_t>(down))};
  const int64_t rows =
      layout.num_rows < shape.block_size ? layout.num_rows : shape.block_size;
  const int threads = static_cast<int>(CeilDiv(rows, kWarpRows)) * kWarpLanes;
  return DAFJAX_LAUNCH((PackColumnsKernel<kBits, Values, Codes>),
                       static_cast<unsigned>(blocks), threads, pack.stream, job);
}

template <int kBits, typename Values, typename Codes>
Failure PackBlocks(const AffineShape& shape, const Pack<Codes>& pack) {
  return shape.columns == 0 ? PackRows<kBits, Values>(shape, pack)
                            : PackColumns<kBits, Values>(shape, pack);
}

// Requires that there are elements.
template <int kBits, typename Codes>
Failure PackAs(const AffineShape& shape, const Pack<Codes>& pack) {
  return shape.type == FloatType::kBFloat16 ? PackBlocks<kBits, TilePairs>(shape, pack)
                                            : PackBlocks<kBits, TileValues>(shape, pack);
}

inline ConstFloatArray InputOf(const AffineShape& shape, const void* x) {
  return {static_cast<const char*>(x), shape.type,
          AreAlignedRows(x, shape.num_rows, shape.row_elements,
                         ElementNbytes(shape.type))};
}

}  // namespace dafjax

#endif  // DAFJAX_CUDA_PACK_LAUNCH_H_
