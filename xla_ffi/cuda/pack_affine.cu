#include <cstdint>

#include "cuda/device.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/pack_columns.h"
#include "cuda/pack_rows.h"
#include "format/affine.h"
#include "format/columns.h"
#include "format/float_type.h"
#include "format/packed.h"

namespace dafjax {
namespace {

// What a launch needs besides the shape.
struct Pack {
  Stream stream;
  DeviceRounding rounding;
  ConstFloatArray x;
  DeviceCodes packed;
};

template <int kBits>
Failure PackRows(const AffineShape& shape, const Pack& pack) {
  const int64_t tiles = shape.NumTiles();
  const bool in_pairs = shape.block_size > kTileElements;
  const int64_t slots = in_pairs ? CeilDiv(tiles, 2) * 2 : tiles;
  const int64_t blocks = CeilDiv(shape.num_rows * slots, kPackRowsTiles);
  if (const Failure failure = CheckLaunch(blocks)) return failure;
  const PackRowsJob job = {pack.x,
                           pack.packed.codes,
                           pack.packed.scale,
                           pack.packed.minimum,
                           pack.rounding,
                           shape.num_rows,
                           shape.row_elements,
                           tiles,
                           slots,
                           shape.NumBlocks(),
                           static_cast<int>(shape.block_size / kStripElements),
                           IsAligned(pack.packed.codes, 8)};
  return DAFJAX_LAUNCH(PackRowsKernel<kBits>, static_cast<unsigned>(blocks),
                       kPackRowsThreads, pack.stream, job);
}

template <int kBits>
Failure PackColumns(const AffineShape& shape, const Pack& pack) {
  const ColumnLayout layout(shape.row_elements, shape.columns);
  const int64_t down = CeilDiv(layout.num_rows, shape.block_size);
  const int64_t blocks = shape.num_rows * down * layout.LaneGroups();
  if (const Failure failure = CheckLaunch(blocks)) return failure;
  const PackColumnsJob job = {pack.x,
                              pack.packed.codes,
                              pack.packed.scale,
                              pack.packed.minimum,
                              pack.rounding,
                              shape.row_elements,
                              shape.block_size,
                              layout.width,
                              CeilDiv(layout.num_rows, kTileRows),
                              down,
                                 IsAligned(pack.packed.codes, 8)};
  const int64_t rows =
      layout.num_rows < shape.block_size ? layout.num_rows : shape.block_size;
  const int threads = static_cast<int>(CeilDiv(rows, kWarpRows)) * kWarpLanes;
  return DAFJAX_LAUNCH(PackColumnsKernel<kBits>, static_cast<unsigned>(blocks),
                       threads, pack.stream, job);
}

template <int kBits>
Failure PackAs(const AffineShape& shape, const Pack& pack) {
  return shape.columns == 0 ? PackRows<kBits>(shape, pack)
                            : PackColumns<kBits>(shape, pack);
}

}  // namespace

Failure PackAffineOnDevice(Stream stream, const AffineShape& shape, bool stochastic,
                           const uint32_t* seed, const void* x,
                           const DeviceCodes& packed) {
  if (shape.num_rows * shape.row_elements == 0) return FillEmptyGraph(stream);
  const Pack pack = {stream,
                     {stochastic, seed},
                     {static_cast<const char*>(x), shape.type,
                      AreAlignedRows(x, shape.num_rows, shape.row_elements,
                                     ElementNbytes(shape.type))},
                     packed};
  switch (shape.bits) {
    case 1: return PackAs<1>(shape, pack);
    case 2: return PackAs<2>(shape, pack);
    case 3: return PackAs<3>(shape, pack);
    case 4: return PackAs<4>(shape, pack);
    default: return PackAs<8>(shape, pack);
  }
}

}  // namespace dafjax
