#ifndef DAFJAX_POOL_ALLOCATION_H_
#define DAFJAX_POOL_ALLOCATION_H_

#include <cstdint>
#include <vector>

namespace dafjax::pool {

constexpr int kMostBits = 8;

// The greatest power of two that is at most `bits`, of 1 to 8.
constexpr int PowerOfTwoAtMost(int bits) {
  return bits >= 8 ? 8 : bits >= 4 ? 4 : bits >= 2 ? 2 : 1;
}

// What allocation knows of a site, as `dafjax.allocation.Site`.
struct SiteDemand {
  int64_t num_elements = 0;
  // Finite, at least 0: the variance of the gradient if the site alone has 1 bit.
  double importance = 0;
  int minimum = 1;
  int maximum = kMostBits;
};

// The fewest bits of a site, by those that are asked for; as the one of
// dafjax/allocation.py. A request for the most is met: with fewer, what an exponential is
// taken of ruins the gradient. Others have half: more is asked for where a residual enters
// nonlinearly, and importances, which are of first order, say too little there.
constexpr int MinimumBits(int asked) {
  return asked >= kMostBits ? kMostBits : asked > 1 ? asked / 2 : 1;
}

// The bits of all codes.
int64_t NumBits(const std::vector<SiteDemand>& demands, const std::vector<int>& bits);

std::vector<int> Minima(const std::vector<SiteDemand>& demands);

// Bits (1, 2, 4 or 8) with the least sum of importance / (2^bits - 1)^2 such that the
// sum of num_elements * bits is at most `budget`; as `dafjax.allocation.allocate`, to
// the bit. The steps upwards of all sites are taken in the order of what they save for a
// bit, those that do not fit are left out; from each number of bits that all can have,
// the best result counts. Throws std::bad_alloc.
std::vector<int> Allocate(const std::vector<SiteDemand>& demands, int64_t budget);

// Few bits whose expected variance is at most `ceiling`; as
// `dafjax.allocation.allocate_to_variance`.
std::vector<int> AllocateToVariance(const std::vector<SiteDemand>& demands, double ceiling);

// The sum of importance / (2^bits - 1)^2.
double ExpectedVariance(const std::vector<SiteDemand>& demands, const std::vector<int>& bits);

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_ALLOCATION_H_
