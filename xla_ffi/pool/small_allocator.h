#ifndef DAFJAX_POOL_SMALL_ALLOCATOR_H_
#define DAFJAX_POOL_SMALL_ALLOCATOR_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pool/page_allocator.h"

namespace dafjax::pool {

// A page has 64 slots, as a word has bits. A tile of 1 bit is 64 bytes, so that slots of
// 1 KiB lose half a KiB a stream; slots of 4 KiB would lose 2 KiB.
inline constexpr int64_t kSlotNbytes = 1024;
inline constexpr int kPageSlots = 64;
static_assert(kSlotNbytes * kPageSlots == kPageNbytes);

// Neighboring slots of one page.
struct SlotRun {
  uint32_t page = 0;
  uint8_t first = 0;
  // 0: none.
  uint8_t count = 0;
};

// Stretches of less than a page: the least free run that is long enough is used, so that
// long ones last.
//
// Invariant: bit s of a page's mask is set if and only if slot s is free; a page whose
// slots are all free goes back to the allocator of pages; a page is on the list of its
// longest free run.
class SmallAllocator {
 public:
  explicit SmallAllocator(PageAllocator* pages) : pages_(pages) { lists_.fill(kNone); }

  // Makes sure that the next `count` calls of Allocate need no memory for bookkeeping.
  // Throws std::bad_alloc with nothing changed.
  void Prepare(size_t count);

  // `num_slots` is 1 to 63. Returns false if that takes another page and none is free.
  bool Allocate(int num_slots, SlotRun* run);
  void Free(const SlotRun& run);

  uint8_t* Data(const SlotRun& run) const {
    return slot_pages_[run.page].data + run.first * kSlotNbytes;
  }

  // Appends the pages that it holds.
  void AppendPages(std::vector<const uint8_t*>* pages) const;
  // Needs all runs that are in use.
  bool IsValid(const std::vector<SlotRun>& used) const;

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};

  struct SlotPage {
    uint8_t* data = nullptr;
    uint64_t free = 0;
    uint32_t previous = kNone;
    uint32_t next = kNone;
    int longest = 0;
  };

  void Link(uint32_t index);
  void Unlink(uint32_t index);

  PageAllocator* pages_;
  std::vector<SlotPage> slot_pages_;
  // Places in slot_pages_ that hold no page.
  std::vector<uint32_t> vacant_;
  // By the longest free run; one of length 0 is on a list too, that nothing is taken from.
  std::array<uint32_t, kPageSlots + 1> lists_;
  // Bit n: the list of length n + 1 is not empty.
  uint64_t lengths_ = 0;
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_SMALL_ALLOCATOR_H_
