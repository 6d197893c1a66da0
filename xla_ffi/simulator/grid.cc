#include "simulator/grid.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cpu/flush_subnormals.h"
#include "simulator/fiber.h"
#include "simulator/shared_array.h"

namespace dafjax::simulator {
namespace {

enum class State { kReady, kAtBarrier, kInWarp, kWantsArray, kExited, kOutsideMask };

struct Block;

struct Thread {
  explicit Thread(Block* of) : block(of), fiber(&Thread::Run, this) {}
  static void Run(void* thread);

  Block* const block;
  Index index;
  unsigned number = 0;  // in the block
  State state = State::kReady;
  Site site = {"", 0};  // of what it waits for
  WarpKind kind = WarpKind::kSync;
  uint32_t mask = 0;
  uint64_t value = 0;
  unsigned source = 0;
  uint64_t result = 0;
  size_t nbytes = 0;
  void* array = nullptr;
  unsigned barriers_passed = 0;
  unsigned warp_barriers_passed = 0;
  Fiber fiber;
};

struct Block {
  Index index;
  std::deque<Thread> threads;
  std::vector<std::unique_ptr<SharedMemory>> arrays;
  size_t num_exited = 0;
  size_t num_at_barrier = 0;
  // Addresses that the sanitizer knows barriers by, in turns: a thread that comes to the
  // next one must not order those that have yet to leave this one.
  char barriers[2] = {};
  struct WarpBarriers {
    char of_all[2];
    char of_some;  // lanes: those that meet differ, so that there are no turns
  };
  std::vector<WarpBarriers> warps;
};

std::string Describe(Site site) {
  std::string file = site.file;
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(site.line);
}

std::string Describe(Index index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
         std::to_string(index.z) + ")";
}

bool Same(Site a, Site b) { return a.line == b.line && std::string(a.file) == b.file; }

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}
  // Below `count`. splitmix64.
  size_t Below(size_t count) {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return static_cast<size_t>((z ^ z >> 31) % count);
  }

 private:
  uint64_t state_;
};

// One launch.
class Grid {
 public:
  Grid(Index grid, Index block, const std::function<void()>& body)
      : dimensions(grid), block_dimensions(block), kernel(body) {}

  // Returns what went wrong, or nothing.
  std::string RunAll();

  const Index dimensions;
  const Index block_dimensions;
  const std::function<void()>& kernel;
  Thread* current = nullptr;
  char start = 0;   // what orders what the grid has done before what threads do,
  char finish = 0;  // what they have done before what follows the launch,
  char fences = 0;  // and what they do among them where there are fences
  Random random{CurrentSettings().seed};

 private:
  void StartBlock(Index index);
  void FinishBlock(Block* block);
  void Step();
  void MakeReady(Thread* thread);
  void ArriveAtBarrier(Thread* thread);
  void ArriveInWarp(Thread* thread);
  void GiveArray(Thread* thread);
  void DescribeStandstill();
  void Fail(const Block& block, const std::string& message);

  std::vector<std::unique_ptr<Block>> blocks_;  // resident ones
  std::vector<Thread*> ready_;
  std::string error_;
};

Grid* running = nullptr;
std::mutex lock;  // XLA calls handlers from several threads

void Thread::Run(void* thread) {
  Acquire(&running->start);
  running->kernel();
  Release(&running->finish);
  static_cast<Thread*>(thread)->state = State::kExited;
}

void Grid::Fail(const Block& block, const std::string& message) {
  if (error_.empty()) {
    error_ = "simulator: block " + Describe(block.index) + ": " + message;
  }
}

void Grid::StartBlock(Index index) {
  blocks_.push_back(std::make_unique<Block>());
  Block* const block = blocks_.back().get();
  block->index = index;
  const Index size = block_dimensions;
  for (unsigned z = 0; z < size.z; ++z) {
    for (unsigned y = 0; y < size.y; ++y) {
      for (unsigned x = 0; x < size.x; ++x) {
        Thread& thread = block->threads.emplace_back(block);
        thread.index = {x, y, z};
        thread.number = static_cast<unsigned>(block->threads.size() - 1);
        ready_.push_back(&thread);
      }
    }
  }
  block->warps.resize((block->threads.size() + kWarpThreads - 1) / kWarpThreads);
  Release(&start);
}

void Grid::FinishBlock(Block* block) {
  for (const auto& array : block->arrays) {
    if (!array->HasIntactMargins()) {
      Fail(*block, "a write beyond the shared array of " + Describe(array->site()) +
                       " (" + std::to_string(array->nbytes()) + " bytes).");
    }
  }
  for (auto& other : blocks_) {
    if (other.get() != block) continue;
    other = std::move(blocks_.back());
    blocks_.pop_back();
    return;
  }
}

void Grid::MakeReady(Thread* thread) {
  thread->state = State::kReady;
  ready_.push_back(thread);
}

void Grid::ArriveAtBarrier(Thread* thread) {
  Block* const block = thread->block;
  if (++block->num_at_barrier < block->threads.size()) return;
  block->num_at_barrier = 0;
  for (Thread& other : block->threads) {
    if (!Same(other.site, thread->site)) {
      Fail(*block, "threads meet at different barriers, " + Describe(thread->site) +
                       " and " + Describe(other.site) + ".");
    }
    MakeReady(&other);
  }
}

uint64_t Combined(WarpKind kind, uint64_t a, uint64_t b) {
  const auto signed_a = static_cast<int32_t>(a);
  const auto signed_b = static_cast<int32_t>(b);
  switch (kind) {
    case WarpKind::kSum: return static_cast<uint32_t>(a + b);
    case WarpKind::kLeast: return a < b ? a : b;
    case WarpKind::kGreatest: return a > b ? a : b;
    case WarpKind::kLeastSigned: return signed_a < signed_b ? a : b;
    case WarpKind::kGreatestSigned: return signed_a > signed_b ? a : b;
    case WarpKind::kAnd: return a & b;
    case WarpKind::kOr: return a | b;
    default: return a ^ b;
  }
}

void Grid::ArriveInWarp(Thread* thread) {
  Block* const block = thread->block;
  const unsigned first = thread->number / kWarpThreads * kWarpThreads;
  std::vector<Thread*> lanes;
  for (unsigned lane = 0; lane < kWarpThreads; ++lane) {
    if ((thread->mask >> lane & 1) == 0) continue;
    // Lanes that are not there never arrive.
    if (first + lane >= block->threads.size()) return;
    Thread* const other = &block->threads[first + lane];
    if (other->state != State::kInWarp || other->mask != thread->mask ||
        other->kind != thread->kind || !Same(other->site, thread->site)) {
      return;
    }
    lanes.push_back(other);
  }
  uint64_t combined = lanes.front()->value;
  uint32_t ballot = 0;
  for (Thread* other : lanes) {
    if (other != lanes.front()) combined = Combined(thread->kind, combined, other->value);
    if (other->value != 0) ballot |= uint32_t{1} << other->number % kWarpThreads;
  }
  for (Thread* other : lanes) {
    other->result = thread->kind == WarpKind::kBallot ? ballot : combined;
    if (thread->kind == WarpKind::kShuffle) {
      if (other->source >= kWarpThreads || (thread->mask >> other->source & 1) == 0) {
        Fail(*block, "thread " + Describe(other->index) + " reads lane " +
                         std::to_string(other->source) + " at " +
                         Describe(other->site) + ", which takes no part.");
        other->source = other->number % kWarpThreads;
      }
      other->result = block->threads[first + other->source].value;
    }
  }
  for (Thread* other : lanes) MakeReady(other);
}

void Grid::GiveArray(Thread* thread) {
  Block* const block = thread->block;
  thread->array = nullptr;
  for (const auto& array : block->arrays) {
    if (Same(array->site(), thread->site)) thread->array = array->data();
  }
  if (thread->array == nullptr) {
    block->arrays.push_back(
        std::make_unique<SharedMemory>(thread->nbytes, thread->site));
    thread->array = block->arrays.back()->data();
  }
  Release(&start);
  MakeReady(thread);
}

// Runs one thread until it has to wait.
void Grid::Step() {
  const size_t pick = random.Below(ready_.size());
  Thread* const thread = ready_[pick];
  ready_[pick] = ready_.back();
  ready_.pop_back();
  current = thread;
  thread->fiber.Enter();
  current = nullptr;
  switch (thread->state) {
    case State::kReady: ready_.push_back(thread); break;
    case State::kAtBarrier: ArriveAtBarrier(thread); break;
    case State::kInWarp: ArriveInWarp(thread); break;
    case State::kWantsArray: GiveArray(thread); break;
    case State::kOutsideMask:
      Fail(*thread->block, "thread " + Describe(thread->index) +
                               " is not in the mask of its own warp operation at " +
                               Describe(thread->site) + ".");
      break;
    case State::kExited: {
      Block* const block = thread->block;
      if (++block->num_exited == block->threads.size()) FinishBlock(block);
      break;
    }
  }
}

void Grid::DescribeStandstill() {
  const Block& block = *blocks_.front();
  size_t at_barrier = 0;
  size_t in_warp = 0;
  std::string where;
  for (const Thread& thread : block.threads) {
    if (thread.state == State::kExited) continue;
    (thread.state == State::kAtBarrier ? at_barrier : in_warp) += 1;
    const std::string place = Describe(thread.site);
    if (where.find(place) == std::string::npos) where += ", " + place;
  }
  Fail(block, "threads never meet: of " + std::to_string(block.threads.size()) + ", " +
                  std::to_string(at_barrier) + " wait at a barrier, " +
                  std::to_string(in_warp) + " in a warp operation, and " +
                  std::to_string(block.num_exited) + " have returned" + where + ".");
}

std::string Grid::RunAll() {
  const uint64_t count = uint64_t{dimensions.x} * dimensions.y * dimensions.z;
  const size_t resident = CurrentSettings().resident_blocks;
  uint64_t next = 0;
  // Blocks start in any order: from a random one on, up or down.
  const uint64_t origin = random.Below(count);
  const bool down = random.Below(2) == 1;
  while (error_.empty() && (next < count || !blocks_.empty())) {
    while (next < count && blocks_.size() < resident) {
      const uint64_t turn = down ? count - 1 - next : next;
      const uint64_t b = (origin + turn) % count;
      ++next;
      StartBlock({static_cast<unsigned>(b % dimensions.x),
                  static_cast<unsigned>(b / dimensions.x % dimensions.y),
                  static_cast<unsigned>(b / dimensions.x / dimensions.y)});
    }
    if (ready_.empty()) {
      DescribeStandstill();
    } else {
      Step();
    }
  }
  Acquire(&finish);
  return error_;
}

// Gives control back to the grid, until it is this thread's turn.
void Wait(Thread* thread, State state, Site site) {
  thread->state = state;
  thread->site = site;
  thread->fiber.Leave(false);
}

}  // namespace

Settings& CurrentSettings() {
  static Settings settings;
  return settings;
}

const char* Run(Index grid, Index block, const std::function<void()>& kernel) {
  static thread_local std::string error;
  const std::lock_guard<std::mutex> guard(lock);
  const FlushSubnormals flush;  // device code is compiled so
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0 ||
      threads > kMaxBlockThreads || grid.x > 0x7fffffff || grid.y > 0xffff ||
      grid.z > 0xffff) {
    error = "simulator: a grid of " + Describe(grid) + " blocks of " + Describe(block) +
            " threads cannot be launched.";
    return error.c_str();
  }
  {
    Grid launch(grid, block, kernel);
    running = &launch;
    error = launch.RunAll();
    running = nullptr;
  }
  Fiber::EndLaunch();
  return error.empty() ? nullptr : error.c_str();
}

Index ThreadIndex() { return running->current->index; }
Index BlockIndex() { return running->current->block->index; }
Index BlockDimensions() { return running->block_dimensions; }
Index GridDimensions() { return running->dimensions; }
unsigned Lane() { return running->current->number % kWarpThreads; }

// Now and then for long: what is rare on a device is to happen here.
void TakeTurns() {
  Thread* const thread = running->current;
  for (size_t turns = size_t{1} << running->random.Below(7); turns > 0; --turns) {
    Wait(thread, State::kReady, {"", 0});
  }
}

void SyncBlock(Site site) {
  Thread* const thread = running->current;
  char* const barrier = &thread->block->barriers[thread->barriers_passed++ % 2];
  Release(barrier);
  Wait(thread, State::kAtBarrier, site);
  Acquire(barrier);
}

void Fence() {
  Release(&running->fences);
  Acquire(&running->fences);
}

void* SharedArray(size_t nbytes, Site site) {
  Thread* const thread = running->current;
  thread->nbytes = nbytes;
  Wait(thread, State::kWantsArray, site);
  Acquire(&running->start);
  return thread->array;
}

uint64_t WarpOperation(WarpKind kind, uint32_t mask, uint64_t value, unsigned source,
                       Site site) {
  Thread* const thread = running->current;
  const unsigned lane = thread->number % kWarpThreads;
  if ((mask >> lane & 1) == 0) {
    Wait(thread, State::kOutsideMask, site);  // and never goes on
  }
  thread->kind = kind;
  thread->mask = mask;
  thread->value = value;
  thread->source = source;
  if (kind != WarpKind::kSync) {
    Wait(thread, State::kInWarp, site);
    return thread->result;
  }
  Block::WarpBarriers& warp = thread->block->warps[thread->number / kWarpThreads];
  char* const barrier = mask == 0xffffffff
                            ? &warp.of_all[thread->warp_barriers_passed++ % 2]
                            : &warp.of_some;
  Release(barrier);
  Wait(thread, State::kInWarp, site);
  Acquire(barrier);
  return 0;
}

}  // namespace dafjax::simulator
