#include "device_pool/host_packer.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/paged_words.h"
#include "cuda/device.h"
#include "format/packed.h"
#include "pool/tables.h"

namespace dafjax {
namespace {

// What a function of the host is called with, which owns it.
struct HostPack {
  PackBytesFunction pack;
  int64_t num_tiles;
  const uint16_t* bytes;
  std::vector<uint8_t*> pages;
  AffineCodes planes;
};

void RunHostPack(void* data) {
  const std::unique_ptr<HostPack> job(static_cast<HostPack*>(data));
  job->pack(job->num_tiles, job->bytes, job->planes);
}

int64_t SlotNbytes(int64_t num_tiles) { return num_tiles * kTileElements; }

}  // namespace

HostPacker::~HostPacker() {
  Synchronize();
  for (const Slot& slot : slots_) {
    if (slot.written != nullptr) static_cast<void>(cudaEventDestroy(slot.written));
    if (slot.packed != nullptr) static_cast<void>(cudaEventDestroy(slot.packed));
  }
  for (void* const data : allocated_) static_cast<void>(cudaFreeHost(data));
  if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
}

Failure HostPacker::Start(PackBytesFunction pack) {
  pack_ = pack;
  Failure failure =
      WhatFailed(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  for (Slot& slot : slots_) {
    for (cudaEvent_t* const event : {&slot.written, &slot.packed}) {
      if (failure != nullptr) return failure;
      failure = WhatFailed(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }
  }
  return failure;
}

bool HostPacker::Fits(int64_t num_tiles) {
  return SlotNbytes(num_tiles) <= kMaxSlotNbytes;
}

Failure HostPacker::Begin(Stream stream, int64_t num_tiles, uint16_t** slot) {
  Slot& next = SlotOf(last_number_ + 1);
  if (const Failure failure = Grow(&next, SlotNbytes(num_tiles))) return failure;
  *slot = next.on_device;
  return WhatFailed(cudaStreamWaitEvent(stream, next.packed, 0));
}

Failure HostPacker::Grow(Slot* slot, int64_t nbytes) {
  if (nbytes <= slot->nbytes) return nullptr;
  const int64_t wanted = std::min(std::max(nbytes, 2 * slot->nbytes), kMaxSlotNbytes);
  void* data = nullptr;
  void* on_device = nullptr;
  const unsigned flags = cudaHostAllocMapped | cudaHostAllocPortable;
  if (const Failure failure =
          WhatFailed(cudaHostAlloc(&data, static_cast<size_t>(wanted), flags))) {
    return failure;
  }
  allocated_.push_back(data);
  if (const Failure failure =
          WhatFailed(cudaHostGetDevicePointer(&on_device, data, 0))) {
    return failure;
  }
  slot->data = static_cast<uint16_t*>(data);
  slot->on_device = static_cast<uint16_t*>(on_device);
  slot->nbytes = wanted;
  return nullptr;
}

Failure HostPacker::End(Stream stream, int bits, int64_t num_tiles,
                        std::vector<uint8_t*> pages, uint64_t* number) {
  Slot& slot = SlotOf(last_number_ + 1);
  auto job = std::make_unique<HostPack>();
  job->pack = pack_;
  job->num_tiles = num_tiles;
  job->bytes = slot.data;
  job->pages = std::move(pages);
  job->planes.kept_bits = bits;
  uint8_t* const* next = job->pages.data();
  for (int i = 0; i < PlanesOf(bits).count; ++i) {
    const int width = PlanesOf(bits).widths[i];
    job->planes.planes[i] = {next, pool::kLog2PageNbytes - 1, 0};
    job->planes.words_per_row[i] = WordsOfTiles(num_tiles, width);
    next += CeilDiv(num_tiles * pool::TileNbytes(width), pool::kPageNbytes);
  }
  Failure failure = WhatFailed(cudaEventRecord(slot.written, stream));
  if (failure == nullptr) {
    failure = WhatFailed(cudaStreamWaitEvent(stream_, slot.written, 0));
  }
  if (failure == nullptr) {
    HostPack* const owned = job.release();
    failure = WhatFailed(cudaLaunchHostFunc(stream_, RunHostPack, owned));
    if (failure != nullptr) job.reset(owned);
  }
  if (failure == nullptr) failure = WhatFailed(cudaEventRecord(slot.packed, stream_));
  if (failure == nullptr) *number = ++last_number_;
  return failure;
}

Failure HostPacker::WaitFor(Stream stream, uint64_t number) {
  // Whoever came to its slot again has waited.
  if (number == 0 || number + kSlots <= last_number_) return nullptr;
  return WhatFailed(cudaStreamWaitEvent(stream, SlotOf(number).packed, 0));
}

void HostPacker::Synchronize() {
  if (stream_ != nullptr) static_cast<void>(cudaStreamSynchronize(stream_));
}

}  // namespace dafjax
