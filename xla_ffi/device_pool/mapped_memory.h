#ifndef DAFJAX_DEVICE_POOL_MAPPED_MEMORY_H_
#define DAFJAX_DEVICE_POOL_MAPPED_MEMORY_H_

#include <cstdint>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "pool/memory.h"

namespace dafjax {

// Memory of the host that a GPU sees too: each page is pinned and mapped on its own, so
// that the pool can give back any of them.
//
// What is released is used by nothing that will be enqueued, but may be used by what the
// GPU has yet to do. So it stays mapped: Seal() says that the GPU has been told of all
// that was released so far, and when it has done what it was told then, Unmap() gives it
// back. Until then it can be committed again as it is.
//
// Invariant: a page is in `pages_` if and only if it is registered with CUDA.
class MappedMemory final : public pool::Memory {
 public:
  // `wait` returns when the GPU has done all that it was told.
  MappedMemory(pool::Memory* system, std::function<void()> wait)
      : system_(system), wait_(std::move(wait)) {}

  uint8_t* Reserve(int64_t nbytes) override;
  void Unreserve(uint8_t* data, int64_t nbytes) override;
  bool Commit(uint8_t* data, int64_t nbytes) override;
  void Release(uint8_t* data, int64_t nbytes) override;

  // The device's address of a place in a committed page.
  uint8_t* OnDevice(const uint8_t* place) const;

  // Returns whether there is anything that Unmap may give back one day.
  bool Seal();
  void Unmap();

 private:
  enum class State { kInUse, kReleased, kSealed };
  struct Page {
    uint8_t* on_device = nullptr;
    State state = State::kInUse;
  };
  using Pages = std::unordered_map<uintptr_t, Page>;

  bool Map(uint8_t* page);
  void Unmap(uint8_t* page);
  bool MapUnlessMapped(uint8_t* page);

  pool::Memory* const system_;
  const std::function<void()> wait_;
  mutable std::mutex mutex_;
  Pages pages_;
  // Of `pages_`, those in these states.
  int64_t num_released_ = 0;
  int64_t num_sealed_ = 0;
};

}  // namespace dafjax

#endif  // DAFJAX_DEVICE_POOL_MAPPED_MEMORY_H_
