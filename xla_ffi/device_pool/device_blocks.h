#ifndef DAFJAX_DEVICE_POOL_DEVICE_BLOCKS_H_
#define DAFJAX_DEVICE_POOL_DEVICE_BLOCKS_H_

#include <cstddef>
#include <vector>

#include "cuda/device.h"
#include "cuda/kernels.h"

namespace dafjax {

// Memory of the device that stays where it is and lives as long as this. Whoever destroys
// it waits for the device first.
class DeviceBlocks {
 public:
  DeviceBlocks() = default;
  ~DeviceBlocks() {
    for (void* const block : blocks_) static_cast<void>(cudaFree(block));
  }
  DeviceBlocks(const DeviceBlocks&) = delete;
  DeviceBlocks& operator=(const DeviceBlocks&) = delete;

  // Space for `count` objects; what is in it is anything.
  template <typename T>
  Failure Allocate(size_t count, T** data) {
    blocks_.reserve(blocks_.size() + 1);
    void* block = nullptr;
    const cudaError_t error = cudaMalloc(&block, count * sizeof(T));
    if (const Failure failure = WhatFailed(error)) {
      return error == cudaErrorMemoryAllocation ? kNoMemory : failure;
    }
    blocks_.push_back(block);
    *data = static_cast<T*>(block);
    return nullptr;
  }

 private:
  static constexpr Failure kNoMemory =
      "out of memory of the GPU, of which JAX takes three quarters when it starts, or "
      "as much as `XLA_PYTHON_CLIENT_MEM_FRACTION` says: let it take less";

  std::vector<void*> blocks_;
};

}  // namespace dafjax

#endif  // DAFJAX_DEVICE_POOL_DEVICE_BLOCKS_H_
