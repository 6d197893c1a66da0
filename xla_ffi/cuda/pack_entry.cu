#include <cstdint>

#include "cuda/entry_pages.h"
#include "cuda/pack_launch.h"
#include "cuda/pool_kernels.h"
#include "format/affine.h"

namespace dafjax {

namespace {

template <typename Codes>
Failure PackInto(const AffineShape& shape, const Pack<Codes>& pack) {
  switch (shape.bits) {
    case 1: return PackAs<1>(shape, pack);
    case 2: return PackAs<2>(shape, pack);
    case 4: return PackAs<4>(shape, pack);
    default: return PackAs<8>(shape, pack);
  }
}

}  // namespace

Failure PackEntryOnDevice(Stream stream, const AffineShape& shape, bool stochastic,
                          const uint32_t* seed, const void* x, bool has_planes,
                          const EntryPages& pages) {
  const Pack<CodesInPages<uint16_t>> pack = {
      stream, {stochastic, seed}, InputOf(shape, x), {has_planes, pages}};
  return PackInto(shape, pack);
}

Failure QuantizeEntryOnDevice(Stream stream, const AffineShape& shape, bool stochastic,
                              const uint32_t* seed, const void* x,
                              const EntryPages& pages, uint16_t* slot) {
  const Pack<CodesInSlot> pack = {
      stream, {stochastic, seed}, InputOf(shape, x), {slot, pages}};
  return PackInto(shape, pack);
}

}  // namespace dafjax
