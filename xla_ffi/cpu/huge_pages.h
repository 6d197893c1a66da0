#ifndef DAFJAX_CPU_HUGE_PAGES_H_
#define DAFJAX_CPU_HUGE_PAGES_H_

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace dafjax {

// Asks for huge pages where a large buffer is about to be written. XLA allocates buffers
// anew for each execution, and above 32 MiB malloc maps them each time, so that without
// huge pages most of the time of a kernel that writes goes into page faults.
inline void AdviseHugePages([[maybe_unused]] void* data,
                            [[maybe_unused]] int64_t nbytes) {
#if defined(__linux__)
  constexpr int64_t kLeastNbytes = int64_t{32} << 20;
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  if (nbytes < kLeastNbytes) return;
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + static_cast<uintptr_t>(nbytes)) / kHugePage * kHugePage;
  // Only advice: a refusal changes nothing but the speed.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace dafjax

#endif  // DAFJAX_CPU_HUGE_PAGES_H_
