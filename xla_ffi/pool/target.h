#ifndef DAFJAX_POOL_TARGET_H_
#define DAFJAX_POOL_TARGET_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pool/allocation.h"
#include "pool/tables.h"

namespace dafjax::pool {

// What bits are allocated for at the start of an execution. Without a target it is the most
// that all demands allow.
struct Target {
  enum Kind { kNone, kAverageBits, kNbytes, kRelativeVariance };

  Kind kind = kNone;
  // Bits of an element; bytes of the entries that are held at once, metadata included;
  // or the variance of the gradient over its squared norm.
  double value = 0;

  // What the sites take that are not allocated for, and what all take together.
  struct Taken {
    // Of sites whose bits are set, and that ask for 8.
    int64_t bits = 0;
    double variance = 0;
    // Of all sites.
    int64_t num_elements = 0;
    int64_t metadata_nbytes = 0;
    // Of what an execution puts, the share that is held at once, above 0 and at most 1.
    double held_share = 1;
  };

  // Bits of the sites that are allocated for: their minima where the target cannot be met,
  // not even with 1 bit each. Never more than fit the pool's budget, `room`, so that
  // nothing need be evicted. `gradient_energy` is the squared norm of the gradient; 0 if
  // it is unknown. Throws std::bad_alloc.
  std::vector<int> Meet(const std::vector<SiteDemand>& demands, const Taken& taken,
                        int64_t room, double gradient_energy) const {
    const double fitting = BitsIn(Usable(room), taken);
    if (kind == kRelativeVariance) {
      std::vector<int> bits =
          AllocateToVariance(demands, value * gradient_energy - taken.variance);
      const bool fits = static_cast<double>(NumBits(demands, bits)) <= fitting;
      return fits ? bits : Within(fitting, demands);
    }
    if (kind == kNone) return Within(fitting, demands);
    const double wanted =
        kind == kAverageBits
            ? value * static_cast<double>(taken.num_elements) -
                  static_cast<double>(taken.bits)
            : BitsIn(kShare * value, taken);
    return Within(std::min(wanted, fitting), demands);
  }

  // Whether so many bits an element, besides what is taken, fit the pool's budget.
  static bool Fits(const std::vector<SiteDemand>& demands, const std::vector<int>& bits,
                   const Taken& taken, int64_t room) {
    return static_cast<double>(NumBits(demands, bits)) <= BitsIn(Usable(room), taken);
  }

 private:
  // The rest is for what the ends of planes round up to.
  static constexpr double kShare = 0.98;

  static std::vector<int> Within(double bits, const std::vector<SiteDemand>& demands) {
    int64_t least = 0;
    for (const SiteDemand& demand : demands) least += demand.num_elements;
    constexpr double kMost = 0x1p62;
    return bits < static_cast<double>(least)
               ? Minima(demands)
               : Allocate(demands, static_cast<int64_t>(std::min(bits, kMost)));
  }

  // Bits of codes that so many bytes have room for, besides what is taken.
  static double BitsIn(double nbytes, const Taken& taken) {
    return 8 * (nbytes / taken.held_share - static_cast<double>(taken.metadata_nbytes)) -
           static_cast<double>(taken.bits);
  }

  // Of a budget, what codes and metadata can have: whole pages, but half of the one that
  // the last ends of planes share.
  static double Usable(int64_t budget) {
    const auto pages = static_cast<double>(budget / kPageNbytes);
    return kShare * static_cast<double>(kPageNbytes) * std::max(0.0, pages - 0.5);
  }
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_TARGET_H_
