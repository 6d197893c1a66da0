#include "ledger/device_notes.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/device.h"
#include "cuda/kernels.h"
#include "ledger/ledger.h"

namespace dafjax {
namespace {

// A note on its way, and the pinned memory that its rows are copied to.
struct DeviceNote {
  NoteFunction note;
  uint64_t ledger;
  std::vector<int64_t> sites;
  int64_t num_rows;
  float* rows = nullptr;
  int64_t capacity = 0;  // of `rows`, in numbers
};

// Notes that are not under way. They are used again: to allocate pinned memory, CUDA waits
// for the device.
class IdleNotes {
 public:
  // Never destroyed: the device may still be at work while the process exits.
  static IdleNotes& All() {
    static IdleNotes* const all = new IdleNotes;
    return *all;
  }

  // One with room for `count` numbers.
  Failure Take(int64_t count, DeviceNote** taken) {
    *taken = Find(count);
    if (*taken != nullptr) return nullptr;
    auto made = std::make_unique<DeviceNote>();
    made->capacity = std::max(count, kLeastCapacity);
    const size_t nbytes = static_cast<size_t>(made->capacity) * sizeof(float);
    void* rows = nullptr;
    // Without the lock: the device may be at what takes it, GiveBack.
    if (const Failure failure =
            WhatFailed(cudaHostAlloc(&rows, nbytes, cudaHostAllocPortable))) {
      return failure;
    }
    made->rows = static_cast<float*>(rows);
    *taken = made.get();
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.push_back(std::move(made));
    idle_.reserve(all_.size());
    return nullptr;
  }

  // What the host does when the device is there: it calls no CUDA, and nothing fails.
  void GiveBack(DeviceNote* note) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(note);
  }

 private:
  static constexpr int64_t kLeastCapacity = 1024;

  DeviceNote* Find(int64_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto has_room = [=](const DeviceNote* note) { return note->capacity >= count; };
    const auto found = std::find_if(idle_.begin(), idle_.end(), has_room);
    if (found == idle_.end()) return nullptr;
    DeviceNote* const note = *found;
    idle_.erase(found);
    return note;
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<DeviceNote>> all_;
  std::vector<DeviceNote*> idle_;  // has room for all
};

void RunNote(void* data) {
  auto* const note = static_cast<DeviceNote*>(data);
  note->note(note->ledger, note->sites.data(), static_cast<int64_t>(note->sites.size()),
             note->rows, note->num_rows);
  IdleNotes::All().GiveBack(note);
}

}  // namespace

Failure NoteFromDevice(Stream stream, NoteFunction note, uint64_t ledger,
                       const int64_t* sites, int64_t num_sites, const float* rows,
                       int64_t num_rows) {
  const int64_t count = num_rows * (num_sites + 1);
  DeviceNote* taken = nullptr;
  if (const Failure failure = IdleNotes::All().Take(count, &taken)) return failure;
  taken->note = note;
  taken->ledger = ledger;
  taken->sites.assign(sites, sites + num_sites);
  taken->num_rows = num_rows;
  if (const Failure failure = WhatFailed(
          cudaMemcpyAsync(taken->rows, rows, static_cast<size_t>(count) * sizeof(float),
                          cudaMemcpyDeviceToHost, stream))) {
    IdleNotes::All().GiveBack(taken);
    return failure;
  }
  // If that fails, the copy is still under way: the note is not used again.
  return WhatFailed(cudaLaunchHostFunc(stream, RunNote, taken));
}

}  // namespace dafjax
