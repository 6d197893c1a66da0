#ifndef DAFJAX_FFI_TAPE_CHECKS_H_
#define DAFJAX_FFI_TAPE_CHECKS_H_

#include <cstdint>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace dafjax {

// A tape that fits its buffers, and these.
struct CheckedTape {
  const uint64_t* entries;
  int64_t num_entries;
  int64_t num_rows;
  int64_t num_given;
};

// Or an error that begins with `call`.
xla::ffi::ErrorOr<CheckedTape> CheckTape(
    const std::string& call, xla::ffi::Span<const int64_t> tape,
    const xla::ffi::AnyBuffer& given,
    const xla::ffi::AnyBuffer& values);

}  // namespace dafjax

#endif  // DAFJAX_FFI_TAPE_CHECKS_H_
