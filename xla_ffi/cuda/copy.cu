#include <cstdint>

#include "cuda/device.h"
#include "cuda/kernels.h"

namespace dafjax {
namespace {

DAFJAX_KERNEL(1) NothingKernel() {}

}  // namespace

Failure FillEmptyGraph(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (const Failure failure = WhatFailed(cudaStreamIsCapturing(stream, &status))) {
    return failure;
  }
  if (status == cudaStreamCaptureStatusNone) return nullptr;
  return DAFJAX_LAUNCH(NothingKernel, 1, 1, stream);
}

Failure CopyOnDevice(Stream stream, const void* from, int64_t nbytes, void* to) {
  return WhatFailed(cudaMemcpyAsync(to, from, static_cast<size_t>(nbytes),
                                    cudaMemcpyDeviceToDevice, stream));
}

Failure CopyToDevice(Stream stream, const void* from, int64_t nbytes, void* to) {
  if (const Failure failure =
          WhatFailed(cudaMemcpyAsync(to, from, static_cast<size_t>(nbytes),
                                     cudaMemcpyHostToDevice, stream))) {
    return failure;
  }
  return WaitForStream(stream);
}

Failure WaitForStream(Stream stream) {
  return WhatFailed(cudaStreamSynchronize(stream));
}

Failure ClearOnDevice(Stream stream, void* data, int64_t nbytes) {
  return WhatFailed(cudaMemsetAsync(data, 0, static_cast<size_t>(nbytes), stream));
}

}  // namespace dafjax
