#ifndef DAFJAX_POOL_SITES_H_
#define DAFJAX_POOL_SITES_H_

#include <cmath>
#include <cstdint>
#include <unordered_map>

#include "pool/execution.h"

namespace dafjax::pool {

// What is set for a site.
struct SiteSettings {
  // 0: no limit but the request's.
  int bits = 0;
  // Meaningless unless known.
  double importance = 0;
  bool known = false;
};

// What is counted of a site.
struct SiteCounts {
  int64_t puts = 0;
  int64_t evictions = 0;
  int max_bits = 0;
  // Of one execution: sums over tiles.
  int64_t run_id = 0;
  int64_t tiles = 0;
  int64_t tile_bits_put = 0;
  int64_t tile_bits_kept = 0;
};

struct Site {
  // What holds, and what will from the next execution on.
  SiteSettings now;
  SiteSettings next;
  // Of the last put.
  int64_t num_tiles = 0;
  // The observer's.
  SiteCounts counts;
};

// Settings of sites. What is set holds after Apply().
//
// Invariant: importances are finite and not negative.
class Sites {
 public:
  static constexpr double kSampleWeight = 1.0 / 8;

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
    next.importance += (next.known ? kSampleWeight : 1.0) * (sample - next.importance);
    next.known = true;
    changed_ = true;
    return true;
  }
  void SetBits(SiteId id, int bits) {
    Get(id).next.bits = bits;
    changed_ = true;
  }

  void Apply() {
    if (!changed_) return;
    changed_ = false;
    double sum = 0;
    int64_t known = 0;
    for (auto& [id, site] : sites_) {
      site.now = site.next;
      if (!site.now.known || site.num_tiles == 0) continue;
      // Divided before it is summed: the sum of finite importances may not be finite.
      sum += site.now.importance / static_cast<double>(site.num_tiles);
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

  const std::unordered_map<SiteId, Site>& all() const { return sites_; }

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
