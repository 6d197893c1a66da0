#include "ffi/affine_checks.h"

#include <cstdint>
#include <optional>
#include <string>

#include "ffi/checks.h"
#include "format/affine.h"
#include "format/float_type.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {

namespace ffi = xla::ffi;

ffi::ErrorOr<AffineShape> CheckAffine(const std::string& call, const char* values_name,
                                      const ffi::AnyBuffer& values,
                                      const ffi::AnyBuffer& codes,
                                      const ffi::AnyBuffer& scale,
                                      const ffi::AnyBuffer& minimum, int64_t bits,
                                      int64_t block_size, int64_t columns) {
  if (ffi::Error error = CheckCode(call, bits, block_size); error.failure()) {
    return ffi::Unexpected(error);
  }
  const std::optional<FloatType> type = FloatTypeOf(values.element_type());
  if (!type.has_value()) {
    return ffi::Unexpected(InvalidArgument(
        call, std::string(values_name) + " must be float32, bfloat16 or float16."));
  }
  const std::optional<Rows> rows = RowsOf(values);
  if (!rows.has_value()) {
    return ffi::Unexpected(InvalidDimensions(call, values_name, values));
  }
  const int64_t n = rows->row_elements;
  if (ffi::Error error = CheckColumns(call, columns, n); error.failure()) {
    return ffi::Unexpected(error);
  }
  const AffineShape shape = {*type,          static_cast<int>(bits), block_size,
                             rows->num_rows, n,                      columns};
  const int64_t blocks = shape.NumBlocks();
  for (const ffi::Error& error :
       {CheckBuffer(call, "codes", codes, ffi::DataType::U16, "uint16", values,
                    shape.NumWords()),
        CheckBuffer(call, "scale", scale, ffi::DataType::BF16, "bfloat16", values,
                    blocks),
        CheckBuffer(call, "minimum", minimum, ffi::DataType::BF16, "bfloat16", values,
                    blocks)}) {
    if (error.failure()) return ffi::Unexpected(error);
  }
  return shape;
}

}  // namespace dafjax
