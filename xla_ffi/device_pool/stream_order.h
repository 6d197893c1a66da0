#ifndef DAFJAX_DEVICE_POOL_STREAM_ORDER_H_
#define DAFJAX_DEVICE_POOL_STREAM_ORDER_H_

#include "cuda/device.h"
#include "cuda/kernels.h"

namespace dafjax {

// What several streams of a device do for a pool is done in the order in which the host
// enqueued it. So a page is written again only when all have read it that the host has let
// read it, and no load sees half of a change. Within a stream that costs nothing.
//
// It holds for the streams of one device. Between devices it could make a device wait for
// one that waits for it in a collective operation.
class StreamOrder {
 public:
  StreamOrder() = default;
  ~StreamOrder() {
    if (last_call_ != nullptr) static_cast<void>(cudaEventDestroy(last_call_));
  }
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  // Before all others.
  Failure Start() {
    return WhatFailed(cudaEventCreateWithFlags(&last_call_, cudaEventDisableTiming));
  }

  // Before and after what a call enqueues. The event is recorded each time, and not when
  // another stream comes: by then the stream may have been given work that waits for it.
  Failure Enter(Stream stream) {
    if (!any_ || stream == last_stream_) return nullptr;
    return WhatFailed(cudaStreamWaitEvent(stream, last_call_, 0));
  }
  Failure Leave(Stream stream) {
    any_ = true;
    last_stream_ = stream;
    return WhatFailed(cudaEventRecord(last_call_, stream));
  }

  // Returns when all calls are done.
  void Wait() { static_cast<void>(cudaEventSynchronize(last_call_)); }

 private:
  cudaEvent_t last_call_ = nullptr;
  Stream last_stream_ = nullptr;
  bool any_ = false;
};

}  // namespace dafjax

#endif  // DAFJAX_DEVICE_POOL_STREAM_ORDER_H_
