#include "ledger/ledger.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>

#include "pool/by_hash.h"
#include "pool/running_mean.h"

namespace dafjax {

Ledger::Ledger(const std::vector<uint64_t>& sites) {
  for (const uint64_t site : sites) importances_.emplace(site, Sum());
}

void Ledger::Add(double number, Sum* sum) noexcept {
  const double total = sum->total + Bounded(number, sum->mean);
  if (!(number >= 0) || !std::isfinite(number) || !std::isfinite(total)) {
    ++refused_;
    return;
  }
  sum->total = total;
  sum->mean = sum->mean > 0 ? RunningMean(sum->mean, number) : number;
}

void Ledger::Note(const int64_t* sites, int64_t num_sites, const float* rows,
                  int64_t num_rows) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t i = 0; i < num_sites; ++i) {
      const auto found = importances_.find(static_cast<uint64_t>(sites[i]));
      if (found != importances_.end()) Add(rows[i], &found->second);
    }
    Add(rows[num_sites], &gradient_energy_);
    ++notes_;
    rows += num_sites + 1;
  }
}

Measured Ledger::Take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Measured taken;
  for (const auto& [site, sum] : importances_) taken.importances[site] = sum.total;
  // Nothing fails from here on.
  for (auto& [site, sum] : importances_) sum.total = 0;
  taken.gradient_energy = std::exchange(gradient_energy_.total, 0.0);
  taken.notes = std::exchange(notes_, 0);
  taken.refused = std::exchange(refused_, 0);
  return taken;
}

void NoteInLedger(uint64_t ledger, const int64_t* sites, int64_t num_sites,
                  const float* rows, int64_t num_rows) noexcept {
  const std::shared_ptr<Ledger> found = ByHash<Ledger>::All().Find(ledger);
  if (found != nullptr) found->Note(sites, num_sites, rows, num_rows);
}

}  // namespace dafjax
