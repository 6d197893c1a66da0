#ifndef DAFJAX_DEVICE_POOL_PINNED_BLOCKS_H_
#define DAFJAX_DEVICE_POOL_PINNED_BLOCKS_H_

#include <cstddef>
#include <cstring>
#include <vector>

#include "cuda/device.h"
#include "cuda/kernels.h"

namespace dafjax {

// Memory of the host that the device sees, which stays where it is and lives as long as
// this. Whoever destroys it waits for the device first.
class PinnedBlocks {
 public:
  PinnedBlocks() = default;
  ~PinnedBlocks() {
    for (void* const block : blocks_) static_cast<void>(cudaFreeHost(block));
  }
  PinnedBlocks(const PinnedBlocks&) = delete;
  PinnedBlocks& operator=(const PinnedBlocks&) = delete;

  // `count` objects, all zeros, and the device's address of them.
  template <typename T>
  Failure Allocate(size_t count, T** data, T** on_device) {
    blocks_.reserve(blocks_.size() + 1);
    void* block = nullptr;
    const unsigned flags = cudaHostAllocMapped | cudaHostAllocPortable;
    if (const Failure failure =
            WhatFailed(cudaHostAlloc(&block, count * sizeof(T), flags))) {
      return failure;
    }
    blocks_.push_back(block);
    std::memset(block, 0, count * sizeof(T));
    *data = static_cast<T*>(block);
    void* address = nullptr;
    const Failure failure = WhatFailed(cudaHostGetDevicePointer(&address, block, 0));
    *on_device = static_cast<T*>(address);
    return failure;
  }

 private:
  std::vector<void*> blocks_;
};

}  // namespace dafjax

#endif  // DAFJAX_DEVICE_POOL_PINNED_BLOCKS_H_
