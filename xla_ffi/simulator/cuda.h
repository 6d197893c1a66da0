#ifndef DAFJAX_SIMULATOR_CUDA_H_
#define DAFJAX_SIMULATOR_CUDA_H_

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "simulator/grid.h"
#include "simulator/runtime.h"

// The part of CUDA that kernels of this project use, under CUDA's own names, for g++. The
// thread sanitizer must see what is in this file, and must not see what is in grid.cc.

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  return {x, y, z, w};
}

#define threadIdx (::dafjax::simulator::ThreadIndex())
#define blockIdx (::dafjax::simulator::BlockIndex())
#define blockDim (::dafjax::simulator::BlockDimensions())
#define gridDim (::dafjax::simulator::GridDimensions())

// A default argument: the line of the call.
#define DAFJAX_HERE \
  const ::dafjax::simulator::Site site = {__builtin_FILE(), __builtin_LINE()}

inline void __syncthreads(DAFJAX_HERE) { ::dafjax::simulator::SyncBlock(site); }

inline void __threadfence() { ::dafjax::simulator::Fence(); }

inline void __syncwarp(uint32_t mask = 0xffffffff, DAFJAX_HERE) {
  ::dafjax::simulator::WarpOperation(::dafjax::simulator::WarpKind::kSync, mask, 0, 0,
                                     site);
}

template <typename T>
inline T __shfl_sync(uint32_t mask, T value, int source, DAFJAX_HERE) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = ::dafjax::simulator::WarpOperation(::dafjax::simulator::WarpKind::kShuffle, mask,
                                            bits, static_cast<unsigned>(source) % 32,
                                            site);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

template <typename T>
inline T __shfl_xor_sync(uint32_t mask, T value, int lanes, DAFJAX_HERE) {
  const unsigned source = ::dafjax::simulator::Lane() ^ static_cast<unsigned>(lanes);
  return __shfl_sync(mask, value, static_cast<int>(source), site);
}

// Lanes whose source would be beyond the warp keep their own value.
template <typename T>
inline T __shfl_down_sync(uint32_t mask, T value, unsigned lanes, DAFJAX_HERE) {
  const unsigned lane = ::dafjax::simulator::Lane();
  const unsigned source = lane + lanes < 32 ? lane + lanes : lane;
  return __shfl_sync(mask, value, static_cast<int>(source), site);
}

inline uint32_t __ballot_sync(uint32_t mask, int condition, DAFJAX_HERE) {
  return static_cast<uint32_t>(::dafjax::simulator::WarpOperation(
      ::dafjax::simulator::WarpKind::kBallot, mask, condition != 0, 0, site));
}

inline int __any_sync(uint32_t mask, int condition, DAFJAX_HERE) {
  return __ballot_sync(mask, condition, site) != 0;
}

inline int __all_sync(uint32_t mask, int condition, DAFJAX_HERE) {
  return __ballot_sync(mask, condition, site) == mask;
}

#define DAFJAX_WARP_REDUCTION(name, type, kind)                                     \
  inline type name(uint32_t mask, type value, DAFJAX_HERE) {                        \
    return static_cast<type>(::dafjax::simulator::WarpOperation(                    \
        ::dafjax::simulator::WarpKind::kind, mask, static_cast<uint32_t>(value), 0, \
        site));                                                                     \
  }
DAFJAX_WARP_REDUCTION(__reduce_add_sync, uint32_t, kSum)
DAFJAX_WARP_REDUCTION(__reduce_min_sync, uint32_t, kLeast)
DAFJAX_WARP_REDUCTION(__reduce_max_sync, uint32_t, kGreatest)
DAFJAX_WARP_REDUCTION(__reduce_min_sync, int32_t, kLeastSigned)
DAFJAX_WARP_REDUCTION(__reduce_max_sync, int32_t, kGreatestSigned)
DAFJAX_WARP_REDUCTION(__reduce_and_sync, uint32_t, kAnd)
DAFJAX_WARP_REDUCTION(__reduce_or_sync, uint32_t, kOr)
DAFJAX_WARP_REDUCTION(__reduce_xor_sync, uint32_t, kXor)
#undef DAFJAX_WARP_REDUCTION
#undef DAFJAX_HERE

// Atomics order nothing, as in CUDA; they return what was there before. Others may come in
// between an atomic and what is before and after it, such as a fence.
namespace dafjax::simulator {

template <typename T, typename Change>
T ChangeAtomically(T* place, const Change& change) {
  TakeTurns();
  T before = __atomic_load_n(place, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(place, &before, change(before), true,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  TakeTurns();
  return before;
}

}  // namespace dafjax::simulator

inline uint32_t atomicAdd(uint32_t* place, uint32_t value) {
  return ::dafjax::simulator::ChangeAtomically(
      place, [=](uint32_t v) { return v + value; });
}

inline float atomicAdd(float* place, float value) {
  const uint32_t before = ::dafjax::simulator::ChangeAtomically(
      reinterpret_cast<uint32_t*>(place), [=](uint32_t v) {
        return __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, v) + value);
      });
  return __builtin_bit_cast(float, before);
}

inline uint32_t atomicMin(uint32_t* place, uint32_t value) {
  return ::dafjax::simulator::ChangeAtomically(
      place, [=](uint32_t v) { return v < value ? v : value; });
}

inline uint32_t atomicMax(uint32_t* place, uint32_t value) {
  return ::dafjax::simulator::ChangeAtomically(
      place, [=](uint32_t v) { return v > value ? v : value; });
}

inline uint32_t atomicOr(uint32_t* place, uint32_t value) {
  return ::dafjax::simulator::ChangeAtomically(
      place, [=](uint32_t v) { return v | value; });
}

inline uint32_t atomicExch(uint32_t* place, uint32_t value) {
  return ::dafjax::simulator::ChangeAtomically(place, [=](uint32_t) { return value; });
}

// Adds one, and goes from `last` to 0.
inline uint32_t atomicInc(uint32_t* place, uint32_t last) {
  return ::dafjax::simulator::ChangeAtomically(
      place, [=](uint32_t v) { return v >= last ? 0 : v + 1; });
}

inline uint32_t __float_as_uint(float v) { return __builtin_bit_cast(uint32_t, v); }
inline float __uint_as_float(uint32_t v) { return __builtin_bit_cast(float, v); }
inline float __fdiv_rn(float a, float b) { return a / b; }

// Towards zero; too large values, and negative ones, give the nearest uint32, NaN gives 0.
inline uint32_t __float2uint_rz(float v) {
  if (!(v > 0.0f)) return 0;
  return v < 0x1p32f ? static_cast<uint32_t>(v) : 0xffffffff;
}

inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}

// The halves of `a` times the two lowest bytes of `b`, added to `c`.
inline uint32_t __dp2a_lo(uint32_t a, uint32_t b, uint32_t c) {
  return (a & 0xffff) * (b & 0xff) + (a >> 16) * (b >> 8 & 0xff) + c;
}

// Bytes of `y:x`, picked by the four lowest hexadecimal digits of `selector`.
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t place = selector >> 4 * i & 7;
    picked |= static_cast<uint32_t>(bytes >> 8 * place & 0xff) << 8 * i;
  }
  return picked;
}

// The first bit that is set, counted from the top; 32 if none is.
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v)); }

// Orders memory for the host, too.
inline void __threadfence_system() { ::dafjax::simulator::Fence(); }

#endif  // DAFJAX_SIMULATOR_CUDA_H_
