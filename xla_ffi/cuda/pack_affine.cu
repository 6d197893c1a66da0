#include <cstdint>

#include "cuda/graph.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/pack_launch.h"
#include "cuda/packed_places.h"
#include "format/affine.h"

namespace dafjax {

Failure PackAffineOnDevice(Stream stream, const AffineShape& shape,
                           const DeviceRounding& rounding, const void* x,
                           const DeviceCodes& packed, const BlockSums& sums) {
  if (shape.num_rows * shape.row_elements == 0) return FillEmptyGraph(stream);
  const Pack<CodesInArrays<uint16_t>> pack = {stream,
                                              rounding,
                                              InputOf(shape, x),
                                              {packed.codes, packed.scale, packed.minimum,
                                               IsAligned(packed.codes, 8)},
                                              sums};
  switch (shape.bits) {
    case 1: return PackAs<1>(shape, pack);
    case 2: return PackAs<2>(shape, pack);
    case 3: return PackAs<3>(shape, pack);
    case 4: return PackAs<4>(shape, pack);
    default: return PackAs<8>(shape, pack);
  }
}

}  // namespace dafjax
