#include "pool/allocation.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace dafjax::pool {
namespace {

constexpr int kLadder[] = {1, 2, 4, 8};
constexpr int kRungs = 4;

// At 0 bits: pool/eviction.h.
double Distortion(int bits) {
  if (bits == 0) return 3.0;
  const double levels = static_cast<double>((1 << bits) - 1);
  return 1.0 / (levels * levels);
}

// From one number of bits of a site to the next.
struct Step {
  size_t site;
  int before;
  int after;
  // Variance that it saves for each bit that it costs.
  double saved;
};

// Upwards from `bits`, those that save most for a bit first.
std::vector<Step> StepsFrom(const std::vector<SiteDemand>& demands,
                            const std::vector<int>& bits) {
  std::vector<Step> steps;
  for (size_t s = 0; s < demands.size(); ++s) {
    const SiteDemand& demand = demands[s];
    for (int rung = 0; rung + 1 < kRungs; ++rung) {
      const int before = kLadder[rung];
      const int after = kLadder[rung + 1];
      if (before < bits[s] || after > demand.maximum || demand.num_elements <= 0) {
        continue;
      }
      const double less = Distortion(before) - Distortion(after);
      const double cost = static_cast<double>(demand.num_elements * (after - before));
      steps.push_back({s, before, after, demand.importance * less / cost});
    }
  }
  // Stable: the steps of a site, and equal ones, stay in order.
  std::stable_sort(steps.begin(), steps.end(),
                   [](const Step& a, const Step& b) { return a.saved > b.saved; });
  return steps;
}

// Takes steps upwards, those that save most for a bit first, while they fit.
std::vector<int> Raised(const std::vector<SiteDemand>& demands, std::vector<int> bits,
                        int64_t budget) {
  int64_t left = budget - NumBits(demands, bits);
  for (const Step& step : StepsFrom(demands, bits)) {
    const int64_t cost = demands[step.site].num_elements * (step.after - step.before);
    // A step that did not fit bars those after it.
    if (bits[step.site] != step.before || cost > left) continue;
    bits[step.site] = step.after;
    left -= cost;
  }
  return bits;
}

// The minima; the most useful of them if not all fit.
std::vector<int> Lowest(const std::vector<SiteDemand>& demands, int64_t budget) {
  std::vector<int> bits = Minima(demands);
  if (NumBits(demands, bits) <= budget) return bits;
  std::vector<SiteDemand> up_to_minima = demands;
  for (SiteDemand& demand : up_to_minima) demand.maximum = demand.minimum;
  return Raised(up_to_minima, std::vector<int>(demands.size(), kLadder[0]), budget);
}

}  // namespace

int64_t NumBits(const std::vector<SiteDemand>& demands, const std::vector<int>& bits) {
  int64_t sum = 0;
  for (size_t s = 0; s < demands.size(); ++s) sum += demands[s].num_elements * bits[s];
  return sum;
}

std::vector<int> Minima(const std::vector<SiteDemand>& demands) {
  std::vector<int> bits;
  bits.reserve(demands.size());
  for (const SiteDemand& demand : demands) bits.push_back(demand.minimum);
  return bits;
}

std::vector<int> Allocate(const std::vector<SiteDemand>& demands, int64_t budget) {
  std::vector<int> bits = Lowest(demands, budget);
  std::vector<int> best = Raised(demands, bits, budget);
  double least = ExpectedVariance(demands, best);
  // Never worse than the same bits for all.
  for (int rung = 1; rung < kRungs; ++rung) {
    for (size_t s = 0; s < demands.size(); ++s) {
      const int floor = std::max(kLadder[rung], demands[s].minimum);
      bits[s] = std::min(floor, demands[s].maximum);
    }
    if (NumBits(demands, bits) > budget) continue;
    std::vector<int> raised = Raised(demands, bits, budget);
    const double variance = ExpectedVariance(demands, raised);
    if (variance >= least) continue;
    least = variance;
    best = std::move(raised);
  }
  return best;
}

std::vector<int> AllocateToVariance(const std::vector<SiteDemand>& demands,
                                    double ceiling) {
  std::vector<int> bits = Minima(demands);
  for (const Step& step : StepsFrom(demands, bits)) {
    if (ExpectedVariance(demands, bits) <= ceiling) break;
    bits[step.site] = step.after;
  }
  return bits;
}

double ExpectedVariance(const std::vector<SiteDemand>& demands,
                        const std::vector<int>& bits) {
  double sum = 0;
  for (size_t s = 0; s < demands.size(); ++s) {
    sum += demands[s].importance * Distortion(bits[s]);
  }
  return sum;
}

}  // namespace dafjax::pool
