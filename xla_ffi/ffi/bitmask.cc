#include <cstdint>
#include <optional>
#include <string>

#include "cpu/batch.h"
#include "cpu/instruction_sets.h"
#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "ffi/helpers.h"
#include "format/packed.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {
namespace {

namespace ffi = xla::ffi;

ffi::ErrorOr<Rows> CheckBitmask(const std::string& call, const char* values_name,
                                const ffi::AnyBuffer& values,
                                const ffi::AnyBuffer& words) {
  if (values.element_type() != ffi::DataType::PRED) {
    return ffi::Unexpected(
        InvalidArgument(call, std::string(values_name) + " must be bool."));
  }
  const std::optional<Rows> rows = RowsOf(values);
  if (!rows.has_value()) {
    return ffi::Unexpected(InvalidDimensions(call, values_name, values));
  }
  ffi::Error error = CheckBuffer(call, "words", words, ffi::DataType::U16, "uint16",
                                 values, NumWords(rows->row_elements, 1));
  if (error.failure()) return ffi::Unexpected(error);
  return *rows;
}

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
