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
  const void* x;
  DeviceCodes packed;
};

bool IsAlignedX(const AffineShape& shape, const void* x) {
  return AreAlignedRows(x, shape.num_rows, shape.row_elements,
                        ElementNbytes(shape.type));
}

template <FloatType kType, int kBits>
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
                           IsAlignedX(shape, pack.x),
                           IsAligned(pack.packed.codes, 8)};
  return DAFJAX_LAUNCH((PackRowsKernel<kType, kBits>), static_cast<unsigned>(blocks),
                       kPackRowsThreads, pack.stream, job);
}

template <FloatType kType, int kBits>
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
                              IsAlignedX(shape, pack.x),
                              IsAligned(pack.packed.codes, 8)};
  const int64_t rows =
      layout.num_rows < shape.block_size ? layout.num_rows : shape.block_size;
  const int threads = static_cast<int>(CeilDiv(rows, kWarpRows)) * kWarpLanes;
  return DAFJAX_LAUNCH((PackColumnsKernel<kType, kBits>), static_cast<unsigned>(blocks),
                       threads, pack.stream, job);
}

template <FloatType kType, int kBits>
Failure PackAs(const AffineShape& shape, const Pack& pack) {
  return shape.columns == 0 ? PackRows<kType, kBits>(shape, pack)
                            : PackColumns<kType, kBits>(shape, pack);
}

template <FloatType kType>
Failure PackOfType(const AffineShape& shape, const Pack& pack) {
  switch (shape.bits) {
    case 1: return PackAs<kType, 1>(shape, pack);
    case 2: return PackAs<kType, 2>(shape, pack);
    case 3: return PackAs<kType, 3>(shape, pack);
    case 4: return PackAs<kType, 4>(shape, pack);
    default: return PackAs<kType, 8>(shape, pack);
  }
}

}  // namespace

Failure PackAffineOnDevice(Stream stream, const AffineShape& shape, bool stochastic,
                           const uint32_t* seed, const void* x,
                           const DeviceCodes& packed) {
  if (shape.num_rows * shape.row_elements == 0) return FillEmptyGraph(stream);
  const Pack pack = {stream, {stochastic, seed}, x, packed};
  switch (shape.type) {
    case FloatType::kFloat32: return PackOfType<FloatType::kFloat32>(shape, pack);
    case FloatType::kBFloat16: return PackOfType<FloatType::kBFloat16>(shape, pack);
    default: return PackOfType<FloatType::kFloat16>(shape, pack);
  }
}

}  // namespace dafjax
