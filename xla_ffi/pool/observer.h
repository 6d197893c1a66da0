#ifndef DAFJAX_POOL_OBSERVER_H_
#define DAFJAX_POOL_OBSERVER_H_

#include <algorithm>
#include <cstdint>

#include "pool/entry.h"
#include "pool/statistics.h"

namespace dafjax::pool {

// Counts what happens to entries. It decides nothing.
//
// Invariant: entries.current and bytes.current are those of all entries that are not
// vacant; bytes_live those of entries that are being written or are live.
class Observer {
 public:
  // A new entry, that is complete. `bits` and `max_bits` are the request's;
  // `asked_nbytes` is what it would take with all bits.
  void Put(const Entry& entry, int bits, int max_bits, int64_t asked_nbytes) {
    stats_.entries.Add(1);
    stats_.bytes.Add(entry.Nbytes());
    Count(entry.phase, 1, entry.Nbytes());
    stats_.degraded_nbytes += asked_nbytes - entry.Nbytes();
    put_nbytes_ += entry.Nbytes();
    SiteCounts& site = entry.site->counts;
    if (site.puts == 0 || site.run_id != entry.execution.run_id) {
      site.run_id = entry.execution.run_id;
      site.tiles = site.tile_bits_put = site.tile_bits_kept = 0;
      site.metadata_nbytes = 0;
    }
    ++site.puts;
    site.bits = bits;
    site.max_bits = max_bits;
    site.tiles += entry.num_tiles;
    site.metadata_nbytes += entry.metadata.HeldNbytes();
    site.tile_bits_put += entry.num_tiles * entry.bits_put;
    site.tile_bits_kept += entry.num_tiles * entry.bits_kept;
  }

  void Move(const Entry& entry, Phase to) {
    Count(entry.phase, -1, -entry.Nbytes());
    Count(to, 1, entry.Nbytes());
    if (to != Phase::kVacant) return;
    stats_.entries.Remove(1);
    stats_.bytes.Remove(entry.Nbytes());
    if (entry.phase == Phase::kReclaimable) ++stats_.reclaims;
  }

  // The entry is about to lose a plane of `nbytes`, and keep `bits`.
  void Evict(const Entry& entry, int64_t nbytes, int bits) {
    Count(entry.phase, 0, -nbytes);
    stats_.bytes.Remove(nbytes);
    stats_.degraded_nbytes += nbytes;
    ++stats_.evictions;
    put_nbytes_ -= nbytes;
    SiteCounts& site = entry.site->counts;
    ++site.evictions;
    if (site.run_id == entry.execution.run_id) {
      site.tile_bits_kept -= entry.num_tiles * (entry.bits_kept - bits);
    }
  }

  void Grow() { ++stats_.growths; }
  void Exhaust() { ++stats_.exhausted; }
  void RefuseImportance() { ++stats_.refused_importances; }
  void RefuseHandle() { ++stats_.refused_handles; }
  void StartExecution() { ++stats_.executions; }
  // An execution of a program starts, on the first of its devices.
  void StartRun() {
    put_nbytes_ = 0;
    peak_live_nbytes_ = stats_.bytes_live;
  }

  // Of what has been put since then, the share that was live at once; above 0, at most 1.
  double HeldShare() const {
    if (put_nbytes_ <= 0 || peak_live_nbytes_ <= 0) return 1;
    const double put = static_cast<double>(put_nbytes_);
    return std::min(1.0, static_cast<double>(peak_live_nbytes_) / put);
  }

  const Stats& counts() const { return stats_; }

 private:
  void Count(Phase phase, int64_t entries, int64_t nbytes) {
    switch (phase) {
      case Phase::kVacant: return;
      case Phase::kWriting: stats_.entries_writing += entries; break;
      case Phase::kLive: stats_.entries_live += entries; break;
      case Phase::kReclaimable: stats_.entries_reclaimable += entries; return;
    }
    stats_.bytes_live += nbytes;
    peak_live_nbytes_ = std::max(peak_live_nbytes_, stats_.bytes_live);
  }

  Stats stats_;
  // Of one execution of a program, without what was evicted since.
  int64_t put_nbytes_ = 0;
  int64_t peak_live_nbytes_ = 0;
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_OBSERVER_H_
