#ifndef DAFJAX_POOL_SITES_H_
#define DAFJAX_POOL_SITES_H_

#include <cmath>
#include <cstdint>
#include <unordered_map>

#include "pool/execution.h"
#include "pool/running_mean.h"

namespace dafjax::pool {

// What is set for a site.
struct SiteSettings {
  // 0: what allocation gave, or else the request's.
  int bits = 0;
  // Meaningless unless known.
  double importance = 0;
  bool known = false;
};

// What is counted of a site.
struct SiteCounts {
  int64_t puts = 0;
  int64_t evictions = 0;
  // The last request's.
  int bits = 0;
  int max_bits = 0;
  // Of one execution: sums over tiles.
  int64_t run_id = 0;
  int64_t tiles = 0;
  int64_t tile_bits_put = 0;
  int64_t tile_bits_kept = 0;
  int64_t metadata_nbytes = 0;
};

// What was measured in the execution that runs.
struct SiteMeasure {
  // Mean squared ranges of blocks, times tiles; and the tiles.
  double squared_ranges = 0;
  double tiles = 0;
  // The importance if all squared ranges were 1.
  double sensitivity = 0;
};

struct Site {
  // What holds, and what will from the next execution on.
  SiteSettings now;
  SiteSettings next;
  // What allocation gave it; 0: nothing.
  int allocated_bits = 0;
  SiteMeasure measured;
  // Of all entries of the last execution.
  int64_t tiles_of_execution = 0;
  // The observer's.
  SiteCounts counts;
};

// Settings of sites. What is set holds after Apply().
//
// Invariant: importances are finite and not negative.
class Sites {
 public:
  // Throws std::bad_alloc with nothing changed.
  Site& Get(SiteId id) { return sites_[id]; }

  // Return false if the importance is refused.
  bool SetImportance(SiteId id, double importance) {
    if (!IsImportance(importance)) return false;
    SiteSettings& next = Get(id).next;
    next.importance = importance;
    next.known = true;
    changed_ = true;
    return true;
  }
  bool AddImportance(SiteId id, double sample) {
    if (!IsImportance(sample)) return false;
    SiteSettings& next = Get(id).next;
    next.importance = next.known ? RunningMean(next.importance, sample) : sample;
    next.known = true;
    changed_ = true;
    return true;
  }
  void SetBits(SiteId id, int bits) {
    Get(id).next.bits = bits;
    changed_ = true;
  }

  // Of an entry that was put: the mean of the squared ranges of its blocks.
  void NoteRange(SiteId id, double mean_square, int64_t num_tiles) {
    SiteMeasure& measured = Get(id).measured;
    measured.squared_ranges += mean_square * static_cast<double>(num_tiles);
    measured.tiles += static_cast<double>(num_tiles);
  }
  // Of a backward pass that read an entry. Returns false if it is refused.
  bool NoteSensitivity(SiteId id, double sensitivity) {
    if (!IsImportance(sensitivity)) return false;
    Get(id).measured.sensitivity += sensitivity;
    return true;
  }
  // Makes samples of importance of what the execution that is over measured. Returns how
  // many were refused.
  int TakeMeasures() {
    int refused = 0;
    for (auto& [id, site] : sites_) {
      const SiteMeasure measured = site.measured;
      site.measured = {};
      if (measured.tiles == 0 || measured.sensitivity == 0) continue;
      const double mean = measured.squared_ranges / measured.tiles;
      if (!AddImportance(id, measured.sensitivity * mean)) ++refused;
    }
    return refused;
  }

  void Apply() {
    for (auto& [id, site] : sites_) site.tiles_of_execution = site.counts.tiles;
    if (!changed_) return;
    changed_ = false;
    double sum = 0;
    int64_t known = 0;
    for (auto& [id, site] : sites_) {
      site.now = site.next;
      if (!site.now.known || site.tiles_of_execution == 0) continue;
      // Divided before it is summed: the sum of finite importances may not be finite.
      sum += site.now.importance / static_cast<double>(site.tiles_of_execution);
      ++known;
    }
    const double mean = known > 0 ? sum / static_cast<double>(known) : 1.0;
    default_per_tile_ = std::isfinite(mean) ? mean : 1.0;
  }

  // A site of which nothing is known counts as the mean site, tile for tile.
  double Importance(const Site& site, int64_t num_tiles) const {
    return site.now.known ? site.now.importance
                          : default_per_tile_ * static_cast<double>(num_tiles);
  }
  // Of one of the entries that a site puts in an execution: its share, by tiles.
  double ImportanceOfEntry(const Site& site, int64_t num_tiles) const {
    const double importance = Importance(site, num_tiles);
    if (!site.now.known || site.tiles_of_execution <= num_tiles) return importance;
    return importance * static_cast<double>(num_tiles) /
           static_cast<double>(site.tiles_of_execution);
  }

  const std::unordered_map<SiteId, Site>& all() const { return sites_; }
  std::unordered_map<SiteId, Site>& all() { return sites_; }

  bool IsValid() const {
    for (const auto& [id, site] : sites_) {
      if (!IsImportance(site.now.importance) || !IsImportance(site.next.importance)) {
        return false;
      }
    }
    return true;
  }

 private:
  static bool IsImportance(double x) { return std::isfinite(x) && x >= 0; }

  std::unordered_map<SiteId, Site> sites_;
  double default_per_tile_ = 1.0;
  bool changed_ = false;
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_SITES_H_
