// The page pool: what each part promises, every invariant after each operation, failing
// allocations, threads and forks. Exits with 0 if all holds. With the argument `threads`
// it is only what several threads do, for sanitizers of threads, which do not follow
// forks. Built and run by tests/test_pool_cpp.py.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "format/packed.h"
#include "pool/bookkeeping.h"
#include "pool/pool.h"
#include "pool/registry.h"

// The n-th allocation of this thread fails; 0: none does.
static thread_local int64_t allocations_left = 0;

static void* AllocateOrFail(std::size_t size) {
  if (allocations_left > 0 && --allocations_left == 0) throw std::bad_alloc();
  void* data = std::malloc(size == 0 ? 1 : size);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}
// Not inlined, or GCC sees one half of a pair and takes it for a mistake.
#define NOINLINE __attribute__((noinline))
NOINLINE void* operator new(std::size_t size) { return AllocateOrFail(size); }
NOINLINE void* operator new[](std::size_t size) { return AllocateOrFail(size); }
// What std::stable_sort asks for; it does without.
NOINLINE void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return std::malloc(size);
}
NOINLINE void operator delete(void* data) noexcept { std::free(data); }
NOINLINE void operator delete[](void* data) noexcept { std::free(data); }
NOINLINE void operator delete(void* data, std::size_t) noexcept { std::free(data); }
NOINLINE void operator delete[](void* data, std::size_t) noexcept { std::free(data); }

namespace dafjax::pool {
namespace {

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                       \
    }                                                                      \
  } while (false)

#define CHECK_VALID(pool)                                                            \
  do {                                                                               \
    std::string why;                                                                 \
    if (!(pool).IsValid(&why)) {                                                     \
      std::fprintf(stderr, "%s:%d: violated: %s\n", __FILE__, __LINE__, why.c_str()); \
      std::_Exit(1);                                                                 \
    }                                                                                \
  } while (false)

constexpr int64_t kMiB = int64_t{1} << 20;

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    state_ += 0x9e3779b97f4a7c15;
    uint64_t z = state_;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  int64_t Below(int64_t n) {
    return static_cast<int64_t>(Next() % static_cast<uint64_t>(n));
  }

 private:
  uint64_t state_;
};

// Refuses what it is told to refuse.
class FailingMemory final : public Memory {
 public:
  uint8_t* Reserve(int64_t nbytes) override {
    return Fails() ? nullptr : system_.Reserve(nbytes);
  }
  void Unreserve(uint8_t* data, int64_t nbytes) override {
    system_.Unreserve(data, nbytes);
  }
  bool Commit(uint8_t* data, int64_t nbytes) override {
    if (nbytes > most || Fails() || !system_.Commit(data, nbytes)) return false;
    committed += nbytes;
    return true;
  }
  void Release(uint8_t* data, int64_t nbytes) override {
    committed -= nbytes;
    system_.Release(data, nbytes);
  }

  // The n-th call and all behind it fail; 0: none does.
  int64_t calls_left = 0;
  // Of one call.
  int64_t most = std::numeric_limits<int64_t>::max();
  int64_t committed = 0;

 private:
  bool Fails() {
    if (calls_left == 0) return false;
    if (calls_left > 1) --calls_left;
    return calls_left == 1;
  }
  SystemMemory system_;
};

uint8_t ByteOf(uint64_t seed, int stream, int64_t offset) {
  return static_cast<uint8_t>((seed * 131 + static_cast<uint64_t>(stream)) * 31 +
                              static_cast<uint64_t>(offset) * 7 +
                              static_cast<uint64_t>(offset >> 8));
}

template <typename View, typename Visit>
void ForEachByte(const View& view, int64_t num_tiles, const Visit& visit) {
  for (int p = 0; p < view.num_planes; ++p) {
    const int64_t nbytes = TileNbytes(view.planes[p].width);
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      auto* data = view.planes[p].Tile(tile);
      for (int64_t i = 0; i < nbytes; ++i) visit(data + i, p, tile * nbytes + i);
    }
  }
  for (int64_t i = 0; i < view.metadata.nbytes; ++i) {
    visit(view.metadata.At(i), kMaxPlanes, i);
  }
}

struct Put {
  Execution execution;
  SiteId site = 0;
  PutRequest request;
  uint64_t seed = 0;
};

Status Store(Pool* pool, const Put& put, Handle* handle, int* bits = nullptr) {
  PutView view;
  const Status status = pool->Put(put.execution, put.site, put.request, &view, handle);
  if (!status.ok()) return status;
  if (bits != nullptr) *bits = view.num_planes == 0 ? 0 : view.bits;
  ForEachByte(view, put.request.num_tiles, [&](uint8_t* byte, int stream, int64_t at) {
    *byte = ByteOf(put.seed, stream, at);
  });
  return pool->Commit(*handle);
}

// Checks every byte; returns the bits that are left, or -1 if the handle is stale.
int Load(Pool* pool, const Put& put, const Handle& handle, int64_t reads = 0) {
  GetView view;
  const Status status = pool->Get(put.execution, handle, &view);
  if (!status.ok()) {
    CHECK(status.code == Code::kStaleHandle);
    return -1;
  }
  CHECK(view.num_tiles == put.request.num_tiles);
  CHECK(view.metadata.nbytes == put.request.metadata_nbytes);
  CHECK(view.num_planes == NumPlanes(view.bits_kept));
  ForEachByte(view, put.request.num_tiles,
              [&](const uint8_t* byte, int stream, int64_t at) {
                CHECK(*byte == ByteOf(put.seed, stream, at));
              });
  CHECK(pool->Unpin(handle, reads).ok());
  return view.bits_kept;
}

Options WithBudget(int64_t budget, int in_flight = 1, Memory* memory = nullptr) {
  Options options;
  options.budget = budget;
  options.executions_in_flight = in_flight;
  options.memory = memory;
  return options;
}

// Parts.

void TestStreamSizes() {
  Stream stream;
  for (int64_t n = 0; n < 4 * kPageNbytes; ++n) {
    stream.nbytes = n;
    const int64_t held = stream.HeldNbytes();
    CHECK(held >= n && held < n + kSlotNbytes);
    CHECK(stream.TailSlots() < kPageSlots && stream.TailSlots() >= 0);
    CHECK(stream.LackingNbytes() == held);
  }
}

void TestErrorFallsConvexly() {
  CHECK(RelativeError(8) < RelativeError(4) && RelativeError(4) < RelativeError(2));
  double previous = 0;
  for (int bits = 8; bits > 0; bits = LowerBits(bits)) {
    const int64_t freed = bits - LowerBits(bits);
    const double loss = LossPerByte(1.0, bits, LowerBits(bits), freed);
    CHECK(loss > previous);
    previous = loss;
  }
}

void TestEpochs() {
  for (const int in_flight : {1, 2, 3}) {
    Epochs epochs(in_flight);
    epochs.Prepare(0);
    epochs.Prepare(1);
    std::vector<int64_t> started;
    Random random(in_flight);
    for (int i = 0; i < 400; ++i) {
      // Two programs, each with its own numbers.
      const int64_t base = random.Below(2) == 0 ? 1000000 : 7;
      const int64_t id = base + i / 4 + random.Below(3);
      EntryList over;
      const bool is_new = epochs.Start({id, 0}, &over);
      CHECK(is_new == (std::find(started.begin(), started.end(), id) == started.end()));
      if (is_new) started.push_back(id);
      CHECK(epochs.IsValid());
      for (size_t n = 0; n < started.size(); ++n) {
        const int newer = static_cast<int>(started.size() - 1 - n);
        CHECK((epochs.Find({started[n], 0}) == nullptr) == (newer >= in_flight));
        CHECK(epochs.Find({started[n], 1}) == nullptr);
      }
    }
  }
}

void TestSmallAllocator() {
  SystemMemory memory;
  PageAllocator pages(&memory);
  CHECK(pages.Grow(64) == 64);
  SmallAllocator small(&pages);
  std::vector<SlotRun> runs;
  Random random(1);
  for (int i = 0; i < 4000; ++i) {
    if (random.Below(2) == 0 || runs.empty()) {
      small.Prepare(1);
      SlotRun run;
      if (small.Allocate(1 + static_cast<int>(random.Below(63)), &run)) {
        runs.push_back(run);
      }
    } else {
      std::swap(runs[static_cast<size_t>(random.Below(runs.size()))], runs.back());
      small.Free(runs.back());
      runs.pop_back();
    }
    CHECK(small.IsValid(runs));
  }
  // Planted: a run that is in use twice, and one that nobody holds.
  std::vector<SlotRun> wrong = runs;
  wrong.push_back(runs.front());
  CHECK(!small.IsValid(wrong));
  wrong.assign(runs.begin() + 1, runs.end());
  CHECK(!small.IsValid(wrong));
  for (const SlotRun& run : runs) small.Free(run);
  CHECK(small.IsValid({}));
  CHECK(pages.num_used() == 0);
}

void TestPageAllocator() {
  FailingMemory memory;
  {
    PageAllocator pages(&memory);
    std::vector<const uint8_t*> used;
    std::set<const uint8_t*> all;
    Random random(2);
    for (int i = 0; i < 3000; ++i) {
      const int64_t what = random.Below(100);
      if (what < 4) {
        pages.Grow(random.Below(100));
      } else if (what < 8) {
        const int64_t free = pages.num_free();
        const int64_t wanted = random.Below(70);
        CHECK(pages.ReleaseFree(wanted) == std::min(free, wanted));
      } else if (what < 60) {
        uint8_t* page = pages.Allocate();
        CHECK((page == nullptr) == (pages.num_free() == 0 && page == nullptr));
        if (page == nullptr) continue;
        std::memset(page, 1, kPageNbytes);
        used.push_back(page);
      } else if (!used.empty()) {
        std::swap(used[static_cast<size_t>(random.Below(used.size()))], used.back());
        pages.Free(const_cast<uint8_t*>(used.back()));
        used.pop_back();
      }
      CHECK(memory.committed == pages.num_committed() * kPageNbytes);
      if (i % 10 == 0) CHECK(pages.IsValid(used));
    }
    // Planted: a page in use that was freed, and one that nobody freed.
    std::vector<const uint8_t*> wrong = used;
    wrong.push_back(wrong.front());
    CHECK(!pages.IsValid(wrong));
    wrong.resize(used.size() - 1);
    CHECK(!pages.IsValid(wrong));
    wrong.push_back(used.front() + 1);
    CHECK(!pages.IsValid(wrong));
  }
  // A system that gives little at once, and then nothing.
  FailingMemory poor;
  poor.most = 3 * kPageNbytes;
  PageAllocator pages(&poor);
  CHECK(pages.Grow(40) == 40);
  poor.calls_left = 3;
  CHECK(pages.Grow(40) > 0);
  poor.calls_left = 1;
  CHECK(pages.Grow(40) == 0);
  // Whole chunks go first.
  FailingMemory chunks;
  PageAllocator parts(&chunks);
  CHECK(parts.Grow(3 * kChunkPages) == 3 * kChunkPages);
  uint8_t* kept = parts.Allocate();
  CHECK(parts.ReleaseFree(2 * kChunkPages) == 2 * kChunkPages);
  CHECK(parts.num_free() == kChunkPages - 1);
  CHECK(parts.IsValid({kept}));
}

// The pool.

void TestArguments() {
  Pool pool(WithBudget(kMiB));
  PutView view;
  Handle handle;
  const auto code = [&](const PutRequest& request) {
    return pool.Put({1, 0}, 1, request, &view, &handle).code;
  };
  CHECK(code({-1, 2, 0}) == Code::kInvalidArgument);
  CHECK(code({1, 0, 0}) == Code::kInvalidArgument);
  CHECK(code({1, 9, 0}) == Code::kInvalidArgument);
  CHECK(code({1, 2, -1}) == Code::kInvalidArgument);
  CHECK(code({std::numeric_limits<int64_t>::max(), 2, 0}) == Code::kInvalidArgument);
  CHECK(code({1, 2, int64_t{1} << 40}) == Code::kPoolExhausted);
  CHECK(pool.SetBits(1, 3).code == Code::kInvalidArgument);
  CHECK(pool.SetBudget(-1).code == Code::kInvalidArgument);
  CHECK(code({0, 8, 0}) == Code::kOk);
  CHECK(view.bits == 8 && view.planes[0].num_pages == 0);
  CHECK(pool.Commit(handle).ok());
  CHECK(pool.Commit(handle).code == Code::kInvalidArgument);
  CHECK(pool.Abort(handle).code == Code::kInvalidArgument);
  CHECK(pool.Unpin(handle).code == Code::kInvalidArgument);
  CHECK(code({1, 2, 8}) == Code::kOk);
  GetView read;
  CHECK(pool.Get({1, 0}, handle, &read).code == Code::kInvalidArgument);
  CHECK(pool.Abort(handle).ok());
  CHECK(pool.Get({1, 0}, handle, &read).code == Code::kStaleHandle);
  CHECK_VALID(pool);
}

void TestHandlesAreChecked() {
  Pool pool(WithBudget(kMiB));
  Pool other(WithBudget(kMiB));
  const Put put = {{1, 0}, 5, {10, 8, 100}, 3};
  Handle handle;
  CHECK(Store(&pool, put, &handle).ok());
  Handle elsewhere;
  CHECK(Store(&other, put, &elsewhere).ok());
  CHECK(Load(&pool, put, handle) == 8);
  CHECK(Load(&pool, put, elsewhere) == -1);
  CHECK(Load(&other, put, handle) == -1);
  uint32_t words[4];
  for (int bit = 0; bit < 128; ++bit) {
    std::memcpy(words, &handle, sizeof(words));
    words[bit / 32] ^= uint32_t{1} << (bit % 32);
    Handle forged;
    std::memcpy(&forged, words, sizeof(words));
    GetView view;
    CHECK(pool.Get({1, 0}, forged, &view).code == Code::kStaleHandle);
    CHECK(pool.Commit(forged).code == Code::kStaleHandle);
    CHECK(pool.Unpin(forged).code == Code::kStaleHandle);
  }
  Random random(9);
  for (int i = 0; i < 100000; ++i) {
    const uint64_t a = random.Next(), b = random.Next();
    const Handle forged = {static_cast<uint32_t>(a % 2), static_cast<uint32_t>(a >> 32) % 2,
                           handle.pool_id, static_cast<uint32_t>(b)};
    GetView view;
    CHECK(forged == handle || !pool.Get({1, 0}, forged, &view).ok());
  }
  CHECK(Load(&pool, put, handle) == 8);
  CHECK(pool.Snapshot().refused_handles >= 128 * 3);
}

void TestTheLeastImportantLosesItsLastPlane() {
  // Three entries of 8 bits in 64 tiles take 32 KiB each, and slots for metadata.
  Pool pool(WithBudget(4 * kPageNbytes));
  pool.SetImportance(0, 100.0);
  pool.SetImportance(1, 1.0);
  pool.SetImportance(2, 10000.0);
  std::vector<Put> puts;
  std::vector<Handle> handles(7);
  for (uint64_t i = 0; i < 3; ++i) puts.push_back({{1, 0}, i, {128, 8, 512}, i});
  for (size_t i = 0; i < 3; ++i) CHECK(Store(&pool, puts[i], &handles[i]).ok());
  CHECK(Load(&pool, puts[0], handles[0]) == 8);
  // A fourth, that matters more than all, takes from the second first.
  puts.push_back({{1, 0}, 3, {128, 8, 512}, 3});
  pool.SetImportance(3, 1e9);
  CHECK(Store(&pool, puts[3], &handles[3]).ok());
  CHECK_VALID(pool);
  int bits[4];
  for (size_t i = 0; i < 4; ++i) bits[i] = Load(&pool, puts[i], handles[i]);
  CHECK(bits[1] < 8);
  CHECK(bits[1] <= bits[0] && bits[0] <= bits[2]);
  CHECK(pool.Snapshot().evictions > 0 && pool.Snapshot().degraded_nbytes > 0);
}

void TestWhatNeedsAllBitsLosesThemLast() {
  Pool pool(WithBudget(4 * kPageNbytes));
  pool.SetImportance(0, 1.0);
  for (uint64_t site = 1; site < 6; ++site) pool.SetImportance(site, 1e6);
  std::vector<Put> puts = {{{1, 0}, 0, {128, 8, 512, 8}, 0}};
  for (uint64_t i = 1; i < 6; ++i) puts.push_back({{1, 0}, i, {128, 8, 512}, i});
  std::vector<Handle> handles(puts.size());
  for (size_t i = 0; i < puts.size(); ++i) CHECK(Store(&pool, puts[i], &handles[i]).ok());
  CHECK(Load(&pool, puts[0], handles[0]) == 8);
  for (size_t i = 1; i < 6; ++i) CHECK(Load(&pool, puts[i], handles[i]) < 8);
  // A target does not take them either.
  pool.SetTarget({Target::kAverageBits, 1});
  for (const int64_t run : {2, 3}) {
    for (size_t i = 0; i < 2; ++i) {
      puts[i].execution.run_id = run;
      CHECK(Store(&pool, puts[i], &handles[i]).ok());
    }
  }
  CHECK(Load(&pool, puts[0], handles[0]) == 8);
  CHECK(Load(&pool, puts[1], handles[1]) == 1);
  CHECK_VALID(pool);
}

void TestWhatDidNotFitHasFewerBitsFromTheNextExecutionOn() {
  Pool pool(WithBudget(5 * kPageNbytes));
  // 64 KiB each at 8 bits, and what exponentials are taken of.
  std::vector<Put> puts = {{{1, 0}, 0, {16, 8, 512, 8}, 0}};
  for (uint64_t i = 1; i < 9; ++i) puts.push_back({{1, 0}, i, {128, 8, 512, 4}, i});
  for (uint64_t i = 0; i < 9; ++i) pool.SetImportance(i, i % 2 == 0 ? 1e-3 : 1.0);
  std::vector<Handle> handles(puts.size());
  const auto run = [&](int64_t number) {
    std::vector<int> bits;
    for (size_t i = 0; i < puts.size(); ++i) {
      puts[i].execution.run_id = number;
      CHECK(Store(&pool, puts[i], &handles[i]).ok());
    }
    for (size_t i = 0; i < puts.size(); ++i) {
      bits.push_back(Load(&pool, puts[i], handles[i]));
    }
    CHECK_VALID(pool);
    return bits;
  };
  // All fit with the 4 bits that they ask for; with half of the budget not.
  CHECK(run(1) == std::vector<int>({8, 4, 4, 4, 4, 4, 4, 4, 4}));
  CHECK(run(2) == std::vector<int>({8, 4, 4, 4, 4, 4, 4, 4, 4}));
  CHECK(pool.Snapshot().evictions == 0);
  CHECK(pool.SetBudget(3 * kPageNbytes).ok());
  const std::vector<int> fitting = run(3);
  CHECK(fitting[0] == 8);
  for (size_t i = 1; i < 9; ++i) CHECK(fitting[i] <= 4 && fitting[i] >= 1);
  for (size_t i = 1; i < 9; i += 2) CHECK(fitting[i] >= fitting[i + 1]);
  CHECK(run(4) == fitting);
  CHECK(pool.Snapshot().evictions == 0 && pool.Snapshot().degraded_nbytes == 0);
  // What a user has set stays.
  CHECK(pool.SetBudget(3 * kPageNbytes).ok());
  CHECK(pool.SetBits(2, 8).ok());
  CHECK(run(6)[2] == 8);
  CHECK(pool.SetBits(2, 0).ok());
  CHECK(pool.SetBudget(5 * kPageNbytes).ok());
  CHECK(run(7) == std::vector<int>({8, 4, 4, 4, 4, 4, 4, 4, 4}));
  CHECK(pool.Snapshot().evictions == 0);
}

void TestWhatAsksForAllBitsSharesABudgetThatIsTooSmall() {
  Pool pool(WithBudget(5 * kPageNbytes));
  std::vector<Handle> handles(8);
  Stats before;
  for (const int64_t run : {1, 2, 3}) {
    int bits[8];
    for (uint64_t i = 0; i < 8; ++i) {
      if (run == 1) pool.SetImportance(i, i < 4 ? 1e-3 : 1.0);
      CHECK(Store(&pool, {{run, 0}, i, {128, 8, 512, 8}, i}, &handles[i]).ok());
    }
    for (uint64_t i = 0; i < 8; ++i) {
      bits[i] = Load(&pool, {{run, 0}, i, {128, 8, 512, 8}, i}, handles[i]);
    }
    CHECK_VALID(pool);
    const Stats stats = pool.Snapshot();
    // The first execution finds out; from then on nothing is lost after it was put.
    if (run == 1) CHECK(stats.evictions > 0);
    if (run > 1) {
      CHECK(stats.evictions == before.evictions);
      for (int i = 0; i < 4; ++i) CHECK(bits[i] <= bits[i + 4] && bits[i] >= 1);
      for (int i = 4; i < 8; ++i) CHECK(bits[i] >= 4);
    }
    before = stats;
  }
}

void TestTargetsThatDoNotFitTakeBitsOfWhatAsksForAll() {
  Pool pool(WithBudget(3 * kPageNbytes));
  pool.SetTarget({Target::kNbytes, 3.0 * kPageNbytes});
  std::vector<Handle> handles(8);
  int64_t evictions = 0;
  for (const int64_t run : {1, 2, 3}) {
    int bits[8];
    // The first four are what exponentials are taken of: 8 bits of these take 4 pages.
    const auto put = [&](uint64_t i) -> Put {
      return {{run, 0}, i, {128, 8, 512, i < 4 ? 8 : 0}, i};
    };
    for (uint64_t i = 0; i < 8; ++i) {
      if (run == 1) pool.SetImportance(i, 1.0);
      CHECK(Store(&pool, put(i), &handles[i]).ok());
    }
    for (uint64_t i = 0; i < 8; ++i) bits[i] = Load(&pool, put(i), handles[i]);
    CHECK_VALID(pool);
    if (run > 1) {
      CHECK(pool.Snapshot().evictions == evictions);
      for (const int b : bits) CHECK(b >= 1 && b <= 4);
    }
    evictions = pool.Snapshot().evictions;
  }
}

void TestAnUnimportantPutReducesItself() {
  Pool pool(WithBudget(2 * kPageNbytes));
  pool.SetImportance(0, 1e9);
  pool.SetImportance(1, 0.0);
  const Put first = {{1, 0}, 0, {128, 8, 512}, 1};
  const Put second = {{1, 0}, 1, {256, 8, 512}, 2};
  Handle a, b;
  int bits = -1;
  CHECK(Store(&pool, first, &a).ok());
  CHECK(Store(&pool, second, &b, &bits).ok());
  CHECK(bits < 8 && bits > 0);
  CHECK(Load(&pool, first, a) == 8 && Load(&pool, second, b) == bits);
  CHECK(pool.Snapshot().evictions == 0 && pool.Snapshot().degraded_nbytes > 0);
  CHECK_VALID(pool);
}

void TestBlockMeansAreTheLast() {
  Pool pool(WithBudget(2 * kPageNbytes));
  std::vector<Handle> handles;
  std::vector<Put> puts;
  Status status;
  // 4 KiB of metadata each.
  for (uint64_t i = 0; status.ok(); ++i) {
    CHECK(i < 100);
    puts.push_back({{1, 0}, i, {100, 8, 4096}, i});
    handles.emplace_back();
    status = Store(&pool, puts.back(), &handles.back());
    CHECK_VALID(pool);
  }
  CHECK(status.code == Code::kPoolExhausted);
  CHECK(status.message.find("budget") != std::string::npos);
  // 32 would fit if all that was left lay side by side.
  CHECK(handles.size() >= 25 && handles.size() <= 33);
  for (size_t i = 0; i + 1 < handles.size(); ++i) {
    CHECK(Load(&pool, puts[i], handles[i]) == 0);
  }
  // What cannot fit at all costs the others nothing.
  Pool whole(WithBudget(kMiB));
  Handle handle;
  const Put put = {{1, 0}, 1, {100, 8, 100}, 1};
  CHECK(Store(&whole, put, &handle).ok());
  Handle none;
  CHECK(!Store(&whole, {{1, 0}, 1, {100, 8, 2 * kMiB}, 1}, &none).ok());
  CHECK(Load(&whole, put, handle) == 8);
  CHECK(whole.Snapshot().exhausted == 1);
}

void TestPinnedEntriesLoseNothing() {
  Pool pool(WithBudget(2 * kPageNbytes));
  const Put first = {{1, 0}, 0, {128, 8, 512}, 1};
  Handle a;
  CHECK(Store(&pool, first, &a).ok());
  GetView view;
  CHECK(pool.Get({1, 0}, a, &view).ok());
  for (uint64_t i = 1; i < 20; ++i) {
    Handle b;
    CHECK(Store(&pool, {{1, 0}, i, {128, 8, 512}, i}, &b).ok());
    CHECK_VALID(pool);
  }
  // Its execution is over, and everything that can be is collected.
  Handle c;
  CHECK(Store(&pool, {{2, 0}, 1, {128, 8, 512}, 1}, &c).ok());
  pool.CollectAll();
  CHECK_VALID(pool);
  CHECK(pool.Snapshot().entries.current == 1);
  ForEachByte(view, 128, [&](const uint8_t* byte, int stream, int64_t at) {
    CHECK(*byte == ByteOf(1, stream, at));
  });
  CHECK(pool.Unpin(a).ok());
  CHECK(Load(&pool, first, a) == 8);
  pool.Collect();
  CHECK(pool.Snapshot().entries.current == 0);
  CHECK(pool.Snapshot().committed.current == 0);
  CHECK_VALID(pool);
}

void TestWhatHasBeenReadIsCollected() {
  // The last of three executions, of which two can be in flight.
  Pool pool(WithBudget(100 * kMiB, 2));
  Put puts[6];
  Handle handles[6];
  for (int64_t i = 0; i < 6; ++i) {
    puts[i] = {{i / 2, 0}, 1, {600, 4, 3000}, static_cast<uint64_t>(i)};
    CHECK(Store(&pool, puts[i], &handles[i]).ok());
  }
  const auto left = [&] {
    pool.Collect();
    CHECK_VALID(pool);
    CHECK(pool.Snapshot().entries.current == pool.Snapshot().entries_live);
    return pool.Snapshot().entries_live;
  };
  // The first execution is over.
  CHECK(left() == 4);
  // As often as its readers say; once of twice; how often is unknown; never.
  CHECK(Load(&pool, puts[2], handles[2], 1) == 4);
  CHECK(Load(&pool, puts[3], handles[3], 2) == 4);
  CHECK(Load(&pool, puts[4], handles[4]) == 4);
  // Loads free nothing.
  CHECK(pool.Snapshot().entries_live == 4 && Load(&pool, puts[2], handles[2], 1) == 4);
  CHECK(left() == 3);
  CHECK(Load(&pool, puts[2], handles[2], 1) == -1);
  for (int i = 3; i < 6; ++i) CHECK(Load(&pool, puts[i], handles[i], 9) == 4);
  CHECK(left() == 3);
  // Another kernel still reads it.
  GetView view;
  CHECK(pool.Get({2, 0}, handles[3], &view).ok());
  CHECK(Load(&pool, puts[3], handles[3], 3) == 4);
  pool.Collect();
  CHECK_VALID(pool);
  ForEachByte(view, 600, [&](const uint8_t* byte, int stream, int64_t at) {
    CHECK(*byte == ByteOf(3, stream, at));
  });
  CHECK(pool.Unpin(handles[3]).ok());
  CHECK(left() == 2);
  // What is put into its place has not been read.
  CHECK(Store(&pool, {{2, 0}, 1, {600, 4, 3000}, 7}, &handles[3]).ok());
  CHECK(left() == 3);
  // Whoever reads it where the pool does not see it says so.
  pool.MarkSpent(handles[2]);
  pool.MarkSpent(handles[4]);
  pool.MarkSpent({9999, 0, 0, 0});
  CHECK(left() == 2 && pool.Snapshot().refused_handles == 1);
}

void TestExecutionsThatAreOverAreReusedBeforeThePoolGrows() {
  Pool pool(WithBudget(100 * kMiB));
  Handle handle, last;
  Put put, last_put;
  int64_t committed = 0;
  for (int64_t run = 0; run < 100; ++run) {
    for (uint64_t i = 0; i < 20; ++i) {
      put = {{run, 0}, i, {600, 4, 3000}, i};
      CHECK(Store(&pool, put, &handle).ok());
      if (i == 0 && run > 0) {
        // It can still be read: nothing needed its pages yet.
        CHECK(Load(&pool, last_put, last) == 4);
        CHECK(pool.Snapshot().entries_live == 1);
      }
    }
    last = handle;
    last_put = put;
    if (run == 0) committed = pool.Snapshot().committed.current;
  }
  const Stats stats = pool.Snapshot();
  CHECK(stats.committed.peak <= committed + 2 * kMiB);
  CHECK(stats.evictions == 0 && stats.entries_live == 20 && stats.executions == 100);
  CHECK_VALID(pool);
  pool.Collect();
  CHECK(pool.Snapshot().entries.current == 20);
  CHECK(Load(&pool, last_put, last) == 4);
  // With two in flight, the one before the last is not over.
  Pool two(WithBudget(100 * kMiB, 2));
  std::vector<Handle> handles(4);
  for (int64_t run = 0; run < 4; ++run) {
    CHECK(Store(&two, {{run, 0}, 1, {10, 2, 8}, 1}, &handles[run]).ok());
    CHECK(two.Snapshot().entries_live == std::min<int64_t>(run + 1, 2));
  }
  two.Collect();
  for (int64_t run = 0; run < 4; ++run) {
    const Put made = {{run, 0}, 1, {10, 2, 8}, 1};
    CHECK(Load(&two, made, handles[run]) == (run < 2 ? -1 : 2));
  }
}

void TestDevicesHaveTheirOwnExecutions() {
  Pool pool(WithBudget(100 * kMiB));
  const Put on_first = {{1, 0}, 1, {10, 2, 8}, 1};
  Handle first, second;
  CHECK(Store(&pool, on_first, &first).ok());
  for (int64_t run = 2; run < 9; ++run) {
    CHECK(Store(&pool, {{run, 1}, 1, {10, 2, 8}, 1}, &second).ok());
  }
  pool.Collect();
  CHECK(Load(&pool, on_first, first) == 2);
  CHECK(pool.Snapshot().entries_live == 2);
  // An execution that comes late is over as soon as it has put.
  CHECK(Store(&pool, {{3, 1}, 1, {10, 2, 8}, 1}, &second).ok());
  CHECK(pool.Snapshot().entries_reclaimable == 1);
  CHECK_VALID(pool);
}

void TestSettingsHoldFromTheNextExecution() {
  Pool pool(WithBudget(64 * kMiB));
  Handle handle;
  int bits = 0;
  CHECK(Store(&pool, {{1, 0}, 7, {1000, 8, 8}, 1}, &handle, &bits).ok() && bits == 8);
  CHECK(pool.SetBits(7, 2).ok());
  CHECK(Store(&pool, {{1, 0}, 7, {1000, 8, 8}, 1}, &handle, &bits).ok() && bits == 8);
  CHECK(Store(&pool, {{2, 0}, 7, {1000, 8, 8}, 1}, &handle, &bits).ok() && bits == 2);
  CHECK(Store(&pool, {{2, 0}, 7, {1000, 1, 8}, 1}, &handle, &bits).ok() && bits == 1);
  CHECK(Store(&pool, {{2, 0}, 8, {1000, 7, 8}, 1}, &handle, &bits).ok() && bits == 4);
  CHECK(pool.SetBits(7, 0).ok());
  CHECK(pool.SetBudget(5 * kPageNbytes).ok());
  CHECK(pool.budget() == 5 * kPageNbytes);
  std::vector<Handle> handles(30);
  for (uint64_t i = 0; i < 30; ++i) {
    CHECK(Store(&pool, {{2, 0}, i, {1000, 8, 8}, i}, &handles[i]).ok());
  }
  CHECK(pool.Snapshot().committed.current > 5 * kPageNbytes);
  CHECK(Store(&pool, {{3, 0}, 7, {1000, 8, 8}, 1}, &handle, &bits).ok());
  CHECK(pool.Snapshot().committed.current <= 5 * kPageNbytes);
  CHECK_VALID(pool);
  // Live entries of another device lose planes when the budget falls.
  Pool wide(WithBudget(64 * kMiB));
  for (uint64_t i = 0; i < 30; ++i) {
    CHECK(Store(&wide, {{2, 0}, i, {1000, 8, 8}, i}, &handles[i]).ok());
  }
  CHECK(wide.SetBudget(30 * kPageNbytes).ok());
  CHECK(Store(&wide, {{3, 1}, 7, {1000, 8, 8}, 1}, &handle).ok());
  CHECK(wide.Snapshot().committed.current <= 30 * kPageNbytes);
  CHECK(wide.Snapshot().entries_live == 31);
  for (uint64_t i = 0; i < 30; ++i) {
    CHECK(Load(&wide, {{2, 0}, i, {1000, 8, 8}, i}, handles[i]) >= 0);
  }
  CHECK_VALID(wide);
  // And it may rise again.
  CHECK(wide.SetBudget(64 * kMiB).ok());
  CHECK(Store(&wide, {{4, 0}, 7, {30000, 8, 8}, 1}, &handle, &bits).ok() && bits == 8);
}

void TestImportances() {
  Pool pool(WithBudget(kMiB));
  Handle handle;
  CHECK(Store(&pool, {{1, 0}, 1, {10, 8, 8}, 1}, &handle).ok());
  CHECK(!pool.Snapshot().sites[1].importance_known);
  for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL, -1.0}) {
    pool.SetImportance(1, bad);
    pool.AddImportance(1, bad);
  }
  CHECK(pool.Snapshot().refused_importances == 8);
  CHECK(!pool.Snapshot().sites[1].importance_known);
  pool.AddImportance(1, 8.0);
  CHECK(pool.Snapshot().sites[1].importance == 8.0);
  pool.AddImportance(1, 16.0);
  CHECK(pool.Snapshot().sites[1].importance == 9.0);
  // Far above the mean, it counts as 8 times that.
  pool.AddImportance(1, 1e27);
  CHECK(pool.Snapshot().sites[1].importance == 9.0 + 7 * 9.0 / 8);
  pool.SetImportance(1, 0);
  pool.AddImportance(1, 80.0);
  CHECK(pool.Snapshot().sites[1].importance == 10.0);
  pool.SetImportance(1, std::numeric_limits<double>::max());
  CHECK(pool.Snapshot().sites[1].importance == std::numeric_limits<double>::max());
  CHECK(Store(&pool, {{2, 0}, 1, {10, 8, 8}, 1}, &handle).ok());
  CHECK_VALID(pool);
}

// One put after another, with everything failing in turn: a put that fails changes
// nothing that can be seen.
void TestFailingAllocations() {
  int64_t failures = 0;
  for (int64_t k = 1; k <= 2000; ++k) {
    FailingMemory memory;
    Pool pool(WithBudget(8 * kMiB, 1, &memory));
    std::vector<std::pair<Put, Handle>> kept;
    bool failed = false;
    for (uint64_t i = 0; i < 12; ++i) {
      const Put put = {{static_cast<int64_t>(i / 6), 0}, i, {100 + 40 * static_cast<int64_t>(i), 8, 700}, i};
      const Stats before = pool.Snapshot();
      Handle handle;
      PutView view;
      allocations_left = k;
      const Status status = pool.Put(put.execution, put.site, put.request, &view, &handle);
      allocations_left = 0;
      if (!status.ok()) {
        failed = true;
        CHECK(status.code == Code::kPoolExhausted && !status.message.empty());
        const Stats after = pool.Snapshot();
        CHECK(handle == Handle{} && view.num_planes == 0);
        CHECK(after.entries.current == before.entries.current);
        CHECK(after.bytes.current == before.bytes.current);
        CHECK(after.pages_used == before.pages_used);
        CHECK(after.sites.size() == before.sites.size());
        CHECK_VALID(pool);
        // The next try succeeds.
        CHECK(pool.Put(put.execution, put.site, put.request, &view, &handle).ok());
      }
      CHECK_VALID(pool);
      ForEachByte(view, put.request.num_tiles, [&](uint8_t* b, int stream, int64_t at) {
        *b = ByteOf(put.seed, stream, at);
      });
      CHECK(pool.Commit(handle).ok());
      kept.emplace_back(put, handle);
    }
    for (const auto& [put, handle] : kept) Load(&pool, put, handle);
    CHECK_VALID(pool);
    if (!failed) break;
    ++failures;
    CHECK(k < 2000);
  }
  CHECK(failures >= 5);

  // The system's memory fails from the k-th call on: entries lose planes, no more.
  for (int64_t k = 1; k <= 40; ++k) {
    FailingMemory memory;
    Pool pool(WithBudget(64 * kMiB, 1, &memory));
    memory.calls_left = k + 1;
    std::vector<std::pair<Put, Handle>> kept;
    for (uint64_t i = 0; i < 30; ++i) {
      const Put put = {{1, 0}, i, {2000, 8, 700}, i};
      Handle handle;
      const Status status = Store(&pool, put, &handle);
      if (status.ok()) kept.emplace_back(put, handle);
      CHECK(status.ok() || status.code == Code::kPoolExhausted);
      CHECK_VALID(pool);
    }
    for (const auto& [put, handle] : kept) CHECK(Load(&pool, put, handle) >= 0);
    // Without address space, or the first pages of it, there is nothing.
    CHECK((k <= 2) == kept.empty());
  }
}

// Random operations against a model that keeps what was put.
void TestRandomOperations(uint64_t seed, int64_t budget, int in_flight) {
  Pool pool(WithBudget(budget, in_flight));
  Random random(seed);
  struct Kept {
    Put put;
    Handle handle;
    int bits;
  };
  std::vector<Kept> kept;
  int64_t run = 0;
  int64_t limit = budget;
  int64_t committed = 0;
  for (int step = 0; step < 3000; ++step) {
    const int64_t what = random.Below(100);
    if (what < 45) {
      Kept entry;
      entry.put = {{run - (random.Below(10) == 0 ? 1 : 0), static_cast<int32_t>(random.Below(2))},
                   random.Next() % 16,
                   {random.Below(random.Below(20) == 0 ? 5000 : 300), 8,
                    random.Below(random.Below(20) == 0 ? 200000 : 3000)},
                   random.Next()};
      const Status status = Store(&pool, entry.put, &entry.handle, &entry.bits);
      if (status.ok()) {
        kept.push_back(entry);
      } else {
        CHECK(status.code == Code::kPoolExhausted);
      }
    } else if (what < 85) {
      if (kept.empty()) continue;
      Kept& entry = kept[static_cast<size_t>(random.Below(kept.size()))];
      const int bits = Load(&pool, entry.put, entry.handle, random.Below(4));
      CHECK(bits <= entry.bits);
      if (entry.bits >= 0 || bits < 0) entry.bits = bits;
    } else if (what < 90) {
      ++run;
    } else if (what < 92) {
      pool.SetImportance(random.Next() % 16, static_cast<double>(random.Below(1000)));
    } else if (what < 94) {
      const int choices[] = {0, 1, 2, 4, 8};
      CHECK(pool.SetBits(random.Next() % 16, choices[random.Below(5)]).ok());
    } else if (what < 96) {
      limit = budget / 4 + random.Below(budget);
      CHECK(pool.SetBudget(limit).ok());
    } else if (what < 98) {
      pool.Collect();
    } else if (what < 99) {
      PutView view;
      Handle handle;
      if (pool.Put({run, 0}, 3, {400, 8, 900}, &view, &handle).ok()) {
        CHECK_VALID(pool);
        CHECK(pool.Abort(handle).ok());
      }
    } else if (random.Below(10) == 0) {
      pool.CollectAll();
    }
    CHECK_VALID(pool);
    const Stats stats = pool.Snapshot();
    // Above a budget that fell there may be what nothing can be taken from; it shrinks.
    CHECK(stats.committed.current <= std::max({stats.budget, limit, committed}));
    committed = stats.committed.current;
  }
}

// Several threads with an execution each; meant for TSan too.
void TestThreads() {
  Pool pool(WithBudget(12 * kMiB, 8));
  std::atomic<int64_t> run{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, &run, t] {
      Random random(static_cast<uint64_t>(t));
      for (int step = 0; step < 30; ++step) {
        const Execution execution = {++run, t % 2};
        std::vector<std::pair<Put, Handle>> kept;
        for (uint64_t i = 0; i < 10; ++i) {
          const Put put = {execution, i, {random.Below(600), 8, random.Below(2000)},
                           random.Next()};
          Handle handle;
          if (Store(&pool, put, &handle).ok()) kept.emplace_back(put, handle);
        }
        for (const auto& [put, handle] : kept) Load(&pool, put, handle);
        pool.AddImportance(random.Next() % 10, 1.0);
      }
    });
  }
  std::thread reader([&pool, &stop] {
    Random random(77);
    while (!stop) {
      const Stats stats = pool.Snapshot();
      CHECK(stats.entries.current == stats.entries_live + stats.entries_reclaimable +
                                         stats.entries_writing);
      CHECK(stats.committed.current ==
            (stats.pages_used + stats.pages_free) * kPageNbytes);
      CHECK_VALID(pool);
      CHECK(pool.SetBudget((8 + random.Below(8)) * kMiB).ok());
      pool.Collect();
    }
  });
  for (std::thread& thread : threads) thread.join();
  stop = true;
  reader.join();
  CHECK_VALID(pool);
}

void TestForkedChildrenStartEmpty() {
  auto pool = std::make_shared<Pool>(WithBudget(8 * kMiB));
  CHECK(Register(HashOfName("forked"), pool));
  const Put put = {{1, 0}, 1, {100, 8, 100}, 1};
  Handle handle;
  CHECK(Store(pool.get(), put, &handle).ok());
  CHECK(pool->SetBudget(4 * kMiB).ok());
  pool->SetTarget({Target::kAverageBits, 1});
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    CHECK(FindPool(HashOfName("forked")) == pool);
    CHECK(Load(pool.get(), put, handle) == -1);
    CHECK(pool->Snapshot().entries.current == 0);
    CHECK(pool->Snapshot().budget == 4 * kMiB);
    Handle own;
    CHECK(Store(pool.get(), put, &own).ok());
    CHECK(!(own == handle));
    CHECK(Load(pool.get(), put, own) == 8);
    // The target holds, as soon as something is known to allocate for.
    pool->SetImportance(1, 1.0);
    for (const int64_t run : {2, 3}) {
      CHECK(Store(pool.get(), {{run, 0}, 1, {100, 8, 100}, 1}, &own).ok());
    }
    CHECK(Load(pool.get(), put, own) == 1);
    CHECK_VALID(*pool);
    pool.reset();
    std::_Exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(Load(pool.get(), put, handle) == 8);
}

void TestRegistry() {
  CHECK(FindPool(HashOfName("nobody")) == nullptr);
  auto pool = std::make_shared<Pool>(Options{});
  CHECK(Register(HashOfName("mine"), pool));
  CHECK(FindPool(HashOfName("mine")) == pool);
  CHECK(!Register(HashOfName("mine"), pool));
  pool.reset();
  CHECK(FindPool(HashOfName("mine")) == nullptr);
  CHECK(Register(HashOfName("mine"), std::make_shared<Pool>(Options{})));
}

void TestAll() {
  TestStreamSizes();
  TestErrorFallsConvexly();
  TestEpochs();
  TestSmallAllocator();
  TestPageAllocator();
  TestArguments();
  TestHandlesAreChecked();
  TestTheLeastImportantLosesItsLastPlane();
  TestWhatNeedsAllBitsLosesThemLast();
  TestWhatDidNotFitHasFewerBitsFromTheNextExecutionOn();
  TestWhatAsksForAllBitsSharesABudgetThatIsTooSmall();
  TestTargetsThatDoNotFitTakeBitsOfWhatAsksForAll();
  TestAnUnimportantPutReducesItself();
  TestBlockMeansAreTheLast();
  TestPinnedEntriesLoseNothing();
  TestWhatHasBeenReadIsCollected();
  TestExecutionsThatAreOverAreReusedBeforeThePoolGrows();
  TestDevicesHaveTheirOwnExecutions();
  TestSettingsHoldFromTheNextExecution();
  TestImportances();
  TestRegistry();
  TestFailingAllocations();
  for (uint64_t seed = 0; seed < 4; ++seed) {
    TestRandomOperations(seed, (2 + static_cast<int64_t>(seed)) * kMiB,
                         1 + static_cast<int>(seed % 3));
  }
  TestThreads();
  TestForkedChildrenStartEmpty();
}

}  // namespace
}  // namespace dafjax::pool

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "threads") == 0) {
    dafjax::pool::TestThreads();
  } else {
    dafjax::pool::TestAll();
  }
  return 0;
}
