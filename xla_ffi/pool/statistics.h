#ifndef DAFJAX_POOL_STATISTICS_H_
#define DAFJAX_POOL_STATISTICS_H_

#include <cstdint>
#include <map>

namespace dafjax::pool {

// An amount that rises and falls.
//
// Invariant: 0 <= current <= peak <= total.
struct Amount {
  int64_t current = 0;
  int64_t peak = 0;
  // Of all that was ever added.
  int64_t total = 0;

  void Add(int64_t amount) {
    current += amount;
    total += amount;
    if (current > peak) peak = current;
  }
  void Remove(int64_t amount) { current -= amount; }
  bool IsValid() const { return 0 <= current && current <= peak && peak <= total; }
};

// What is known of one site, of all its puts so far.
struct SiteStats {
  int64_t puts = 0;
  // Planes that its entries lost to others.
  int64_t evictions = 0;
  // Of the last put: what was asked for, what it was encoded with, and what is left.
  int max_bits = 0;
  int bits_put = 0;
  int bits_kept = 0;
  double importance = 0;
  bool importance_known = false;
};

// A consistent snapshot.
//
// Invariants: committed.current = pages_used * 64 KiB + pages_free * 64 KiB <= budget,
// unless the budget fell and the next execution has not started; entries.current =
// entries_live + entries_reclaimable + entries_writing; bytes.current <= pages_used *
// 64 KiB.
struct Stats {
  int64_t budget = 0;
  // Of entries: what their planes and metadata hold, without what rounding adds.
  Amount bytes;
  Amount entries;
  int64_t entries_live = 0;
  int64_t entries_reclaimable = 0;
  int64_t entries_writing = 0;
  int64_t bytes_live = 0;
  Amount committed;
  int64_t pages_used = 0;
  int64_t pages_free = 0;
  int64_t growths = 0;
  int64_t evictions = 0;
  int64_t reclaims = 0;
  // Of planes that were asked for and are lost, or never were written, for lack of room.
  int64_t degraded_nbytes = 0;
  int64_t exhausted = 0;
  int64_t refused_importances = 0;
  int64_t refused_handles = 0;
  int64_t executions = 0;
  std::map<uint64_t, SiteStats> sites;

  // Bytes of entries / bytes of the pages that hold them; 1 if there are none.
  double Utilization(int64_t page_nbytes) const {
    return pages_used == 0 ? 1.0
                           : static_cast<double>(bytes.current) /
                                 static_cast<double>(pages_used * page_nbytes);
  }
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_STATISTICS_H_
