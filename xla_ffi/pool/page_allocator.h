#ifndef DAFJAX_POOL_PAGE_ALLOCATOR_H_
#define DAFJAX_POOL_PAGE_ALLOCATOR_H_

#include <cstdint>
#include <vector>

#include "pool/arena.h"
#include "pool/memory.h"

namespace dafjax::pool {

// Pages of kPageNbytes on a stack: what was freed last, and is likely still cached, is
// used first.
//
// Invariant: the pages that are committed in the arenas are those on the stack, each
// once, and those that are in use: num_committed() = num_free() + num_used().
class PageAllocator {
 public:
  explicit PageAllocator(Memory* memory) : memory_(memory) {}
  ~PageAllocator() {
    for (const Arena& arena : arenas_) memory_->Unreserve(arena.data, arena.Nbytes());
  }
  PageAllocator(const PageAllocator&) = delete;
  PageAllocator& operator=(const PageAllocator&) = delete;

  // Null if no page is free.
  uint8_t* Allocate() {
    if (free_.empty()) return nullptr;
    uint8_t* page = free_.back();
    free_.pop_back();
    return page;
  }
  // Never fails: the stack has room for every page that is committed.
  void Free(uint8_t* page) { free_.push_back(page); }

  // Commits up to `num_pages` more and returns how many.
  int64_t Grow(int64_t num_pages) noexcept;

  // Gives up to `num_pages` free pages back to the system, whole chunks first, and
  // returns how many.
  int64_t ReleaseFree(int64_t num_pages);

  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  int64_t num_committed() const { return num_committed_; }
  int64_t num_used() const { return num_committed_ - num_free(); }

  // Needs the pages that are in use, in any order.
  bool IsValid(std::vector<const uint8_t*> used) const;

 private:
  bool ReserveStack(int64_t num_pages) noexcept;
  bool AddArena(int64_t least_pages) noexcept;
  int64_t CommitHoles(Arena* arena, int64_t num_pages) noexcept;
  void Release(uint8_t* page, int64_t num_pages);
  Arena* ArenaOf(const uint8_t* page);

  Memory* memory_;
  std::vector<Arena> arenas_;
  std::vector<uint8_t*> free_;
  int64_t num_committed_ = 0;
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_PAGE_ALLOCATOR_H_
