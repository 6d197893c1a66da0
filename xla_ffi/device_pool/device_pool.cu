#include "device_pool/device_pool.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/device.h"
#include "cuda/entry_table.h"
#include "cuda/pool_kernels.h"
#include "device_pool/device_blocks.h"
#include "device_pool/entry_packer.h"
#include "device_pool/mapped_memory.h"
#include "device_pool/note_queue.h"
#include "device_pool/pinned_blocks.h"
#include "device_pool/stream_order.h"
#include "device_pool/told_entries.h"
#include "format/affine.h"
#include "format/packed.h"
#include "pool/attachment.h"
#include "pool/handle.h"
#include "pool/pool.h"
#include "pool/status.h"
#include "pool/tables.h"
#include "pool/writing.h"

namespace dafjax {
namespace {

using pool::Code;
using pool::Status;

std::string Text(int64_t number) { return std::to_string(number); }

Status StatusOf(Failure failure) {
  if (failure == nullptr) return {};
  return {Code::kDeviceFailure,
          std::string("CUDA could not enqueue what the page pool needs: ") + failure +
              ". `python -m dafjax doctor` tells what CUDA has."};
}

Status CannotMap(const char* attribute) {
  return {Code::kUnsupported,
          std::string("this GPU does not see memory of the host (") + attribute +
              " is 0), in which a page pool keeps residuals. Use "
              "`dafjax.stores.Arrays()` on it."};
}

// Makes a device the current one of this thread.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    static_cast<void>(cudaGetDevice(&before_));
    static_cast<void>(cudaSetDevice(device));
  }
  ~OnDevice() { static_cast<void>(cudaSetDevice(before_)); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

class CudaDevicePool final : public DevicePool {
 public:
  CudaDevicePool(pool::AttachablePool* pool, PackBytesFunction pack,
                 pool::Memory* system)
      : pool_(pool), pack_(pack), memory_(system, [this] { Wait(); }) {}
  ~CudaDevicePool() override;

  // Before all others. On any status but kOk there is nothing but to destroy it.
  Status Start();

  Status Put(const DevicePut& put) override;
  Status Get(Stream stream, const AffineShape& shape, const uint32_t* handle,
             int64_t reads, void* y) override;
  Status Note(Stream stream, const float* sensitivities, int64_t num_rows,
              const int64_t* sites, int64_t num_sites) override;
  pool::Memory* memory() override { return &memory_; }
  Status TellReads() override;
  Status Settle() override;
  int64_t num_refused() const override;
  pool::Packer packer() const override { return packer_.packer(); }

 private:
  bool Has(cudaDeviceAttr attribute) const;
  Status CheckAttributes() const;
  Failure Allocate();
  void Wait();

  // Of every call, with the lock.
  Status Enter(Stream stream);
  Status Leave(Stream stream);
  Status TakeFaults();
  Status CheckDevice() const;

  Status Write(const DevicePut& put, const pool::PutView& view,
               const pool::Handle& handle);
  Failure TellChanges(Stream stream);
  Failure NoteRanges(const DevicePut& put, const DeviceEntry& entry);
  void UnmapSealed();

  pool::AttachablePool* const pool_;
  const PackBytesFunction pack_;
  int device_ = 0;
  // Held while a call decides and enqueues: the order of decisions is that of streams.
  std::mutex mutex_;
  StreamOrder order_;
  MappedMemory memory_;
  // What the host and the device both see.
  PinnedBlocks pinned_;
  DeviceBlocks blocks_;
  ToldEntries entries_{&blocks_, &memory_};
  LoadFaults* faults_ = nullptr;
  LoadFaults* faults_on_device_ = nullptr;
  LoadFaults faults_told_ = {};
  NoteQueue notes_;
  EntryPacker packer_;
  // For what no program enqueues.
  Stream own_stream_ = nullptr;
  // Whether memory is sealed; and whether the event has been recorded since, after which
  // it can be unmapped.
  bool seals_ = false;
  bool unmaps_ = false;
  cudaEvent_t unmap_ = nullptr;
};

Status CudaDevicePool::Start() {
  Status status = StatusOf(WhatFailed(cudaGetDevice(&device_)));
  if (status.ok()) status = CheckAttributes();
  return status.ok() ? StatusOf(Allocate()) : status;
}

bool CudaDevicePool::Has(cudaDeviceAttr attribute) const {
  int value = 0;
  return cudaDeviceGetAttribute(&value, attribute, device_) == cudaSuccess && value != 0;
}

Status CudaDevicePool::CheckAttributes() const {
  if (!Has(cudaDevAttrCanMapHostMemory)) return CannotMap("cudaDevAttrCanMapHostMemory");
  if (!Has(cudaDevAttrHostRegisterSupported)) {
    return CannotMap("cudaDevAttrHostRegisterSupported");
  }
  return {};
}

Failure CudaDevicePool::Allocate() {
  if (const Failure failure = order_.Start()) return failure;
  // Codes that cross a bus to be packed cost more than they save.
  const bool gpu_packs = pool_->packer() == pool::Packer::kAuto &&
                         !Has(cudaDevAttrIntegrated);
  const pool::Packer packer = gpu_packs ? pool::Packer::kGpu : pool_->packer();
  if (const Failure failure = packer_.Start(pack_, packer)) return failure;
  if (const Failure failure =
          WhatFailed(cudaStreamCreateWithFlags(&own_stream_, cudaStreamNonBlocking))) {
    return failure;
  }
  if (const Failure failure =
          WhatFailed(cudaEventCreateWithFlags(&unmap_, cudaEventDisableTiming))) {
    return failure;
  }
  if (const Failure failure = pinned_.Allocate(1, &faults_, &faults_on_device_)) {
    return failure;
  }
  NoteBoard* board = nullptr;
  NoteBoard* board_on_device = nullptr;
  if (const Failure failure = pinned_.Allocate(1, &board, &board_on_device)) {
    return failure;
  }
  notes_.Start(board, board_on_device);
  return nullptr;
}

// Returns when the device, and the CPU behind it, have done all that they were told.
void CudaDevicePool::Wait() {
  order_.Wait();
  packer_.Synchronize();
}

CudaDevicePool::~CudaDevicePool() {
  // Nothing can be done about what fails here.
  if (faults_ != nullptr) Wait();
  if (unmap_ != nullptr) static_cast<void>(cudaEventDestroy(unmap_));
  if (own_stream_ != nullptr) static_cast<void>(cudaStreamDestroy(own_stream_));
}

Status CudaDevicePool::Put(const DevicePut& put) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Status status = Enter(put.stream);
  if (!status.ok()) return status;
  if (const Failure failure = packer_.Choose(put)) return StatusOf(failure);
  const int64_t num_tiles = put.shape.num_rows * put.shape.NumTiles();
  const pool::PutRequest request = {num_tiles, put.max_bits,
                                    put.shape.ParametersNbytes(), put.bits};
  pool::PutView view;
  pool::Handle handle;
  status = pool_->Put(put.execution, put.site, request, &view, &handle);
  if (status.ok()) {
    status = Write(put, view, handle);
  } else {
    // Others may have lost planes, or be gone, before it was certain.
    static_cast<void>(TellChanges(put.stream));
  }
  const Status left = Leave(put.stream);
  return status.ok() ? left : status;
}

// Enqueues what has changed, the entry and its codes.
Status CudaDevicePool::Write(const DevicePut& put, const pool::PutView& view,
                             const pool::Handle& handle) {
  pool::Writing writing(pool_, handle);
  AffineShape shape = put.shape;
  shape.bits = view.bits;
  DeviceEntry entry = {};
  Failure failure = TellChanges(put.stream);
  if (failure == nullptr) {
    failure = entries_.Tell(put.stream, put.shape, view, handle, put.handle, &entry);
  }
  if (failure == nullptr) failure = packer_.Pack(put, shape, view, entry);
  if (failure == nullptr && pool_->measures()) failure = NoteRanges(put, entry);
  return failure == nullptr ? writing.Commit() : StatusOf(failure);
}

Status CudaDevicePool::Get(Stream stream, const AffineShape& shape, const uint32_t* handle,
                           int64_t reads, void* y) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Status status = Enter(stream);
  if (!status.ok()) return status;
  // Changes that no put has told of: what was collected.
  Failure failure = TellChanges(stream);
  // Which entry it will be is not known: all that the CPU is to pack comes first.
  if (failure == nullptr) failure = packer_.WaitForAll(stream);
  if (failure == nullptr) {
    failure = UnpackEntryOnDevice(stream, shape, entries_.table(), handle, reads, y,
                                  faults_on_device_);
  }
  return failure == nullptr ? Leave(stream) : StatusOf(failure);
}

Status CudaDevicePool::Note(Stream stream, const float* sensitivities, int64_t num_rows,
                            const int64_t* sites, int64_t num_sites) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Status status = Enter(stream);
  if (!status.ok()) return status;
  std::vector<pool::SiteId> ids(sites, sites + num_sites);
  NotePlace place;
  if (!notes_.AddSensitivities(std::move(ids), &place)) return Leave(stream);
  if (const Failure failure = NoteSumsOnDevice(stream, sensitivities, num_rows,
                                               num_sites + 1, place)) {
    return StatusOf(failure);
  }
  return Leave(stream);
}

Status CudaDevicePool::TellReads() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const OnDevice on_device(device_);
  std::vector<pool::Handle> spent;
  Failure failure = order_.Enter(own_stream_);
  if (failure == nullptr) failure = entries_.FindSpent(own_stream_, &spent);
  if (failure == nullptr) failure = order_.Leave(own_stream_);
  for (const pool::Handle& handle : spent) pool_->MarkSpent(handle);
  return StatusOf(failure);
}

Status CudaDevicePool::Settle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const OnDevice on_device(device_);
  // All is waited for below.
  unmaps_ = false;
  Failure failure = order_.Enter(own_stream_);
  if (failure == nullptr) failure = TellChanges(own_stream_);
  if (failure == nullptr) failure = order_.Leave(own_stream_);
  if (failure != nullptr) return StatusOf(failure);
  Wait();
  UnmapSealed();
  notes_.Deliver(pool_);
  return TakeFaults();
}

int64_t CudaDevicePool::num_refused() const {
  const volatile LoadFaults* const faults = faults_;
  return int64_t{faults->stale} + faults->mismatched;
}

Status CudaDevicePool::Enter(Stream stream) {
  Status status = CheckDevice();
  if (status.ok()) status = TakeFaults();
  if (!status.ok()) return status;
  if (unmaps_ && cudaEventQuery(unmap_) == cudaSuccess) UnmapSealed();
  notes_.Deliver(pool_);
  return StatusOf(order_.Enter(stream));
}

Status CudaDevicePool::Leave(Stream stream) {
  Failure failure = order_.Leave(stream);
  if (failure == nullptr && seals_ && !unmaps_) {
    unmaps_ = true;
    failure = WhatFailed(cudaEventRecord(unmap_, stream));
  }
  return StatusOf(failure);
}

Status CudaDevicePool::CheckDevice() const {
  int device = 0;
  if (const Failure failure = WhatFailed(cudaGetDevice(&device))) {
    return StatusOf(failure);
  }
  if (device == device_) return {};
  return {Code::kUnsupported,
          "the page pool serves GPU " + Text(device_) + ", and not GPU " + Text(device) +
              " too: what is reused on one would have to wait for the other. Make a "
              "`dafjax.stores.PagePool` for each GPU."};
}

Status CudaDevicePool::TakeFaults() {
  const volatile LoadFaults* const faults = faults_;
  const LoadFaults now = {faults->stale, faults->mismatched};
  const LoadFaults before = faults_told_;
  faults_told_ = now;
  if (now.stale != before.stale) {
    return {Code::kStaleHandle,
            "a load that the GPU made before this call found nothing, and gave NaN: the "
            "residual is gone because its execution is over, or was collected when its "
            "backward pass had run, or the handle is none of this pool in this process. "
            "Run the forward and the backward pass in one `jax.jit` of the whole step, "
            "call `PagePool.collect()` after the last call of a pullback, or let more "
            "executions overlap with `PagePool(executions_in_flight=...)`."};
  }
  if (now.mismatched != before.mismatched) {
    return {Code::kInvalidArgument,
            "a load that the GPU made before this call gave NaN: the handle is that of "
            "an entry of another shape than its result."};
  }
  return {};
}

// Enqueues all changes that the pool has made since the last time.
Failure CudaDevicePool::TellChanges(Stream stream) {
  // Before the changes are taken: what is released later is not among them. What is sealed
  // while an event is awaited would be unmapped with it, too early.
  if (!unmaps_) seals_ = memory_.Seal();
  pool::Change changes[TableUpdate::kMaxChanges];
  while (true) {
    const int count = pool_->TakeChanges(changes, TableUpdate::kMaxChanges);
    if (count == 0) return nullptr;
    if (const Failure failure = packer_.WaitForChanged(stream, changes, count)) {
      return failure;
    }
    if (const Failure failure = entries_.TellChanges(stream, changes, count)) {
      return failure;
    }
  }
}

// Enqueues what measures the ranges of an entry's blocks.
Failure CudaDevicePool::NoteRanges(const DevicePut& put, const DeviceEntry& entry) {
  const double levels = static_cast<double>((1 << entry.bits_put) - 1);
  const double factor = levels * levels / static_cast<double>(entry.pages.num_blocks);
  NotePlace place;
  if (!notes_.AddRanges(put.site, factor, entry.num_tiles, &place)) return nullptr;
  return NoteScalesOnDevice(put.stream, entries_.table(), entry.handle.words[0], place);
}

void CudaDevicePool::UnmapSealed() {
  memory_.Unmap();
  unmaps_ = false;
  seals_ = false;
}

}  // namespace

std::shared_ptr<DevicePool> MakeDevicePool(pool::AttachablePool* pool,
                                           PackBytesFunction pack, pool::Memory* system,
                                           Status* status) {
  auto made = std::make_shared<CudaDevicePool>(pool, pack, system);
  *status = made->Start();
  return status->ok() ? made : nullptr;
}

}  // namespace dafjax
