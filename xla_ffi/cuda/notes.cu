#include <cstdint>

#include "cuda/device.h"
#include "cuda/entry_pages.h"
#include "cuda/entry_table.h"
#include "cuda/pool_kernels.h"
#include "format/affine.h"

namespace dafjax {
namespace {

constexpr int kNoteThreads = 512;
constexpr int kNoteWarps = kNoteThreads / kWarpLanes;
// In 16 bytes.
constexpr int kScalesOfLoad = 8;

DAFJAX_DEVICE double* NumberOf(const NotePlace& place, int64_t index) {
  return &place.board->numbers[(place.first + index) % NoteBoard::kNumbers];
}

// After all threads have written, that is seen by the host before the number is.
DAFJAX_DEVICE void Finish(const NotePlace& place) {
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) place.board->done = place.number;
}

DAFJAX_DEVICE double SquareOfScale(uint32_t stored) {
  const double scale = __uint_as_float((stored & (kFlaggedBit - 1)) << 16);
  return scale * scale;
}

// One block, which loads much at a time: scales are far away, in the host's memory.
DAFJAX_KERNEL(kNoteThreads)
NoteScalesKernel(const EntryTable table, uint32_t slot, const NotePlace place) {
  const EntryPages& pages = table.At(slot)->pages;
  DAFJAX_SHARED(double, of_warps, kNoteWarps);
  const int thread = static_cast<int>(threadIdx.x);
  double sum = 0;
  for (int64_t first = int64_t{thread} * kScalesOfLoad; first < pages.num_blocks;
       first += kNoteThreads * kScalesOfLoad) {
    const uint4 loaded = *reinterpret_cast<const uint4*>(pages.Parameter(first));
    const uint32_t words[] = {loaded.x, loaded.y, loaded.z, loaded.w};
    DAFJAX_UNROLL
    for (int i = 0; i < kScalesOfLoad; ++i) {
      if (first + i < pages.num_blocks) {
        sum += SquareOfScale(words[i / 2] >> i % 2 * 16 & 0xffff);
      }
    }
  }
  DAFJAX_UNROLL
  for (int step = 1; step < kWarpLanes; step *= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, step);
  }
  if (thread % kWarpLanes == 0) of_warps[thread / kWarpLanes] = sum;
  __syncthreads();
  if (thread == 0) {
    double total = 0;
    for (int warp = 0; warp < kNoteWarps; ++warp) total += of_warps[warp];
    *NumberOf(place, 0) = total;
  }
  Finish(place);
}

DAFJAX_KERNEL(kNoteThreads)
NoteSumsKernel(const float* x, int64_t num_rows, int64_t num_columns,
               const NotePlace place) {
  for (int64_t column = threadIdx.x; column < num_columns; column += kNoteThreads) {
    double sum = 0;
    for (int64_t row = 0; row < num_rows; ++row) {
      sum += static_cast<double>(x[row * num_columns + column]);
    }
    *NumberOf(place, column) = sum;
  }
  Finish(place);
}

}  // namespace

Failure NoteScalesOnDevice(Stream stream, const EntryTable& table, uint32_t slot,
                           const NotePlace& place) {
  return DAFJAX_LAUNCH(NoteScalesKernel, 1, kNoteThreads, stream, table, slot, place);
}

Failure NoteSumsOnDevice(Stream stream, const float* x, int64_t num_rows,
                         int64_t num_columns, const NotePlace& place) {
  return DAFJAX_LAUNCH(NoteSumsKernel, 1, kNoteThreads, stream, x, num_rows, num_columns,
                       place);
}

}  // namespace dafjax
