#ifndef DAFJAX_POOL_STREAMS_H_
#define DAFJAX_POOL_STREAMS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pool/page_allocator.h"
#include "pool/small_allocator.h"

namespace dafjax::pool {

// Bytes in pages: the codes of one plane of an entry, or its metadata.
//
// Invariant: pages holds the first of the full pages, and of the tail if tail.count > 0,
// that `nbytes` need: as many as FullPages(), and one if TailSlots() > 0, once complete.
struct Stream {
  int64_t nbytes = 0;
  std::vector<uint8_t*> pages;
  SlotRun tail;

  int64_t FullPages() const {
    // A rest that needs all slots of a page is a page.
    return (nbytes + kSlotNbytes - 1) / kPageNbytes;
  }
  int TailSlots() const {
    const int64_t slots = CeilDiv(nbytes, kSlotNbytes) - FullPages() * kPageSlots;
    return static_cast<int>(slots);
  }
  int64_t NumPages() const { return FullPages() + (TailSlots() > 0); }
  bool IsComplete() const { return static_cast<int64_t>(pages.size()) == NumPages(); }
  // What it takes of pages, with what rounding to slots adds.
  int64_t HeldNbytes() const {
    return FullPages() * kPageNbytes + TailSlots() * kSlotNbytes;
  }
  int64_t LackingNbytes() const {
    const int64_t full = static_cast<int64_t>(pages.size()) - (tail.count > 0);
    const int tail_slots = tail.count > 0 ? 0 : TailSlots();
    return (FullPages() - full) * kPageNbytes + tail_slots * kSlotNbytes;
  }
};

// Gives streams their pages.
class Streams {
 public:
  explicit Streams(PageAllocator* pages) : pages_(pages), small_(pages) {}

  // Makes sure that Extend needs no memory for bookkeeping for the next `count` streams.
  // Throws std::bad_alloc with nothing changed.
  void Prepare(size_t count) { small_.Prepare(count); }

  // Takes pages until the stream is complete; false if they ran out before. Requires
  // that stream->pages has the capacity.
  bool Extend(Stream* stream) {
    while (static_cast<int64_t>(stream->pages.size()) < stream->FullPages()) {
      uint8_t* page = pages_->Allocate();
      if (page == nullptr) return false;
      stream->pages.push_back(page);
    }
    if (stream->IsComplete()) return true;
    if (!small_.Allocate(stream->TailSlots(), &stream->tail)) return false;
    stream->pages.push_back(small_.Data(stream->tail));
    return true;
  }

  // Takes back what the stream has. It keeps its capacity.
  void Clear(Stream* stream) {
    if (stream->tail.count > 0) {
      small_.Free(stream->tail);
      stream->pages.pop_back();
    }
    // The last one first, so that the stack gives them out in order again.
    for (; !stream->pages.empty(); stream->pages.pop_back()) {
      pages_->Free(stream->pages.back());
    }
    stream->tail = {};
    stream->nbytes = 0;
  }

  const SmallAllocator& small() const { return small_; }

 private:
  PageAllocator* pages_;
  SmallAllocator small_;
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_STREAMS_H_
