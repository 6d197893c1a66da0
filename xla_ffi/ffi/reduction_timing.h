#ifndef DAFJAX_FFI_REDUCTION_TIMING_H_
#define DAFJAX_FFI_REDUCTION_TIMING_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "format/reduction.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {

// A reduction of float32 rows that is timed, `launches` of them at once.
struct TimedReduction {
  Reduction reduction;
  Strategy strategy;
  int64_t num_rows;
  int64_t row_elements;
  int64_t launches;
};

// The buffers of a call that times reductions, and what it times.
struct ReductionTiming {
  const void* x;
  uint32_t* scratch;
  float* first;
  float* second;
  int64_t num_rounds;
  std::vector<TimedReduction> timed;
};

// Checks a call on any platform. `timed` has five numbers for each TimedReduction, and
// `seconds` is [num_rounds, number of reductions]; what is timed fits into the rest.
xla::ffi::ErrorOr<ReductionTiming> CheckReductionTiming(
    const std::string& call, const xla::ffi::AnyBuffer& x,
    const xla::ffi::AnyBuffer& seconds, const xla::ffi::AnyBuffer& scratch,
    const xla::ffi::AnyBuffer& first, const xla::ffi::AnyBuffer& second,
    xla::ffi::Span<const int64_t> timed);

// Returns the seconds of one launch of each, all reductions in turn, round by round.
// `run` makes the launches of the reduction of some number, `times` as many as it has, and
// waits until they are done; it returns null, or what went wrong, which goes to `*failure`.
template <typename Run>
std::vector<float> TimeReductions(const ReductionTiming& timing, int times,
                                  const Run& run, const char** failure) {
  using Clock = std::chrono::steady_clock;
  std::vector<float> seconds;
  // The first round is not counted: it wakes threads, and loads code and memory.
  for (int64_t round = -1; round < timing.num_rounds; ++round) {
    for (size_t number = 0; number < timing.timed.size(); ++number) {
      const Clock::time_point start = Clock::now();
      *failure = run(number);
      if (*failure != nullptr) return seconds;
      const std::chrono::duration<double> took = Clock::now() - start;
      if (round < 0) continue;
      const int64_t launches = times * timing.timed[number].launches;
      seconds.push_back(
          static_cast<float>(took.count() / static_cast<double>(launches)));
    }
  }
  return seconds;
}

}  // namespace dafjax

#endif  // DAFJAX_FFI_REDUCTION_TIMING_H_
