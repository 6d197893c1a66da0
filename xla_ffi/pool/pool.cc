#include "pool/pool.h"

#include <cmath>
#include <mutex>
#include <new>
#include <utility>

#include "pool/bookkeeping.h"
#include "pool/fork.h"
#include "pool/memory_adaptors.h"

namespace dafjax::pool {
namespace {

// Far above what memory holds, and far below where products overflow.
constexpr int64_t kMaxTiles = int64_t{1} << 40;
constexpr int64_t kMaxMetadataNbytes = int64_t{1} << 46;

std::string Text(int64_t number) { return std::to_string(number); }

// Nothing may be allocated here: the text fits into the string itself.
Status OutOfMemory() noexcept { return {Code::kPoolExhausted, "out of memory"}; }

Status Check(const PutRequest& request) {
  if (request.num_tiles < 0 || request.num_tiles > kMaxTiles) {
    return {Code::kInvalidArgument, "`num_tiles` must be from 0 to 2^40, but is " +
                                        Text(request.num_tiles) + "."};
  }
  if (request.max_bits < 1 || request.max_bits > 8) {
    return {Code::kInvalidArgument,
            "`max_bits` must be from 1 to 8, but is " + Text(request.max_bits) + "."};
  }
  if (request.metadata_nbytes < 0 || request.metadata_nbytes > kMaxMetadataNbytes) {
    return {Code::kInvalidArgument, "`metadata_nbytes` must be from 0 to 2^46, but is " +
                                        Text(request.metadata_nbytes) + "."};
  }
  return {};
}

Status NotWriting() {
  return {Code::kInvalidArgument,
          "the entry is committed already: `Commit` and `Abort` end what one `Put` "
          "began."};
}

template <typename Byte>
void FillTables(const Entry& entry, int* num_planes, PlaneTable<Byte>* planes,
                MetadataTable<Byte>* metadata) {
  *num_planes = NumPlanes(entry.bits_kept);
  const Planes widths = PlanesOf(entry.bits_put);
  for (int i = 0; i < *num_planes; ++i) {
    const int width = widths.widths[i];
    const int log2_width = width == 4 ? 2 : width == 2 ? 1 : 0;
    planes[i].pages = entry.planes[i].pages.data();
    planes[i].num_pages = static_cast<int64_t>(entry.planes[i].pages.size());
    // A tile of one bit takes 2^6 bytes.
    planes[i].log2_page_tiles = kLog2PageNbytes - 6 - log2_width;
    planes[i].width = width;
  }
  metadata->pages = entry.metadata.pages.data();
  metadata->num_pages = static_cast<int64_t>(entry.metadata.pages.size());
  metadata->nbytes = entry.metadata.nbytes;
}

static_assert(TileNbytes(1) == 1 << 6);

}  // namespace

// What is behind the lock, of one process. After fork() the child leaves it behind as it
// is: a thread that the child does not have may hold the lock, and the pages are not
// mapped (memory.cc).
struct Pool::State {
  State(const Options& options, Memory* memory, int64_t budget)
      : forks(NumForks()),
        replaceable(memory),
        book(&replaceable,
             options.growth != nullptr ? options.growth
                                       : std::make_shared<const AdaptiveGrowth>(),
             budget, options.executions_in_flight < 1 ? 1 : options.executions_in_flight,
             options.backward_once) {}

  const uint32_t forks;
  std::mutex mutex;
  ReplaceableMemory replaceable;
  // Outlives the pages that come from its memory.
  std::shared_ptr<Attachment> attachment;
  Bookkeeping book;
};

Pool::Pool(const Options& options)
    : options_(options), budget_(options.budget < 0 ? 0 : options.budget) {
  state_ = new State(options_, memory(), budget_);
}

Pool::~Pool() {
  State* state = state_.load();
  if (state->forks == NumForks()) delete state;
}

Memory* Pool::memory() const {
  return options_.memory != nullptr ? options_.memory : &system_;
}

Pool::State& Pool::state() const {
  State* state = state_.load(std::memory_order_acquire);
  if (state->forks == NumForks()) return *state;
  auto fresh = std::make_unique<State>(options_, memory(), budget_.load());
  fresh->book.SetTarget({target_kind_.load(), target_value_.load()});
  if (state_.compare_exchange_strong(state, fresh.get())) return *fresh.release();
  // Another thread of the child was faster.
  return *state;
}

// Runs `function` on the bookkeeping under the lock. It may throw std::bad_alloc.
template <typename Function>
auto Pool::Locked(Function function) const {
  State& state = this->state();
  const std::lock_guard<std::mutex> lock(state.mutex);
  return function(&state.book);
}

template <typename Function>
Status Pool::Guarded(Function function) const noexcept {
  try {
    return Locked(std::move(function));
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  }
}

Status Pool::Attach(const MakeAttachment& make,
                    std::shared_ptr<Attachment>* attachment) noexcept {
  State& state = this->state();
  return Guarded([&](Bookkeeping* book) -> Status {
    if (state.attachment == nullptr) {
      if (options_.backward_once) {
        return {Code::kInvalidArgument,
                "`PagePool(backward_once=True)` serves programs for CPUs only: on a GPU, "
                "which runs behind the host, the host does not know what has been read. "
                "Leave it out."};
      }
      book->Collect(false);
      if (book->HasCommitted()) {
        return {Code::kInvalidArgument,
                "the page pool holds residuals of programs for CPUs, in memory that no "
                "GPU sees. Make another `dafjax.stores.PagePool` for programs for GPUs."};
      }
      Status status;
      std::shared_ptr<Attachment> made = make(memory(), &status);
      if (made == nullptr) return status;
      book->TrackChanges();
      state.replaceable.Replace(made->memory());
      state.attachment = std::move(made);
    }
    *attachment = state.attachment;
    return {};
  });
}

int Pool::TakeChanges(Change* changes, int most) noexcept {
  return Locked([&](Bookkeeping* book) { return book->TakeChanges(changes, most); });
}

std::shared_ptr<Attachment> Pool::attachment() const noexcept {
  State& state = this->state();
  const std::lock_guard<std::mutex> lock(state.mutex);
  return state.attachment;
}

Status Pool::Put(const Execution& execution, SiteId site, const PutRequest& request,
                 PutView* view, Handle* handle) noexcept {
  return Guarded([&](Bookkeeping* book) -> Status {
    Status status = Check(request);
    if (!status.ok()) return status;
    uint32_t slot = 0;
    status = book->Put({execution, site, request.num_tiles, request.max_bits,
                        request.metadata_nbytes, request.bits},
                       &slot);
    if (!status.ok()) return status;
    const Entry& entry = book->At(slot);
    *view = {};
    view->bits = entry.bits_put;
    FillTables(entry, &view->num_planes, view->planes, &view->metadata);
    *handle = book->HandleOf(slot);
    return {};
  });
}

Status Pool::Commit(const Handle& handle) noexcept {
  return Guarded([&](Bookkeeping* book) -> Status {
    Status status;
    const Entry* entry = book->Find(handle, &status);
    if (entry == nullptr) return status;
    if (entry->phase != Phase::kWriting) return NotWriting();
    book->Commit(handle.slot);
    return {};
  });
}

Status Pool::Abort(const Handle& handle) noexcept {
  return Guarded([&](Bookkeeping* book) -> Status {
    Status status;
    const Entry* entry = book->Find(handle, &status);
    if (entry == nullptr) return status;
    if (entry->phase != Phase::kWriting) return NotWriting();
    book->Abort(handle.slot);
    return {};
  });
}

Status Pool::Get(const Execution&, const Handle& handle, GetView* view) noexcept {
  return Guarded([&](Bookkeeping* book) -> Status {
    Status status;
    const Entry* entry = book->Find(handle, &status);
    if (entry == nullptr) return status;
    if (!entry->IsCommitted()) {
      return {Code::kInvalidArgument,
              "the entry is still being written: `Commit` makes it readable."};
    }
    book->Pin(handle.slot);
    *view = {};
    view->bits_put = entry->bits_put;
    view->bits_kept = entry->bits_kept;
    view->num_tiles = entry->num_tiles;
    FillTables(*entry, &view->num_planes, view->planes, &view->metadata);
    return {};
  });
}

Status Pool::Unpin(const Handle& handle, int64_t reads) noexcept {
  return Guarded([&](Bookkeeping* book) -> Status {
    Status status;
    const Entry* entry = book->Find(handle, &status);
    if (entry == nullptr) return status;
    if (entry->pins == 0) {
      return {Code::kInvalidArgument,
              "the entry is not pinned: each `Unpin` ends one `Get`."};
    }
    book->Unpin(handle.slot, reads);
    return {};
  });
}

void Pool::MarkSpent(const Handle& handle) noexcept {
  Locked([&](Bookkeeping* book) { book->MarkSpent(handle); });
}

void Pool::SetImportance(SiteId site, double importance) noexcept {
  // Without memory for it the importance stays what it was.
  static_cast<void>(Guarded([&](Bookkeeping* book) -> Status {
    book->SetImportance(site, importance);
    return {};
  }));
}

void Pool::AddImportance(SiteId site, double sample) noexcept {
  static_cast<void>(Guarded([&](Bookkeeping* book) -> Status {
    book->AddImportance(site, sample);
    return {};
  }));
}

void Pool::NoteRange(SiteId site, double mean_square, int64_t num_tiles) noexcept {
  static_cast<void>(Guarded([&](Bookkeeping* book) -> Status {
    book->NoteRange(site, mean_square, num_tiles);
    return {};
  }));
}

void Pool::NoteSensitivity(SiteId site, double sensitivity) noexcept {
  static_cast<void>(Guarded([&](Bookkeeping* book) -> Status {
    book->NoteSensitivity(site, sensitivity);
    return {};
  }));
}

void Pool::NoteGradient(double energy) noexcept {
  static_cast<void>(Guarded([&](Bookkeeping* book) -> Status {
    book->NoteGradient(energy);
    return {};
  }));
}

void Pool::SetTarget(const Target& target) noexcept {
  static_cast<void>(Guarded([&](Bookkeeping* book) -> Status {
    book->SetTarget(target);
    target_kind_ = target.kind;
    target_value_ = target.value;
    return {};
  }));
}

Status Pool::SetBits(SiteId site, int bits) noexcept {
  return Guarded([&](Bookkeeping* book) -> Status {
    if (bits != 0 && bits != 1 && bits != 2 && bits != 4 && bits != 8) {
      return {Code::kInvalidArgument,
              "`bits` must be 1, 2, 4 or 8, or 0 for no limit, but is " + Text(bits) +
                  "."};
    }
    book->SetBits(site, bits);
    return {};
  });
}

Status Pool::SetBudget(int64_t nbytes) noexcept {
  return Guarded([&](Bookkeeping* book) -> Status {
    if (nbytes < 0) {
      return {Code::kInvalidArgument,
              "`budget` must not be negative, but is " + Text(nbytes) + "."};
    }
    budget_ = nbytes;
    book->SetBudget(nbytes);
    return {};
  });
}

int64_t Pool::budget() const noexcept { return budget_.load(); }

void Pool::Collect() noexcept {
  static_cast<void>(Guarded([](Bookkeeping* book) -> Status {
    book->Collect(false);
    return {};
  }));
}

void Pool::CollectAll() noexcept {
  static_cast<void>(Guarded([](Bookkeeping* book) -> Status {
    book->Collect(true);
    return {};
  }));
}

Stats Pool::Snapshot() const {
  return Locked([](Bookkeeping* book) { return book->Snapshot(); });
}

bool Pool::IsValid(std::string* why) const {
  return Locked([why](Bookkeeping* book) {
    const char* violation = book->Violation();
    if (violation != nullptr && why != nullptr) *why = violation;
    return violation == nullptr;
  });
}

}  // namespace dafjax::pool
