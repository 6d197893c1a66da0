#ifndef DAFJAX_FFI_CHECKS_H_
#define DAFJAX_FFI_CHECKS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "format/affine.h"
#include "format/float_type.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {

// A buffer as rows: the last dimension, and the product of all others.
struct Rows {
  int64_t num_rows;
  int64_t row_elements;
};

// Nothing if the buffer is a scalar or has more elements than int64 can count.
std::optional<Rows> RowsOf(const xla::ffi::AnyBuffer& buffer);

std::optional<FloatType> FloatTypeOf(xla::ffi::DataType dtype);

std::string DimensionsToString(xla::ffi::AnyBuffer::Dimensions dimensions);

// The checks below return success, or an error that begins with `call`.
xla::ffi::Error CheckCode(const std::string& call, int64_t bits, int64_t block_size);

xla::ffi::Error CheckColumns(const std::string& call, int64_t columns,
                             int64_t row_elements);

xla::ffi::Error CheckRounding(const std::string& call, int64_t stochastic,
                              int64_t dithered, const xla::ffi::AnyBuffer& seed);

// The seeds of rows whose noise is to be subtracted: the first of the other operands. Null
// if `dithered` is 0.
xla::ffi::ErrorOr<const uint32_t*> SeedsOf(const std::string& call, int64_t dithered,
                                           const xla::ffi::RemainingArgs& others,
                                           int64_t num_rows);

// `buffer` has `dtype`, the dimensions of `like` but the last, and `last` there.
xla::ffi::Error CheckBuffer(const std::string& call, const char* name,
                            const xla::ffi::AnyBuffer& buffer,
                            xla::ffi::DataType dtype, const char* dtype_name,
                            const xla::ffi::AnyBuffer& like, int64_t last);

// The number of rows of a buffer [*batch, num_sites + 1].
xla::ffi::ErrorOr<int64_t> CheckRowsOfSites(
    const std::string& call, const char* name, int64_t num_sites,
    const xla::ffi::Buffer<xla::ffi::F32>& buffer);

xla::ffi::Error InvalidArgument(const std::string& call, const std::string& message);

// Says why RowsOf(buffer) gives nothing.
xla::ffi::Error InvalidDimensions(const std::string& call, const std::string& name,
                                  const xla::ffi::AnyBuffer& buffer);

}  // namespace dafjax

#endif  // DAFJAX_FFI_CHECKS_H_
