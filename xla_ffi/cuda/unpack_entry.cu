#include <cstdint>

#include "cuda/device.h"
#include "cuda/entry_pages.h"
#include "cuda/entry_table.h"
#include "cuda/launch.h"
#include "cuda/pool_kernels.h"
#include "cuda/tile_values.h"
#include "cuda/unpack.h"
#include "cuda/unpack_launch.h"
#include "format/affine.h"
#include "format/float_type.h"

namespace dafjax {
namespace {

struct UnpackEntryJob {
  UnpackJob unpack;
  EntryTable table;
  const uint32_t* handle;
  int64_t reads;
  LoadFaults* faults;
};

enum class Found { kEntry, kZeros, kStale, kMismatched };

DAFJAX_DEVICE Found Find(const UnpackEntryJob& job, DeviceEntry** entry) {
  const uint32_t slot = job.handle[0];
  const uint32_t generation = job.handle[1];
  const uint32_t pool = job.handle[2];
  const uint32_t check = job.handle[3];
  if ((slot | generation | pool | check) == 0) return Found::kZeros;
  if (slot >= job.table.num_slots) return Found::kStale;
  DeviceEntry* const at = job.table.At(slot);
  const uint32_t* const words = at->handle.words;
  if (words[0] != slot || words[1] != generation || words[2] != pool ||
      words[3] != check) {
    return Found::kStale;
  }
  const UnpackJob& unpack = job.unpack;
  if (at->num_tiles != unpack.num_rows * unpack.tiles_per_row ||
      at->pages.num_blocks != unpack.num_rows * unpack.blocks_per_row) {
    return Found::kMismatched;
  }
  *entry = at;
  return Found::kEntry;
}

DAFJAX_DEVICE uint32_t BitsOfNan(FloatType type) {
  switch (type) {
    case FloatType::kFloat32: return 0x7fc00000;
    case FloatType::kBFloat16: return 0x7fc0;
    default: return 0x7e00;
  }
}

// Fills the part of the array that this launch block would have decoded.
DAFJAX_DEVICE void Fill(const UnpackJob& job, uint32_t bits) {
  const int64_t count = job.num_rows * job.row_elements;
  const int64_t step = int64_t{gridDim.x} * kUnpackThreads;
  for (int64_t i = int64_t{blockIdx.x} * kUnpackThreads + threadIdx.x; i < count;
       i += step) {
    StoreBits(job.y, i, bits);
  }
}

template <bool kColumns>
DAFJAX_KERNEL(kUnpackThreads)
UnpackEntryKernel(const UnpackEntryJob job) {
  DeviceEntry* entry = nullptr;
  const Found found = Find(job, &entry);
  if (found != Found::kEntry) {
    Fill(job.unpack, found == Found::kZeros ? 0 : BitsOfNan(job.unpack.y.type));
    // Launches of a pool follow each other: one thread at a time counts.
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      if (found == Found::kStale) ++job.faults->stale;
      if (found == Found::kMismatched) ++job.faults->mismatched;
    }
    return;
  }
  // Here too, one thread at a time counts.
  if (job.reads > 0 && blockIdx.x == 0 && threadIdx.x == 0 && !entry->is_spent) {
    entry->is_spent = ++entry->reads >= job.reads;
  }
  const int bits_kept = entry->bits_kept;
  const CodesInPages<const uint16_t> codes = {bits_kept > 0, entry->pages};
  const float step = static_cast<float>(1 << (entry->bits_put - bits_kept));
  const BitsLeft left = {step, (step - 1.0f) * 0.5f};
  UnpackPart<kColumns>(job.unpack, codes, [&](const auto&... part) {
    switch (bits_kept) {
      case 0: DecodePart<0>(job.unpack, codes, left, part...); break;
      case 1: DecodePart<1>(job.unpack, codes, left, part...); break;
      case 2: DecodePart<2>(job.unpack, codes, left, part...); break;
      case 4: DecodePart<4>(job.unpack, codes, left, part...); break;
      default: DecodePart<8>(job.unpack, codes, left, part...); break;
    }
  });
}

}  // namespace

Failure UnpackEntryOnDevice(Stream stream, const AffineShape& shape,
                            const EntryTable& table, const uint32_t* handle,
                            int64_t reads, void* y, LoadFaults* faults) {
  const UnpackEntryJob job = {UnpackJobOf(shape, y), table, handle, reads, faults};
  const int64_t blocks = NumUnpackBlocks(job.unpack);
  if (const Failure failure = CheckLaunch(blocks)) return failure;
  return shape.columns == 0
             ? DAFJAX_LAUNCH(UnpackEntryKernel<false>, static_cast<unsigned>(blocks),
                             kUnpackThreads, stream, job)
             : DAFJAX_LAUNCH(UnpackEntryKernel<true>, static_cast<unsigned>(blocks),
                             kUnpackThreads, stream, job);
}

}  // namespace dafjax
