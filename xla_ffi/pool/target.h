#ifndef DAFJAX_POOL_TARGET_H_
#define DAFJAX_POOL_TARGET_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "pool/allocation.h"
#include "pool/tables.h"

namespace dafjax::pool {

// What bits are allocated for at the start of an execution.
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
  // not even with 1 bit each. `gradient_energy` is the squared norm of the gradient; 0 if
  // it is unknown. Throws std::bad_alloc.
  std::vector<int> Meet(const std::vector<SiteDemand>& demands, const Taken& taken,
                        double gradient_energy) const {
    if (kind == kRelativeVariance) {
      return AllocateToVariance(demands, value * gradient_energy - taken.variance);
    }
    const double all =
        kind == kAverageBits
            ? value * static_cast<double>(taken.num_elements)
            : 8 * (Usable(value) / taken.held_share -
                   static_cast<double>(taken.metadata_nbytes));
    const double bits = all - static_cast<double>(taken.bits);
    constexpr double kMost = 0x1p62;
    return bits < static_cast<double>(Least(demands))
               ? Minima(demands)
               : Allocate(demands, static_cast<int64_t>(std::min(bits, kMost)));
  }

 private:
  // Of so many bytes, those that codes and metadata can have: whole pages; of the one that
  // the last ends of planes share, half; and of all the rest a little, where other ends
  // leave pages in part.
  static double Usable(double nbytes) {
    constexpr double kShare = 0.98;
    const auto page = static_cast<double>(kPageNbytes);
    return kShare * page * std::max(0.0, std::floor(nbytes / page) - 0.5);
  }

  static int64_t Least(const std::vector<SiteDemand>& demands) {
    int64_t bits = 0;
    for (const SiteDemand& demand : demands) bits += demand.num_elements;
    return bits;
  }
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_TARGET_H_
