#ifndef DAFJAX_CUDA_REDUCE_H_
#define DAFJAX_CUDA_REDUCE_H_

#include <cstdint>

#include "cuda/device.h"
#include "cuda/tile_values.h"
#include "format/reduction.h"

namespace dafjax {

inline constexpr int kReduceThreads = 256;
inline constexpr int kReduceWarps = kReduceThreads / kWarpLanes;

// The order of uint32 that is the order of floats: NaN is not among them.
DAFJAX_DEVICE uint32_t KeyOf(float v) {
  const uint32_t bits = __float_as_uint(v);
  return (bits & 0x80000000) != 0 ? ~bits : bits | 0x80000000;
}

// Of a key; the greatest and the least uint32 are keys of none, and give NaN. Zeros become
// +0, and subnormals too.
DAFJAX_DEVICE float ValueOf(uint32_t key) {
  if (key == 0 || key == 0xffffffff) return __uint_as_float(0x7fc00000);
  const uint32_t bits = (key & 0x80000000) != 0 ? key & 0x7fffffff : ~key;
  return __uint_as_float(bits) + 0.0f;
}

// What a part of a row comes to, in two words that are combined word by word. Zeros are
// neutral, so that the state of a row is all zeros before and after a reduction.

// The complement of the least key and the greatest key: of both the greatest counts, and
// that of NaN is greater than all.
struct MinMaxOfPart {
  static DAFJAX_DEVICE MinMaxOfPart Start() {
    return {__uint_as_float(0x7f800000), __uint_as_float(0xff800000), false};
  }
  DAFJAX_DEVICE void Add(float v) {
    lo = fminf(lo, v);
    hi = fmaxf(hi, v);
    has_nan = has_nan || v != v;
  }
  DAFJAX_DEVICE uint2 Words() const {
    return has_nan ? make_uint2(0xffffffff, 0xffffffff)
                   : make_uint2(~KeyOf(lo), KeyOf(hi));
  }
  static DAFJAX_DEVICE uint2 Combine(uint2 a, uint2 b) {
    return make_uint2(a.x > b.x ? a.x : b.x, a.y > b.y ? a.y : b.y);
  }
  static DAFJAX_DEVICE void CombineAtomically(uint32_t* state, uint2 words) {
    atomicMax(state, words.x);
    atomicMax(state + 1, words.y);
  }
  static DAFJAX_DEVICE void Store(uint2 words, int64_t row, float* first,
                                  float* second) {
    first[row] = ValueOf(~words.x);
    second[row] = ValueOf(words.y);
  }

  float lo, hi;  // but for NaN
  bool has_nan;
};

struct SumOfSquaresOfPart {
  static DAFJAX_DEVICE SumOfSquaresOfPart Start() { return {0.0f}; }
  DAFJAX_DEVICE void Add(float v) { sum = fmaf(v, v, sum); }
  DAFJAX_DEVICE uint2 Words() const { return make_uint2(__float_as_uint(sum), 0); }
  static DAFJAX_DEVICE uint2 Combine(uint2 a, uint2 b) {
    return make_uint2(__float_as_uint(__uint_as_float(a.x) + __uint_as_float(b.x)), 0);
  }
  // In any order: the last bits of the result may differ from call to call.
  static DAFJAX_DEVICE void CombineAtomically(uint32_t* state, uint2 words) {
    atomicAdd(reinterpret_cast<float*>(state), __uint_as_float(words.x));
  }
  static DAFJAX_DEVICE void Store(uint2 words, int64_t row, float* first, float*) {
    first[row] = __uint_as_float(words.x);
  }

  float sum;
};

struct ReduceJob {
  ConstFloatArray x;
  int64_t row_elements;
  int64_t num_parts;  // of a row
  uint32_t* states;   // [num_rows][kStateWords], zeros
  uint32_t* parts;    // [num_rows][num_parts][kPartWords]
  float* first;       // [num_rows]
  float* second;
};

template <typename Part>
DAFJAX_DEVICE uint2 CombineWarp(uint2 words) {
  DAFJAX_UNROLL
  for (int step = kWarpLanes / 2; step > 0; step /= 2) {
    const uint2 other = make_uint2(__shfl_xor_sync(kAllLanes, words.x, step),
                                   __shfl_xor_sync(kAllLanes, words.y, step));
    words = Part::Combine(words, other);
  }
  return words;
}

// Reduces what the threads of a launch block have of the row's elements: every
// `num_parts`-th stretch of them, several loads at a time.
template <typename Part>
DAFJAX_DEVICE uint2 ReduceOwnElements(const ReduceJob& job, int64_t row, int64_t part) {
  constexpr int kLoads = 4;
  constexpr int64_t kStretch = int64_t{kReduceThreads} * kThreadLanes * kLoads;
  const ConstFloatArray x = job.x.From(row * job.row_elements);
  const int64_t n = job.row_elements;
  Part sum = Part::Start();
  DAFJAX_NO_UNROLL
  for (int64_t begin = part * kStretch; begin < n; begin += job.num_parts * kStretch) {
    const int64_t first = begin + static_cast<int>(threadIdx.x) * kThreadLanes;
    if (x.aligned && begin + kStretch <= n) {
      float v[kLoads][kThreadLanes];
      DAFJAX_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        LoadFour(x, first + i * kReduceThreads * kThreadLanes, v[i]);
      }
      DAFJAX_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        DAFJAX_UNROLL
        for (int j = 0; j < kThreadLanes; ++j) sum.Add(v[i][j]);
      }
      continue;
    }
    DAFJAX_NO_UNROLL
    for (int i = 0; i < kThreadLanes * kLoads; ++i) {
      const int64_t e = begin + static_cast<int>(threadIdx.x) + i * kReduceThreads;
      if (e < n) sum.Add(LoadValue(x, e));
    }
  }
  return sum.Words();
}

// Combines the parts of a row, always in the same order. Of one warp.
template <typename Part>
DAFJAX_DEVICE void CombineParts(const ReduceJob& job, int64_t row, int lane) {
  const uint32_t* const parts = job.parts + row * job.num_parts * kPartWords;
  uint2 words = make_uint2(0, 0);
  DAFJAX_NO_UNROLL
  for (int64_t p = lane; p < job.num_parts; p += kWarpLanes) {
    words = Part::Combine(words,
                          make_uint2(parts[p * kPartWords], parts[p * kPartWords + 1]));
  }
  words = CombineWarp<Part>(words);
  if (lane == 0) Part::Store(words, row, job.first, job.second);
}

DAFJAX_DEVICE void StorePart(const ReduceJob& job, int64_t row, int64_t part,
                             uint2 words) {
  uint32_t* const place = job.parts + (row * job.num_parts + part) * kPartWords;
  place[0] = words.x;
  place[1] = words.y;
}

// kOrdered: blocks leave their parts, and the last one combines them. Otherwise they, or
// their warps, change the row's state atomically.
template <typename Part, Strategy kStrategy, bool kOrdered>
DAFJAX_KERNEL(kReduceThreads)
ReduceKernel(const ReduceJob job) {
  DAFJAX_SHARED(uint32_t, shared_first, kReduceWarps);
  DAFJAX_SHARED(uint32_t, shared_second, kReduceWarps);
  DAFJAX_SHARED(uint32_t, shared_is_last, 1);
  const int lane = static_cast<int>(threadIdx.x % kWarpLanes);
  const int warp = static_cast<int>(threadIdx.x / kWarpLanes);
  const int64_t row = blockIdx.x / job.num_parts;
  const int64_t part = blockIdx.x % job.num_parts;
  uint32_t* const state = job.states + row * kStateWords;

  uint2 words = CombineWarp<Part>(ReduceOwnElements<Part>(job, row, part));
  if constexpr (kStrategy == Strategy::kAtomic) {
    if (lane == 0) {
      Part::CombineAtomically(state, words);
      __threadfence();
    }
    __syncthreads();
  } else {
    if (lane == 0) {
      shared_first[warp] = words.x;
      shared_second[warp] = words.y;
    }
    __syncthreads();
    if (warp == 0) {
      words = make_uint2(lane < kReduceWarps ? shared_first[lane] : 0,
                         lane < kReduceWarps ? shared_second[lane] : 0);
      words = CombineWarp<Part>(words);
    }
  }
  if constexpr (kStrategy == Strategy::kParallel) {
    if (threadIdx.x != 0) return;
    if (job.num_parts == 1) {
      Part::Store(words, row, job.first, job.second);
    } else {
      StorePart(job, row, part, words);
    }
    return;
  }

  if (threadIdx.x == 0) {
    if constexpr (kOrdered) {
      StorePart(job, row, part, words);
    } else if constexpr (kStrategy == Strategy::kHybrid) {
      Part::CombineAtomically(state, words);
    }
    __threadfence();
    const uint32_t last = static_cast<uint32_t>(job.num_parts - 1);
    // The ticket goes back to 0 by itself.
    shared_is_last[0] = atomicInc(state + 2, last) == last ? 1 : 0;
    __threadfence();
  }
  __syncthreads();
  if (shared_is_last[0] == 0 || warp != 0) return;
  if constexpr (kOrdered) {
    CombineParts<Part>(job, row, lane);
  } else if (lane == 0) {
    const uint32_t first = atomicExch(state, 0u);
    const uint32_t second = atomicExch(state + 1, 0u);
    Part::Store(make_uint2(first, second), row, job.first, job.second);
  }
}

// After ReduceKernel with Strategy::kParallel, if a row has several parts: a warp for each
// row.
template <typename Part>
DAFJAX_KERNEL(kWarpLanes)
CombineKernel(const ReduceJob job) {
  CombineParts<Part>(job, blockIdx.x, static_cast<int>(threadIdx.x));
}

}  // namespace dafjax

#endif  // DAFJAX_CUDA_REDUCE_H_
