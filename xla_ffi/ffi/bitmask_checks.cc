#include "ffi/bitmask_checks.h"

#include <optional>
#include <string>

#include "ffi/checks.h"
#include "format/packed.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {

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

}  // namespace dafjax
