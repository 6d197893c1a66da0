#ifndef DAFJAX_POOL_EPOCHS_H_
#define DAFJAX_POOL_EPOCHS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pool/entry.h"
#include "pool/execution.h"

namespace dafjax::pool {

// Which executions are over, and the entries of those that are not.
//
// Run ids of a process rise by one with each execution, and a device runs what one thread
// dispatches in that order: an execution is over when `in_flight` newer ones have started
// on its device.
//
// Invariant: of each device, `runs` are the `in_flight` newest executions that have
// started (fewer if fewer have), in the order of their ids. An execution is over if and
// only if its device has `in_flight` runs and they all are newer.
class Epochs {
 public:
  struct Run {
    int64_t id = 0;
    EntryList live;
  };
  struct Device {
    int32_t id = 0;
    std::vector<Run> runs;
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
    std::vector<Run>& runs = FindDevice(execution.device)->runs;
    auto at = std::lower_bound(runs.begin(), runs.end(), execution.run_id,
                               [](const Run& run, int64_t id) { return run.id < id; });
    if (at != runs.end() && at->id == execution.run_id) return false;
    if (runs.size() < in_flight_) {
      runs.insert(at, {execution.run_id, {}});
      return true;
    }
    // So old that it counts as over already.
    if (at == runs.begin()) return false;
    *over = runs.front().live;
    std::move(runs.begin() + 1, at, runs.begin());
    *(at - 1) = {execution.run_id, {}};
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
      for (size_t i = 1; i < device.runs.size(); ++i) {
        if (device.runs[i - 1].id >= device.runs[i].id) return false;
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
