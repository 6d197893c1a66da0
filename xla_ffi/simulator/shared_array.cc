#include "simulator/shared_array.h"

#include <sys/mman.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "simulator/grid.h"

// Of the address sanitizer; null where it is not linked in.
extern "C" {
__attribute__((weak)) void __asan_poison_memory_region(const volatile void* address,
                                                       size_t nbytes);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* address,
                                                         size_t nbytes);
}

namespace dafjax::simulator {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMargin = 256;  // bytes, and what follows up to the end of the page
constexpr int kGarbage = 0xa5;
constexpr int kMarginByte = 0xc3;

bool IsFilled(const unsigned char* begin, const unsigned char* end) {
  for (; begin < end; ++begin) {
    if (*begin != kMarginByte) return false;
  }
  return true;
}

}  // namespace

// Mapped, not taken from the heap: the thread sanitizer must forget it with the block.
SharedMemory::SharedMemory(size_t nbytes, Site site) : nbytes_(nbytes), site_(site) {
  mapped_nbytes_ = (nbytes + 2 * kMargin + kPage - 1) / kPage * kPage;
  void* const mapped = mmap(nullptr, mapped_nbytes_, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    std::perror("simulator: no memory for a shared array");
    std::abort();
  }
  mapped_ = static_cast<unsigned char*>(mapped);
  data_ = mapped_ + kMargin;
  std::memset(mapped_, kMarginByte, mapped_nbytes_);
  std::memset(data_, kGarbage, nbytes);
  if (__asan_poison_memory_region != nullptr) {
    __asan_poison_memory_region(mapped_, mapped_nbytes_);
    __asan_unpoison_memory_region(data_, nbytes);
  }
}

SharedMemory::~SharedMemory() {
  if (__asan_unpoison_memory_region != nullptr) {
    __asan_unpoison_memory_region(mapped_, mapped_nbytes_);
  }
  munmap(mapped_, mapped_nbytes_);
}

bool SharedMemory::HasIntactMargins() const {
  // The address sanitizer has stopped the program already if they are not.
  if (__asan_poison_memory_region != nullptr) return true;
  return IsFilled(mapped_, data_) && IsFilled(data_ + nbytes_, mapped_ + mapped_nbytes_);
}

}  // namespace dafjax::simulator
