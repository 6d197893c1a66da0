#ifndef DAFJAX_CUDA_ENTRY_TABLE_H_
#define DAFJAX_CUDA_ENTRY_TABLE_H_

#include <cstdint>

#include "cuda/device.h"
#include "cuda/entry_pages.h"

namespace dafjax {

// 128 bits that stand for an entry (pool/handle.h).
struct EntryHandle {
  uint32_t words[4];
};

// What the device knows of an entry. Its handle is that of zeros if there is none.
struct alignas(16) DeviceEntry {
  EntryHandle handle;
  int16_t bits_put;
  int16_t bits_kept;
  // Loads that have run, and whether they are as many as a backward pass makes.
  uint16_t reads;
  uint16_t is_spent;
  int64_t num_tiles;  // of all rows
  EntryPages pages;
};
static_assert(sizeof(DeviceEntry) == 64);

// The entries by slot, in chunks each of which has twice as many as the one before: a
// chunk stays where it is, so that what was enqueued finds it there, however many follow.
// Only kernels read and write entries, in the order of a stream: those that were enqueued
// before a change see what was there before.
struct EntryTable {
  static constexpr int kMaxChunks = 20;
  static constexpr uint32_t kFirstChunkSlots = 256;

  static constexpr uint32_t SlotsOf(int chunk) { return kFirstChunkSlots << chunk; }
  // Of all chunks before.
  static constexpr uint32_t SlotsBefore(int chunk) {
    return kFirstChunkSlots * ((uint32_t{1} << chunk) - 1);
  }

  DAFJAX_DEVICE DeviceEntry* At(uint32_t slot) const {
    const int chunk = 31 - __clz(static_cast<int>(slot / kFirstChunkSlots + 1));
    return chunks[chunk] + (slot - SlotsBefore(chunk));
  }

  uint32_t num_slots;
  DeviceEntry* chunks[kMaxChunks];
};

}  // namespace dafjax

#endif  // DAFJAX_CUDA_ENTRY_TABLE_H_
