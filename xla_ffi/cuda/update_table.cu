#include <cstdint>

#include "cuda/device.h"
#include "cuda/entry_table.h"
#include "cuda/pool_kernels.h"

namespace dafjax {
namespace {

constexpr int kUpdateThreads = 128;

// One block: each step sees the one before.
DAFJAX_KERNEL(kUpdateThreads) UpdateTableKernel(const TableUpdate update) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < update.num_changes; i += kUpdateThreads) {
    const EntryChange change = update.changes[i];
    // The device was never told of entries whose put failed.
    if (change.slot >= update.table.num_slots) continue;
    DeviceEntry* const entry = update.table.At(change.slot);
    if (change.bits_kept == EntryChange::kGone) {
      entry->handle = {};
    } else {
      entry->bits_kept = static_cast<int16_t>(change.bits_kept);
    }
  }
  __syncthreads();
  for (int i = thread; i < update.num_pages; i += kUpdateThreads) {
    update.entry.pages.list[update.first_page + i] = update.pages[i];
  }
  if (update.handle == nullptr || thread >= 4) return;
  update.handle[thread] = update.entry.handle.words[thread];
  if (thread == 0) *update.table.At(update.slot) = update.entry;
}

}  // namespace

Failure UpdateTableOnDevice(Stream stream, const TableUpdate& update) {
  return DAFJAX_LAUNCH(UpdateTableKernel, 1, kUpdateThreads, stream, update);
}

}  // namespace dafjax
