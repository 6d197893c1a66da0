// Reductions, by the CPU and by simulated CUDA kernels, against a loop: every strategy,
// dtype and kind of data, over rows of one part and of many.
//
//   cuda_reduce_test           one case of four
//   cuda_reduce_test all       every case
//   cuda_reduce_test orders    only many orders of few threads

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/flush_subnormals.h"
#include "cpu/reduce.h"
#include "cpu/work.h"
#include "cuda/device.h"
#include "cuda/kernels.h"
#include "format/float_type.h"
#include "format/reduction.h"
#include "simulator/grid.h"
#include "values.h"

namespace dafjax {
namespace {

constexpr Strategy kStrategies[] = {Strategy::kParallel, Strategy::kAtomic,
                                    Strategy::kHybrid};

float ValueAt(FloatType type, const uint8_t* x, int64_t index) {
  uint32_t bits = 0;
  std::memcpy(&bits, x + index * ElementNbytes(type), ElementNbytes(type));
  if (type == FloatType::kFloat32) return __uint_as_float(bits);
  return type == FloatType::kBFloat16 ? __uint_as_float(bits << 16) : WidenFloat16(bits);
}

struct Expected {
  float lo = std::numeric_limits<float>::infinity();
  float hi = -std::numeric_limits<float>::infinity();
  double sum = 0.0;
};

// Subnormals count as zero, all zeros are +0, and a NaN makes everything NaN.
Expected ExpectedOf(FloatType type, const uint8_t* x, int64_t n) {
  Expected expected;
  bool has_nan = false;
  for (int64_t i = 0; i < n; ++i) {
    float v = ValueAt(type, x, i);
    if (std::fabs(v) < std::numeric_limits<float>::min()) v = 0.0f;
    has_nan = has_nan || std::isnan(v);
    if (v < expected.lo) expected.lo = v;
    if (v > expected.hi) expected.hi = v;
    expected.sum += static_cast<double>(v) * static_cast<double>(v);
  }
  if (has_nan) expected.lo = expected.hi = std::numeric_limits<float>::quiet_NaN();
  return expected;
}

bool SameBits(float a, float b) { return __float_as_uint(a) == __float_as_uint(b); }

// Sums are of float32: beyond its range they are infinite, below it zero.
bool IsCloseTo(float sum, double expected) {
  constexpr double kMost = std::numeric_limits<float>::max();
  if (std::isnan(expected)) return std::isnan(sum);
  if (expected > 0.999 * kMost) return sum > 0.998f * static_cast<float>(kMost);
  if (expected < 1e-30) return sum < 2e-30f;
  return std::fabs(sum - expected) <= 2e-6 * expected;
}

struct Case {
  FloatType type;
  int64_t num_rows;
  int64_t row_elements;
  Kind kind;
  int64_t offset;
};

// A reduction by somebody: x, scratch, first, second.
using Reduce = std::function<void(Reduction, Strategy, const void*, uint32_t*, float*,
                                  float*)>;

void TestBy(const char* who, const Case& of, const uint8_t* x, const Reduce& reduce) {
  for (const Strategy strategy : kStrategies) {
    std::vector<uint32_t> scratch(of.num_rows * ScratchWords(of.row_elements), 0xdeadbeef);
    std::vector<float> lo(of.num_rows, -7.0f), hi(lo), sum(lo);
    reduce(Reduction::kMinMax, strategy, x, scratch.data(), lo.data(), hi.data());
    reduce(Reduction::kSumOfSquares, strategy, x, scratch.data(), sum.data(), nullptr);
    for (int64_t row = 0; row < of.num_rows; ++row) {
      const Expected expected = ExpectedOf(
          of.type, x + row * of.row_elements * ElementNbytes(of.type), of.row_elements);
      if (SameBits(lo[row], expected.lo) && SameBits(hi[row], expected.hi) &&
          IsCloseTo(sum[row], expected.sum)) {
        continue;
      }
      std::fprintf(stderr,
                   "%s: strategy %d type %d rows %d elements %d kind %d offset %d: row "
                   "%d is %g %g %g, not %g %g %g\n",
                   who, static_cast<int>(strategy), static_cast<int>(of.type),
                   static_cast<int>(of.num_rows), static_cast<int>(of.row_elements),
                   of.kind, static_cast<int>(of.offset), static_cast<int>(row), lo[row],
                   hi[row], sum[row], expected.lo, expected.hi, expected.sum);
      std::exit(1);
    }
  }
}

void Test(const Case& of, Random* random) {
  simulator::CurrentSettings().seed = random->Next();
  simulator::CurrentSettings().resident_blocks = 1 + random->Next() % 5;
  const int64_t nbytes = ElementNbytes(of.type);
  std::vector<uint8_t> values =
      MakeValues(of.kind, of.type, of.num_rows * of.row_elements, random);
  const std::vector<uint8_t> aligned(values.begin() + nbytes, values.end());
  const uint8_t* const x = of.offset == 0 ? aligned.data() : values.data() + nbytes;
  TestBy("GPU", of, x, [&](Reduction reduction, Strategy strategy, const void* data,
                           uint32_t* scratch, float* first, float* second) {
    const char* const failure =
        ReduceOnDevice(nullptr, reduction, strategy, of.type, of.num_rows,
                       of.row_elements, data, scratch, first, second);
    if (failure != nullptr) std::fprintf(stderr, "%s\n", failure);
    CHECK(failure == nullptr);
  });
  for (const int num_threads : {1, 3}) {
    TestBy("CPU", of, x, [&](Reduction reduction, Strategy strategy, const void* data,
                             uint32_t* scratch, float* first, float* second) {
      std::vector<std::thread> threads;
      const Helpers helpers = {num_threads - 1, [&](std::function<void()> task) {
                                 threads.emplace_back(std::move(task));
                               }};
      ReduceRows(reduction, strategy, of.type, of.num_rows, of.row_elements, data,
                 scratch, first, second, helpers);
      for (std::thread& thread : threads) thread.join();
    });
  }
}

// The state of a row is as it was before: a caller that keeps it need not clear it again.
void TestStateIsLeftAsItWas() {
  const std::vector<float> x(40'000, 3.0f);
  std::vector<uint32_t> scratch(ScratchWords(x.size()), 0xdeadbeef);
  float lo = 0.0f;
  float hi = 0.0f;
  for (const Strategy strategy : {Strategy::kAtomic, Strategy::kHybrid}) {
    for (const Reduction reduction : {Reduction::kMinMax, Reduction::kSumOfSquares}) {
      CHECK(ReduceOnDevice(nullptr, reduction, strategy, FloatType::kFloat32, 1,
                           static_cast<int64_t>(x.size()), x.data(), scratch.data(), &lo,
                           &hi) == nullptr);
      for (int i = 0; i < 3; ++i) CHECK(scratch[i] == 0);
    }
  }
}

// Few threads, in many orders: what the thread sanitizer is to look at.
void TestOrders(Random* random) {
  for (int order = 0; order < 15; ++order) {
    Test({FloatType::kFloat32, 1, 2 * kLeastPartElements + 1, kSmooth, 0}, random);
  }
}

int Main(const std::string& what) {
  Random random;
  TestStateIsLeftAsItWas();
  TestOrders(&random);
  if (what == "orders") return 0;
  const bool all = what == "all";
  int turn = 0;
  for (const int64_t n : {0, 1, 3, 4, 31, 1000, 4096, 8192, 8193, 16'400, 50'003}) {
    for (int kind = 0; kind < kNumKinds; ++kind) {
      for (const FloatType type : kTypes) {
        if (!all && ++turn % 4 != 0) continue;
        const int64_t num_rows = n > 10'000 ? 1 + kind % 2 : 1 + kind % 3;
        Test({type, num_rows, n, static_cast<Kind>(kind), random.Next() % 2}, &random);
      }
    }
  }
  // More bytes than one thread takes for itself.
  Test({FloatType::kFloat32, 3, 100'001, kSmooth, 0}, &random);
  Test({FloatType::kFloat32, 0, 100, kSmooth, 0}, &random);
  CHECK(ReduceOnDevice(nullptr, Reduction::kMinMax, Strategy::kHybrid, FloatType::kFloat32,
                       int64_t{1} << 32, 1, nullptr, nullptr, nullptr,
                       nullptr) != nullptr);
  return 0;
}

}  // namespace
}  // namespace dafjax

int main(int argc, char** argv) { return dafjax::Main(argc > 1 ? argv[1] : ""); }
