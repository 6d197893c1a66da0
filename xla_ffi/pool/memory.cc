#include "pool/memory.h"

#include <sys/mman.h>

#include "pool/arena.h"

namespace dafjax::pool {
namespace {

constexpr int kPrivate = MAP_PRIVATE | MAP_ANONYMOUS
#ifdef MAP_NORESERVE
                         | MAP_NORESERVE
#endif
    ;

// The child of a fork starts with an empty pool: it gets none of these pages, and no
// write of the parent copies one.
void KeepFromChildren([[maybe_unused]] void* data, [[maybe_unused]] int64_t nbytes) {
#ifdef MADV_DONTFORK
  madvise(data, static_cast<size_t>(nbytes), MADV_DONTFORK);
#endif
}

}  // namespace

uint8_t* SystemMemory::Reserve(int64_t nbytes) {
  // The system aligns to its own pages: what sticks out of the aligned range goes back.
  const size_t size = static_cast<size_t>(nbytes + kChunkNbytes);
  void* mapped = mmap(nullptr, size, PROT_NONE, kPrivate, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  uint8_t* begin = static_cast<uint8_t*>(mapped);
  const uintptr_t address = reinterpret_cast<uintptr_t>(begin);
  const int64_t before = static_cast<int64_t>(-address & (kChunkNbytes - 1));
  uint8_t* data = begin + before;
  if (before > 0) munmap(begin, static_cast<size_t>(before));
  const int64_t after = kChunkNbytes - before;
  if (after > 0) munmap(data + nbytes, static_cast<size_t>(after));
  KeepFromChildren(data, nbytes);
  return data;
}

void SystemMemory::Unreserve(uint8_t* data, int64_t nbytes) {
  munmap(data, static_cast<size_t>(nbytes));
}

bool SystemMemory::Commit(uint8_t* data, int64_t nbytes) {
  if (mprotect(data, static_cast<size_t>(nbytes), PROT_READ | PROT_WRITE) != 0) {
    return false;
  }
#ifdef MADV_HUGEPAGE
  // Only advice. Part of a chunk cannot become a huge page, whatever is advised, because
  // the rest of the chunk is not mapped for use: what is resident is what is committed.
  madvise(data, static_cast<size_t>(nbytes), MADV_HUGEPAGE);
#endif
  return true;
}

void SystemMemory::Release(uint8_t* data, int64_t nbytes) {
  const size_t size = static_cast<size_t>(nbytes);
  // A new mapping in place of the old one gives back the pages and the promise of them.
  if (mmap(data, size, PROT_NONE, kPrivate | MAP_FIXED, -1, 0) != MAP_FAILED) {
    KeepFromChildren(data, nbytes);
    return;
  }
  // Too many mappings: the pages alone.
  madvise(data, size, MADV_DONTNEED);
}

}  // namespace dafjax::pool
