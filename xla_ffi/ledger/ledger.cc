#include "ledger/ledger.h"

#include <cmath>

namespace dafjax {

Ledger::Ledger(const std::vector<uint64_t>& sites) {
  for (const uint64_t site : sites) measured_.importances.emplace(site, 0.0);
}

void Ledger::Add(double number, double* sum) noexcept {
  const double total = *sum + number;
  if (!(number >= 0) || !std::isfinite(total)) {
    ++measured_.refused;
    return;
  }
  *sum = total;
}

void Ledger::Note(const int64_t* sites, int64_t num_sites, const float* rows,
                  int64_t num_rows) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t i = 0; i < num_sites; ++i) {
      const auto found = measured_.importances.find(static_cast<uint64_t>(sites[i]));
      if (found != measured_.importances.end()) Add(rows[i], &found->second);
    }
    Add(rows[num_sites], &measured_.gradient_energy);
    ++measured_.notes;
    rows += num_sites + 1;
  }
}

Measured Ledger::Take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Measured taken = measured_;
  for (auto& [site, sum] : measured_.importances) sum = 0;
  measured_.gradient_energy = 0;
  measured_.notes = 0;
  measured_.refused = 0;
  return taken;
}

}  // namespace dafjax
