#ifndef DAFJAX_CUDA_DIVISOR_H_
#define DAFJAX_CUDA_DIVISOR_H_

#include <cstdint>

#include "cuda/device.h"

namespace dafjax {

// A number that numbers below 2^31 are divided by: of a launch, so that its threads
// multiply and shift instead. Granlund and Montgomery, "Division by Invariant Integers
// using Multiplication", PLDI 1994, theorem 4.2: with `shift` = ceil(log2(divisor)) and
// `factor` = ceil(2^(31 + shift) / divisor), n / divisor = n * factor >> (31 + shift).
class Divisor {
 public:
  // Requires 1 <= divisor < 2^31.
  explicit Divisor(uint32_t divisor) : divisor_(divisor) {
    while (uint32_t{1} << shift_ < divisor) ++shift_;
    factor_ = static_cast<uint32_t>(
        ((uint64_t{1} << (31 + shift_)) + divisor - 1) / divisor);
  }

  DAFJAX_DEVICE uint32_t Quotient(uint32_t n) const {
    return __umulhi(2 * n, factor_) >> shift_;
  }
  DAFJAX_DEVICE uint32_t Remainder(uint32_t n, uint32_t quotient) const {
    return n - quotient * divisor_;
  }
  DAFJAX_DEVICE uint32_t Value() const { return divisor_; }

 private:
  uint32_t divisor_;
  uint32_t factor_;
  int shift_ = 0;
};

}  // namespace dafjax

#endif  // DAFJAX_CUDA_DIVISOR_H_
