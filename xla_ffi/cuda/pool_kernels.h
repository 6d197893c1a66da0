#ifndef DAFJAX_CUDA_POOL_KERNELS_H_
#define DAFJAX_CUDA_POOL_KERNELS_H_

#include <cstdint>

#include "cuda/entry_table.h"
#include "cuda/kernels.h"
#include "format/affine.h"

namespace dafjax {

// What becomes of an entry that the device knows.
struct EntryChange {
  static constexpr int32_t kGone = -1;

  uint32_t slot;
  int32_t bits_kept;
};

// A change of the table: all of it goes with the launch, by value, so that nothing has to
// be kept for the device to read later. Kernels take 4 KiB of arguments.
struct TableUpdate {
  static constexpr int kMaxChanges = 64;
  static constexpr int kMaxPages = 352;

  EntryTable table;
  // First, entries that have changed.
  int32_t num_changes;
  EntryChange changes[kMaxChanges];
  // Then addresses for the list of the entry's pages, from place `first_page` on.
  int32_t num_pages;
  int32_t first_page;
  uint8_t* pages[kMaxPages];
  // Then, unless it is null, the entry for the slot, and its handle for the program.
  uint32_t* handle;
  uint32_t slot;
  DeviceEntry entry;
};
static_assert(sizeof(TableUpdate) <= 4000);

Failure UpdateTableOnDevice(Stream stream, const TableUpdate& update);

// Requires that there are elements, and that the list of `pages` is in place.
Failure PackEntryOnDevice(Stream stream, const AffineShape& shape, bool stochastic,
                          const uint32_t* seed, const void* x, bool has_planes,
                          const EntryPages& pages);

// PackEntryOnDevice, but for the planes: the codes go to `slot`, 256 words for each tile,
// from where the CPU packs them.
Failure QuantizeEntryOnDevice(Stream stream, const AffineShape& shape, bool stochastic,
                              const uint32_t* seed, const void* x,
                              const EntryPages& pages, uint16_t* slot);

// What loads found wrong, in memory that the host sees: counts that only rise.
struct LoadFaults {
  // Handles that name no entry.
  uint32_t stale;
  // Handles of entries of another shape.
  uint32_t mismatched;
};

// Decodes the entry that the handle names when the kernel runs, from what is left of it;
// zeros for the handle of zeros. What cannot be decoded becomes NaN and is counted.
// `shape.bits` is not read. The entry is spent when so many `reads` have run; 0: never.
// Requires that there are elements.
Failure UnpackEntryOnDevice(Stream stream, const AffineShape& shape,
                            const EntryTable& table, const uint32_t* handle,
                            int64_t reads, void* y, LoadFaults* faults);

// Where kernels write numbers for the host: memory that it sees. When `done` is a note's
// number, that note and all before are there.
struct NoteBoard {
  static constexpr int64_t kNumbers = int64_t{1} << 14;

  uint64_t done;
  double numbers[kNumbers];
};

// A note that is to be written: from place `first` on, around the end to the beginning.
struct NotePlace {
  NoteBoard* board;
  uint64_t number;
  int64_t first;
};

// Notes the sum of the squared scales of the blocks of the entry that is at a slot.
Failure NoteScalesOnDevice(Stream stream, const EntryTable& table, uint32_t slot,
                           const NotePlace& place);

// Notes the sums of the columns of float32 [num_rows, num_columns].
Failure NoteSumsOnDevice(Stream stream, const float* x, int64_t num_rows,
                         int64_t num_columns, const NotePlace& place);

}  // namespace dafjax

#endif  // DAFJAX_CUDA_POOL_KERNELS_H_
