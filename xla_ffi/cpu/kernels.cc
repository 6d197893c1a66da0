#include "cpu/kernels.h"

#include <cstdint>
#include <cstring>
#include <limits>

#include "cpu/instruction_sets.h"
#include "format/affine.h"
#include "format/columns.h"
#include "format/noise.h"
#include "format/packed.h"

// Tests that need bytes, not speed, define DAFJAX_ONLY_SCALAR: it compiles faster.
#if defined(DAFJAX_ONLY_SCALAR)
#elif defined(__x86_64__)
#define DAFJAX_HAS_AVX
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#define DAFJAX_HAS_NEON
#include <arm_neon.h>
#endif

// One translation unit holds all instruction sets, and what it defines for one of them
// has internal linkage: no linker can take the AVX-512 copy of a function for all.
#define INLINE [[maybe_unused]] inline __attribute__((always_inline))

namespace dafjax {
namespace {

namespace scalar {
constexpr int kBlockWidth = 4;
#include "cpu/float_math.inc"
#include "cpu/isa/scalar.inc"
#include "cpu/kernels.inc"
}  // namespace scalar

#if defined(DAFJAX_HAS_AVX)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace avx2 {
constexpr int kBlockWidth = 8;
#include "cpu/float_math.inc"
#include "cpu/isa/avx2.inc"
#include "cpu/kernels.inc"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(                                                    \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), \
    apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif
namespace avx512 {
constexpr int kBlockWidth = 8;
#include "cpu/float_math.inc"
#include "cpu/isa/avx512.inc"
#include "cpu/kernels.inc"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

bool HasF16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && HasF16c();
}

bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

#elif defined(DAFJAX_HAS_NEON)

namespace neon {
constexpr int kBlockWidth = 4;
#include "cpu/float_math.inc"
#include "cpu/isa/neon.inc"
#include "cpu/kernels.inc"
}  // namespace neon

#endif

std::vector<const Kernels*> FindInstructionSets() {
  std::vector<const Kernels*> sets;
#if defined(DAFJAX_HAS_AVX)
  if (HasAvx512()) sets.push_back(&avx512::kKernels);
  if (HasAvx2()) sets.push_back(&avx2::kKernels);
#elif defined(DAFJAX_HAS_NEON)
  sets.push_back(&neon::kKernels);
#endif
  sets.push_back(&scalar::kKernels);
  return sets;
}

// Chosen when the library loads.
const std::vector<const Kernels*> instruction_sets = FindInstructionSets();

}  // namespace

const std::vector<const Kernels*>& InstructionSets() { return instruction_sets; }

const Kernels& BestKernels() { return *instruction_sets.front(); }

}  // namespace dafjax
