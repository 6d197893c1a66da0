#ifndef DAFJAX_FFI_AFFINE_CHECKS_H_
#define DAFJAX_FFI_AFFINE_CHECKS_H_

#include <cstdint>
#include <string>

#include "format/affine.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {

// Checks everything that packing and unpacking have in common, on every platform, and
// describes the batch. `values` is the side that is not packed.
xla::ffi::ErrorOr<AffineShape> CheckAffine(
    const std::string& call, const char* values_name, const xla::ffi::AnyBuffer& values,
    const xla::ffi::AnyBuffer& codes, const xla::ffi::AnyBuffer& scale,
    const xla::ffi::AnyBuffer& minimum, int64_t bits, int64_t block_size,
    int64_t columns);

}  // namespace dafjax

#endif  // DAFJAX_FFI_AFFINE_CHECKS_H_
