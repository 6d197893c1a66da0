#include "pool/bookkeeping.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <limits>
#include <new>
#include <utility>
#include <vector>

namespace dafjax::pool {
namespace {

std::atomic<uint32_t> next_pool_id{1};

std::string Text(int64_t number) { return std::to_string(number); }

}  // namespace

Bookkeeping::Bookkeeping(Memory* memory, std::shared_ptr<const Growth> growth,
                         int64_t budget, int executions_in_flight, bool backward_once)
    : pool_id_(next_pool_id.fetch_add(1)),
      key_(RandomHandleKey()),
      growth_(std::move(growth)),
      backward_once_(backward_once),
      next_budget_(budget),
      observed_(memory),
      memory_(&observed_, budget),
      pages_(&memory_),
      streams_(&pages_),
      epochs_(executions_in_flight) {}

Status Bookkeeping::Put(const NewEntry& wanted, uint32_t* slot) {
  // All that may throw, before anything changes.
  const uint32_t chosen = PrepareEntry(wanted);
  epochs_.Prepare(wanted.execution.device);
  Site& site = sites_.Get(wanted.site);

  // Taken off before room is made, which makes other entries vacant.
  vacant_.pop_back();
  StartExecution(wanted.execution);
  Entry& entry = entries_[chosen];
  entry.execution = wanted.execution;
  entry.site = &site;
  entry.num_tiles = wanted.num_tiles;
  entry.needs_all = MinimumBits(wanted.bits) == kMostBits;
  entry.importance = sites_.ImportanceOfEntry(site, wanted.num_tiles);
  entry.sequence = ++sequence_;
  int bits = wanted.bits > 0 ? wanted.bits : wanted.max_bits;
  if (site.allocated_bits > 0) bits = site.allocated_bits;
  if (site.now.bits > 0) bits = site.now.bits;
  entry.metadata.nbytes = wanted.metadata_nbytes;
  ShapeEntry(&entry, PowerOfTwoAtMost(std::min(bits, wanted.max_bits)));
  const int64_t asked_nbytes = entry.Nbytes();

  while (!Fill(&entry)) {
    if (MakeRoom(&entry)) continue;
    Clear(&entry);
    vacant_.push_back(chosen);
    observer_.Exhaust();
    return Exhausted(wanted);
  }
  entry.phase = Phase::kWriting;
  fixed_nbytes_ += entry.FixedNbytes();
  peak_pages_ = std::max(peak_pages_, pages_.num_used());
  observer_.Put(entry, wanted.bits, wanted.max_bits, asked_nbytes);
  *slot = chosen;
  return {};
}

void Bookkeeping::Commit(uint32_t slot) {
  Entry& entry = entries_[slot];
  Epochs::Run* run = epochs_.Find(entry.execution);
  MoveTo(&entry, run == nullptr ? Phase::kReclaimable : Phase::kLive);
  (run == nullptr ? reclaimable_ : run->live).Append(&entries_, slot);
}

void Bookkeeping::Abort(uint32_t slot) { Free(slot); }

const Entry& Bookkeeping::Pin(uint32_t slot) {
  Entry& entry = entries_[slot];
  ++entry.pins;
  return entry;
}

void Bookkeeping::Unpin(uint32_t slot, int64_t reads) {
  Entry& entry = entries_[slot];
  --entry.pins;
  if (reads > 0 && ++entry.reads >= reads) entry.spent = true;
  if (!backward_once_ || !entry.spent || entry.pins > 0) return;
  if (entry.phase == Phase::kLive) {
    epochs_.Find(entry.execution)->live.Remove(&entries_, slot);
  }
  Free(slot);
  pages_.ReleaseFree(pages_.num_free());
}

void Bookkeeping::MarkSpent(const Handle& handle) {
  if (handle.slot >= entries_.size() || !(HandleOf(handle.slot) == handle)) return;
  entries_[handle.slot].spent = entries_[handle.slot].IsCommitted();
}

const Entry* Bookkeeping::Find(const Handle& handle, Status* status) {
  if (handle.pool_id == pool_id_ && handle.slot < entries_.size() &&
      handle.check == HandleCheck(key_, handle)) {
    const Entry& entry = entries_[handle.slot];
    if (entry.phase != Phase::kVacant && entry.generation == handle.generation) {
      return &entry;
    }
    observer_.RefuseHandle();
    status->code = Code::kStaleHandle;
    status->message =
        backward_once_
            ? "the residual that this handle names is gone: its backward pass has run, "
              "or its execution is over. Where a backward pass runs twice, use "
              "`PagePool(backward_once=False)`."
            : "the residual that this handle names is gone: its execution is over, or its "
              "backward pass has run, and its pages were reused or collected. Run the "
              "forward and the backward pass in one `jax.jit` of the whole step, call "
              "`PagePool.collect()` after the last call of a pullback, or let more "
              "executions overlap with `PagePool(executions_in_flight=...)`.";
    return nullptr;
  }
  observer_.RefuseHandle();
  status->code = Code::kStaleHandle;
  status->message =
      "this is no handle of this pool in this process: handles cannot be kept over "
      "`os.fork`, in checkpoints, or be given to another pool. Compute the forward pass "
      "again where the residual is needed.";
  return nullptr;
}

Handle Bookkeeping::HandleOf(uint32_t slot) const {
  Handle handle = {slot, entries_[slot].generation, pool_id_, 0};
  handle.check = HandleCheck(key_, handle);
  return handle;
}

void Bookkeeping::SetImportance(SiteId site, double importance) {
  if (!sites_.SetImportance(site, importance)) observer_.RefuseImportance();
}

void Bookkeeping::AddImportance(SiteId site, double sample) {
  if (!sites_.AddImportance(site, sample)) observer_.RefuseImportance();
}

void Bookkeeping::TrackChanges() {
  changes_.reserve(entries_.size());
  tracks_changes_ = true;
}

int Bookkeeping::TakeChanges(Change* changes, int most) {
  int count = 0;
  for (; count < most && !changes_.empty(); changes_.pop_back(), ++count) {
    Entry& entry = entries_[changes_.back()];
    entry.changed = false;
    // What is being written took the place of what is gone.
    changes[count] = {changes_.back(),
                      entry.IsCommitted() ? entry.bits_kept : Change::kGone};
  }
  return count;
}

void Bookkeeping::Collect(bool all) {
  for (Epochs::Device& device : epochs_.devices()) {
    for (Epochs::Run& run : device.runs) {
      all ? MakeReclaimable(&run.live) : MakeSpentReclaimable(&run.live);
    }
  }
  while (ReclaimOldest()) {
  }
  pages_.ReleaseFree(pages_.num_free());
}

// Room.

bool Bookkeeping::Fill(Entry* entry) {
  if (!streams_.Extend(&entry->metadata)) return false;
  for (Stream& plane : entry->planes) {
    if (!streams_.Extend(&plane)) return false;
  }
  return true;
}

bool Bookkeeping::MakeRoom(Entry* entry) {
  return ReclaimOldest() || Grow(entry->LackingNbytes()) || Degrade(entry);
}

bool Bookkeeping::ReclaimOldest() {
  uint32_t slot = reclaimable_.head;
  while (slot != kNoEntry && entries_[slot].pins > 0) slot = entries_[slot].next;
  if (slot == kNoEntry) return false;
  Free(slot);
  return true;
}

bool Bookkeeping::Grow(int64_t lacking_nbytes) {
  const int64_t room = memory_.Room() / kPageNbytes;
  if (room <= 0) return false;
  Demand demand;
  demand.needed = lacking_nbytes;
  demand.committed = pages_.num_committed() * kPageNbytes;
  demand.peak_used =
      std::max({peak_pages_, last_peak_pages_, pages_.num_used()}) * kPageNbytes;
  const int64_t nbytes = std::max(growth_->Increment(demand), lacking_nbytes);
  const int64_t pages = CeilDiv(nbytes, kChunkNbytes) * kChunkPages;
  if (pages_.Grow(std::min(pages, room)) == 0) return false;
  observer_.Grow();
  return true;
}

bool Bookkeeping::Degrade(Entry* entry) {
  // Evict nothing for an entry that cannot fit anyway.
  if (fixed_nbytes_ + entry->metadata.HeldNbytes() > memory_.limit()) return false;
  const auto victim = FirstVictim();
  if (entry->bits_kept > 0 &&
      (victim == tree_.end() || entry->Key() < victim->first)) {
    const int bits = LowerBits(entry->bits_kept);
    streams_.Clear(&entry->planes[NumPlanes(entry->bits_kept) - 1]);
    entry->bits_kept = bits;
    entry->bits_put = std::max(bits, 1);
    return true;
  }
  return EvictFirst();
}

// Entries come into the tree when something is to be evicted, and not before: as long as
// the budget is wide, no put pays for the tree. Those of executions that are over do not
// count, because all of them that could be are reclaimed first.
void Bookkeeping::OfferAll() {
  for (Epochs::Device& device : epochs_.devices()) {
    for (Epochs::Run& run : device.runs) {
      for (uint32_t slot = run.live.tail; slot != kNoEntry;
           slot = entries_[slot].previous) {
        Entry& entry = entries_[slot];
        if (entry.offered) break;
        entry.offered = true;
        if (entry.bits_kept > 0) tree_.Insert(&entry.place, entry.Key(), slot);
      }
    }
  }
}

EvictionTree::Tree::const_iterator Bookkeeping::FirstVictim() {
  OfferAll();
  auto victim = tree_.begin();
  while (victim != tree_.end() && entries_[victim->second].pins > 0) ++victim;
  return victim;
}

bool Bookkeeping::EvictFirst() {
  const auto victim = FirstVictim();
  if (victim == tree_.end()) return false;
  Evict(victim->second);
  return true;
}

void Bookkeeping::Evict(uint32_t slot) {
  Entry& entry = entries_[slot];
  Stream& plane = entry.planes[NumPlanes(entry.bits_kept) - 1];
  const int bits = LowerBits(entry.bits_kept);
  observer_.Evict(entry, plane.nbytes, bits);
  tree_.Remove(&entry.place);
  streams_.Clear(&plane);
  entry.bits_kept = bits;
  MarkChanged(slot);
  if (bits > 0) tree_.Insert(&entry.place, entry.Key(), slot);
}

void Bookkeeping::Shrink() {
  if (memory_.Room() >= 0) return;
  const int64_t over = CeilDiv(-memory_.Room(), kPageNbytes);
  while (pages_.num_free() < over && (ReclaimOldest() || EvictFirst())) {
  }
  pages_.ReleaseFree(over);
}

Status Bookkeeping::Exhausted(const NewEntry& wanted) const {
  return {Code::kPoolExhausted,
          "the page pool cannot hold a residual of " + Text(wanted.num_tiles) +
              " tiles: the scales and minima of its blocks alone take " +
              Text(wanted.metadata_nbytes) + " bytes, of the budget of " +
              Text(memory_.limit()) + " bytes entries in use hold " +
              Text(fixed_nbytes_) + " that cannot be given up, and " +
              Text(pages_.num_committed() * kPageNbytes) +
              " are committed. Raise the budget (`pool.budget = ...`), lower "
              "`executions_in_flight`, or make blocks larger (`block_size`); if the "
              "budget is not reached, the system has no more memory."};
}

// Lives of entries.

uint32_t Bookkeeping::PrepareEntry(const NewEntry& wanted) {
  if (vacant_.empty()) {
    // Every entry may become vacant.
    if (vacant_.capacity() < entries_.size() + 1) {
      vacant_.reserve(2 * (entries_.size() + 1));
    }
    if (tracks_changes_ && changes_.capacity() < entries_.size() + 1) {
      changes_.reserve(2 * (entries_.size() + 1));
    }
    entries_.emplace_back();
    vacant_.push_back(static_cast<uint32_t>(entries_.size() - 1));
  }
  const uint32_t slot = vacant_.back();
  Entry& entry = entries_[slot];
  // No stream ever has more pages than the pool, whatever is asked for.
  const int64_t most =
      std::max({memory_.limit(), next_budget_, pages_.num_committed() * kPageNbytes}) /
          kPageNbytes +
      1;
  const auto reserve = [most](Stream* stream, int64_t nbytes) {
    const int64_t pages = std::min(CeilDiv(nbytes, kPageNbytes), most);
    stream->pages.reserve(static_cast<size_t>(pages));
  };
  const Planes planes = PlanesOf(PowerOfTwoAtMost(wanted.max_bits));
  for (int i = 0; i < planes.count; ++i) {
    reserve(&entry.planes[i], wanted.num_tiles * TileNbytes(planes.widths[i]));
  }
  reserve(&entry.metadata, wanted.metadata_nbytes);
  entry.place.Prepare();
  streams_.Prepare(kMaxPlanes + 1);
  return slot;
}

void Bookkeeping::ShapeEntry(Entry* entry, int bits) {
  const Planes planes = PlanesOf(bits);
  for (int i = 0; i < planes.count; ++i) {
    entry->planes[i].nbytes = entry->num_tiles * TileNbytes(planes.widths[i]);
  }
  entry->bits_put = bits;
  entry->bits_kept = bits;
}

void Bookkeeping::MoveTo(Entry* entry, Phase phase) {
  observer_.Move(*entry, phase);
  fixed_nbytes_ -= entry->FixedNbytes();
  entry->phase = phase;
  fixed_nbytes_ += entry->FixedNbytes();
}

void Bookkeeping::Free(uint32_t slot) {
  Entry& entry = entries_[slot];
  if (entry.place.inside()) tree_.Remove(&entry.place);
  if (entry.phase == Phase::kReclaimable) {
    reclaimable_.Remove(&entries_, slot);
  }
  MoveTo(&entry, Phase::kVacant);
  Clear(&entry);
  MarkChanged(slot);
  // A slot whose generations are used up is never used again: no handle comes twice.
  if (++entry.generation != std::numeric_limits<uint32_t>::max()) {
    vacant_.push_back(slot);
  }
}

void Bookkeeping::Clear(Entry* entry) {
  // Against the order of Fill, so that an entry that takes its place gets its pages in
  // the same order again, and memory is gone through upwards.
  for (int i = kMaxPlanes; i > 0; --i) streams_.Clear(&entry->planes[i - 1]);
  streams_.Clear(&entry->metadata);
  entry->bits_put = 0;
  entry->bits_kept = 0;
  entry->reads = 0;
  entry->spent = false;
  entry->offered = false;
}

void Bookkeeping::StartExecution(const Execution& execution) {
  EntryList over;
  if (epochs_.Start(execution, &over)) {
    observer_.StartExecution();
    MakeReclaimable(&over);
    // The devices of a program have one run id: what holds in it is settled once.
    if (execution.run_id != last_run_id_) {
      for (int n = sites_.TakeMeasures(); n > 0; --n) observer_.RefuseImportance();
      sites_.Apply();
      allocator_.Allocate(last_run_id_, observer_.HeldShare(), next_budget_, &sites_);
      observer_.StartRun();
      last_run_id_ = execution.run_id;
    }
    memory_.set_limit(next_budget_);
    last_peak_pages_ = peak_pages_;
    peak_pages_ = 0;
  }
  Shrink();
}

void Bookkeeping::MakeReclaimable(EntryList* over) {
  for (uint32_t slot = over->head; slot != kNoEntry; slot = entries_[slot].next) {
    MoveTo(&entries_[slot], Phase::kReclaimable);
  }
  reclaimable_.Splice(&entries_, over);
}

void Bookkeeping::MakeSpentReclaimable(EntryList* live) {
  for (uint32_t slot = live->head; slot != kNoEntry;) {
    Entry& entry = entries_[slot];
    const uint32_t next = entry.next;
    if (entry.spent) {
      live->Remove(&entries_, slot);
      MoveTo(&entry, Phase::kReclaimable);
      reclaimable_.Append(&entries_, slot);
    }
    slot = next;
  }
}

void Bookkeeping::MarkChanged(uint32_t slot) {
  if (!tracks_changes_ || entries_[slot].changed) return;
  entries_[slot].changed = true;
  changes_.push_back(slot);
}

}  // namespace dafjax::pool
