#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ffi/handlers.h"
#include "ffi/tied_buffers.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {
namespace {

namespace ffi = xla::ffi;

ffi::Error TieHandler(ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return Tie(operands, results, [](const void* from, int64_t nbytes, void* to) {
    std::memcpy(to, from, static_cast<size_t>(nbytes));
    return ffi::Error::Success();
  });
}

}  // namespace
}  // namespace dafjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_tie, dafjax::TieHandler,
                              xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets());
