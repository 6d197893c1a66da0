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
#include "format/noise.h"
#include "format/packed.h"

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
