// The simulator of the CUDA model: that correct kernels run and give what they should, and
// that it notices kernels that are wrong.
//
//   simulator_test        everything that must work
//   simulator_test BUG    a kernel with a bug; fails if the bug is found

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "simulator/grid.h"
#include "values.h"

namespace dafjax {
namespace {

constexpr int kThreads = 96;
constexpr int kBlocks = 7;

void ExpectLaunched(const char* failure) {
  if (failure == nullptr) return;
  std::fprintf(stderr, "%s\n", failure);
  std::exit(1);
}

void ExpectFailure(const char* failure, const char* part) {
  CHECK(failure != nullptr);
  if (std::strstr(failure, part) == nullptr) {
    std::fprintf(stderr, "%s\nhas no \"%s\"\n", failure, part);
    std::exit(1);
  }
}

DAFJAX_KERNEL(1) CountKernel(uint32_t* count) { ++*count; }

// What is the device's is there for kernels and copies, and not for the host.
void TestDeviceMemory(bool by_host) {
  void* data = nullptr;
  CHECK(cudaMalloc(&data, 8) == cudaSuccess);
  uint32_t* const count = static_cast<uint32_t*>(data);
  CHECK(cudaMemsetAsync(count, 0, 8, nullptr) == cudaSuccess);
  ExpectLaunched(DAFJAX_LAUNCH(CountKernel, 1, 1, nullptr, count));
  uint32_t found = 0;
  CHECK(cudaMemcpyAsync(&found, count, 4, cudaMemcpyDeviceToHost, nullptr) ==
        cudaSuccess);
  CHECK(found == 1);
  if (by_host) CHECK(*count == 1);
  CHECK(cudaFree(data) == cudaSuccess);
  CHECK(cudaFree(&found) != cudaSuccess);
}

// Every thread gives its number to the one before it, through shared memory.
template <bool kWithBarrier>
DAFJAX_KERNEL(kThreads)
RotateKernel(uint32_t* out) {
  DAFJAX_SHARED(uint32_t, numbers, kThreads);
  numbers[threadIdx.x] = threadIdx.x;
  if (kWithBarrier) __syncthreads();
  out[blockIdx.x * kThreads + threadIdx.x] = numbers[(threadIdx.x + 1) % kThreads];
}

void TestRotate(bool with_barrier) {
  std::vector<uint32_t> out(kBlocks * kThreads);
  ExpectLaunched(
      with_barrier
          ? DAFJAX_LAUNCH(RotateKernel<true>, kBlocks, kThreads, nullptr, out.data())
          : DAFJAX_LAUNCH(RotateKernel<false>, kBlocks, kThreads, nullptr, out.data()));
  for (uint32_t i = 0; i < out.size(); ++i) {
    CHECK(out[i] == (i % kThreads + 1) % kThreads);
  }
}

// The sum of all numbers below n: partial sums of blocks, which the last one to finish
// adds up, and leaves the ticket as it was.
template <bool kWithFence>
DAFJAX_KERNEL(kThreads)
LastBlockKernel(uint32_t n, uint32_t* parts, uint32_t* ticket, uint32_t* out) {
  DAFJAX_SHARED(uint32_t, warp_sums, kThreads / kWarpLanes);
  DAFJAX_SHARED(uint32_t, is_last, 1);
  uint32_t sum = 0;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < n;
       i += gridDim.x * kThreads) {
    sum += i;
  }
  for (int step = 16; step > 0; step /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, step);
  }
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = warp_sums[0] + warp_sums[1] + warp_sums[2];
    if (kWithFence) __threadfence();
    is_last[0] = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (is_last[0] == 0 || threadIdx.x != 0) return;
  uint32_t total = 0;
  for (uint32_t b = 0; b < gridDim.x; ++b) total += parts[b];
  *out = total;
}

void TestLastBlock(bool with_fence) {
  std::vector<uint32_t> parts(kBlocks, 0xdead);
  uint32_t ticket = 0;
  uint32_t out = 0;
  for (int repeat = 0; repeat < 20; ++repeat) {
    simulator::CurrentSettings().seed += 1;
    ExpectLaunched(with_fence
                       ? DAFJAX_LAUNCH(LastBlockKernel<true>, kBlocks, kThreads, nullptr,
                                       1000u, parts.data(), &ticket, &out)
                       : DAFJAX_LAUNCH(LastBlockKernel<false>, kBlocks, kThreads, nullptr,
                                       1000u, parts.data(), &ticket, &out));
    CHECK(out == 499500 && ticket == 0);
  }
}

template <bool kAtomic>
DAFJAX_KERNEL(kThreads)
CountKernel(uint32_t* count, uint32_t* least, uint32_t* greatest) {
  if (kAtomic) {
    atomicAdd(count, 1u);
    atomicMin(least, 100 + threadIdx.x);
    atomicMax(greatest, 100 + threadIdx.x);
  } else {
    *count += 1;
  }
}

void TestCount(bool atomic) {
  uint32_t count = 0;
  uint32_t least = 0xffffffff;
  uint32_t greatest = 0;
  if (atomic) {
    ExpectLaunched(DAFJAX_LAUNCH(CountKernel<true>, kBlocks, kThreads, nullptr, &count,
                                 &least, &greatest));
    CHECK(least == 100 && greatest == 99 + kThreads);
  } else {
    ExpectLaunched(DAFJAX_LAUNCH(CountKernel<false>, kBlocks, kThreads, nullptr, &count,
                                 &least, &greatest));
  }
  CHECK(count == kBlocks * kThreads);
}

// The last launch block has fewer elements than threads.
template <bool kInBounds>
DAFJAX_KERNEL(kThreads)
FillKernel(uint32_t* out, uint32_t n) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (!kInBounds || i < n) out[i] = i;
}

void TestFill(bool in_bounds) {
  constexpr uint32_t kCount = 3 * kThreads - 1;
  const std::unique_ptr<uint32_t[]> out(new uint32_t[kCount]);
  ExpectLaunched(
      in_bounds
          ? DAFJAX_LAUNCH(FillKernel<true>, 3, kThreads, nullptr, out.get(), kCount)
          : DAFJAX_LAUNCH(FillKernel<false>, 3, kThreads, nullptr, out.get(), kCount));
  for (uint32_t i = 0; i < kCount; ++i) CHECK(out[i] == i);
}

// Writes to the `extra`-th element beyond a shared array.
DAFJAX_KERNEL(kThreads)
SharedKernel(uint32_t* out, int extra) {
  DAFJAX_SHARED(uint32_t, numbers, kThreads);
  numbers[static_cast<int>(threadIdx.x) + extra] = 1;
  __syncthreads();
  out[threadIdx.x] = numbers[threadIdx.x];
}

void TestShared(int extra) {
  std::vector<uint32_t> out(kThreads);
  ExpectLaunched(DAFJAX_LAUNCH(SharedKernel, 1, kThreads, nullptr, out.data(), extra));
}

DAFJAX_KERNEL(32) ReadGarbageKernel(uint32_t* out) {
  DAFJAX_SHARED(uint32_t, numbers, 32);
  out[threadIdx.x] = numbers[threadIdx.x];
}

void TestGarbage() {
  std::vector<uint32_t> out(32, 0);
  ExpectLaunched(DAFJAX_LAUNCH(ReadGarbageKernel, 1, 32, nullptr, out.data()));
  for (const uint32_t v : out) CHECK(v != 0 && v != 0xffffffff);
}

// A shuffle makes lanes meet, but orders no memory; __syncwarp() does.
template <bool kSync>
DAFJAX_KERNEL(32)
WarpOrderKernel(uint32_t* out) {
  DAFJAX_SHARED(uint32_t, numbers, 32);
  numbers[threadIdx.x] = threadIdx.x;
  const uint32_t other = __shfl_xor_sync(kAllLanes, threadIdx.x, 1);
  if (kSync) __syncwarp();
  out[threadIdx.x] = numbers[other];
}

void TestWarpOrder(bool sync) {
  std::vector<uint32_t> out(32);
  ExpectLaunched(
      sync ? DAFJAX_LAUNCH(WarpOrderKernel<true>, 1, 32, nullptr, out.data())
           : DAFJAX_LAUNCH(WarpOrderKernel<false>, 1, 32, nullptr, out.data()));
  for (uint32_t i = 0; i < 32; ++i) CHECK(out[i] == (i ^ 1));
}

// A barrier between two uses of an array is needed, too.
template <bool kWithBarrier>
DAFJAX_KERNEL(kThreads)
ReuseKernel(uint32_t* out) {
  DAFJAX_SHARED(uint32_t, numbers, kThreads);
  uint32_t sum = 0;
  for (uint32_t turn = 0; turn < 4; ++turn) {
    numbers[threadIdx.x] = turn;
    __syncthreads();
    sum += numbers[(threadIdx.x + turn) % kThreads];
    if (kWithBarrier) __syncthreads();
  }
  out[threadIdx.x] = sum;
}

void TestReuse(bool with_barrier) {
  std::vector<uint32_t> out(kThreads);
  ExpectLaunched(with_barrier ? DAFJAX_LAUNCH(ReuseKernel<true>, 1, kThreads, nullptr,
                                              out.data())
                              : DAFJAX_LAUNCH(ReuseKernel<false>, 1, kThreads, nullptr,
                                              out.data()));
  for (const uint32_t v : out) CHECK(v == 6);
}

// What a warp can do, lane by lane.
DAFJAX_KERNEL(64) WarpKernel(uint32_t* failures) {
  const uint32_t lane = threadIdx.x % 32;
  const int number = static_cast<int>(lane) - 16;
  bool good = __shfl_sync(kAllLanes, lane, 5) == 5;
  good = good && __shfl_xor_sync(kAllLanes, 1.5f * static_cast<float>(lane), 3) ==
                     1.5f * static_cast<float>(lane ^ 3);
  good = good && __shfl_down_sync(kAllLanes, lane, 8) == (lane < 24 ? lane + 8 : lane);
  good = good && __shfl_sync(kAllLanes, uint64_t{lane} << 40, 9) == uint64_t{9} << 40;
  good = good && __ballot_sync(kAllLanes, lane % 2) == 0xaaaaaaaa;
  good = good && __any_sync(kAllLanes, lane == 7) && !__any_sync(kAllLanes, lane == 32);
  good = good && __all_sync(kAllLanes, lane < 32) && !__all_sync(kAllLanes, lane < 31);
  good = good && __reduce_add_sync(kAllLanes, lane) == 496;
  good = good && __reduce_min_sync(kAllLanes, lane + 3) == 3;
  good = good && __reduce_max_sync(kAllLanes, lane + 3) == 34;
  good = good && __reduce_min_sync(kAllLanes, number) == -16;
  good = good && __reduce_max_sync(kAllLanes, number) == 15;
  good = good && __reduce_or_sync(kAllLanes, 1u << lane) == 0xffffffff;
  good = good && __reduce_and_sync(kAllLanes, ~(1u << lane)) == 0;
  good = good && __reduce_xor_sync(kAllLanes, lane) == 0;
  // Two parts of a warp, each on its own.
  if (lane < 10) {
    good = good && __reduce_add_sync(0x3ffu, 1u) == 10;
  } else {
    good = good && __reduce_add_sync(~0x3ffu, 1u) == 22;
  }
  __syncwarp();
  if (!good) atomicAdd(failures, 1u);
}

void TestWarps() {
  uint32_t failures = 0;
  ExpectLaunched(DAFJAX_LAUNCH(WarpKernel, 2, 64, nullptr, &failures));
  CHECK(failures == 0);
}

void TestIndices() {
  const simulator::Index grid = {3, 2, 2};
  const simulator::Index block = {4, 3, 5};
  std::vector<uint32_t> visits(3 * 2 * 2 * 4 * 3 * 5, 0);
  ExpectLaunched(simulator::Run(grid, block, [&] {
    const uint32_t b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const uint32_t t =
        (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    visits[b * 60 + t] += 1;
  }));
  for (const uint32_t v : visits) CHECK(v == 1);
  ExpectFailure(simulator::Run({0, 1, 1}, {1, 1, 1}, [] {}), "cannot be launched");
  ExpectFailure(simulator::Run({1, 1, 1}, {1025, 1, 1}, [] {}), "cannot be launched");
}

// The order in which threads come depends on the seed alone.
void TestOrders() {
  std::set<std::vector<uint32_t>> orders;
  for (int turn = 0; turn < 20; ++turn) {
    simulator::CurrentSettings().seed = static_cast<uint64_t>(turn / 2);
    std::vector<uint32_t> order(10);
    uint32_t next = 0;
    ExpectLaunched(simulator::Run({5, 1, 1}, {2, 1, 1}, [&] {
      order[atomicAdd(&next, 1u)] = blockIdx.x * 2 + threadIdx.x;
    }));
    orders.insert(order);
  }
  CHECK(orders.size() == 10);
}

void TestIntrinsics() {
  CHECK(__float2uint_rz(-1.0f) == 0 && __float2uint_rz(1.99f) == 1);
  CHECK(__float2uint_rz(__uint_as_float(0x7fc00000)) == 0);
  CHECK(__float2uint_rz(1e20f) == 0xffffffff);
  CHECK(__byte_perm(0x03020100, 0x07060504, 0x5140) == 0x05010400);
  CHECK(WidenFloat16(0x3c00) == 1.0f && WidenFloat16(0x8001) == -0x1p-24f);
  CHECK(std::isinf(WidenFloat16(0x7c00)) && std::isnan(WidenFloat16(0x7e00)));
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    if ((bits & 0x7c00) == 0x7c00) continue;
    CHECK(RoundToFloat16(WidenFloat16(bits)) == bits);
  }
  CHECK(RoundToFloat16(65519.0f) == 0x7bff && RoundToFloat16(65520.0f) == 0x7c00);
  CHECK(RoundToFloat16(1.0f + 0x1p-11f) == 0x3c00);
  CHECK(RoundToFloat16(1.0f + 0x3p-11f) == 0x3c02);
  CHECK(RoundToFloat16(0x1p-25f) == 0 && RoundToFloat16(0x3p-25f) == 2);
  CHECK(RoundToBFloat16(1.0f + 0x1p-8f) == 0x3f80);
}

// Each of these is found by the simulator itself.

DAFJAX_KERNEL(64) BranchKernel() {
  if (threadIdx.x < 33) __syncthreads();
}

DAFJAX_KERNEL(64) TwoBarriersKernel() {
  if (threadIdx.x < 33) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

DAFJAX_KERNEL(64) DivergedKernel() {
  if (threadIdx.x != 5) __shfl_sync(kAllLanes, 1, 0);
  __syncthreads();
}

DAFJAX_KERNEL(32) AbsentLaneKernel() {
  if (threadIdx.x < 16) __shfl_sync(0xffff, 1, static_cast<int>(threadIdx.x) + 1);
}

DAFJAX_KERNEL(32) OwnMaskKernel() { __ballot_sync(0x7fffffff, 1); }

void TestComplaints() {
  ExpectFailure(DAFJAX_LAUNCH(BranchKernel, 2, 64, nullptr),
                "of 64, 33 wait at a barrier, 0 in a warp operation, and 31 have ret");
  ExpectFailure(DAFJAX_LAUNCH(TwoBarriersKernel, 1, 64, nullptr), "different barriers");
  ExpectFailure(DAFJAX_LAUNCH(DivergedKernel, 1, 64, nullptr),
                "33 wait at a barrier, 31 in a warp operation, and 0 have returned");
  ExpectFailure(DAFJAX_LAUNCH(AbsentLaneKernel, 1, 32, nullptr),
                "reads lane 16 at simulator_test.cc");
  ExpectFailure(DAFJAX_LAUNCH(OwnMaskKernel, 1, 32, nullptr),
                "thread (31, 0, 0) is not in the mask");
  // And what comes afterwards is not affected.
  TestRotate(true);
}

struct Bug {
  const char* name;
  void (*run)();
};

constexpr Bug kBugs[] = {
    {"missing_barrier", [] { TestRotate(false); }},
    {"missing_second_barrier", [] { TestReuse(false); }},
    {"missing_fence", [] { TestLastBlock(false); }},
    {"update_that_is_not_atomic", [] { TestCount(false); }},
    {"global_overrun", [] { TestFill(false); }},
    {"shared_overrun", [] { TestShared(1); }},
    {"shared_underrun", [] { TestShared(-1); }},
    {"host_reads_memory_of_the_device", [] { TestDeviceMemory(true); }},
    {"shuffle_taken_for_a_barrier", [] { TestWarpOrder(false); }},
};

int Main(int argc, char** argv) {
  if (argc > 1) {
    for (const Bug& bug : kBugs) {
      if (std::strcmp(bug.name, argv[1]) != 0) continue;
      bug.run();
      return 0;
    }
    std::fprintf(stderr, "no bug is called %s\n", argv[1]);
    return 2;
  }
  TestIntrinsics();
  TestDeviceMemory(false);
  TestIndices();
  TestWarps();
  TestOrders();
  TestGarbage();
  for (const unsigned resident : {1, 2, 7}) {
    simulator::CurrentSettings().resident_blocks = resident;
    TestRotate(true);
    TestLastBlock(true);
    TestCount(true);
    TestFill(true);
    TestShared(0);
    TestWarpOrder(true);
    TestReuse(true);
  }
  TestComplaints();
  return 0;
}

}  // namespace
}  // namespace dafjax

int main(int argc, char** argv) { return dafjax::Main(argc, argv); }
