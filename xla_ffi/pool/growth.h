#ifndef DAFJAX_POOL_GROWTH_H_
#define DAFJAX_POOL_GROWTH_H_

#include <algorithm>
#include <cstdint>
#include <memory>

namespace dafjax::pool {

// What a growth strategy decides from. All in bytes; `needed` is what the put at hand
// lacks, `peak_used` the most that entries held of late.
struct Demand {
  int64_t needed = 0;
  int64_t committed = 0;
  int64_t peak_used = 0;
};

// How much an arena grows by when a put does not fit: at least `demand.needed`. The pool
// rounds up to chunks of 2 MiB and stays within the budget.
class Growth {
 public:
  virtual ~Growth() = default;
  virtual int64_t Increment(const Demand& demand) const = 0;
};

// A share of the peak: few increments while demand rises from nothing, and little
// overshoot, because what is committed unused is at most `share` of what was needed once.
class AdaptiveGrowth final : public Growth {
 public:
  static constexpr int64_t kLeast = int64_t{2} << 20;
  static constexpr int64_t kMost = int64_t{64} << 20;

  explicit AdaptiveGrowth(double share = 1.0 / 32) : share_(share) {}

  int64_t Increment(const Demand& demand) const override {
    const double part = share_ * static_cast<double>(demand.peak_used);
    const int64_t bounded =
        part >= static_cast<double>(kMost) ? kMost
                                           : std::max(kLeast, static_cast<int64_t>(part));
    return std::max(demand.needed, bounded);
  }

 private:
  double share_;
};

// The same increment each time; DAF's is 100 MB.
class FixedGrowth final : public Growth {
 public:
  static constexpr int64_t kDaf = 100'000'000;

  explicit FixedGrowth(int64_t increment = kDaf) : increment_(increment) {}

  int64_t Increment(const Demand& demand) const override {
    return std::max(demand.needed, increment_);
  }

 private:
  int64_t increment_;
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_GROWTH_H_
