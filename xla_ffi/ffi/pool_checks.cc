#include "ffi/pool_checks.h"

#include <cstdint>
#include <optional>
#include <string>

#include "ffi/checks.h"
#include "format/affine.h"
#include "format/float_type.h"
#include "pool/status.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {

namespace ffi = xla::ffi;

ffi::ErrorOr<Entries> CheckEntries(const std::string& call, const char* values_name,
                                   const ffi::AnyBuffer& values,
                                   const ffi::AnyBuffer& handles, int64_t block_size,
                                   int64_t columns) {
  if (ffi::Error error = CheckCode(call, 1, block_size); error.failure()) {
    return ffi::Unexpected(error);
  }
  const std::optional<FloatType> type = FloatTypeOf(values.element_type());
  if (!type.has_value()) {
    return ffi::Unexpected(InvalidArgument(
        call, std::string(values_name) + " must be float32, bfloat16 or float16."));
  }
  const std::optional<Rows> rows = RowsOf(values);
  const auto dimensions = values.dimensions();
  if (!rows.has_value() || dimensions.size() < 2) {
    return ffi::Unexpected(InvalidArgument(
        call, std::string(values_name) +
                  " must have at least two dimensions and less than 2^57 elements, "
                  "but its dimensions are " +
                  DimensionsToString(dimensions) + "."));
  }
  const int64_t n = rows->row_elements;
  if (ffi::Error error = CheckColumns(call, columns, n); error.failure()) {
    return ffi::Unexpected(error);
  }
  const auto of_handles = handles.dimensions();
  bool fits = handles.element_type() == ffi::DataType::U32 &&
              of_handles.size() == dimensions.size() - 1 && of_handles.back() == 4;
  for (size_t i = 0; fits && i + 1 < of_handles.size(); ++i) {
    fits = of_handles[i] == dimensions[i];
  }
  if (!fits) {
    return ffi::Unexpected(InvalidArgument(
        call, "handle must be uint32 with the dimensions of " +
                  std::string(values_name) + " (" + DimensionsToString(dimensions) +
                  ") but for the last two, and 4, but its dimensions are " +
                  DimensionsToString(of_handles) + "."));
  }
  const int64_t m = dimensions[dimensions.size() - 2];
  const AffineShape shape = {*type, 1, block_size, m, n, columns};
  return Entries{m == 0 ? 0 : rows->num_rows / m, shape, m * n * ElementNbytes(*type)};
}

ffi::Error CheckPut(const std::string& call, int64_t bits, int64_t max_bits,
                    int64_t block_size, int64_t stochastic, const ffi::AnyBuffer& seed) {
  for (const int64_t b : {bits, max_bits}) {
    if (ffi::Error error = CheckCode(call, b, block_size); error.failure()) return error;
  }
  return CheckRounding(call, stochastic, 0, seed);
}

ffi::Error NoSuchPool(const std::string& call) {
  return ffi::Error(
      ffi::ErrorCode::kFailedPrecondition,
      call + ": the page pool that this program was compiled for does not exist in "
             "this process. Keep the `dafjax.stores.PagePool` for as long as programs "
             "use it, or make one of the same name.");
}

ffi::Error ErrorOf(const std::string& call, const pool::Status& status) {
  const auto code = [&] {
    switch (status.code) {
      case pool::Code::kPoolExhausted: return ffi::ErrorCode::kResourceExhausted;
      case pool::Code::kStaleHandle: return ffi::ErrorCode::kFailedPrecondition;
      case pool::Code::kUnsupported: return ffi::ErrorCode::kUnimplemented;
      case pool::Code::kDeviceFailure: return ffi::ErrorCode::kInternal;
      default: return ffi::ErrorCode::kInvalidArgument;
    }
  }();
  return ffi::Error(code, call + ": " + status.message);
}

}  // namespace dafjax
