#ifndef DAFJAX_DEVICE_POOL_TOLD_ENTRIES_H_
#define DAFJAX_DEVICE_POOL_TOLD_ENTRIES_H_

#include <cstdint>
#include <vector>

#include "cuda/entry_table.h"
#include "cuda/kernels.h"
#include "cuda/pool_kernels.h"
#include "device_pool/device_blocks.h"
#include "device_pool/mapped_memory.h"
#include "device_pool/page_lists.h"
#include "format/affine.h"
#include "pool/attachment.h"
#include "pool/handle.h"
#include "pool/pool.h"

namespace dafjax {

// The table of entries that the device reads, in its memory, and what is enqueued to
// change it.
class ToldEntries {
 public:
  // Both must outlive this: what the table is in, and what pages are in.
  ToldEntries(DeviceBlocks* blocks, const MappedMemory* memory)
      : blocks_(blocks), memory_(memory), lists_(blocks) {}

  // Enqueues the list of the pages of a new entry, and then the entry, whose handle is
  // written to `handle_on_device`.
  Failure Tell(Stream stream, const AffineShape& shape, const pool::PutView& view,
               const pool::Handle& handle, uint32_t* handle_on_device,
               DeviceEntry* entry);

  // Enqueues up to TableUpdate::kMaxChanges changes.
  Failure TellChanges(Stream stream, const pool::Change* changes, int count);

  // Handles of the entries that have been read as often as a backward pass does, when all
  // that was enqueued on the stream is done.
  Failure FindSpent(Stream stream, std::vector<pool::Handle>* spent) const;

  const EntryTable& table() const { return table_; }

 private:
  Failure Grow(Stream stream, uint32_t slot);

  DeviceBlocks* const blocks_;
  const MappedMemory* const memory_;
  PageLists lists_;
  EntryTable table_ = {};
};

}  // namespace dafjax

#endif  // DAFJAX_DEVICE_POOL_TOLD_ENTRIES_H_
