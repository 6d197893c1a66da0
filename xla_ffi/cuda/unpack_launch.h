#ifndef DAFJAX_CUDA_UNPACK_LAUNCH_H_
#define DAFJAX_CUDA_UNPACK_LAUNCH_H_

#include <cstdint>

#include "cuda/launch.h"
#include "cuda/unpack.h"
#include "format/affine.h"
#include "format/columns.h"
#include "format/float_type.h"
#include "format/packed.h"

namespace dafjax {

inline UnpackJob UnpackJobOf(const AffineShape& shape, void* y) {
  return {{static_cast<char*>(y), shape.type,
           AreAlignedRows(y, shape.num_rows, shape.row_elements,
                          ElementNbytes(shape.type))},
          shape.num_rows,
          shape.row_elements,
          shape.NumTiles(),
          shape.NumBlocks(),
          Log2(shape.block_size),
          shape.columns == 0 ? 0 : ColumnLayout(shape.row_elements, shape.columns).width};
}

inline int64_t NumUnpackBlocks(const UnpackJob& job) {
  return CeilDiv(job.num_rows * job.tiles_per_row, kUnpackTiles);
}

}  // namespace dafjax

#endif  // DAFJAX_CUDA_UNPACK_LAUNCH_H_
