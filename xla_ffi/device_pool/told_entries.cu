#include "device_pool/told_entries.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/entry_pages.h"
#include "cuda/entry_table.h"
#include "cuda/pool_kernels.h"
#include "format/affine.h"
#include "pool/attachment.h"
#include "pool/handle.h"
#include "pool/pool.h"
#include "pool/tables.h"

namespace dafjax {

static_assert(pool::kLog2PageNbytes == kLog2EntryPageNbytes);
static_assert(pool::Change::kGone == EntryChange::kGone);

Failure ToldEntries::Tell(Stream stream, const AffineShape& shape,
                          const pool::PutView& view, const pool::Handle& handle,
                          uint32_t* handle_on_device, DeviceEntry* entry) {
  if (const Failure failure = Grow(stream, handle.slot)) return failure;
  *entry = {};
  entry->handle = {{handle.slot, handle.generation, handle.pool_id, handle.check}};
  entry->bits_put = static_cast<int16_t>(view.bits);
  entry->bits_kept = view.num_planes == 0 ? int16_t{0} : entry->bits_put;
  entry->num_tiles = shape.num_rows * shape.NumTiles();
  EntryPages& pages = entry->pages;
  pages.num_blocks = shape.num_rows * shape.NumBlocks();
  int64_t num_pages = view.metadata.num_pages;
  for (int i = 0; i < view.num_planes; ++i) {
    pages.first_pages[i] = static_cast<int32_t>(num_pages);
    num_pages += view.planes[i].num_pages;
  }
  if (const Failure failure = lists_.Of(handle.slot, num_pages, &pages.list)) {
    return failure;
  }

  TableUpdate update = {};
  update.table = table_;
  update.slot = handle.slot;
  Failure failure = nullptr;
  const auto tell = [&] {
    update.entry = *entry;
    failure = UpdateTableOnDevice(stream, update);
    update.first_page += update.num_pages;
    update.num_pages = 0;
  };
  const auto add = [&](uint8_t* const* some, int64_t count) {
    for (int64_t i = 0; i < count && failure == nullptr; ++i) {
      if (update.num_pages == TableUpdate::kMaxPages) tell();
      update.pages[update.num_pages++] = memory_->OnDevice(some[i]);
    }
  };
  add(view.metadata.pages, view.metadata.num_pages);
  for (int i = 0; i < view.num_planes; ++i) {
    add(view.planes[i].pages, view.planes[i].num_pages);
  }
  update.handle = handle_on_device;
  if (failure == nullptr) tell();
  return failure;
}

Failure ToldEntries::TellChanges(Stream stream, const pool::Change* changes,
                                 int count) {
  TableUpdate update = {};
  update.table = table_;
  update.num_changes = count;
  for (int i = 0; i < count; ++i) {
    update.changes[i] = {changes[i].slot, changes[i].bits_kept};
  }
  return UpdateTableOnDevice(stream, update);
}

Failure ToldEntries::FindSpent(Stream stream, std::vector<pool::Handle>* spent) const {
  std::vector<DeviceEntry> entries;
  for (int chunk = 0; EntryTable::SlotsBefore(chunk) < table_.num_slots; ++chunk) {
    entries.resize(EntryTable::SlotsOf(chunk));
    const auto nbytes = static_cast<int64_t>(entries.size() * sizeof(DeviceEntry));
    if (const Failure failure =
            CopyToHost(stream, table_.chunks[chunk], nbytes, entries.data())) {
      return failure;
    }
    for (const DeviceEntry& entry : entries) {
      const uint32_t* const words = entry.handle.words;
      if (entry.is_spent) spent->push_back({words[0], words[1], words[2], words[3]});
    }
  }
  return nullptr;
}

// Makes sure that the table has the slot.
Failure ToldEntries::Grow(Stream stream, uint32_t slot) {
  for (int chunk = 0; slot >= table_.num_slots; ++chunk) {
    if (chunk == EntryTable::kMaxChunks) return "the page pool has too many entries.";
    if (table_.chunks[chunk] != nullptr) continue;
    DeviceEntry* entries = nullptr;
    const size_t count = EntryTable::SlotsOf(chunk);
    Failure failure = blocks_->Allocate(count, &entries);
    if (failure == nullptr) {
      failure = ClearOnDevice(stream, entries,
                              static_cast<int64_t>(count * sizeof(DeviceEntry)));
    }
    if (failure != nullptr) return failure;
    table_.chunks[chunk] = entries;
    table_.num_slots += EntryTable::SlotsOf(chunk);
  }
  return nullptr;
}

}  // namespace dafjax
