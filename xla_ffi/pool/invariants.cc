// The snapshot of statistics, and the check of every invariant.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "pool/bookkeeping.h"

namespace dafjax::pool {

Stats Bookkeeping::Snapshot() const {
  Stats stats = observer_.counts();
  stats.budget = memory_.limit();
  stats.committed = observed_.committed();
  stats.pages_used = pages_.num_used();
  stats.pages_free = pages_.num_free();
  stats.expected_variance = allocator_.expected_variance();
  stats.gradient_energy = allocator_.gradient_energy();
  for (const auto& [id, site] : sites_.all()) {
    const SiteCounts& counts = site.counts;
    if (counts.puts == 0) continue;
    const double tiles = counts.tiles > 0 ? static_cast<double>(counts.tiles) : 1.0;
    SiteStats& out = stats.sites[id];
    out.puts = counts.puts;
    out.evictions = counts.evictions;
    out.max_bits = counts.max_bits;
    out.bits_put = static_cast<double>(counts.tile_bits_put) / tiles;
    out.bits_kept = static_cast<double>(counts.tile_bits_kept) / tiles;
    out.importance = site.next.importance;
    out.importance_known = site.next.known;
  }
  return stats;
}

namespace {

// Sums over all entries, to compare with what is counted.
struct Sums {
  int64_t entries = 0;
  int64_t writing = 0;
  int64_t live = 0;
  int64_t reclaimable = 0;
  int64_t nbytes = 0;
  int64_t live_nbytes = 0;
  int64_t fixed_nbytes = 0;
  int64_t in_tree = 0;
  int64_t vacant = 0;
  int64_t changed = 0;
  std::vector<const uint8_t*> pages;
  std::vector<SlotRun> tails;
};

const char* StreamViolation(const Stream& stream, const SmallAllocator& small,
                            Sums* sums) {
  if (!stream.IsComplete()) return "stream: all its pages are there";
  if (stream.tail.count != stream.TailSlots()) return "stream: tail = TailSlots()";
  const size_t full = static_cast<size_t>(stream.FullPages());
  sums->pages.insert(sums->pages.end(), stream.pages.begin(),
                     stream.pages.begin() + static_cast<std::ptrdiff_t>(full));
  if (stream.tail.count == 0) return nullptr;
  if (stream.pages.back() != small.Data(stream.tail)) return "stream: page of the tail";
  sums->tails.push_back(stream.tail);
  return nullptr;
}

const char* EntryViolation(const Entry& entry, const SmallAllocator& small, Sums* sums) {
  sums->changed += entry.changed;
  if (entry.phase == Phase::kVacant) {
    if (entry.Nbytes() != 0 || entry.LackingNbytes() != 0 || entry.pins != 0 ||
        entry.offered || entry.place.inside()) {
      return "entry: a vacant one is empty";
    }
    // One whose generations are used up stays vacant.
    sums->vacant += entry.generation != std::numeric_limits<uint32_t>::max();
    return nullptr;
  }
  if (entry.bits_kept > entry.bits_put) return "entry: bits_kept <= bits_put";
  const Planes planes = PlanesOf(entry.bits_put);
  for (int i = 0; i < kMaxPlanes; ++i) {
    const bool kept = i < NumPlanes(entry.bits_kept);
    const int64_t nbytes = kept ? entry.num_tiles * TileNbytes(planes.widths[i]) : 0;
    if (entry.planes[i].nbytes != nbytes) return "entry: bytes of planes";
    const char* violation = StreamViolation(entry.planes[i], small, sums);
    if (violation != nullptr) return violation;
  }
  if (const char* v = StreamViolation(entry.metadata, small, sums)) return v;
  if (entry.offered && !entry.IsCommitted()) return "entry: offered only if committed";
  if (entry.place.inside() != (entry.offered && entry.bits_kept > 0)) {
    return "entry: in the tree if and only if offered with bits_kept > 0";
  }
  if (entry.pins < 0 || (entry.pins > 0 && !entry.IsCommitted())) {
    return "entry: pins > 0 only if committed";
  }
  ++sums->entries;
  sums->nbytes += entry.Nbytes();
  sums->fixed_nbytes += entry.FixedNbytes();
  sums->in_tree += entry.place.inside();
  sums->writing += entry.phase == Phase::kWriting;
  sums->live += entry.phase == Phase::kLive;
  sums->reclaimable += entry.phase == Phase::kReclaimable;
  if (entry.phase != Phase::kReclaimable) sums->live_nbytes += entry.Nbytes();
  return nullptr;
}

bool IsValidList(const Entries& entries, const EntryList& list, Phase phase) {
  int64_t count = 0;
  uint32_t previous = kNoEntry;
  for (uint32_t slot = list.head; slot != kNoEntry; slot = entries[slot].next) {
    if (slot >= entries.size() || ++count > list.count) return false;
    if (entries[slot].phase != phase || entries[slot].previous != previous) return false;
    previous = slot;
  }
  return count == list.count && list.tail == previous;
}

}  // namespace

const char* Bookkeeping::Violation() const {
  Sums sums;
  for (const Entry& entry : entries_) {
    const char* violation = EntryViolation(entry, streams_.small(), &sums);
    if (violation != nullptr) return violation;
  }
  if (static_cast<int64_t>(vacant_.size()) != sums.vacant ||
      vacant_.capacity() < entries_.size()) {
    return "entries: each vacant one can be found";
  }
  for (const uint32_t slot : changes_) {
    if (slot >= entries_.size() || !entries_[slot].changed) return "changes: marked";
  }
  if (static_cast<int64_t>(changes_.size()) != sums.changed ||
      (tracks_changes_ && changes_.capacity() < entries_.size())) {
    return "changes: each once, with room for all";
  }
  if (!streams_.small().IsValid(sums.tails)) return "small allocator: masks and lists";
  streams_.small().AppendPages(&sums.pages);
  if (!pages_.IsValid(sums.pages)) return "page allocator: used + free = committed";

  int64_t in_tree = 0;
  const EvictionKey* previous = nullptr;
  for (const auto& [key, slot] : tree_) {
    if (slot >= entries_.size() || !entries_[slot].place.inside() ||
        !(key == entries_[slot].Key())) {
      return "eviction tree: keys are those of entries";
    }
    if (previous != nullptr && key < *previous) return "eviction tree: order";
    previous = &key;
    ++in_tree;
  }
  if (in_tree != sums.in_tree) return "eviction tree: each entry once";

  if (!epochs_.IsValid()) return "epochs: at most `in_flight` runs, none of them over";
  int64_t live = 0;
  for (const Epochs::Device& device : epochs_.devices()) {
    for (const Epochs::Run& run : device.runs) {
      if (!IsValidList(entries_, run.live, Phase::kLive)) return "epochs: lists";
      for (uint32_t i = run.live.head; i != kNoEntry; i = entries_[i].next) {
        const Execution& execution = entries_[i].execution;
        if (execution.run_id != run.id || execution.device != device.id) {
          return "epochs: entries are of their run";
        }
        const uint32_t before = entries_[i].previous;
        if (entries_[i].offered && before != kNoEntry && !entries_[before].offered) {
          return "epochs: entries that are not offered are the last ones";
        }
      }
      live += run.live.count;
    }
  }
  if (live != sums.live) return "epochs: each live entry on one list";
  if (!IsValidList(entries_, reclaimable_, Phase::kReclaimable) ||
      reclaimable_.count != sums.reclaimable) {
    return "reclaimable entries: list";
  }
  if (!sites_.IsValid()) return "sites: importances are finite and not negative";

  if (fixed_nbytes_ != sums.fixed_nbytes) return "fixed_nbytes = sum of FixedNbytes()";
  const Stats& counts = observer_.counts();
  if (!counts.entries.IsValid() || !counts.bytes.IsValid() ||
      counts.entries.current != sums.entries || counts.bytes.current != sums.nbytes ||
      counts.entries_writing != sums.writing || counts.entries_live != sums.live ||
      counts.entries_reclaimable != sums.reclaimable ||
      counts.bytes_live != sums.live_nbytes) {
    return "statistics: counts are sums over entries";
  }
  const int64_t committed = pages_.num_committed() * kPageNbytes;
  if (observed_.committed().current != committed ||
      memory_.limit() - memory_.Room() != committed) {
    return "memory: committed = pages * 64 KiB";
  }
  // Only what nothing may be taken from can be above a budget that fell.
  if (committed > memory_.limit() && pages_.num_free() > 0) {
    return "memory: committed <= budget";
  }
  return nullptr;
}

}  // namespace dafjax::pool
