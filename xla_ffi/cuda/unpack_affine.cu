#include <cstdint>

#include "cuda/device.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/unpack.h"
#include "format/affine.h"
#include "format/columns.h"
#include "format/float_type.h"
#include "format/packed.h"

namespace dafjax {
namespace {

template <FloatType kType, int kBits, bool kColumns>
Failure Launch(Stream stream, const UnpackJob& job) {
  const int64_t blocks = CeilDiv(job.num_rows * job.tiles_per_row, kUnpackTiles);
  if (const Failure failure = CheckLaunch(blocks)) return failure;
  return DAFJAX_LAUNCH((UnpackKernel<kType, kBits, kColumns>),
                       static_cast<unsigned>(blocks), kUnpackThreads, stream, job);
}

template <FloatType kType, int kBits>
Failure UnpackAs(Stream stream, const AffineShape& shape, const UnpackJob& job) {
  return shape.columns == 0 ? Launch<kType, kBits, false>(stream, job)
                            : Launch<kType, kBits, true>(stream, job);
}

template <FloatType kType>
Failure UnpackOfType(Stream stream, const AffineShape& shape, const UnpackJob& job) {
  switch (shape.bits) {
    case 1: return UnpackAs<kType, 1>(stream, shape, job);
    case 2: return UnpackAs<kType, 2>(stream, shape, job);
    case 3: return UnpackAs<kType, 3>(stream, shape, job);
    case 4: return UnpackAs<kType, 4>(stream, shape, job);
    default: return UnpackAs<kType, 8>(stream, shape, job);
  }
}

}  // namespace

Failure UnpackAffineOnDevice(Stream stream, const AffineShape& shape,
                             const ConstDeviceCodes& packed, void* y) {
  if (shape.num_rows * shape.row_elements == 0) return FillEmptyGraph(stream);
  const UnpackJob job = {
      packed.codes,
      packed.scale,
      packed.minimum,
      y,
      shape.num_rows,
      shape.row_elements,
      shape.NumTiles(),
      shape.NumBlocks(),
      shape.block_size,
      shape.columns == 0 ? 0 : ColumnLayout(shape.row_elements, shape.columns).width,
      AreAlignedRows(y, shape.num_rows, shape.row_elements, ElementNbytes(shape.type)),
      IsAligned(packed.codes, 8) && IsAligned(packed.scale, 8) &&
          IsAligned(packed.minimum, 8)};
  switch (shape.type) {
    case FloatType::kFloat32:
      return UnpackOfType<FloatType::kFloat32>(stream, shape, job);
    case FloatType::kBFloat16:
      return UnpackOfType<FloatType::kBFloat16>(stream, shape, job);
    default: return UnpackOfType<FloatType::kFloat16>(stream, shape, job);
  }
}

}  // namespace dafjax
