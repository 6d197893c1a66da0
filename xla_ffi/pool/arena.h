#ifndef DAFJAX_POOL_ARENA_H_
#define DAFJAX_POOL_ARENA_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "pool/memory.h"
#include "pool/tables.h"

namespace dafjax::pool {

// What a huge page covers. A chunk is committed whole where the budget allows.
inline constexpr int64_t kChunkNbytes = int64_t{2} << 20;
inline constexpr int64_t kChunkPages = kChunkNbytes / kPageNbytes;
static_assert(kChunkPages == 32);

inline int CountPages(uint32_t mask) { return __builtin_popcount(mask); }

// A range of reserved address space, of which single pages are committed.
//
// Invariant: bit p of masks[c] is set if and only if page 32 * c + p is committed, and
// num_committed = the number of bits that are set.
struct Arena {
  uint8_t* data = nullptr;
  std::vector<uint32_t> masks;
  int64_t num_committed = 0;

  int64_t NumPages() const {
    return static_cast<int64_t>(masks.size()) * kChunkPages;
  }
  int64_t Nbytes() const { return NumPages() * kPageNbytes; }
  uint8_t* Page(int64_t index) const { return data + index * kPageNbytes; }
  bool Contains(const uint8_t* page) const {
    return page >= data && page < data + Nbytes();
  }
  int64_t IndexOf(const uint8_t* page) const { return (page - data) / kPageNbytes; }

  bool IsCommitted(int64_t index) const {
    return masks[index / kChunkPages] >> (index % kChunkPages) & 1;
  }
  void SetCommitted(int64_t index, bool committed) {
    const uint32_t bit = uint32_t{1} << (index % kChunkPages);
    uint32_t& mask = masks[index / kChunkPages];
    num_committed += int64_t{committed} - int64_t{(mask & bit) != 0};
    mask = committed ? mask | bit : mask & ~bit;
  }

  // The first run of at most `most` pages, from page `from` on, that are not committed:
  // [begin, end). Empty if there is none.
  std::pair<int64_t, int64_t> Hole(int64_t from, int64_t most) const {
    int64_t begin = from;
    while (begin < NumPages() && IsCommitted(begin)) {
      const bool full = masks[begin / kChunkPages] == ~uint32_t{0};
      begin = full ? (begin / kChunkPages + 1) * kChunkPages : begin + 1;
    }
    int64_t end = begin;
    while (end < NumPages() && end - begin < most && !IsCommitted(end)) ++end;
    return {begin, end};
  }

  bool IsValid() const {
    int64_t pages = 0;
    for (const uint32_t mask : masks) pages += CountPages(mask);
    return pages == num_committed && pages <= NumPages() &&
           reinterpret_cast<uintptr_t>(data) % kChunkNbytes == 0;
  }
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_ARENA_H_
