#ifndef DAFJAX_CPU_REDUCE_H_
#define DAFJAX_CPU_REDUCE_H_

#include <cstdint>

#include "cpu/work.h"
#include "format/float_type.h"
#include "format/reduction.h"

namespace dafjax {

// Reduces each row to one float32, or two: `second` is unused for a sum. `scratch` has
// ScratchWords(row_elements) words for each row and need not hold anything.
void ReduceRows(Reduction reduction, Strategy strategy, FloatType type, int64_t num_rows,
                int64_t row_elements, const void* x, uint32_t* scratch, float* first,
                float* second, const Helpers& helpers);

}  // namespace dafjax

#endif  // DAFJAX_CPU_REDUCE_H_
