#ifndef DAFJAX_POOL_ENTRY_H_
#define DAFJAX_POOL_ENTRY_H_

#include <cstddef>
#include <cstdint>
#include <deque>

#include "format/packed.h"
#include "pool/eviction.h"
#include "pool/execution.h"
#include "pool/sites.h"
#include "pool/streams.h"

namespace dafjax::pool {

inline constexpr uint32_t kNoEntry = ~uint32_t{0};

enum class Phase : uint8_t {
  kVacant,
  // Between Put and Commit.
  kWriting,
  // Committed, and its execution is not over.
  kLive,
  // Committed, and its execution is over.
  kReclaimable,
};

constexpr int NumPlanes(int bits) { return bits == 0 ? 0 : PlanesOf(bits).count; }

// The precision below `bits`, without its last plane: 8 -> 4 -> 2 -> 1 -> 0.
constexpr int LowerBits(int bits) { return bits / 2; }

// One array of codes that is kept, or room for one.
//
// Invariants: if it is not vacant, bits_kept <= bits_put, plane i holds num_tiles *
// TileNbytes(width of i) bytes if i < NumPlanes(bits_kept) and none if not, and all
// streams are complete. It is on a list if and only if it is committed: that of its
// execution if live, that of all reclaimable ones if not. It is in the eviction tree if
// and only if it is committed, `offered` and bits_kept > 0. pins > 0 only if it is
// committed. If it is vacant, all streams are empty.
struct Entry {
  uint32_t generation = 0;
  Phase phase = Phase::kVacant;
  int bits_put = 0;
  int bits_kept = 0;
  int pins = 0;
  // Since it was put, by those who say how many there are in a backward pass.
  int64_t reads = 0;
  // Whether these are as many as its readers say that one backward pass makes.
  bool spent = false;
  // Whether the eviction tree has been told of it.
  bool offered = false;
  // Whether its slot is among those that have changed.
  bool changed = false;
  // Whether 8 bits were asked for: those that an exponential is taken of ruin a gradient
  // with fewer, which importances, of first order, do not tell.
  bool needs_all = false;
  Execution execution;
  // Null only if vacant; a site is never removed.
  Site* site = nullptr;
  int64_t num_tiles = 0;
  // The order of puts.
  uint64_t sequence = 0;
  // Its site's when it was put.
  double importance = 0;
  Stream metadata;
  Stream planes[kMaxPlanes];
  // Neighbors on its list.
  uint32_t previous = kNoEntry;
  uint32_t next = kNoEntry;
  EvictionTree::Place place;

  bool IsCommitted() const {
    return phase == Phase::kLive || phase == Phase::kReclaimable;
  }
  int64_t PlanesNbytes() const {
    int64_t nbytes = 0;
    for (const Stream& plane : planes) nbytes += plane.nbytes;
    return nbytes;
  }
  int64_t Nbytes() const { return metadata.nbytes + PlanesNbytes(); }
  int64_t HeldPlanesNbytes() const {
    int64_t nbytes = 0;
    for (const Stream& plane : planes) nbytes += plane.HeldNbytes();
    return nbytes;
  }
  // What no eviction can take, as long as the entry is not reclaimable.
  int64_t FixedNbytes() const {
    switch (phase) {
      case Phase::kWriting: return metadata.HeldNbytes() + HeldPlanesNbytes();
      case Phase::kLive: return metadata.HeldNbytes();
      default: return 0;
    }
  }
  int64_t LackingNbytes() const {
    int64_t nbytes = metadata.LackingNbytes();
    for (const Stream& plane : planes) nbytes += plane.LackingNbytes();
    return nbytes;
  }
  // Requires bits_kept > 0.
  EvictionKey Key() const {
    const int64_t freed = planes[NumPlanes(bits_kept) - 1].HeldNbytes();
    return {needs_all, LossPerByte(importance, bits_kept, LowerBits(bits_kept), freed),
            sequence};
  }
};

using Entries = std::deque<Entry>;

// Entries that are linked with each other, in the order in which they were added.
//
// Invariant: `count` entries from `head` to `tail`, each the previous of its next.
struct EntryList {
  uint32_t head = kNoEntry;
  uint32_t tail = kNoEntry;
  int64_t count = 0;

  void Append(Entries* entries, uint32_t slot) {
    Entry& entry = (*entries)[slot];
    entry.previous = tail;
    entry.next = kNoEntry;
    (tail == kNoEntry ? head : (*entries)[tail].next) = slot;
    tail = slot;
    ++count;
  }

  void Remove(Entries* entries, uint32_t slot) {
    Entry& entry = (*entries)[slot];
    (entry.previous == kNoEntry ? head : (*entries)[entry.previous].next) = entry.next;
    (entry.next == kNoEntry ? tail : (*entries)[entry.next].previous) = entry.previous;
    entry.previous = entry.next = kNoEntry;
    --count;
  }

  // Puts all entries of `other` behind the own ones.
  void Splice(Entries* entries, EntryList* other) {
    if (other->count == 0) return;
    (tail == kNoEntry ? head : (*entries)[tail].next) = other->head;
    (*entries)[other->head].previous = tail;
    tail = other->tail;
    count += other->count;
    *other = {};
  }
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_ENTRY_H_
