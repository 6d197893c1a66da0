#ifndef DAFJAX_FORMAT_REDUCTION_H_
#define DAFJAX_FORMAT_REDUCTION_H_

#include <cstdint>

#include "format/packed.h"

namespace dafjax {

// Reductions of rows, README.md section 8: what a row comes to, and how.
enum class Reduction { kMinMax, kSumOfSquares };

// kParallel: parts of a row, and then what they come to. kAtomic: whoever has a part adds
// it to the row's state. kHybrid: threads that share memory put their parts together, and
// one of them adds the result to the state.
enum class Strategy { kParallel, kAtomic, kHybrid };

constexpr bool IsStrategy(int64_t value) { return value >= 0 && value <= 2; }

// A row is cut into parts of so many elements at least, and into so many at most. The
// number depends on nothing else, so that devices may share the rows out.
inline constexpr int64_t kLeastPartElements = 8192;
inline constexpr int64_t kMostParts = 1024;

constexpr int64_t NumParts(int64_t row_elements) {
  const int64_t wanted = CeilDiv(row_elements, kLeastPartElements);
  const int64_t parts = wanted < kMostParts ? wanted : kMostParts;
  return parts > 1 ? parts : 1;
}

// The memory that a reduction needs besides, in uint32 for each row: the state and the
// parts. First come the states of all rows, and then the parts of all rows.
inline constexpr int64_t kStateWords = 4;  // two of the result, a ticket, and padding
inline constexpr int64_t kPartWords = 2;

constexpr int64_t ScratchWords(int64_t row_elements) {
  return kStateWords + kPartWords * NumParts(row_elements);
}

static_assert(NumParts(0) == 1 && NumParts(8192) == 1 && NumParts(8193) == 2);
static_assert(NumParts(int64_t{1} << 40) == 1024);

}  // namespace dafjax

#endif  // DAFJAX_FORMAT_REDUCTION_H_
