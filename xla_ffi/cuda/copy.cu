#include <cstdint>

#include "cuda/device.h"
#include "cuda/kernels.h"

namespace dafjax {

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

Failure CopyToHost(Stream stream, const void* from, int64_t nbytes, void* to) {
  if (const Failure failure =
          WhatFailed(cudaMemcpyAsync(to, from, static_cast<size_t>(nbytes),
                                     cudaMemcpyDeviceToHost, stream))) {
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
