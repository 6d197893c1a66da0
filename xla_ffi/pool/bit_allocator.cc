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

// What a site has in any case; 0: what is allocated.
int FixedBits(const Site& site) {
  if (site.now.bits > 0) return site.now.bits;
  return MinimumBits(site.counts.bits) == kMostBits ? kMostBits : 0;
}

}  // namespace

void BitAllocator::Allocate(int64_t run_id, double held, int64_t room,
                            Sites* sites) noexcept {
  gradient_.Settle();
  expected_variance_ = 0;
  const bool allocates = target_.kind != Target::kNone;
  if (!allocates) {
    for (auto& [id, site] : sites->all()) site.allocated_bits = 0;
  }
  try {
    const std::vector<Named> put = SitesOf(run_id, sites);
    if (std::none_of(put.begin(), put.end(),
                     [](const Named& named) { return named.second->now.known; })) {
      return;
    }
    std::vector<Site*> free;
    std::vector<SiteDemand> demands;
    Target::Taken taken;
    taken.held_share = held;
    for (const auto& [id, site] : put) {
      const SiteCounts& counts = site->counts;
      const SiteDemand demand = {counts.tiles * kTileElements,
                                 sites->Importance(*site, counts.tiles),
                                 MinimumBits(counts.bits)};
      taken.num_elements += demand.num_elements;
      taken.metadata_nbytes += counts.metadata_nbytes;
      const int fixed = allocates ? FixedBits(*site) : KeptBits(counts);
      if (allocates && fixed == 0) {
        demands.push_back(demand);
        free.push_back(site);
        continue;
      }
      taken.bits += demand.num_elements * fixed;
      taken.variance += ExpectedVariance({demand}, {fixed});
    }
    if (allocates) {
      const std::vector<int> bits =
          target_.Meet(demands, taken, room, gradient_.energy());
      for (size_t i = 0; i < free.size(); ++i) free[i]->allocated_bits = bits[i];
      expected_variance_ = ExpectedVariance(demands, bits);
    }
    expected_variance_ += taken.variance;
  } catch (const std::bad_alloc&) {
    // Bits stay what they were.
  }
}

}  // namespace dafjax::pool
