#include "pool/small_allocator.h"

#include <algorithm>

namespace dafjax::pool {
namespace {

constexpr uint64_t kAllFree = ~uint64_t{0};

int LongestRun(uint64_t mask) {
  if (mask == kAllFree) return kPageSlots;
  int length = 0;
  for (; mask != 0; mask &= mask >> 1) ++length;
  return length;
}

// The start of the shortest run that has room: long ones last.
int BestStart(uint64_t mask, int count) {
  int best = -1;
  int best_length = kPageSlots + 1;
  for (int at = 0; at < kPageSlots;) {
    const uint64_t rest = mask >> at;
    if (rest == 0) break;
    at += __builtin_ctzll(rest);
    const uint64_t inverted = ~(mask >> at);
    const int length = inverted == 0 ? kPageSlots : __builtin_ctzll(inverted);
    if (length >= count && length < best_length) {
      best = at;
      best_length = length;
    }
    at += length;
  }
  return best;
}

uint64_t MaskOf(const SlotRun& run) {
  return ((uint64_t{1} << run.count) - 1) << run.first;
}

}  // namespace

void SmallAllocator::Prepare(size_t count) {
  // Every page may become vacant.
  const size_t room = slot_pages_.size() + count;
  if (vacant_.capacity() < room) vacant_.reserve(std::max(room, 2 * vacant_.capacity()));
  if (slot_pages_.capacity() < room) {
    slot_pages_.reserve(std::max(room, 2 * slot_pages_.capacity()));
  }
}

bool SmallAllocator::Allocate(int num_slots, SlotRun* run) {
  const uint64_t lengths = lengths_ & (kAllFree << (num_slots - 1));
  uint32_t index;
  if (lengths != 0) {
    index = lists_[__builtin_ctzll(lengths) + 1];
    Unlink(index);
  } else {
    uint8_t* data = pages_->Allocate();
    if (data == nullptr) return false;
    if (vacant_.empty()) {
      index = static_cast<uint32_t>(slot_pages_.size());
      slot_pages_.push_back({});
    } else {
      index = vacant_.back();
      vacant_.pop_back();
    }
    slot_pages_[index].data = data;
    slot_pages_[index].free = kAllFree;
  }
  SlotPage& page = slot_pages_[index];
  run->page = index;
  run->first = static_cast<uint8_t>(BestStart(page.free, num_slots));
  run->count = static_cast<uint8_t>(num_slots);
  page.free &= ~MaskOf(*run);
  Link(index);
  return true;
}

void SmallAllocator::Free(const SlotRun& run) {
  SlotPage& page = slot_pages_[run.page];
  Unlink(run.page);
  page.free |= MaskOf(run);
  if (page.free != kAllFree) {
    Link(run.page);
    return;
  }
  pages_->Free(page.data);
  page = {};
  vacant_.push_back(run.page);
}

void SmallAllocator::Link(uint32_t index) {
  SlotPage& page = slot_pages_[index];
  page.longest = LongestRun(page.free);
  page.previous = kNone;
  page.next = lists_[page.longest];
  if (page.next != kNone) slot_pages_[page.next].previous = index;
  lists_[page.longest] = index;
  if (page.longest > 0) lengths_ |= uint64_t{1} << (page.longest - 1);
}

void SmallAllocator::Unlink(uint32_t index) {
  const SlotPage& page = slot_pages_[index];
  if (page.next != kNone) slot_pages_[page.next].previous = page.previous;
  if (page.previous != kNone) {
    slot_pages_[page.previous].next = page.next;
    return;
  }
  lists_[page.longest] = page.next;
  if (page.next == kNone && page.longest > 0) {
    lengths_ &= ~(uint64_t{1} << (page.longest - 1));
  }
}

void SmallAllocator::AppendPages(std::vector<const uint8_t*>* pages) const {
  for (const SlotPage& page : slot_pages_) {
    if (page.data != nullptr) pages->push_back(page.data);
  }
}

bool SmallAllocator::IsValid(const std::vector<SlotRun>& used) const {
  std::vector<uint64_t> free(slot_pages_.size(), kAllFree);
  for (const SlotRun& run : used) {
    if (run.count == 0 || run.first + run.count > kPageSlots) return false;
    if (run.page >= free.size() || (free[run.page] & MaskOf(run)) != MaskOf(run)) {
      return false;
    }
    free[run.page] &= ~MaskOf(run);
  }
  size_t held = 0;
  for (size_t i = 0; i < free.size(); ++i) {
    const SlotPage& page = slot_pages_[i];
    if (page.data == nullptr) {
      if (free[i] != kAllFree) return false;
      continue;
    }
    ++held;
    if (page.free != free[i] || page.free == kAllFree) return false;
    if (page.longest != LongestRun(page.free)) return false;
  }
  size_t listed = 0;
  for (int length = 0; length <= kPageSlots; ++length) {
    const bool marked = length > 0 && (lengths_ >> (length - 1) & 1) != 0;
    if (length > 0 && marked != (lists_[length] != kNone)) return false;
    uint32_t previous = kNone;
    for (uint32_t i = lists_[length]; i != kNone; i = slot_pages_[i].next) {
      const SlotPage& page = slot_pages_[i];
      if (page.longest != length || page.previous != previous) return false;
      if (++listed > held) return false;
      previous = i;
    }
  }
  return listed == held && held + vacant_.size() == slot_pages_.size();
}

}  // namespace dafjax::pool
