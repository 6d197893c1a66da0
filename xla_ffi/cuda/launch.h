#ifndef DAFJAX_CUDA_LAUNCH_H_
#define DAFJAX_CUDA_LAUNCH_H_

#include <cstdint>

#include "cuda/kernels.h"

namespace dafjax {

inline constexpr int64_t kMaxLaunchBlocks = 0x7fffffff;

inline bool IsAligned(const void* p, int64_t nbytes) {
  return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(nbytes) == 0;
}

// Whether elements of each row of a batch can be loaded four at a time.
inline bool AreAlignedRows(const void* p, int64_t num_rows, int64_t row_elements,
                           int64_t element_nbytes) {
  return IsAligned(p, 4 * element_nbytes) && (num_rows == 1 || row_elements % 4 == 0);
}

// Null if so many blocks can be launched.
inline Failure CheckLaunch(int64_t num_blocks) {
  return num_blocks <= kMaxLaunchBlocks
             ? nullptr
             : "the array has more elements than one kernel launch can cover.";
}

}  // namespace dafjax

#endif  // DAFJAX_CUDA_LAUNCH_H_
