#include "cuda/reduce.h"

#include <cstdint>

#include "cuda/device.h"
#include "cuda/graph.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "format/float_type.h"
#include "format/reduction.h"

namespace dafjax {
namespace {

// Sums of floats are put together in a fixed order where that costs no kernel: their
// hybrid leaves parts instead of changing a state.
template <typename Part>
inline constexpr bool kIsOrdered = false;
template <>
inline constexpr bool kIsOrdered<SumOfSquaresOfPart> = true;

template <typename Part>
Failure Reduce(Stream stream, Strategy strategy, unsigned blocks, int64_t num_rows,
               const ReduceJob& job) {
  if (strategy == Strategy::kParallel) {
    const Failure failure =
        DAFJAX_LAUNCH((ReduceKernel<Part, Strategy::kParallel, true>), blocks,
                      kReduceThreads, stream, job);
    if (failure != nullptr || job.num_parts == 1) return failure;
    return DAFJAX_LAUNCH(CombineKernel<Part>, static_cast<unsigned>(num_rows),
                         kWarpLanes, stream, job);
  }
  const auto nbytes = static_cast<size_t>(num_rows * kStateWords) * sizeof(uint32_t);
  if (const Failure failure =
          WhatFailed(cudaMemsetAsync(job.states, 0, nbytes, stream))) {
    return failure;
  }
  if (strategy == Strategy::kAtomic) {
    return DAFJAX_LAUNCH((ReduceKernel<Part, Strategy::kAtomic, false>), blocks,
                         kReduceThreads, stream, job);
  }
  return DAFJAX_LAUNCH((ReduceKernel<Part, Strategy::kHybrid, kIsOrdered<Part>>), blocks,
                       kReduceThreads, stream, job);
}

}  // namespace

Failure ReduceOnDevice(Stream stream, Reduction reduction, Strategy strategy,
                       FloatType type, int64_t num_rows, int64_t row_elements,
                       const void* x, uint32_t* scratch, float* first, float* second) {
  if (num_rows == 0) return FillEmptyGraph(stream);
  const int64_t num_parts = NumParts(row_elements);
  const int64_t blocks = num_rows * num_parts;
  if (const Failure failure = CheckLaunch(blocks)) return failure;
  const ReduceJob job = {
      {static_cast<const char*>(x), type,
       AreAlignedRows(x, num_rows, row_elements, ElementNbytes(type))},
      row_elements,
      num_parts,
      scratch,
      scratch + num_rows * kStateWords,
      first,
      second};
  return reduction == Reduction::kMinMax
             ? Reduce<MinMaxOfPart>(stream, strategy, static_cast<unsigned>(blocks),
                                    num_rows, job)
             : Reduce<SumOfSquaresOfPart>(stream, strategy,
                                          static_cast<unsigned>(blocks), num_rows, job);
}

}  // namespace dafjax
