#ifndef DAFJAX_DEVICE_POOL_LAP_TIMER_H_
#define DAFJAX_DEVICE_POOL_LAP_TIMER_H_

#include <deque>

#include "cuda/device.h"
#include "cuda/kernels.h"

namespace dafjax {

// How long a stream takes from one lap to the next, without waiting for it.
class LapTimer {
 public:
  LapTimer() = default;
  ~LapTimer() {
    for (const cudaEvent_t lap : laps_) static_cast<void>(cudaEventDestroy(lap));
  }
  LapTimer(const LapTimer&) = delete;
  LapTimer& operator=(const LapTimer&) = delete;

  Failure Lap(Stream stream) {
    cudaEvent_t lap = nullptr;
    if (const Failure failure = WhatFailed(cudaEventCreateWithFlags(&lap, 0))) {
      return failure;
    }
    laps_.push_back(lap);
    return WhatFailed(cudaEventRecord(lap, stream));
  }

  // Takes the oldest time that is known by now, in milliseconds; false if there is none.
  bool Take(float* time) {
    if (laps_.size() < 2 || cudaEventQuery(laps_[1]) != cudaSuccess) return false;
    const bool known = cudaEventElapsedTime(time, laps_[0], laps_[1]) == cudaSuccess;
    static_cast<void>(cudaEventDestroy(laps_.front()));
    laps_.pop_front();
    return known;
  }

 private:
  std::deque<cudaEvent_t> laps_;
};

}  // namespace dafjax

#endif  // DAFJAX_DEVICE_POOL_LAP_TIMER_H_
