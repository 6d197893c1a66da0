#include <cstdint>

#include "cuda/graph.h"
#include "cuda/kernels.h"
#include "ffi/cuda_handlers.h"
#include "ffi/device_stream.h"
#include "ffi/tied_buffers.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {
namespace {

namespace ffi = xla::ffi;

ffi::Error TieHandler(Stream stream, ffi::RemainingArgs operands,
                      ffi::RemainingRets results) {
  bool any_copied = false;
  ffi::Error error =
      Tie(operands, results, [&](const void* from, int64_t nbytes, void* to) {
        any_copied = true;
        return Enqueued("tie", CopyOnDevice(stream, from, nbytes, to));
      });
  if (error.failure() || any_copied) return error;
  return Enqueued("tie", FillEmptyGraph(stream));
}

}  // namespace
}  // namespace dafjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    dafjax_cuda_tie, dafjax::TieHandler,
    xla::ffi::Ffi::Bind().Ctx<dafjax::DeviceStream>().RemainingArgs().RemainingRets(),
    {xla::ffi::Traits::kCmdBufferCompatible});
