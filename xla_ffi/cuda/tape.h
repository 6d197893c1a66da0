#ifndef DAFJAX_CUDA_TAPE_H_
#define DAFJAX_CUDA_TAPE_H_

#include <cstdint>

#include "cuda/kernels.h"

namespace dafjax {

// As EvaluateTape (cpu/tape.h). The entries are on the host, and free on return.
Failure EvaluateTapeOnDevice(Stream stream, const uint64_t* entries, int64_t num_entries,
                             int64_t num_rows, int64_t num_given, const float* given,
                             float* values);

}  // namespace dafjax

#endif  // DAFJAX_CUDA_TAPE_H_
