#ifndef DAFJAX_POOL_EPOCHS_H_
#define DAFJAX_POOL_EPOCHS_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pool/entry.h"
#include "pool/execution.h"

namespace dafjax::pool {

// Which executions are over, and the entries of those that are not.
//
// Run ids tell executions of a program apart: they rise by one with each, from a number of
// its own, so that they say nothing of the order of different programs. A device runs what
// one thread dispatches in that order: an execution is over when `in_flight` newer ones
// have started on its device.
//
// Invariant: of each device, `runs` are the `in_flight` newest executions that have
// started (fewer if fewer have), in the order in which they did; `over` are the ids of
// some before, and none of them is in `runs`.
class Epochs {
 public:
  struct Run {
    int64_t id = 0;
    EntryList live;
  };
  struct Device {
    int32_t id = 0;
    std::vector<Run> runs;
    // Of executions that may still put something, although they count as over.
    std::array<int64_t, 8> over = {};
    int64_t num_over = 0;

    bool IsOver(int64_t run_id) const {
      const auto count = std::min<int64_t>(num_over, over.size());
      return std::find(over.begin(), over.begin() + count, run_id) !=
             over.begin() + count;
    }
  };

  explicit Epochs(int in_flight) : in_flight_(static_cast<size_t>(in_flight)) {}

  // Makes sure that Start needs no memory. Throws std::bad_alloc with nothing changed.
  void Prepare(int32_t device) {
    if (FindDevice(device) != nullptr) return;
    Device fresh;
    fresh.id = device;
    fresh.runs.reserve(in_flight_);
    devices_.push_back(std::move(fresh));
  }

  // Says that something runs in `execution`. Returns whether that is new; `over` then
  // gets the entries of the execution that is over because of it.
  bool Start(const Execution& execution, EntryList* over) {
    Device* device = FindDevice(execution.device);
    std::vector<Run>& runs = device->runs;
    if (Find(execution) != nullptr || device->IsOver(execution.run_id)) return false;
    if (runs.size() == in_flight_) {
      *over = runs.front().live;
      device->over[device->num_over++ % device->over.size()] = runs.front().id;
      std::move(runs.begin() + 1, runs.end(), runs.begin());
      runs.pop_back();
    }
    runs.push_back({execution.run_id, {}});
    return true;
  }

  // The run of an execution that has started; null if it is over.
  Run* Find(const Execution& execution) {
    Device* device = FindDevice(execution.device);
    for (Run& run : device->runs) {
      if (run.id == execution.run_id) return &run;
    }
    return nullptr;
  }

  std::vector<Device>& devices() { return devices_; }
  const std::vector<Device>& devices() const { return devices_; }

  bool IsValid() const {
    for (const Device& device : devices_) {
      if (device.runs.size() > in_flight_) return false;
      for (const Run& run : device.runs) {
        if (device.IsOver(run.id)) return false;
      }
    }
    return true;
  }

 private:
  Device* FindDevice(int32_t id) {
    for (Device& device : devices_) {
      if (device.id == id) return &device;
    }
    return nullptr;
  }

  size_t in_flight_;
  std::vector<Device> devices_;
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_EPOCHS_H_
