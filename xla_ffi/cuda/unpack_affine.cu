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

template <int kBits, bool kColumns>
Failure Launch(Stream stream, const UnpackJob& job) {
  const int64_t blocks = CeilDiv(job.num_rows * job.tiles_per_row, kUnpackTiles);
  if (const Failure failure = CheckLaunch(blocks)) return failure;
  return DAFJAX_LAUNCH((UnpackKernel<kBits, kColumns>),
                       static_cast<unsigned>(blocks), kUnpackThreads, stream, job);
}

template <int kBits>
Failure UnpackAs(Stream stream, const AffineShape& shape, const UnpackJob& job) {
  return shape.columns == 0 ? Launch<kBits, false>(stream, job)
                            : Launch<kBits, true>(stream, job);
}

}  // namespace

Failure UnpackAffineOnDevice(Stream stream, const AffineShape& shape,
                             const ConstDeviceCodes& packed, void* y) {
  if (shape.num_rows * shape.row_elements == 0) return FillEmptyGraph(stream);
  const UnpackJob job = {
      packed.codes,
      packed.scale,
      packed.minimum,
      {static_cast<char*>(y), shape.type,
       AreAlignedRows(y, shape.num_rows, shape.row_elements,
                      ElementNbytes(shape.type))},
      shape.num_rows,
      shape.row_elements,
      shape.NumTiles(),
      shape.NumBlocks(),
      shape.block_size,
      shape.columns == 0 ? 0 : ColumnLayout(shape.row_elements, shape.columns).width,
      IsAligned(packed.codes, 8) && IsAligned(packed.scale, 8) &&
          IsAligned(packed.minimum, 8)};
  switch (shape.bits) {
    case 1: return UnpackAs<1>(stream, shape, job);
    case 2: return UnpackAs<2>(stream, shape, job);
    case 3: return UnpackAs<3>(stream, shape, job);
    case 4: return UnpackAs<4>(stream, shape, job);
    default: return UnpackAs<8>(stream, shape, job);
  }
}

}  // namespace dafjax
