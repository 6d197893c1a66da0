#include <cstdint>

#include "cpu/batch.h"
#include "cpu/instruction_sets.h"
#include "ffi/bitmask_checks.h"
#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "ffi/helpers.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {
namespace {

namespace ffi = xla::ffi;

ffi::Error PackBitmaskHandler(ffi::ThreadPool pool, ffi::AnyBuffer x,
                              ffi::Result<ffi::AnyBuffer> words) {
  const ffi::ErrorOr<Rows> rows = CheckBitmask("pack_bitmask", "x", x, *words);
  if (rows.has_error()) return rows.error();

  PackBitmask(BestKernels(), rows->num_rows, rows->row_elements,
              static_cast<const uint8_t*>(x.untyped_data()),
              static_cast<uint16_t*>(words->untyped_data()), HelpersOf(pool));
  return ffi::Error::Success();
}

ffi::Error UnpackBitmaskHandler(ffi::ThreadPool pool, ffi::AnyBuffer words,
                                ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> y) {
  const ffi::ErrorOr<Rows> rows = CheckBitmask("unpack_bitmask", "y", *y, words);
  if (rows.has_error()) return rows.error();

  UnpackBitmask(BestKernels(), rows->num_rows, rows->row_elements,
                static_cast<const uint16_t*>(words.untyped_data()),
                static_cast<uint8_t*>(y->untyped_data()), HelpersOf(pool));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace dafjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_pack_bitmask, dafjax::PackBitmaskHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()    // x
                                  .Ret<xla::ffi::AnyBuffer>());  // words

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_unpack_bitmask, dafjax::UnpackBitmaskHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()    // words
                                  .RemainingArgs()               // not read
                                  .Ret<xla::ffi::AnyBuffer>());  // y
