// What CUB takes for the least and the greatest value of an array, in one pass.
//
//   nvcc -O3 -arch=native cub.cu -o cub && ./cub > cub.json

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cub/device/device_reduce.cuh>
#include <limits>
#include <vector>

namespace {

void Check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

struct Extremes {
  float lo, hi;
};

struct Extend {
  __host__ __device__ Extremes operator()(const Extremes& a, const Extremes& b) const {
    return {a.lo < b.lo ? a.lo : b.lo, a.hi > b.hi ? a.hi : b.hi};
  }
};

struct Widen {
  __host__ __device__ Extremes operator()(float v) const { return {v, v}; }
};

constexpr int kLaunches = 32;

}  // namespace

int main() {
  constexpr int64_t kMostElements = int64_t{1} << 26;
  std::vector<float> values(kMostElements);
  for (int64_t i = 0; i < kMostElements; ++i) {
    values[i] = static_cast<float>(i * 2654435761u % 1000003);
  }
  float* x = nullptr;
  Extremes* out = nullptr;
  Check(cudaMalloc(&x, kMostElements * sizeof(float)));
  Check(cudaMalloc(&out, sizeof(Extremes)));
  Check(cudaMemcpy(x, values.data(), kMostElements * sizeof(float),
                   cudaMemcpyHostToDevice));
  const Extremes start = {std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()};
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin));
  Check(cudaEventCreate(&end));
  std::printf("{\"cub\": [");
  for (int log2 = 14; log2 <= 26; log2 += 2) {
    const int64_t n = int64_t{1} << log2;
    size_t nbytes = 0;
    void* scratch = nullptr;
    Check(cub::DeviceReduce::TransformReduce(scratch, nbytes, x, out, n, Extend{},
                                             Widen{}, start));
    Check(cudaMalloc(&scratch, nbytes));
    float best = std::numeric_limits<float>::infinity();
    for (int round = 0; round < 15; ++round) {
      Check(cudaEventRecord(begin));
      for (int i = 0; i < kLaunches; ++i) {
        Check(cub::DeviceReduce::TransformReduce(scratch, nbytes, x, out, n, Extend{},
                                                 Widen{}, start));
      }
      Check(cudaEventRecord(end));
      Check(cudaEventSynchronize(end));
      float milliseconds = 0;
      Check(cudaEventElapsedTime(&milliseconds, begin, end));
      if (milliseconds < best) best = milliseconds;
    }
    Check(cudaFree(scratch));
    const double seconds = best / 1e3 / kLaunches;
    std::printf("%s\n {\"elements\": %lld, \"seconds\": %.3e, "
                "\"gigabytes_per_second\": %.1f}",
                log2 == 14 ? "" : ",", static_cast<long long>(n), seconds,
                4.0 * static_cast<double>(n) / 1e9 / seconds);
  }
  std::printf("\n]}\n");
  return 0;
}
