#ifndef DAFJAX_POOL_BOOKKEEPING_H_
#define DAFJAX_POOL_BOOKKEEPING_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "pool/attachment.h"
#include "pool/bit_allocator.h"
#include "pool/entry.h"
#include "pool/epochs.h"
#include "pool/eviction.h"
#include "pool/execution.h"
#include "pool/growth.h"
#include "pool/handle.h"
#include "pool/memory_adaptors.h"
#include "pool/observer.h"
#include "pool/page_allocator.h"
#include "pool/sites.h"
#include "pool/statistics.h"
#include "pool/status.h"
#include "pool/streams.h"
#include "pool/target.h"

namespace dafjax::pool {

// The pool for one thread: pool.h adds the lock and fork().
//
// Functions that may throw std::bad_alloc do so before they change anything that can be
// seen; they are marked.
//
// Invariants, besides those of the parts: every page that is in use belongs to a stream
// of one entry or to the small allocator, whose slots that are in use are the tails of
// streams; `changes_` has each slot once that is marked as changed; the tree holds the
// offered entries with bits_kept > 0, each with its key; lists hold the committed entries, each with its phase, and on that of an execution the
// entries that are not offered are the last ones; fixed_nbytes = the sum of FixedNbytes()
// of all entries; the observer's counts are the sums over all entries.
class Bookkeeping {
 public:
  Bookkeeping(Memory* memory, std::shared_ptr<const Growth> growth, int64_t budget,
              int executions_in_flight, bool backward_once);

  struct NewEntry {
    Execution execution;
    SiteId site = 0;
    int64_t num_tiles = 0;
    int max_bits = 0;
    int64_t metadata_nbytes = 0;
    // Where nothing else is set or allocated; 0: max_bits.
    int bits = 0;
  };

  // Makes an entry in the phase of writing. May throw.
  Status Put(const NewEntry& wanted, uint32_t* slot);
  // Require an entry in the phase of writing.
  void Commit(uint32_t slot);
  void Abort(uint32_t slot);
  // Require a committed entry; Unpin one that is pinned. It may be gone afterwards.
  const Entry& Pin(uint32_t slot);
  void Unpin(uint32_t slot, int64_t reads);
  // Says that its readers have read what the handle names, if it still names an entry.
  void MarkSpent(const Handle& handle);

  const Entry& At(uint32_t slot) const { return entries_[slot]; }
  // The entry that a handle names; null, and why in `status` (whose text may throw).
  const Entry* Find(const Handle& handle, Status* status);
  Handle HandleOf(uint32_t slot) const;

  // May throw.
  void SetImportance(SiteId site, double importance);
  void AddImportance(SiteId site, double sample);
  void SetBits(SiteId site, int bits) { sites_.SetBits(site, bits); }
  void SetBudget(int64_t nbytes) { next_budget_ = nbytes; }
  void SetTarget(const Target& target) { allocator_.SetTarget(target); }
  void NoteRange(SiteId site, double mean_square, int64_t num_tiles) {
    sites_.NoteRange(site, mean_square, num_tiles);
  }
  void NoteSensitivity(SiteId site, double sensitivity) {
    if (!sites_.NoteSensitivity(site, sensitivity)) observer_.RefuseImportance();
  }
  void NoteGradient(double energy) { allocator_.NoteGradient(energy); }

  // Keeps a list of slots whose entry loses a plane or is gone from now on. May throw.
  void TrackChanges();
  // Takes up to `most` of them off the list; returns how many.
  int TakeChanges(Change* changes, int most);
  bool HasCommitted() const { return pages_.num_committed() > 0; }

  // Frees what is reclaimable, and what its backward pass has read; gives free pages
  // back. With `all`, all executions count as over.
  void Collect(bool all);

  // May throw.
  Stats Snapshot() const;
  // Null, or the invariant that is violated. May throw.
  const char* Violation() const;

 private:
  // Room.
  bool Fill(Entry* entry);
  bool MakeRoom(Entry* entry);
  bool ReclaimOldest();
  bool Grow(int64_t lacking_nbytes);
  bool Degrade(Entry* entry);
  bool EvictFirst();
  void OfferAll();
  EvictionTree::Tree::const_iterator FirstVictim();
  void Evict(uint32_t slot);
  void Shrink();
  Status Exhausted(const NewEntry& wanted) const;

  // Lives of entries.
  uint32_t PrepareEntry(const NewEntry& wanted);
  void ShapeEntry(Entry* entry, int bits);
  void MoveTo(Entry* entry, Phase phase);
  void Free(uint32_t slot);
  void Clear(Entry* entry);
  void StartExecution(const Execution& execution);
  void MakeReclaimable(EntryList* over);
  void MakeSpentReclaimable(EntryList* live);
  void MarkChanged(uint32_t slot);

  const uint32_t pool_id_;
  const HandleKey key_;
  const std::shared_ptr<const Growth> growth_;
  const bool backward_once_;
  int64_t next_budget_;
  // The one that put anything last.
  int64_t last_run_id_ = std::numeric_limits<int64_t>::min();
  ObservedMemory observed_;
  LimitedMemory memory_;
  PageAllocator pages_;
  Streams streams_;
  Entries entries_;
  std::vector<uint32_t> vacant_;
  bool tracks_changes_ = false;
  std::vector<uint32_t> changes_;
  EvictionTree tree_;
  Epochs epochs_;
  EntryList reclaimable_;
  Sites sites_;
  BitAllocator allocator_;
  Observer observer_;
  uint64_t sequence_ = 0;
  int64_t fixed_nbytes_ = 0;
  // Of pages in use, in this execution and the one before.
  int64_t peak_pages_ = 0;
  int64_t last_peak_pages_ = 0;
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_BOOKKEEPING_H_
