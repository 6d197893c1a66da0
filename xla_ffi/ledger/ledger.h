#ifndef DAFJAX_LEDGER_LEDGER_H_
#define DAFJAX_LEDGER_LEDGER_H_

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "pool/fork_safe_lock.h"

namespace dafjax {

// What backward passes have measured since it was read last.
struct Measured {
  // Of each site, by its hash: the sum of its importances.
  std::unordered_map<uint64_t, double> importances;
  // The sum of the squared norms of gradients.
  double gradient_energy = 0;
  // Backward passes that were noted.
  int64_t notes = 0;
  // Numbers that were not finite, or negative.
  int64_t refused = 0;
};

// Sums of what backward passes measure whose residuals wait in arrays of the program. A
// child of fork() has those of its parent, and counts on by itself.
//
// Invariant: sums are finite and not negative.
class Ledger {
 public:
  // For sites of these hashes. Later nothing is allocated: notes may come from any
  // thread, and have no way to fail.
  explicit Ledger(const std::vector<uint64_t>& sites);

  // Adds rows of `num_sites` importances and a squared norm each. Sites that are
  // unknown, and numbers that are not finite or negative, are left out. Of numbers far
  // above those before little counts (running_mean.h).
  void Note(const int64_t* sites, int64_t num_sites, const float* rows,
            int64_t num_rows) noexcept;

  // Returns the sums and begins anew.
  Measured Take();

 private:
  struct Sum {
    double total = 0;
    // Of late; it outlives Take().
    double mean = 0;
  };

  // Adds a number unless it must be refused.
  void Add(double number, Sum* sum) noexcept;

  static inline std::mutex& mutex_ = ForkSafeLock<Ledger>();

  std::unordered_map<uint64_t, Sum> importances_;
  Sum gradient_energy_;
  int64_t notes_ = 0;
  int64_t refused_ = 0;
};

// Adds rows to the ledger with the name of this hash. A program may outlive what its bits
// are adapted by: if there is no such ledger any more, nobody wants to know.
void NoteInLedger(uint64_t ledger, const int64_t* sites, int64_t num_sites,
                  const float* rows, int64_t num_rows) noexcept;

// NoteInLedger for another library.
using NoteFunction = decltype(&NoteInLedger);

}  // namespace dafjax

#endif  // DAFJAX_LEDGER_LEDGER_H_
