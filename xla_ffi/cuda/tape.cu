#include "cuda/tape.h"

#include <algorithm>
#include <cstdint>

#include "cuda/device.h"
#include "cuda/graph.h"
#include "cuda/launch.h"
#include "format/tape.h"

namespace dafjax {
namespace {

// A part of a tape: it goes with the launch, by value. Kernels take 4 KiB of arguments.
struct TapePart {
  static constexpr int kMaxEntries = 480;

  int32_t num_entries;
  uint64_t entries[kMaxEntries];
};
static_assert(sizeof(TapePart) <= 4000);

// A warp for each row. Each operation waits for the one before: one thread does them all.
DAFJAX_KERNEL(kWarpLanes)
TapeKernel(const float* given, int64_t num_given, int64_t row_values, int64_t num_made,
           float* values, const TapePart part) {
  const int64_t row = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x);
  float* const of_row = values + row * row_values;
  if (num_made == 0) {
    for (int64_t i = lane; i < num_given; i += kWarpLanes) {
      of_row[i] = given[row * num_given + i];
    }
    __syncwarp();
  }
  if (lane != 0) return;
  float* next = of_row + num_given + num_made;
  for (int i = 0; i < part.num_entries; ++i) {
    const uint64_t entry = part.entries[i];
    const float a = of_row[FirstPlaceOf(entry)];
    const float b = of_row[SecondPlaceOf(entry)];
    switch (static_cast<TapeOperation>(TapeOperationOf(entry))) {
      case TapeOperation::kAdd: *next++ = a + b; break;
      case TapeOperation::kMultiply: *next++ = a * b; break;
      case TapeOperation::kDivide: *next++ = __fdiv_rn(a, b); break;
    }
  }
}

}  // namespace

Failure EvaluateTapeOnDevice(Stream stream, const uint64_t* entries, int64_t num_entries,
                             int64_t num_rows, int64_t num_given, const float* given,
                             float* values) {
  if (num_rows == 0) return FillEmptyGraph(stream);
  if (const Failure failure = CheckLaunch(num_rows)) return failure;
  // At least one launch: it copies what is given.
  int64_t num_made = 0;
  do {
    TapePart part = {};
    part.num_entries = static_cast<int32_t>(
        std::min<int64_t>(num_entries - num_made, TapePart::kMaxEntries));
    std::copy_n(entries + num_made, part.num_entries, part.entries);
    const Failure failure =
        DAFJAX_LAUNCH(TapeKernel, num_rows, kWarpLanes, stream, given, num_given,
                      num_given + num_entries, num_made, values, part);
    if (failure != nullptr) return failure;
    num_made += part.num_entries;
  } while (num_made < num_entries);
  return nullptr;
}

}  // namespace dafjax
