#include "device_pool/entry_packer.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "cuda/device.h"
#include "cuda/entry_table.h"
#include "cuda/pool_kernels.h"
#include "device_pool/host_packer.h"
#include "device_pool/packer_choice.h"
#include "format/affine.h"
#include "pool/attachment.h"
#include "pool/pool.h"
#include "pool/tables.h"

namespace dafjax {

Failure EntryPacker::Start(PackBytesFunction pack, pool::Packer wanted) {
  choice_ = PackerChoice(wanted);
  return host_.Start(pack);
}

Failure EntryPacker::Choose(const DevicePut& put) {
  if (last_run_id_ == put.execution.run_id) return nullptr;
  last_run_id_ = put.execution.run_id;
  if (choice_.is_open()) {
    if (const Failure failure = timer_.Lap(put.stream)) return failure;
    float time = 0;
    while (timer_.Take(&time)) choice_.Add(time);
  }
  packer_ = choice_.Begin();
  return nullptr;
}

Failure EntryPacker::Pack(const DevicePut& put, const AffineShape& shape,
                          const pool::PutView& view, const DeviceEntry& entry) {
  const uint32_t slot_of_entry = entry.handle.words[0];
  if (packs_.size() <= slot_of_entry) packs_.resize(slot_of_entry + 1);
  uint64_t& number = packs_[slot_of_entry];
  number = 0;
  if (packer_ == pool::Packer::kGpu || view.num_planes == 0 ||
      !HostPacker::Fits(entry.num_tiles)) {
    return PackEntryOnDevice(put.stream, shape, put.stochastic, put.seed, put.x,
                             view.num_planes > 0, entry.pages);
  }
  uint16_t* slot = nullptr;
  Failure failure = host_.Begin(put.stream, entry.num_tiles, &slot);
  if (failure == nullptr) {
    failure = QuantizeEntryOnDevice(put.stream, shape, put.stochastic, put.seed, put.x,
                                    entry.pages, slot);
  }
  if (failure != nullptr) return failure;
  std::vector<uint8_t*> pages;
  for (int i = 0; i < view.num_planes; ++i) {
    const pool::PlaneTable<uint8_t>& plane = view.planes[i];
    pages.insert(pages.end(), plane.pages, plane.pages + plane.num_pages);
  }
  return host_.End(put.stream, shape.bits, entry.num_tiles, std::move(pages), &number);
}

Failure EntryPacker::WaitForChanged(Stream stream, const pool::Change* changes,
                                    int count) {
  uint64_t last = 0;
  for (int i = 0; i < count; ++i) {
    const uint32_t slot = changes[i].slot;
    if (slot < packs_.size()) last = std::max(last, packs_[slot]);
  }
  return host_.WaitFor(stream, last);
}

}  // namespace dafjax
