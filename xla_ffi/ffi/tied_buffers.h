#ifndef DAFJAX_FFI_TIED_BUFFERS_H_
#define DAFJAX_FFI_TIED_BUFFERS_H_

#include <cstdint>
#include <functional>

#include "xla/ffi/api/ffi.h"

namespace dafjax {

// What a tie does on every platform: gives results the values of as many operands, the
// last ones. Each normally shares its operand's memory; where it does not, calls
// `copy(from, nbytes, to)`. The operands before are only waited for.
xla::ffi::Error Tie(
    const xla::ffi::RemainingArgs& operands, const xla::ffi::RemainingRets& results,
    const std::function<xla::ffi::Error(const void*, int64_t, void*)>& copy);

}  // namespace dafjax

#endif  // DAFJAX_FFI_TIED_BUFFERS_H_
