#include "ffi/reduction_timing.h"

#include <cstddef>
#include <cstdint>
#include <string>

#include "ffi/checks.h"
#include "ffi/reduction_checks.h"
#include "format/reduction.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {

namespace ffi = xla::ffi;

namespace {

// What no profile needs more of.
constexpr int64_t kMostElements = int64_t{1} << 40;
constexpr int64_t kMostLaunches = int64_t{1} << 20;

ffi::Error CheckSize(const std::string& call, const char* name,
                     const ffi::AnyBuffer& buffer, ffi::DataType dtype,
                     const char* dtype_name, int64_t wanted) {
  const auto count = static_cast<int64_t>(buffer.element_count());
  if (buffer.element_type() == dtype && count >= wanted) return ffi::Error::Success();
  return InvalidArgument(call, std::string(name) + " must be " + dtype_name +
                                   ", of at least " + std::to_string(wanted) +
                                   " elements, but has the dimensions " +
                                   DimensionsToString(buffer.dimensions()) + ".");
}

bool IsTimed(const TimedReduction& timed, int64_t reduction, int64_t strategy) {
  return (reduction == 0 || reduction == 1) && IsStrategy(strategy) &&
         timed.num_rows >= 1 && timed.num_rows <= kMostElements &&
         timed.row_elements >= 1 &&
         timed.row_elements <= kMostElements / timed.num_rows && timed.launches >= 1 &&
         timed.launches <= kMostLaunches;
}

// Numbers of a TimedReduction.
constexpr size_t kNumbers = 5;

}  // namespace

ffi::ErrorOr<ReductionTiming> CheckReductionTiming(
    const std::string& call, const ffi::AnyBuffer& x, const ffi::AnyBuffer& seconds,
    const ffi::AnyBuffer& scratch, const ffi::AnyBuffer& first,
    const ffi::AnyBuffer& second, ffi::Span<const int64_t> timed) {
  const size_t count = timed.size() / kNumbers;
  if (timed.size() % kNumbers != 0) {
    return ffi::Unexpected(InvalidArgument(
        call, "timed must have 5 numbers for each reduction, but has " +
                  std::to_string(timed.size()) + "."));
  }
  const auto dimensions = seconds.dimensions();
  if (seconds.element_type() != ffi::DataType::F32 || dimensions.size() != 2 ||
      dimensions[1] != static_cast<int64_t>(count)) {
    return ffi::Unexpected(InvalidArgument(
        call, "seconds must be float32 [rounds, " + std::to_string(count) +
                  "], but has the dimensions " + DimensionsToString(dimensions) + "."));
  }
  ReductionTiming timing = {x.untyped_data(), WordsOf(scratch), FloatsOf(first),
                            FloatsOf(second), dimensions[0],    {}};
  for (size_t i = 0; i < count; ++i) {
    const int64_t* const numbers = timed.begin() + i * kNumbers;
    const TimedReduction one = {static_cast<Reduction>(numbers[0]),
                                static_cast<Strategy>(numbers[1]), numbers[2],
                                numbers[3], numbers[4]};
    if (!IsTimed(one, numbers[0], numbers[1])) {
      std::string text;
      for (size_t j = 0; j < kNumbers; ++j) text += " " + std::to_string(numbers[j]);
      return ffi::Unexpected(InvalidArgument(
          call, "timed must be a reduction (0 or 1), a strategy (0, 1 or 2), and at "
                "least one row, element and launch, but number " +
                    std::to_string(i) + " is" + text + "."));
    }
    const int64_t words = one.num_rows * ScratchWords(one.row_elements);
    for (ffi::Error error :
         {CheckSize(call, "x", x, ffi::DataType::F32, "float32",
                    one.num_rows * one.row_elements),
          CheckSize(call, "scratch", scratch, ffi::DataType::U32, "uint32", words),
          CheckSize(call, "the first result", first, ffi::DataType::F32, "float32",
                    one.num_rows),
          CheckSize(call, "the second result", second, ffi::DataType::F32, "float32",
                    one.num_rows)}) {
      if (error.failure()) return ffi::Unexpected(error);
    }
    timing.timed.push_back(one);
  }
  return timing;
}

}  // namespace dafjax
