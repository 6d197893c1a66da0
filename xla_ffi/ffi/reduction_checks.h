#ifndef DAFJAX_FFI_REDUCTION_CHECKS_H_
#define DAFJAX_FFI_REDUCTION_CHECKS_H_

#include <cstdint>
#include <string>

#include "format/float_type.h"
#include "format/reduction.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {

// What a reduction is asked for.
struct ReductionCall {
  FloatType type;
  Strategy strategy;
  int64_t num_rows;
  int64_t row_elements;
};

// Checks what all reductions have in common, on every platform. `second` is null if there
// is one result.
xla::ffi::ErrorOr<ReductionCall> CheckReduction(const std::string& call,
                                                const xla::ffi::AnyBuffer& x,
                                                const xla::ffi::AnyBuffer& first,
                                                const xla::ffi::AnyBuffer* second,
                                                const xla::ffi::AnyBuffer& scratch,
                                                int64_t strategy);

}  // namespace dafjax

#endif  // DAFJAX_FFI_REDUCTION_CHECKS_H_
