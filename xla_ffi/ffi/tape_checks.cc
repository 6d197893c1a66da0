#include "ffi/tape_checks.h"

#include <cstdint>
#include <optional>
#include <string>

#include "ffi/checks.h"
#include "format/tape.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {

namespace ffi = xla::ffi;

ffi::ErrorOr<CheckedTape> CheckTape(const std::string& call,
                                    ffi::Span<const int64_t> tape,
                                    const ffi::AnyBuffer& given,
                                    const ffi::AnyBuffer& values) {
  const std::optional<Rows> rows = RowsOf(given);
  if (!rows.has_value()) {
    return ffi::Unexpected(InvalidDimensions(call, "given", given));
  }
  if (given.element_type() != ffi::DataType::F32) {
    return ffi::Unexpected(InvalidArgument(call, "given must be float32."));
  }
  const int64_t num_entries = static_cast<int64_t>(tape.size());
  ffi::Error error = CheckBuffer(call, "values", values, ffi::DataType::F32, "float32",
                                 given, rows->row_elements + num_entries);
  if (error.failure()) return ffi::Unexpected(error);
  const uint64_t* const entries = reinterpret_cast<const uint64_t*>(tape.begin());
  for (int64_t i = 0; i < num_entries; ++i) {
    if (IsTapeEntry(entries[i], rows->row_elements + i)) continue;
    return ffi::Unexpected(InvalidArgument(
        call, "entry " + std::to_string(i) + " of the tape, " +
                  std::to_string(entries[i]) + ", is no operation on what comes before."));
  }
  return CheckedTape{entries, num_entries, rows->num_rows, rows->row_elements};
}

}  // namespace dafjax
