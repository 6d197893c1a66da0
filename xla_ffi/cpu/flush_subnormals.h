#ifndef DAFJAX_CPU_FLUSH_SUBNORMALS_H_
#define DAFJAX_CPU_FLUSH_SUBNORMALS_H_

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace dafjax {

// While it lives, this thread rounds to nearest, raises no floating-point traps, and
// subnormal operands and results count as zero. XLA's threads run like that, Python's
// do not, and the bytes must not depend on the thread.
class FlushSubnormals {
 public:
  FlushSubnormals() : saved_(Get()) { Set(kFlushing); }
  ~FlushSubnormals() { Set(saved_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
#if defined(__x86_64__)
  using Register = uint32_t;
  // All exceptions masked (0x1f80), flush-to-zero (bit 15), denormals-are-zero (6).
  static constexpr Register kFlushing = 0x1f80 | 0x8000 | 0x0040;
  static Register Get() { return _mm_getcsr(); }
  static void Set(Register value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Register = uint64_t;
  static constexpr Register kFlushing = uint64_t{1} << 24;  // FPCR.FZ
  static Register Get() {
    Register value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void Set(Register value) {
    asm volatile("msr fpcr, %0" : : "r"(value) : "memory");
  }
#else
#error "dafjax runs on x86-64 and aarch64 only"
#endif

  const Register saved_;
};

}  // namespace dafjax

#endif  // DAFJAX_CPU_FLUSH_SUBNORMALS_H_
