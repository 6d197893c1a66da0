#ifndef DAFJAX_CUDA_DEVICE_H_
#define DAFJAX_CUDA_DEVICE_H_

#include <cstdint>

// What kernels are written in: CUDA C++ where nvcc compiles, and where g++ does, the same
// names out of the simulator (simulator/cuda.h). Kernels use no CUB, no cooperative groups
// and no PTX but for what CUDA C++ has no name for (MinOrNan, below), and declare shared
// arrays and launches with the macros below. Device code is compiled with -ftz=true:
// subnormals count as zero, as on CPUs (README.md section 2).
#if defined(__CUDACC__)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define DAFJAX_DEVICE __device__ __forceinline__
#define DAFJAX_KERNEL(...) __global__ void __launch_bounds__(__VA_ARGS__)
// Of so many registers, whatever the number of threads, which is `threads` at most.
#if CUDART_VERSION >= 12040
#define DAFJAX_KERNEL_OF_REGISTERS(threads, registers) \
  __global__ void __maxnreg__(registers)
#else
#define DAFJAX_KERNEL_OF_REGISTERS(threads, registers) DAFJAX_KERNEL(threads)
#endif
#define DAFJAX_UNROLL _Pragma("unroll")
#define DAFJAX_NO_UNROLL _Pragma("unroll 1")
#define DAFJAX_SHARED(type, name, count) __shared__ type name[count]
#define DAFJAX_LAUNCH(kernel, blocks, threads, stream, ...)         \
  (kernel<<<(blocks), (threads), 0, (stream)>>>(__VA_ARGS__),       \
   ::dafjax::WhatFailed(cudaGetLastError()))

#else

#include <tuple>

#include "simulator/cuda.h"

// Arguments are what they are when the kernel is enqueued, as in CUDA.
#define DAFJAX_DEVICE inline
#define DAFJAX_KERNEL(...) void
#define DAFJAX_KERNEL_OF_REGISTERS(threads, registers) void
#define DAFJAX_UNROLL
#define DAFJAX_NO_UNROLL
#define DAFJAX_SHARED(type, name, count)                                             \
  type* const name = static_cast<type*>(::dafjax::simulator::SharedArray(           \
      sizeof(type) * (count), {__FILE__, __LINE__}))
#define DAFJAX_LAUNCH(kernel, blocks, threads, stream, ...)                         \
  ::dafjax::simulator::Launch((stream), {static_cast<unsigned>(blocks), 1, 1},      \
                              {static_cast<unsigned>(threads), 1, 1},               \
                              [values = std::make_tuple(__VA_ARGS__)] {             \
                                std::apply([](auto... v) { kernel(v...); }, values); \
                              })

#endif

namespace dafjax {

inline constexpr int kWarpLanes = 32;
inline constexpr uint32_t kAllLanes = 0xffffffff;

// Null, or what went wrong: told here, and not by the next launch again.
inline const char* WhatFailed(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  static_cast<void>(cudaGetLastError());
  return cudaGetErrorString(error);
}

#if defined(__CUDACC__)

DAFJAX_DEVICE __nv_bfloat162 TwoBFloat16(uint32_t bits) {
  __nv_bfloat162 two;
  memcpy(&two, &bits, sizeof two);
  return two;
}
DAFJAX_DEVICE uint32_t BitsOf(__nv_bfloat162 two) {
  uint32_t bits;
  memcpy(&bits, &two, sizeof bits);
  return bits;
}

// The lesser; NaN if either is.
DAFJAX_DEVICE float MinOrNan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float least;
  asm("min.ftz.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
#else
  return a != a ? a : b != b ? b : fminf(a, b);
#endif
}

// Of the lower and of the upper halves; subnormals are not zero.
DAFJAX_DEVICE uint32_t MinOrNanOfTwoBFloat16(uint32_t a, uint32_t b) {
  return BitsOf(__hmin2_nan(TwoBFloat16(a), TwoBFloat16(b)));
}
// The greater; the other one if one is NaN.
DAFJAX_DEVICE uint32_t MaxOfTwoBFloat16(uint32_t a, uint32_t b) {
  return BitsOf(__hmax2(TwoBFloat16(a), TwoBFloat16(b)));
}

DAFJAX_DEVICE float WidenFloat16(uint32_t v) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(v)));
}

// To nearest, ties to even. `v` is finite.
DAFJAX_DEVICE uint32_t RoundToFloat16(float v) {
  return __half_as_ushort(__float2half_rn(v));
}
DAFJAX_DEVICE uint32_t RoundToBFloat16(float v) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(v));
}

// Two at a time, the first one in the lower half: one instruction since sm_80.
DAFJAX_DEVICE uint32_t RoundTwoToFloat16(float lower, float upper) {
  const __half2 two = __floats2half2_rn(lower, upper);
  return uint32_t{__half_as_ushort(__low2half(two))} |
         uint32_t{__half_as_ushort(__high2half(two))} << 16;
}
DAFJAX_DEVICE uint32_t RoundTwoToBFloat16(float lower, float upper) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(lower, upper);
  return uint32_t{__bfloat16_as_ushort(__low2bfloat16(two))} |
         uint32_t{__bfloat16_as_ushort(__high2bfloat16(two))} << 16;
}

#else

inline float MinOrNan(float a, float b) {
  return a != a ? a : b != b ? b : fminf(a, b);
}

inline uint32_t MinOrNanOfTwoBFloat16(uint32_t a, uint32_t b) {
  const float lower = MinOrNan(__uint_as_float(a << 16), __uint_as_float(b << 16));
  const float upper =
      MinOrNan(__uint_as_float(a & 0xffff0000), __uint_as_float(b & 0xffff0000));
  return __float_as_uint(upper) | __float_as_uint(lower) >> 16;
}
inline uint32_t MaxOfTwoBFloat16(uint32_t a, uint32_t b) {
  const float lower = fmaxf(__uint_as_float(a << 16), __uint_as_float(b << 16));
  const float upper =
      fmaxf(__uint_as_float(a & 0xffff0000), __uint_as_float(b & 0xffff0000));
  return __float_as_uint(upper) | __float_as_uint(lower) >> 16;
}

inline float WidenFloat16(uint32_t v) {
  const uint32_t sign = (v & 0x8000) << 16;
  const uint32_t magnitude = v & 0x7fff;
  if (magnitude >= 0x7c00) return __uint_as_float(sign | 0x70000000 | magnitude << 13);
  // A subnormal is a multiple of 2^-24.
  const float normal = __uint_as_float((magnitude << 13) + 0x38000000);
  const float value =
      magnitude < 0x400 ? static_cast<float>(magnitude) * 0x1p-24f : normal;
  return __uint_as_float(sign | __float_as_uint(value));
}

// To nearest, ties to even. `v` is finite.
inline uint32_t RoundToBFloat16(float v) {
  const uint32_t bits = __float_as_uint(v);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Through float64, where the last place of a half is one of 2^53, and the addition rounds.
inline uint32_t RoundToFloat16(float v) {
  const uint32_t sign = __float_as_uint(v) >> 16 & 0x8000;
  const double magnitude = std::fabs(static_cast<double>(v));
  if (magnitude >= 65520.0) return sign | 0x7c00;
  int exponent = magnitude == 0.0 ? -14 : std::ilogb(magnitude);
  if (exponent < -14) exponent = -14;
  const double ulp = std::ldexp(1.0, exponent - 10);
  const double steps = std::nearbyint(magnitude / ulp);
  // Up to 1024 steps count on from the subnormals; 1024 .. 2048 are those of the exponent.
  return sign + static_cast<uint32_t>((exponent + 14) * 1024) +
         static_cast<uint32_t>(steps);
}

inline uint32_t RoundTwoToFloat16(float lower, float upper) {
  return RoundToFloat16(lower) | RoundToFloat16(upper) << 16;
}
inline uint32_t RoundTwoToBFloat16(float lower, float upper) {
  return RoundToBFloat16(lower) | RoundToBFloat16(upper) << 16;
}

#endif

}  // namespace dafjax

#endif  // DAFJAX_CUDA_DEVICE_H_
