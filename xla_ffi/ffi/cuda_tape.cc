#include <cstdint>
#include <string>

#include "cuda/tape.h"
#include "ffi/cuda_handlers.h"
#include "ffi/device_stream.h"
#include "ffi/tape_checks.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {
namespace {

namespace ffi = xla::ffi;

ffi::Error EvaluateHandler(Stream stream, ffi::AnyBuffer given,
                           ffi::Result<ffi::AnyBuffer> values,
                           ffi::Span<const int64_t> tape) {
  const std::string call = "evaluate";
  const ffi::ErrorOr<CheckedTape> of = CheckTape(call, tape, given, *values);
  if (of.has_error()) return of.error();
  return Enqueued(call, EvaluateTapeOnDevice(stream, of->entries, of->num_entries,
                                             of->num_rows, of->num_given,
                                             given.typed_data<float>(), values->typed_data<float>()));
}

}  // namespace
}  // namespace dafjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_cuda_evaluate, dafjax::EvaluateHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<dafjax::DeviceStream>()
                                  .Arg<xla::ffi::AnyBuffer>()  // given
                                  .Ret<xla::ffi::AnyBuffer>()  // values
                                  .Attr<xla::ffi::Span<const int64_t>>("tape"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
