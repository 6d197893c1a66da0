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
  float* rows;
  int64_t capacity;  // of `rows`, in numbers
};

// Notes that are not under way. They are used again, and made many at a time: to allocate
// pinned memory, CUDA may wait for all devices.
class IdleNotes {
 public:
  // Never destroyed: the device may still be at work while the process exits.
  static IdleNotes& All() {
    static IdleNotes* const all = new IdleNotes;
    return *all;
  }

  // One with room for `count` numbers.
  Failure Take(int64_t count, DeviceNote** taken) {
    *taken = FindIdle(count);
    return *taken != nullptr ? nullptr : Make(count, taken);
  }

  // What the host does when the device is there: it calls no CUDA, and nothing fails.
  void GiveBack(DeviceNote* note) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(note);
  }

 private:
  static constexpr int64_t kCapacity = 1024;  // of most notes
  static constexpr int64_t kAtOnce = 64;

  // The smallest with enough room, or null.
  DeviceNote* FindIdle(int64_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto found = idle_.end();
    for (auto it = idle_.begin(); it != idle_.end(); ++it) {
      const bool has_room = (*it)->capacity >= count;
      if (!has_room) continue;
      if (found == idle_.end() || (*it)->capacity < (*found)->capacity) found = it;
    }
    if (found == idle_.end()) return nullptr;
    DeviceNote* const note = *found;
    idle_.erase(found);
    return note;
  }

  Failure Make(int64_t count, DeviceNote** taken) {
    const int64_t capacity = std::max(count, kCapacity);
    const int64_t num_notes = count > kCapacity ? 1 : kAtOnce;
    std::vector<std::unique_ptr<DeviceNote>> made;
    for (int64_t i = 0; i < num_notes; ++i) made.push_back(std::make_unique<DeviceNote>());
    void* memory = nullptr;
    const size_t nbytes = static_cast<size_t>(num_notes * capacity) * sizeof(float);
    // Without the lock: the device may be at what takes it, GiveBack.
    if (const Failure failure =
            WhatFailed(cudaHostAlloc(&memory, nbytes, cudaHostAllocPortable))) {
      return failure;
    }
    for (int64_t i = 0; i < num_notes; ++i) {
      made[i]->rows = static_cast<float*>(memory) + i * capacity;
      made[i]->capacity = capacity;
    }
    *taken = made[0].get();
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& note : made) all_.push_back(std::move(note));
    idle_.reserve(all_.size());  // for GiveBack
    for (int64_t i = 1; i < num_notes; ++i) {
      idle_.push_back(all_[all_.size() - static_cast<size_t>(i)].get());
    }
    return nullptr;
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<DeviceNote>> all_;
  std::vector<DeviceNote*> idle_;
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
