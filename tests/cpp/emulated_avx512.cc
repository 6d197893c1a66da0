// The AVX-512 kernels with SIMDe in place of the processor's instructions, so that their
// logic is tested on machines that have no AVX-512.

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include <cstdint>
#include <cstring>
#include <limits>

#include "cpu/kernels.h"
#include "format/affine.h"
#include "format/columns.h"
#include "format/noise.h"
#include "format/packed.h"

// What SIMDe 0.7.4 lacks, by halves.
namespace {

using Half = simde__m256i;

inline simde__m512i Join(Half low, Half high) {
  return simde_mm512_inserti64x4(simde_mm512_castsi256_si512(low), high, 1);
}
inline Half Low(simde__m512i v) { return simde_mm512_castsi512_si256(v); }
inline Half High(simde__m512i v) { return simde_mm512_extracti64x4_epi64(v, 1); }
inline simde__m512 JoinFloats(simde__m256 low, simde__m256 high) {
  return simde_mm512_castsi512_ps(
      Join(simde_mm256_castps_si256(low), simde_mm256_castps_si256(high)));
}
inline simde__m256 LowFloats(simde__m512 v) { return simde_mm512_castps512_ps256(v); }
inline simde__m256 HighFloats(simde__m512 v) {
  return simde_mm256_castsi256_ps(High(simde_mm512_castps_si512(v)));
}
inline simde__m128i Low(Half v) { return simde_mm256_castsi256_si128(v); }
inline simde__m128i High(Half v) { return simde_mm256_extracti128_si256(v, 1); }

inline simde__m512i CvtU16(Half v) {
  return Join(simde_mm256_cvtepu16_epi32(Low(v)), simde_mm256_cvtepu16_epi32(High(v)));
}
inline simde__m512i CvtU8(Half v) {
  return Join(simde_mm256_cvtepu8_epi16(Low(v)), simde_mm256_cvtepu8_epi16(High(v)));
}
inline simde__m512 CvtHalf(Half v) {
  return JoinFloats(simde_mm256_cvtph_ps(Low(v)), simde_mm256_cvtph_ps(High(v)));
}
inline Half CvtToHalf(simde__m512 v, int rounding) {
  return simde_mm256_set_m128i(simde_mm256_cvtps_ph(HighFloats(v), rounding),
                               simde_mm256_cvtps_ph(LowFloats(v), rounding));
}
inline Half Narrow(simde__m512i v) {
  simde__m512i_private words = simde__m512i_to_private(v);
  simde__m256i_private narrow = simde__m256i_to_private(simde_mm256_setzero_si256());
  for (int i = 0; i < 16; ++i) narrow.i16[i] = static_cast<int16_t>(words.i32[i]);
  return simde__m256i_from_private(narrow);
}
// SIMDe's own conversion is undefined for what does not fit.
inline simde__m512i Truncate(simde__m512 v) {
  simde__m512_private floats = simde__m512_to_private(v);
  simde__m512i_private ints = simde__m512i_to_private(simde_mm512_setzero_si512());
  for (int i = 0; i < 16; ++i) {
    const float f = floats.f32[i];
    ints.i32[i] = f >= -0x1p31f && f < 0x1p31f ? static_cast<int32_t>(f) : INT32_MIN;
  }
  return simde__m512i_from_private(ints);
}
inline simde__m512 ToFloats(simde__m512i v) {
  return JoinFloats(simde_mm256_cvtepi32_ps(Low(v)), simde_mm256_cvtepi32_ps(High(v)));
}
// SIMDe rounds the product too, and it may overflow. float64 holds it: float_math.inc.
inline simde__m512 FusedMulAdd(simde__m512 v, simde__m512 factor, simde__m512 acc) {
  const simde__m512_private a = simde__m512_to_private(v);
  const simde__m512_private b = simde__m512_to_private(factor);
  simde__m512_private sum = simde__m512_to_private(acc);
  for (int i = 0; i < 16; ++i) {
    sum.f32[i] = static_cast<float>(static_cast<double>(a.f32[i]) * b.f32[i] +
                                    static_cast<double>(sum.f32[i]));
  }
  return simde__m512_from_private(sum);
}

}  // namespace

#undef _mm512_fmadd_ps
#define _mm512_fmadd_ps FusedMulAdd
#define _mm512_cvtepu16_epi32 CvtU16
#define _mm512_cvtepu8_epi16 CvtU8
#define _mm512_cvtph_ps CvtHalf
#define _mm512_cvtps_ph CvtToHalf
#define _mm512_cvtepi32_epi16 Narrow
#define _mm512_cvttps_epi32 Truncate
#define _mm512_cvtepi32_ps ToFloats
#define _mm512_extractf32x8_ps(v, half) HighFloats(v)
#ifndef _MM_FROUND_NO_EXC
#define _MM_FROUND_NO_EXC SIMDE_MM_FROUND_NO_EXC
#define _MM_FROUND_TO_NEAREST_INT SIMDE_MM_FROUND_TO_NEAREST_INT
#endif

#define INLINE [[maybe_unused]] inline __attribute__((always_inline))

namespace dafjax {
namespace {
namespace emulated {
constexpr int kBlockWidth = 4;
#include "cpu/float_math.inc"
#include "cpu/isa/avx512.inc"
#include "cpu/kernels.inc"
}  // namespace emulated
}  // namespace

const Kernels& EmulatedAvx512Kernels() {
  static const Kernels kernels = [] {
    Kernels named = emulated::kKernels;
    named.name = "emulated avx512";
    return named;
  }();
  return kernels;
}

}  // namespace dafjax
