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

// What has been checked.
inline float* FloatsOf(const xla::ffi::AnyBuffer& result) {
  return static_cast<float*>(result.untyped_data());
}
inline uint32_t* WordsOf(const xla::ffi::AnyBuffer& scratch) {
  return static_cast<uint32_t*>(scratch.untyped_data());
}

}  // namespace dafjax

#endif  // DAFJAX_FFI_REDUCTION_CHECKS_H_
