#include "cpu/tape.h"

#include <cstdint>

#include "ffi/handlers.h"
#include "ffi/tape_checks.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {
namespace {

namespace ffi = xla::ffi;

ffi::Error EvaluateHandler(ffi::AnyBuffer given,
                           ffi::Result<ffi::AnyBuffer> values,
                           ffi::Span<const int64_t> tape) {
  const ffi::ErrorOr<CheckedTape> of = CheckTape("evaluate", tape, given, *values);
  if (of.has_error()) return of.error();
  EvaluateTape(of->entries, of->num_entries, of->num_rows, of->num_given,
               given.typed_data<float>(), values->typed_data<float>());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace dafjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_evaluate, dafjax::EvaluateHandler,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()  // given
                                  .Ret<xla::ffi::AnyBuffer>()  // values
                                  .Attr<xla::ffi::Span<const int64_t>>("tape"));
