#include "cuda/bitmask.h"

#include <cstdint>

#include "cuda/device.h"
#include "cuda/graph.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "format/packed.h"

namespace dafjax {
namespace {

BitmaskJob JobOf(int64_t num_rows, int64_t row_elements, const uint8_t* bytes,
                 const uint16_t* words) {
  return {num_rows, row_elements, NumTiles(row_elements),
          AreAlignedRows(bytes, num_rows, row_elements, 1), IsAligned(words, 8)};
}

int64_t NumLaunchBlocks(const BitmaskJob& job) {
  return CeilDiv(job.num_rows * job.tiles_per_row, kBitmaskTiles);
}

}  // namespace

Failure PackBitmaskOnDevice(Stream stream, int64_t num_rows, int64_t row_elements,
                            const uint8_t* x, uint16_t* words) {
  if (num_rows * row_elements == 0) return FillEmptyGraph(stream);
  const BitmaskJob job = JobOf(num_rows, row_elements, x, words);
  if (const Failure failure = CheckLaunch(NumLaunchBlocks(job))) return failure;
  return DAFJAX_LAUNCH(PackBitmaskKernel, static_cast<unsigned>(NumLaunchBlocks(job)),
                       kBitmaskThreads, stream, job, x, words);
}

Failure UnpackBitmaskOnDevice(Stream stream, int64_t num_rows, int64_t row_elements,
                              const uint16_t* words, uint8_t* y) {
  if (num_rows * row_elements == 0) return FillEmptyGraph(stream);
  const BitmaskJob job = JobOf(num_rows, row_elements, y, words);
  if (const Failure failure = CheckLaunch(NumLaunchBlocks(job))) return failure;
  return DAFJAX_LAUNCH(UnpackBitmaskKernel, static_cast<unsigned>(NumLaunchBlocks(job)),
                       kBitmaskThreads, stream, job, words, y);
}

}  // namespace dafjax
