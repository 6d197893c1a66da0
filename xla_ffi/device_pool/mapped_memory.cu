#include "device_pool/mapped_memory.h"

#include <cstdint>
#include <mutex>
#include <new>

#include "cuda/device.h"
#include "pool/tables.h"

namespace dafjax {
namespace {

uintptr_t KeyOf(const uint8_t* page) { return reinterpret_cast<uintptr_t>(page); }

}  // namespace

uint8_t* MappedMemory::Reserve(int64_t nbytes) { return system_->Reserve(nbytes); }

void MappedMemory::Unreserve(uint8_t* data, int64_t nbytes) {
  wait_();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t at = 0; at < nbytes; at += pool::kPageNbytes) Unmap(data + at);
  system_->Unreserve(data, nbytes);
}

bool MappedMemory::Commit(uint8_t* data, int64_t nbytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t done = 0;
  while (done < nbytes && MapUnlessMapped(data + done)) done += pool::kPageNbytes;
  for (int64_t at = 0; at < done; at += pool::kPageNbytes) {
    State& state = pages_.find(KeyOf(data + at))->second.state;
    if (done == nbytes) {
      num_released_ -= state == State::kReleased;
      num_sealed_ -= state == State::kSealed;
      state = State::kInUse;
    } else if (state == State::kInUse) {
      // Those that were mapped before are not: the GPU may have yet to read them.
      Unmap(data + at);
    }
  }
  return done == nbytes;
}

bool MappedMemory::MapUnlessMapped(uint8_t* page) {
  if (pages_.count(KeyOf(page)) > 0) return true;
  if (!system_->Commit(page, pool::kPageNbytes)) return false;
  if (Map(page)) return true;
  system_->Release(page, pool::kPageNbytes);
  return false;
}

void MappedMemory::Release(uint8_t* data, int64_t nbytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t at = 0; at < nbytes; at += pool::kPageNbytes) {
    pages_.find(KeyOf(data + at))->second.state = State::kReleased;
    ++num_released_;
  }
}

uint8_t* MappedMemory::OnDevice(const uint8_t* place) const {
  const uintptr_t in_page = KeyOf(place) & (pool::kPageNbytes - 1);
  const std::lock_guard<std::mutex> lock(mutex_);
  return pages_.find(KeyOf(place) - in_page)->second.on_device + in_page;
}

bool MappedMemory::Seal() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (num_released_ > 0) {
    for (auto& [key, page] : pages_) {
      if (page.state == State::kReleased) page.state = State::kSealed;
    }
    num_sealed_ += num_released_;
    num_released_ = 0;
  }
  return num_sealed_ > 0;
}

void MappedMemory::Unmap() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto next = pages_.begin(); next != pages_.end() && num_sealed_ > 0;) {
    const auto page = next++;
    if (page->second.state != State::kSealed) continue;
    uint8_t* const data = reinterpret_cast<uint8_t*>(page->first);
    Unmap(data);
  }
}

// Requires that the page is committed.
bool MappedMemory::Map(uint8_t* page) {
  Page mapped;
  void* on_device = nullptr;
  const unsigned flags = cudaHostRegisterMapped | cudaHostRegisterPortable;
  if (WhatFailed(cudaHostRegister(page, pool::kPageNbytes, flags))) return false;
  if (cudaHostGetDevicePointer(&on_device, page, 0) == cudaSuccess) {
    mapped.on_device = static_cast<uint8_t*>(on_device);
    try {
      pages_.emplace(KeyOf(page), mapped);
      return true;
    } catch (const std::bad_alloc&) {
    }
  }
  cudaHostUnregister(page);
  return false;
}

// Gives a page back to the system, if it is mapped.
void MappedMemory::Unmap(uint8_t* page) {
  const auto found = pages_.find(KeyOf(page));
  if (found == pages_.end()) return;
  num_released_ -= found->second.state == State::kReleased;
  num_sealed_ -= found->second.state == State::kSealed;
  // When the process exits CUDA may be gone already, and with it what it had mapped.
  static_cast<void>(cudaHostUnregister(page));
  pages_.erase(found);
  system_->Release(page, pool::kPageNbytes);
}

}  // namespace dafjax
