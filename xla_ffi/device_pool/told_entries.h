#ifndef DAFJAX_DEVICE_POOL_TOLD_ENTRIES_H_
#define DAFJAX_DEVICE_POOL_TOLD_ENTRIES_H_

#include <cstdint>

#include "cuda/entry_table.h"
#include "cuda/kernels.h"
#include "cuda/pool_kernels.h"
#include "device_pool/mapped_memory.h"
#include "device_pool/pinned_blocks.h"
#include "format/affine.h"
#include "pool/attachment.h"
#include "pool/handle.h"
#include "pool/pool.h"

namespace dafjax {

// The table of entries that the device reads, and what is enqueued to change it.
class ToldEntries {
 public:
  // Both must outlive this: what the table is in, and what pages are in.
  ToldEntries(PinnedBlocks* blocks, const MappedMemory* memory)
      : blocks_(blocks), memory_(memory) {}

  // Of the list of the pages of an entry, for the most bits that it may be given.
  static int64_t ListNbytesOf(const AffineShape& shape, int max_bits);

  // Enqueues the list of the pages of a new entry, and then the entry, whose handle is
  // written to `handle_on_device`. `list_nbytes` are those of ListNbytesOf; the list is
  // where the metadata of `view` begin.
  Failure Tell(Stream stream, const AffineShape& shape, int64_t list_nbytes,
               const pool::PutView& view, const pool::Handle& handle,
               uint32_t* handle_on_device, DeviceEntry* entry);

  // Enqueues up to TableUpdate::kMaxChanges changes.
  Failure TellChanges(Stream stream, const pool::Change* changes, int count);

  const EntryTable& table() const { return table_; }

 private:
  Failure Grow(uint32_t slot);

  PinnedBlocks* const blocks_;
  const MappedMemory* const memory_;
  EntryTable table_ = {};
};

}  // namespace dafjax

#endif  // DAFJAX_DEVICE_POOL_TOLD_ENTRIES_H_
