#include "device_pool/page_lists.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace dafjax {
namespace {

// Of 32 bytes, as much as the device reads at a time.
constexpr int kLeastSize = 2;
// Of 64 KiB.
constexpr int64_t kBlockPages = int64_t{1} << 13;

int SizeFor(int64_t num_pages) {
  int size = kLeastSize;
  while (int64_t{1} << size < num_pages) ++size;
  return size;
}

}  // namespace

Failure PageLists::Of(uint32_t slot, int64_t num_pages, uint8_t*** list) {
  if (of_slots_.size() <= slot) of_slots_.resize(size_t{slot} + 1);
  List& had = of_slots_[slot];
  if (had.data == nullptr || int64_t{1} << had.size < num_pages) {
    const int size = SizeFor(num_pages);
    uint8_t** data = nullptr;
    if (const Failure failure = Take(size, &data)) return failure;
    if (had.data != nullptr) free_[had.size].push_back(had.data);
    had = {data, size};
  }
  *list = had.data;
  return nullptr;
}

Failure PageLists::Take(int size, uint8_t*** list) {
  if (free_.size() <= static_cast<size_t>(size)) free_.resize(size_t(size) + 1);
  std::vector<uint8_t**>& of_size = free_[size];
  if (!of_size.empty()) {
    *list = of_size.back();
    of_size.pop_back();
    return nullptr;
  }
  const int64_t num_pages = int64_t{1} << size;
  if (rest_pages_ < num_pages) {
    // What was left is too little for most, and is lost: less than what follows.
    const int64_t count = std::max(kBlockPages, num_pages);
    uint8_t** block = nullptr;
    const Failure failure = blocks_->Allocate(static_cast<size_t>(count), &block);
    if (failure != nullptr) return failure;
    rest_ = block;
    rest_pages_ = count;
  }
  *list = rest_;
  rest_ += num_pages;
  rest_pages_ -= num_pages;
  return nullptr;
}

}  // namespace dafjax
