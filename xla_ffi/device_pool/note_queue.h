#ifndef DAFJAX_DEVICE_POOL_NOTE_QUEUE_H_
#define DAFJAX_DEVICE_POOL_NOTE_QUEUE_H_

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "cuda/pool_kernels.h"
#include "pool/execution.h"
#include "pool/pool.h"

namespace dafjax {

// What kernels measure for a pool, which reads it when they have: at a later call, often
// of the next execution. What does not fit on the board is dropped: importances are
// averages over executions.
//
// Ranges count only together with the sensitivities of their execution. They wait for a
// note of sensitivities that was enqueued after them.
//
// Invariant: the notes of the queue are on the board one after another, around its end,
// and used_ is how many numbers they have.
class NoteQueue {
 public:
  // Before all others. `on_device` is the device's address of the same board, which is
  // all zeros.
  void Start(NoteBoard* board, NoteBoard* on_device) {
    board_ = board;
    on_device_ = on_device;
  }

  // A note of the ranges of an entry, and of the sensitivities of sites and the gradient.
  // False if there is no room; otherwise the kernel for `place` is to be enqueued.
  bool AddRanges(pool::SiteId site, double factor, int64_t num_tiles, NotePlace* place) {
    return Add({kRanges, 0, factor, num_tiles, {site}}, 1, place);
  }
  bool AddSensitivities(std::vector<pool::SiteId> sites, NotePlace* place) {
    const int64_t count = static_cast<int64_t>(sites.size()) + 1;
    return Add({kSensitivities, 0, 0, 0, std::move(sites)}, count, place);
  }

  // Tells the pool what has been measured.
  void Deliver(pool::AttachablePool* pool);

 private:
  enum Kind { kRanges, kSensitivities };
  struct Note {
    Kind kind;
    uint64_t number;
    double factor;  // from the sum of squared scales to the mean squared range
    int64_t num_tiles;
    std::vector<pool::SiteId> sites;
  };

  bool Add(Note note, int64_t count, NotePlace* place);
  void DeliverFirst(pool::AttachablePool* pool);

  NoteBoard* board_ = nullptr;
  NoteBoard* on_device_ = nullptr;
  std::deque<Note> queue_;
  uint64_t last_number_ = 0;
  int64_t first_ = 0;
  int64_t used_ = 0;
};

}  // namespace dafjax

#endif  // DAFJAX_DEVICE_POOL_NOTE_QUEUE_H_
