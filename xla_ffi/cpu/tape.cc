#include "cpu/tape.h"

#include <algorithm>
#include <cstdint>

#include "cpu/flush_subnormals.h"
#include "format/tape.h"

namespace dafjax {

void EvaluateTape(const uint64_t* entries, int64_t num_entries, int64_t num_rows,
                  int64_t num_given, const float* given, float* values) {
  const FlushSubnormals flush;
  for (int64_t row = 0; row < num_rows; ++row) {
    float* next = std::copy_n(given + row * num_given, num_given, values);
    for (int64_t i = 0; i < num_entries; ++i) {
      const float a = values[FirstPlaceOf(entries[i])];
      const float b = values[SecondPlaceOf(entries[i])];
      switch (static_cast<TapeOperation>(TapeOperationOf(entries[i]))) {
        case TapeOperation::kAdd: *next++ = a + b; break;
        case TapeOperation::kMultiply: *next++ = a * b; break;
        case TapeOperation::kDivide: *next++ = a / b; break;
      }
    }
    values = next;
  }
}

}  // namespace dafjax
