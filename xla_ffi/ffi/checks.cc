#include "ffi/checks.h"

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "format/affine.h"
#include "format/columns.h"
#include "format/float_type.h"
#include "format/packed.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {

namespace ffi = xla::ffi;

namespace {

// Bounds the number of elements so that no size in bytes or words overflows either.
constexpr int64_t kMaxElements = std::numeric_limits<int64_t>::max() / 64;

}  // namespace

std::optional<Rows> RowsOf(const ffi::AnyBuffer& buffer) {
  const ffi::AnyBuffer::Dimensions dimensions = buffer.dimensions();
  if (dimensions.size() == 0) return std::nullopt;
  Rows rows = {1, dimensions.back()};
  if (rows.row_elements > kMaxElements) return std::nullopt;
  for (size_t i = 0; i + 1 < dimensions.size(); ++i) {
    const int64_t size = dimensions[i];
    const int64_t row = rows.row_elements > 0 ? rows.row_elements : 1;
    if (size != 0 && rows.num_rows > kMaxElements / row / size) return std::nullopt;
    rows.num_rows *= size;
  }
  return rows;
}

std::optional<FloatType> FloatTypeOf(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F32: return FloatType::kFloat32;
    case ffi::DataType::BF16: return FloatType::kBFloat16;
    case ffi::DataType::F16: return FloatType::kFloat16;
    default: return std::nullopt;
  }
}

std::string DimensionsToString(ffi::AnyBuffer::Dimensions dimensions) {
  std::string text = "[";
  for (size_t i = 0; i < dimensions.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(dimensions[i]);
  }
  return text + "]";
}

ffi::ErrorOr<int64_t> CheckRowsOfSites(const std::string& call, const char* name,
                                       int64_t num_sites,
                                       const ffi::Buffer<ffi::F32>& buffer) {
  const auto dimensions = buffer.dimensions();
  if (dimensions.size() < 1 || dimensions.back() != num_sites + 1) {
    return ffi::Unexpected(InvalidArgument(
        call, std::string(name) + " must be [*batch, " + std::to_string(num_sites + 1) +
                  "] for so many sites, but has dimensions " +
                  DimensionsToString(dimensions) + "."));
  }
  return static_cast<int64_t>(buffer.element_count()) / (num_sites + 1);
}

ffi::Error InvalidArgument(const std::string& call, const std::string& message) {
  return ffi::Error::InvalidArgument(call + ": " + message);
}

ffi::Error InvalidDimensions(const std::string& call, const std::string& name,
                             const ffi::AnyBuffer& buffer) {
  return InvalidArgument(call, name +
                                   " must have at least one dimension and less than " +
                                   "2^57 elements, but its dimensions are " +
                                   DimensionsToString(buffer.dimensions()) + ".");
}

ffi::Error CheckCode(const std::string& call, int64_t bits, int64_t block_size) {
  if (!IsCodeWidth(bits)) {
    return InvalidArgument(
        call, "bits (" + std::to_string(bits) + ") must be 1, 2, 3, 4 or 8.");
  }
  if (!IsBlockSize(block_size)) {
    return InvalidArgument(call, "block_size (" + std::to_string(block_size) +
                                     ") must be 64, 128, 256, 512 or 1024.");
  }
  return ffi::Error::Success();
}

ffi::Error CheckColumns(const std::string& call, int64_t columns,
                        int64_t row_elements) {
  if (IsNumberOfColumns(columns, row_elements)) return ffi::Error::Success();
  return InvalidArgument(call, "columns (" + std::to_string(columns) +
                                   ") must be 0 or divide the number of elements of a "
                                   "row (" +
                                   std::to_string(row_elements) + ").");
}

ffi::Error CheckRounding(const std::string& call, int64_t stochastic, int64_t dithered,
                         const ffi::AnyBuffer& seed) {
  if (dithered != 0 && (dithered != 1 || stochastic != 1)) {
    return InvalidArgument(call, "dithered (" + std::to_string(dithered) +
                                     ") must be 0, or 1 where stochastic is 1.");
  }
  if (stochastic != 0 && stochastic != 1) {
    return InvalidArgument(
        call, "stochastic (" + std::to_string(stochastic) + ") must be 0 or 1.");
  }
  if (seed.element_type() != ffi::DataType::U32 || seed.dimensions().size() != 0) {
    return InvalidArgument(call, "seed must be a uint32 scalar, but its dimensions are " +
                                     DimensionsToString(seed.dimensions()) + ".");
  }
  return ffi::Error::Success();
}

ffi::ErrorOr<const uint32_t*> SeedsOf(const std::string& call, int64_t dithered,
                                      const ffi::RemainingArgs& others,
                                      int64_t num_rows) {
  if (dithered == 0) return nullptr;
  if (dithered != 1) {
    return ffi::Unexpected(InvalidArgument(
        call, "dithered (" + std::to_string(dithered) + ") must be 0 or 1."));
  }
  const ffi::ErrorOr<ffi::AnyBuffer> seeds = others.get<ffi::AnyBuffer>(0);
  if (seeds.has_error() || seeds->element_type() != ffi::DataType::U32 ||
      static_cast<int64_t>(seeds->element_count()) != num_rows) {
    return ffi::Unexpected(
        InvalidArgument(call, "where dithered is 1, the operand after the minima must be "
                              "a uint32 seed for each of the " +
                                  std::to_string(num_rows) + " rows."));
  }
  return static_cast<const uint32_t*>(seeds->untyped_data());
}

ffi::Error CheckBuffer(const std::string& call, const char* name,
                       const ffi::AnyBuffer& buffer, ffi::DataType dtype,
                       const char* dtype_name, const ffi::AnyBuffer& like,
                       int64_t last) {
  if (buffer.element_type() != dtype) {
    return InvalidArgument(call, std::string(name) + " must be " + dtype_name + ".");
  }
  const ffi::AnyBuffer::Dimensions batch = like.dimensions();
  std::vector<int64_t> expected(batch.begin(), batch.end());
  expected.back() = last;
  const ffi::AnyBuffer::Dimensions wanted(expected.data(), expected.size());
  const ffi::AnyBuffer::Dimensions actual = buffer.dimensions();
  bool equal = actual.size() == wanted.size();
  for (size_t i = 0; equal && i < wanted.size(); ++i) equal = actual[i] == wanted[i];
  if (!equal) {
    return InvalidArgument(call, "the dimensions of " + std::string(name) + " (" +
                                     DimensionsToString(actual) + ") must be " +
                                     DimensionsToString(wanted) + ".");
  }
  return ffi::Error::Success();
}

}  // namespace dafjax
