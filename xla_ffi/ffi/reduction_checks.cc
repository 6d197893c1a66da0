#include "ffi/reduction_checks.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "ffi/checks.h"
#include "format/float_type.h"
#include "format/reduction.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {

namespace ffi = xla::ffi;

namespace {

// Results have one element for each row.
ffi::Error CheckResult(const std::string& call, const char* name,
                       const ffi::AnyBuffer& result, const ffi::AnyBuffer& x) {
  const ffi::AnyBuffer::Dimensions wanted(x.dimensions().begin(),
                                          x.dimensions().size() - 1);
  const ffi::AnyBuffer::Dimensions actual = result.dimensions();
  bool equal = result.element_type() == ffi::DataType::F32 &&
               actual.size() == wanted.size();
  for (size_t i = 0; equal && i < wanted.size(); ++i) equal = actual[i] == wanted[i];
  if (equal) return ffi::Error::Success();
  return InvalidArgument(call, std::string(name) + " must be float32, with dimensions " +
                                   DimensionsToString(wanted) + ", but has " +
                                   DimensionsToString(actual) + ".");
}

}  // namespace

ffi::ErrorOr<ReductionCall> CheckReduction(const std::string& call,
                                           const ffi::AnyBuffer& x,
                                           const ffi::AnyBuffer& first,
                                           const ffi::AnyBuffer* second,
                                           const ffi::AnyBuffer& scratch,
                                           int64_t strategy) {
  const std::optional<FloatType> type = FloatTypeOf(x.element_type());
  if (!type.has_value()) {
    return ffi::Unexpected(
        InvalidArgument(call, "x must be float32, bfloat16 or float16."));
  }
  const std::optional<Rows> rows = RowsOf(x);
  if (!rows.has_value()) return ffi::Unexpected(InvalidDimensions(call, "x", x));
  if (!IsStrategy(strategy)) {
    return ffi::Unexpected(InvalidArgument(
        call, "strategy (" + std::to_string(strategy) +
                  ") must be 0 (parallel), 1 (atomic) or 2 (hybrid)."));
  }
  if (ffi::Error error = CheckResult(call, "the first result", first, x);
      error.failure()) {
    return ffi::Unexpected(error);
  }
  if (second != nullptr) {
    ffi::Error error = CheckResult(call, "the second result", *second, x);
    if (error.failure()) return ffi::Unexpected(error);
  }
  if (ffi::Error error = CheckBuffer(call, "scratch", scratch, ffi::DataType::U32,
                                     "uint32", x, ScratchWords(rows->row_elements));
      error.failure()) {
    return ffi::Unexpected(error);
  }
  return ReductionCall{*type, static_cast<Strategy>(strategy), rows->num_rows,
                       rows->row_elements};
}

}  // namespace dafjax
