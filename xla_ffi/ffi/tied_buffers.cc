#include "ffi/tied_buffers.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "ffi/checks.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {

namespace ffi = xla::ffi;

namespace {

// Bytes of an element, or nothing if elements may share bytes.
std::optional<int64_t> WholeBytes(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::S1:
    case ffi::DataType::S2:
    case ffi::DataType::S4:
    case ffi::DataType::U1:
    case ffi::DataType::U2:
    case ffi::DataType::U4:
    case ffi::DataType::F4E2M1FN: return std::nullopt;
    default: return static_cast<int64_t>(ffi::ByteWidth(dtype));
  }
}

bool SameShape(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b) {
  if (a.element_type() != b.element_type()) return false;
  const auto m = a.dimensions();
  const auto n = b.dimensions();
  if (m.size() != n.size()) return false;
  for (size_t i = 0; i < m.size(); ++i) {
    if (m[i] != n[i]) return false;
  }
  return true;
}

}  // namespace

ffi::Error Tie(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
               const std::function<ffi::Error(const void*, int64_t, void*)>& copy) {
  const std::string call = "tie";
  if (results.size() > operands.size()) {
    return InvalidArgument(
        call, "the number of results (" + std::to_string(results.size()) +
                  ") must be at most that of operands (" +
                  std::to_string(operands.size()) + ").");
  }
  const size_t num_awaited = operands.size() - results.size();
  for (size_t i = 0; i < results.size(); ++i) {
    const auto operand = operands.get<ffi::AnyBuffer>(num_awaited + i);
    if (operand.has_error()) return operand.error();
    auto result = results.get<ffi::AnyBuffer>(i);
    if (result.has_error()) return result.error();
    const ffi::AnyBuffer& from = *operand;
    const ffi::AnyBuffer& to = **result;
    if (!SameShape(from, to)) {
      return InvalidArgument(call, "result " + std::to_string(i) +
                                       " must have the dtype and the dimensions of its "
                                       "operand.");
    }
    if (from.untyped_data() == to.untyped_data()) continue;
    const std::optional<int64_t> element_nbytes = WholeBytes(from.element_type());
    if (!element_nbytes.has_value()) {
      return ffi::Error(ffi::ErrorCode::kUnimplemented,
                        call + ": operand " + std::to_string(num_awaited + i) +
                            " has a dtype of less than 8 bits and must be aliased.");
    }
    const int64_t nbytes =
        static_cast<int64_t>(from.element_count()) * *element_nbytes;
    if (nbytes == 0) continue;
    ffi::Error error = copy(from.untyped_data(), nbytes, to.untyped_data());
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

}  // namespace dafjax
