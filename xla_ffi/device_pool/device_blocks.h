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
    if (const Failure failure = WhatFailed(cudaMalloc(&block, count * sizeof(T)))) {
      return failure;
    }
    blocks_.push_back(block);
    *data = static_cast<T*>(block);
    return nullptr;
  }

 private:
  std::vector<void*> blocks_;
};

}  // namespace dafjax

#endif  // DAFJAX_DEVICE_POOL_DEVICE_BLOCKS_H_
