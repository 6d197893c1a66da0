#ifndef DAFJAX_SIMULATOR_GRID_H_
#define DAFJAX_SIMULATOR_GRID_H_

#include <cstddef>
#include <cstdint>
#include <functional>

namespace dafjax::simulator {

inline constexpr unsigned kWarpThreads = 32;
inline constexpr unsigned kMaxBlockThreads = 1024;

// A place in a grid or a block, or how large it is.
struct Index {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

// Where an operation stands in the source: threads that meet must meet at the same one.
struct Site {
  const char* file;
  int line;
};

struct Settings {
  uint64_t seed = 1;             // of the order in which threads and blocks take turns
  unsigned resident_blocks = 3;  // so many blocks run interleaved
};

// Of launches from now on. One thread only, while nothing is launched.
Settings& CurrentSettings();

// Runs `kernel` once for each thread of each block, until all have returned. Returns null,
// or what the threads did wrong, which holds until this thread's next launch. What is
// found: threads that wait for each other and never meet, warp operations that read lanes
// which take no part, writes beyond shared arrays. Out-of-bounds accesses, and accesses
// that nothing orders, are for the address and the thread sanitizer to find.
const char* Run(Index grid, Index block, const std::function<void()>& kernel);

// What follows is called by the threads of a running kernel.
Index ThreadIndex();
Index BlockIndex();
Index BlockDimensions();
Index GridDimensions();

// Lets others go first, or not: where the order of threads may matter.
void TakeTurns();

// Waits for all threads of the block, and orders memory among them.
void SyncBlock(Site site);

// Orders what this thread did before among all that fences order.
void Fence();

// The block's array of this site, the same for all its threads. Holds garbage at first.
void* SharedArray(size_t nbytes, Site site);

enum class WarpKind {
  kSync,     // orders memory among the lanes; all others do not
  kShuffle,  // the value of lane `source`
  kBallot,   // the lanes whose value is not 0
  kSum,
  kLeast,
  kGreatest,
  kLeastSigned,
  kGreatestSigned,
  kAnd,
  kOr,
  kXor
};

// Waits until all lanes in `mask` are at this operation; then each gets its result.
uint64_t WarpOperation(WarpKind kind, uint32_t mask, uint64_t value, unsigned source,
                       Site site);

// This thread's lane in its warp.
unsigned Lane();

}  // namespace dafjax::simulator

#endif  // DAFJAX_SIMULATOR_GRID_H_
