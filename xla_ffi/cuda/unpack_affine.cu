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

template <int kBits, bool kColumns, typename Left>
Failure Launch(Stream stream, const UnpackJob& job, const Codes& codes) {
  const int64_t blocks = NumUnpackBlocks(job);
  if (const Failure failure = CheckLaunch(blocks)) return failure;
  return DAFJAX_LAUNCH((UnpackKernel<kBits, kColumns, Left>),
                       static_cast<unsigned>(blocks), kUnpackThreads, stream, job, codes);
}

template <int kBits>
Failure UnpackAs(Stream stream, const AffineShape& shape, const UnpackJob& job,
                 const Codes& codes) {
  const bool has_columns = shape.columns != 0;
  if (job.seeds != nullptr) {
    return has_columns ? Launch<kBits, true, Dithered<kBits>>(stream, job, codes)
                       : Launch<kBits, false, Dithered<kBits>>(stream, job, codes);
  }
  return has_columns ? Launch<kBits, true, AllBits>(stream, job, codes)
                     : Launch<kBits, false, AllBits>(stream, job, codes);
}

}  // namespace

Failure UnpackAffineOnDevice(Stream stream, const AffineShape& shape,
                             const ConstDeviceCodes& packed, void* y,
                             const uint32_t* seeds) {
  if (shape.num_rows * shape.row_elements == 0) return FillEmptyGraph(stream);
  UnpackJob job = UnpackJobOf(shape, y);
  job.seeds = seeds;
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
