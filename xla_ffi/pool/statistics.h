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

// What is known of one site.
struct SiteStats {
  int64_t puts = 0;
  // Planes that its entries lost to others.
  int64_t evictions = 0;
  // What its last put asked for at most.
  int max_bits = 0;
  // Of its last execution, means over tiles: what codes were encoded with, and what is
  // left of that.
  double bits_put = 0;
  double bits_kept = 0;
  // What holds in the next execution; meaningless unless known.
  double importance = 0;
  bool importance_known = false;
};

// A consistent snapshot.
//
// Invariants: committed.current = (pages_used + pages_free) * 64 KiB, which is at most
// the budget unless that fell and the next execution has not started; entries.current =
// entries_live + entries_reclaimable + entries_writing; bytes_live <= bytes.current <=
// pages_used * 64 KiB.
struct Stats {
  int64_t budget = 0;
  // Of entries: what their planes and metadata hold, without what rounding adds.
  Amount bytes;
  Amount entries;
  int64_t entries_live = 0;
  int64_t entries_reclaimable = 0;
  int64_t entries_writing = 0;
  // Of entries that are being written or are live.
  int64_t bytes_live = 0;
  Amount committed;
  int64_t pages_used = 0;
  int64_t pages_free = 0;
  // How often the pool committed more.
  int64_t growths = 0;
  // Planes that entries lost after they were put.
  int64_t evictions = 0;
  // Entries whose pages were reused or given back after their execution.
  int64_t reclaims = 0;
  // Of planes that sites should have had and lost, or never got, for lack of room.
  int64_t degraded_nbytes = 0;
  // Puts that failed for lack of room.
  int64_t exhausted = 0;
  int64_t refused_importances = 0;
  int64_t refused_handles = 0;
  int64_t executions = 0;
  // Of the gradient, as importances tell for the bits that hold; and its squared norm.
  double expected_variance = 0;
  double gradient_energy = 0;
  std::map<uint64_t, SiteStats> sites;
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_STATISTICS_H_
