#include "pool/page_allocator.h"

#include <algorithm>
#include <functional>
#include <new>
#include <utility>

namespace dafjax::pool {
namespace {

// Address space of an arena, where the system grants it.
constexpr int64_t kArenaPages = (int64_t{1} << 30) / kPageNbytes;

}  // namespace

int64_t PageAllocator::Grow(int64_t num_pages) noexcept {
  if (num_pages <= 0 || !ReserveStack(num_committed_ + num_pages)) return 0;
  int64_t grown = 0;
  for (size_t i = 0; grown < num_pages; ++i) {
    if (i == arenas_.size() && !AddArena(num_pages - grown)) break;
    const int64_t missing = num_pages - grown;
    const int64_t holes = arenas_[i].NumPages() - arenas_[i].num_committed;
    const int64_t added = CommitHoles(&arenas_[i], missing);
    grown += added;
    // The system refuses: another arena would not help.
    if (added < std::min(missing, holes)) break;
  }
  return grown;
}

bool PageAllocator::ReserveStack(int64_t num_pages) noexcept {
  const size_t room = static_cast<size_t>(num_pages);
  if (room <= free_.capacity()) return true;
  try {
    free_.reserve(std::max(room, 2 * free_.capacity()));
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

bool PageAllocator::AddArena(int64_t least_pages) noexcept {
  const int64_t least = CeilDiv(least_pages, kChunkPages);
  int64_t chunks = std::max(least, kArenaPages / kChunkPages);
  Arena arena;
  try {
    arenas_.reserve(arenas_.size() + 1);
    arena.masks.resize(static_cast<size_t>(chunks));
  } catch (const std::bad_alloc&) {
    return false;
  }
  while (true) {
    arena.data = memory_->Reserve(chunks * kChunkNbytes);
    if (arena.data != nullptr) break;
    if (chunks == 1) return false;
    chunks /= 2;
    arena.masks.resize(static_cast<size_t>(chunks));
  }
  arenas_.push_back(std::move(arena));
  return true;
}

int64_t PageAllocator::CommitHoles(Arena* arena, int64_t num_pages) noexcept {
  int64_t added = 0;
  int64_t most = num_pages;
  int64_t from = 0;
  while (added < num_pages) {
    const auto [begin, end] = arena->Hole(from, std::min(most, num_pages - added));
    if (begin == end) break;
    if (!memory_->Commit(arena->Page(begin), (end - begin) * kPageNbytes)) {
      // A smaller step may still be granted.
      most = (end - begin) / 2;
      if (most == 0) break;
      continue;
    }
    // Downwards, so that addresses are handed out upwards.
    for (int64_t page = end - 1; page >= begin; --page) {
      arena->SetCommitted(page, true);
      free_.push_back(arena->Page(page));
    }
    num_committed_ += end - begin;
    added += end - begin;
    from = end;
  }
  return added;
}

Arena* PageAllocator::ArenaOf(const uint8_t* page) {
  for (Arena& arena : arenas_) {
    if (arena.Contains(page)) return &arena;
  }
  return nullptr;
}

int64_t PageAllocator::ReleaseFree(int64_t num_pages) {
  if (num_pages <= 0 || free_.empty()) return 0;
  // From high addresses to low ones, which are then the next to be used.
  std::sort(free_.begin(), free_.end(), std::greater<uint8_t*>());
  int64_t released = 0;
  const auto chunk_of = [](const uint8_t* page) {
    return reinterpret_cast<uintptr_t>(page) / kChunkNbytes;
  };
  // Whole chunks in the first pass, parts of chunks in the second.
  for (const bool whole : {true, false}) {
    size_t kept = 0;
    for (size_t begin = 0; begin < free_.size();) {
      size_t end = begin + 1;
      while (end < free_.size() && chunk_of(free_[end]) == chunk_of(free_[begin])) ++end;
      const int64_t count = static_cast<int64_t>(end - begin);
      const Arena& arena = *ArenaOf(free_[begin]);
      const uint32_t mask = arena.masks[arena.IndexOf(free_[begin]) / kChunkPages];
      const bool unused = CountPages(mask) == count;
      int64_t drop = std::min(count, num_pages - released);
      if (whole && (!unused || drop < count)) drop = 0;
      size_t next = begin;
      while (drop > 0) {
        // Neighbors go together.
        size_t last = next + 1;
        const size_t stop = next + static_cast<size_t>(drop);
        while (last < stop && free_[last] + kPageNbytes == free_[last - 1]) ++last;
        const int64_t run = static_cast<int64_t>(last - next);
        Release(free_[last - 1], run);
        released += run;
        drop -= run;
        next = last;
      }
      for (; next < end; ++next) free_[kept++] = free_[next];
      begin = end;
    }
    free_.resize(kept);
  }
  return released;
}

void PageAllocator::Release(uint8_t* page, int64_t num_pages) {
  Arena* arena = ArenaOf(page);
  const int64_t first = arena->IndexOf(page);
  for (int64_t i = 0; i < num_pages; ++i) arena->SetCommitted(first + i, false);
  memory_->Release(page, num_pages * kPageNbytes);
  num_committed_ -= num_pages;
}

bool PageAllocator::IsValid(std::vector<const uint8_t*> used) const {
  if (static_cast<int64_t>(used.size()) != num_used()) return false;
  used.insert(used.end(), free_.begin(), free_.end());
  std::sort(used.begin(), used.end());
  if (std::adjacent_find(used.begin(), used.end()) != used.end()) return false;
  for (const uint8_t* page : used) {
    const auto holds = [page](const Arena& a) { return a.Contains(page); };
    const auto arena = std::find_if(arenas_.begin(), arenas_.end(), holds);
    if (arena == arenas_.end() || (page - arena->data) % kPageNbytes != 0 ||
        !arena->IsCommitted(arena->IndexOf(page))) {
      return false;
    }
  }
  int64_t committed = 0;
  for (const Arena& arena : arenas_) {
    if (!arena.IsValid()) return false;
    committed += arena.num_committed;
  }
  return committed == num_committed_ &&
         free_.capacity() >= static_cast<size_t>(num_committed_);
}

}  // namespace dafjax::pool
