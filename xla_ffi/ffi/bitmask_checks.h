#ifndef DAFJAX_FFI_BITMASK_CHECKS_H_
#define DAFJAX_FFI_BITMASK_CHECKS_H_

#include <string>

#include "ffi/checks.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {

// Checks what packing and unpacking have in common, on every platform.
xla::ffi::ErrorOr<Rows> CheckBitmask(const std::string& call, const char* values_name,
                                     const xla::ffi::AnyBuffer& values,
                                     const xla::ffi::AnyBuffer& words);

}  // namespace dafjax

#endif  // DAFJAX_FFI_BITMASK_CHECKS_H_
