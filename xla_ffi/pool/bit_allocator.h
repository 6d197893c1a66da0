#ifndef DAFJAX_POOL_BIT_ALLOCATOR_H_
#define DAFJAX_POOL_BIT_ALLOCATOR_H_

#include <cmath>
#include <cstdint>

#include "pool/running_mean.h"
#include "pool/sites.h"
#include "pool/target.h"

namespace dafjax::pool {

// The squared norm of the gradient, averaged over executions.
class Gradient {
 public:
  // Of a part of the gradient.
  void Add(double energy) {
    if (std::isfinite(energy) && energy >= 0) sum_ += energy;
  }
  // The execution is over.
  void Settle() {
    if (sum_ == 0) return;
    energy_ = energy_ == 0 ? sum_ : RunningMean(energy_, sum_);
    sum_ = 0;
  }
  double energy() const { return energy_; }

 private:
  double sum_ = 0;
  double energy_ = 0;
};

// Gives bits to sites between executions, so that they meet a target; without one, so that
// a budget that is too small for what is asked for need not be met by evictions, which know
// only what is there already.
class BitAllocator {
 public:
  void SetTarget(const Target& target) { target_ = target; }
  void NoteGradient(double energy) { gradient_.Add(energy); }

  // Allocates for the sites that an execution put, which is over. Of what it put, the
  // share `held` was in the pool at once; it may take `room` bytes from now on. Where
  // memory is lacking, bits stay what they were.
  void Allocate(int64_t run_id, double held, int64_t room, Sites* sites) noexcept;

  // Of the gradient, with the bits that hold.
  double expected_variance() const { return expected_variance_; }
  double gradient_energy() const { return gradient_.energy(); }

 private:
  Target target_;
  Gradient gradient_;
  double expected_variance_ = 0;
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_BIT_ALLOCATOR_H_
