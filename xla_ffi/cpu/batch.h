#ifndef DAFJAX_CPU_BATCH_H_
#define DAFJAX_CPU_BATCH_H_

#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/work.h"
#include "format/affine.h"

namespace dafjax {

// The kernels on a whole batch of rows, shared out among threads. The bytes do not
// depend on the number of threads.
void PackAffine(const Kernels& kernels, const AffineShape& shape,
                const Rounding& rounding, const void* x, const AffineCodes& packed,
                const Helpers& helpers);

// Planes of codes that are there already (kernels.h), of `packed.kept_bits` bits.
void PackBytes(const Kernels& kernels, int64_t num_tiles, const uint16_t* bytes,
               const AffineCodes& packed, const Helpers& helpers);

void UnpackAffine(const Kernels& kernels, const AffineShape& shape,
                  const ConstAffineCodes& packed, void* y, const Helpers& helpers);

void PackBitmask(const Kernels& kernels, int64_t num_rows, int64_t row_elements,
                 const uint8_t* x, uint16_t* words, const Helpers& helpers);

void UnpackBitmask(const Kernels& kernels, int64_t num_rows, int64_t row_elements,
                   const uint16_t* words, uint8_t* y, const Helpers& helpers);

float Sum(const Kernels& kernels, const float* x, int64_t num_elements,
          const Helpers& helpers);

}  // namespace dafjax

#endif  // DAFJAX_CPU_BATCH_H_
