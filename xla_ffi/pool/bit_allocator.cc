#include "pool/bit_allocator.h"

#include <algorithm>
#include <cstddef>
#include <new>
#include <utility>
#include <vector>

#include "format/packed.h"
#include "pool/allocation.h"

namespace dafjax::pool {
namespace {

using Named = std::pair<SiteId, Site*>;

// Those that an execution put, in an order that is the same everywhere.
std::vector<Named> SitesOf(int64_t run_id, Sites* sites) {
  std::vector<Named> put;
  for (auto& [id, site] : sites->all()) {
    if (site.counts.puts > 0 && site.counts.run_id == run_id) put.emplace_back(id, &site);
  }
  std::sort(put.begin(), put.end(),
            [](const Named& a, const Named& b) { return a.first < b.first; });
  return put;
}

// What is left of a site's codes, as a mean.
int KeptBits(const SiteCounts& counts) {
  // Executions that overlap reset each other's counts.
  const int64_t bits = counts.tile_bits_kept / std::max<int64_t>(counts.tiles, 1);
  return static_cast<int>(std::clamp<int64_t>(bits, 0, kMostBits));
}

// What the last execution asked for.
int AskedBits(const SiteCounts& counts) {
  const int bits = counts.bits > 0 ? counts.bits : counts.max_bits;
  return PowerOfTwoAtMost(std::clamp(std::min(bits, counts.max_bits), 1, kMostBits));
}

// Sites, divided into those that bits are allocated for and what the others take.
struct Division {
  std::vector<Site*> free;
  std::vector<SiteDemand> demands;
  Target::Taken taken;
};

// What a site has in any case, or kFree.
using FixedBits = int (*)(const Site&);
constexpr int kFree = -1;

int UserBits(const Site& site) { return site.now.bits > 0 ? site.now.bits : kFree; }

int UserOrNeededBits(const Site& site) {
  if (site.now.bits > 0) return site.now.bits;
  return MinimumBits(site.counts.bits) == kMostBits ? kMostBits : kFree;
}

int KeptBitsOf(const Site& site) { return KeptBits(site.counts); }

Division Divide(const std::vector<Named>& put, double held, const Sites& sites,
                bool is_limit, FixedBits fixed_bits) {
  Division division;
  division.taken.held_share = held;
  for (const auto& [id, site] : put) {
    const SiteCounts& counts = site->counts;
    SiteDemand demand = {counts.tiles * kTileElements,
                         sites.Importance(*site, counts.tiles), MinimumBits(counts.bits)};
    if (is_limit) {
      demand.maximum = AskedBits(counts);
      demand.minimum = std::min(demand.minimum, demand.maximum);
    }
    division.taken.num_elements += demand.num_elements;
    division.taken.metadata_nbytes += counts.metadata_nbytes;
    const int fixed = fixed_bits(*site);
    if (fixed == kFree) {
      division.demands.push_back(demand);
      division.free.push_back(site);
      continue;
    }
    division.taken.bits += demand.num_elements * fixed;
    division.taken.variance += ExpectedVariance({demand}, {fixed});
  }
  return division;
}

// The same number for all sites.
std::vector<int> All(const Division& division, int bits) {
  return std::vector<int>(division.demands.size(), bits);
}

// What asks for 8 bits has them if all others fit the budget with 1 bit; if not, not even
// what an exponential is taken of can have all of its bits.
Division DivideToFit(const std::vector<Named>& put, double held, int64_t room,
                     const Sites& sites, bool is_limit) {
  Division division = Divide(put, held, sites, is_limit, UserOrNeededBits);
  if (Target::Fits(division.demands, All(division, 1), division.taken, room)) {
    return division;
  }
  division = Divide(put, held, sites, is_limit, UserBits);
  for (SiteDemand& demand : division.demands) demand.minimum = 1;
  return division;
}

// Allocates for as many bits as are asked for, at most, if these do not fit the budget.
Division DivideLimited(const std::vector<Named>& put, double held, int64_t room,
                       const Sites& sites) {
  Division division = DivideToFit(put, held, room, sites, true);
  std::vector<int> asked;
  for (const SiteDemand& demand : division.demands) asked.push_back(demand.maximum);
  const bool fits = Target::Fits(division.demands, asked, division.taken, room);
  return fits ? Divide(put, held, sites, true, KeptBitsOf) : division;
}

}  // namespace

void BitAllocator::Allocate(int64_t run_id, double held, int64_t room,
                            Sites* sites) noexcept {
  gradient_.Settle();
  expected_variance_ = 0;
  const bool has_target = target_.kind != Target::kNone;
  if (!has_target) {
    for (auto& [id, site] : sites->all()) site.allocated_bits = 0;
  }
  try {
    const std::vector<Named> put = SitesOf(run_id, sites);
    if (std::none_of(put.begin(), put.end(),
                     [](const Named& named) { return named.second->now.known; })) {
      return;
    }
    const Division division = has_target
                                  ? DivideToFit(put, held, room, *sites, false)
                                  : DivideLimited(put, held, room, *sites);
    const std::vector<int> bits =
        target_.Meet(division.demands, division.taken, room, gradient_.energy());
    for (size_t i = 0; i < bits.size(); ++i) division.free[i]->allocated_bits = bits[i];
    expected_variance_ =
        ExpectedVariance(division.demands, bits) + division.taken.variance;
  } catch (const std::bad_alloc&) {
    // Bits stay what they were.
  }
}

}  // namespace dafjax::pool
