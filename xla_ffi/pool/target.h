#ifndef DAFJAX_POOL_TARGET_H_
#define DAFJAX_POOL_TARGET_H_

#include <cmath>
#include <cstdint>
#include <vector>

#include "pool/allocation.h"

namespace dafjax::pool {

// What bits are allocated for at the start of an execution.
struct Target {
  enum Kind { kNone, kAverageBits, kNbytes, kRelativeVariance };

  Kind kind = kNone;
  // Bits of an element; bytes of all entries, metadata included; or the variance of the
  // gradient over its squared norm.
  double value = 0;

  // What the sites take that are not allocated for, and what all take together.
  struct Taken {
    // Of sites whose bits are set.
    int64_t bits = 0;
    double variance = 0;
    // Of all sites.
    int64_t num_elements = 0;
    int64_t metadata_nbytes = 0;
  };

  // Throws std::bad_alloc. `gradient_energy` is the squared norm of the gradient; 0 if it
  // is unknown.
  std::vector<int> Meet(const std::vector<SiteDemand>& demands, const Taken& taken,
                        double gradient_energy) const {
    if (kind == kRelativeVariance) {
      return AllocateToVariance(demands, value * gradient_energy - taken.variance);
    }
    const double all =
        kind == kAverageBits
            ? value * static_cast<double>(taken.num_elements)
            : 8 * (kShare * value - static_cast<double>(taken.metadata_nbytes));
    const double bits = all - static_cast<double>(taken.bits);
    constexpr double kMost = 0x1p62;
    return Allocate(demands, static_cast<int64_t>(bits < 0       ? 0
                                                  : bits > kMost ? kMost
                                                                 : bits));
  }

 private:
  // The rest is for what the ends of planes round up to.
  static constexpr double kShare = 0.98;
};

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
    energy_ += (energy_ == 0 ? 1.0 : kWeight) * (sum_ - energy_);
    sum_ = 0;
  }
  double energy() const { return energy_; }

 private:
  static constexpr double kWeight = 1.0 / 8;

  double sum_ = 0;
  double energy_ = 0;
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_TARGET_H_
