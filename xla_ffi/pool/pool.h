#ifndef DAFJAX_POOL_POOL_H_
#define DAFJAX_POOL_POOL_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>

#include "pool/attachment.h"
#include "pool/execution.h"
#include "pool/growth.h"
#include "pool/handle.h"
#include "pool/memory.h"
#include "pool/statistics.h"
#include "pool/status.h"
#include "pool/tables.h"
#include "pool/target.h"

namespace dafjax::pool {

struct PutRequest {
  int64_t num_tiles = 0;
  // The most bits of a code, 1 to 8; the pool uses powers of two.
  int max_bits = 0;
  int64_t metadata_nbytes = 0;
  // Bits where none are set or allocated; 0: max_bits.
  int bits = 0;
};

// Where to write an entry. The tables stay valid until Commit or Abort.
struct PutView {
  // What to encode with: 1, 2, 4 or 8.
  int bits = 0;
  // Planes to write, of PlanesOf(bits), most significant first. It is all of them, or
  // none: the budget then leaves no room but for the metadata (bits is 1).
  int num_planes = 0;
  PlaneTable<uint8_t> planes[kMaxPlanes];
  MetadataTable<uint8_t> metadata;
};

// Where to read an entry. The tables stay valid until Unpin.
struct GetView {
  // What it was encoded with: 1, 2, 4 or 8.
  int bits_put = 0;
  // What is left of that, the upper bits of each code: 0, 1, 2, 4 or 8. At 0 only the
  // metadata are left.
  int bits_kept = 0;
  // Of PlanesOf(bits_put), the first ones.
  int num_planes = 0;
  int64_t num_tiles = 0;
  PlaneTable<const uint8_t> planes[kMaxPlanes];
  MetadataTable<const uint8_t> metadata;
};

struct Options {
  static constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

  // The most bytes that are committed at once.
  int64_t budget = kUnlimited;
  // An execution is over when this many newer ones have started on its device.
  int executions_in_flight = 1;
  // An entry is freed, and free pages go back to the system, when it has been read as
  // often as its readers say that a backward pass does.
  bool backward_once = false;
  // What an attachment is to have pack.
  Packer packer = Packer::kAuto;
  // Null: AdaptiveGrowth.
  std::shared_ptr<const Growth> growth;
  // Null: SystemMemory. Must outlive the pool.
  Memory* memory = nullptr;
};

// Makes the attachment of a pool, whose pages come from `system` otherwise. Null, and why
// not in `status`, if it cannot be made.
using MakeAttachment =
    std::function<std::shared_ptr<Attachment>(Memory* system, Status* status)>;

// What an attachment needs of its pool. It is in another library, and calls what is here
// through the table of functions alone.
class AttachablePool {
 public:
  virtual ~AttachablePool() = default;

  // Gives the attachment, and makes it the first time. Programs for the host cannot use
  // the pool from then on: they would write into pages that a device has yet to read.
  virtual Status Attach(const MakeAttachment& make,
                        std::shared_ptr<Attachment>* attachment) noexcept = 0;
  // Of entries that were put, up to `most` that have lost planes or are gone since they
  // were last asked for. Returns how many.
  virtual int TakeChanges(Change* changes, int most) noexcept = 0;

  // As Pool says.
  virtual Status Put(const Execution& execution, SiteId site, const PutRequest& request,
                     PutView* view, Handle* handle) noexcept = 0;
  virtual Status Commit(const Handle& handle) noexcept = 0;
  virtual Status Abort(const Handle& handle) noexcept = 0;
  virtual void MarkSpent(const Handle& handle) noexcept = 0;
  virtual void NoteRange(SiteId site, double mean_square, int64_t num_tiles) noexcept = 0;
  virtual void NoteSensitivity(SiteId site, double sensitivity) noexcept = 0;
  virtual void NoteGradient(double energy) noexcept = 0;
  virtual bool measures() const noexcept = 0;
  virtual Packer packer() const noexcept = 0;
};

// Keeps codes of residuals in pages of 64 KiB, within a budget.
//
// An entry is put in two steps, Put and Commit, so that kernels write straight into its
// pages, outside of the pool's lock; and it is read in two, Get and Unpin. Loads free
// nothing, unless the pool is told that no backward pass runs twice. Entries whose
// execution is over are reclaimable: their pages are reused, oldest first, before the
// pool grows; until then they can still be read.
//
// When the budget leaves no room, the entry whose last plane is least important loses it:
// 8 -> 4 -> 2 -> 1 bit -> metadata alone. That may be the entry that is being put. An
// entry that is being written or is pinned loses nothing. The next execution is given bits
// that fit, if it is known what matters.
//
// Importances, bits and the budget are set at any time and hold from the next execution
// on: the first Put of a new run on any device.
//
// All functions may be called from any thread, and none throws. After fork() the child's
// pool is empty, with the parent's budget and target but no site's settings, and refuses
// the parent's handles.
class Pool final : public AttachablePool {
 public:
  explicit Pool(const Options& options);
  ~Pool() override;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  Status Attach(const MakeAttachment& make,
                std::shared_ptr<Attachment>* attachment) noexcept override;
  int TakeChanges(Change* changes, int most) noexcept override;
  // Null if there is none.
  std::shared_ptr<Attachment> attachment() const noexcept;

  // Makes room for an entry. On any status but kOk, `view` and `handle` are as they were
  // and no page is taken; others may have lost planes before it was certain that even
  // that is not enough.
  Status Put(const Execution& execution, SiteId site, const PutRequest& request,
             PutView* view, Handle* handle) noexcept override;
  // Makes what was written readable. The tables of Put must not be used any more.
  Status Commit(const Handle& handle) noexcept override;
  // Takes back an entry that was put and not committed.
  Status Abort(const Handle& handle) noexcept override;

  // Finds an entry and pins it: it loses nothing until Unpin. Any number of threads may
  // pin an entry at once; each Get that succeeds needs its Unpin.
  Status Get(const Execution& execution, const Handle& handle, GetView* view) noexcept;
  // `reads`: how many are made of the entry in one backward pass; 0 if that is unknown.
  Status Unpin(const Handle& handle, int64_t reads = 0) noexcept;
  // Says that an entry has been read so often by whom the pool does not see; nothing if it
  // is gone.
  void MarkSpent(const Handle& handle) noexcept override;

  // How much the gradient suffers from a site's noise: the constant C of its error
  // C / (2^bits - 1)^2, of all its elements together (pool/eviction.h). One that is not
  // finite or is negative is counted and ignored.
  void SetImportance(SiteId site, double importance) noexcept;
  // Blends a sample into the site's importance (exponential average, weight 1/8).
  void AddImportance(SiteId site, double sample) noexcept;
  // Makes importances of what executions measure: the mean squared range of an entry's
  // blocks, and what its backward pass would make of squared ranges of 1. At the start of
  // the next execution their product, over all entries of a site, is a sample. What is not
  // finite or is negative is counted and ignored.
  void NoteRange(SiteId site, double mean_square, int64_t num_tiles) noexcept override;
  void NoteSensitivity(SiteId site, double sensitivity) noexcept override;
  // The squared norm of the gradient of an execution, or of a part of it.
  void NoteGradient(double energy) noexcept override;
  // What bits are allocated for at the start of each execution, as far as importances are
  // known; sites whose bits are set keep them.
  void SetTarget(const Target& target) noexcept;
  // Whether importances matter, for what is allocated or evicted; else no range need be
  // noted.
  bool measures() const noexcept override {
    return target_kind_.load() != Target::kNone || budget_.load() != Options::kUnlimited;
  }
  Packer packer() const noexcept override { return options_.packer; }
  // Bits that the site's puts get, 1, 2, 4 or 8; never more than the request's max_bits.
  // 0 takes the setting back.
  Status SetBits(SiteId site, int bits) noexcept;
  Status SetBudget(int64_t nbytes) noexcept;
  // The budget that holds from the next execution on.
  int64_t budget() const noexcept;

  // Reclaims all entries whose execution is over, and those that have been read as often
  // as their readers say that a backward pass does; returns free pages to the system. What
  // has yet to be read stays, however long ago it was put.
  void Collect() noexcept;
  // The same, and counts all executions as over: for when none is in flight.
  void CollectAll() noexcept;

  // May throw std::bad_alloc, as may IsValid, and nothing else does.
  Stats Snapshot() const;

  // Checks every invariant, at a cost that grows with the pool. If one is violated and
  // `why` is not null, says which.
  bool IsValid(std::string* why = nullptr) const;

  struct State;

 private:
  State& state() const;
  Memory* memory() const;
  template <typename Function>
  auto Locked(Function function) const;
  template <typename Function>
  Status Guarded(Function function) const noexcept;

  const Options options_;
  mutable SystemMemory system_;
  // What was set last; in the child after fork() it is what the new state starts with.
  std::atomic<int64_t> budget_;
  std::atomic<Target::Kind> target_kind_{Target::kNone};
  std::atomic<double> target_value_{0};
  mutable std::atomic<State*> state_;
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_POOL_H_
