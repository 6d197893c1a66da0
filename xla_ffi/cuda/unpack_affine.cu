#include <cstdint>

#include "cuda/device.h"
#include "cuda/graph.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/packed_places.h"
#include "cuda/unpack.h"
#include "cuda/unpack_launch.h"
#include "format/affine.h"

namespace dafjax {
namespace {

using Codes = CodesInArrays<const uint16_t>;

template <int kBits, bool kColumns>
Failure Launch(Stream stream, const UnpackJob& job, const Codes& codes) {
  const int64_t blocks = NumUnpackBlocks(job);
  if (const Failure failure = CheckLaunch(blocks)) return failure;
  return DAFJAX_LAUNCH((UnpackKernel<kBits, kColumns>),
                       static_cast<unsigned>(blocks), kUnpackThreads, stream, job, codes);
}

template <int kBits>
Failure UnpackAs(Stream stream, const AffineShape& shape, const UnpackJob& job,
                 const Codes& codes) {
  return shape.columns == 0 ? Launch<kBits, false>(stream, job, codes)
                            : Launch<kBits, true>(stream, job, codes);
}

}  // namespace

Failure UnpackAffineOnDevice(Stream stream, const AffineShape& shape,
                             const ConstDeviceCodes& packed, void* y) {
  if (shape.num_rows * shape.row_elements == 0) return FillEmptyGraph(stream);
  const UnpackJob job = UnpackJobOf(shape, y);
  const Codes codes = {packed.codes, packed.scale, packed.minimum,
                       IsAligned(packed.codes, 8) && IsAligned(packed.scale, 8) &&
                           IsAligned(packed.minimum, 8)};
  switch (shape.bits) {
    case 1: return UnpackAs<1>(stream, shape, job, codes);
    case 2: return UnpackAs<2>(stream, shape, job, codes);
    case 3: return UnpackAs<3>(stream, shape, job, codes);
    case 4: return UnpackAs<4>(stream, shape, job, codes);
    default: return UnpackAs<8>(stream, shape, job, codes);
  }
}

}  // namespace dafjax
