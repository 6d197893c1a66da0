#include "cpu/batch.h"

#include <atomic>
#include <cstdint>
#include <functional>

#include "cpu/flush_subnormals.h"
#include "cpu/huge_pages.h"
#include "cpu/kernels.h"
#include "cpu/work.h"
#include "format/affine.h"
#include "format/packed.h"

namespace dafjax {
namespace {

// Bytes of unpacked data: a piece is long enough to hide what claiming it costs, and
// less than four of them are not worth waking a thread for.
constexpr int64_t kPieceNbytes = int64_t{1} << 18;
constexpr int64_t kParallelNbytes = int64_t{1} << 20;

// Calls `groups(first, last)` for stretches of the groups of all rows.
void ForGroups(int64_t num_rows, int64_t row_elements, int64_t element_nbytes,
               const Helpers& helpers,
               const std::function<void(int64_t, int64_t)>& groups) {
  const int64_t count = num_rows * NumGroups(row_elements);
  const int64_t per_piece = kPieceNbytes / (kGroupElements * element_nbytes);
  const bool parallel = num_rows * row_elements * element_nbytes >= kParallelNbytes;
  const auto piece = [=](int64_t i) {
    const FlushSubnormals flush;
    const int64_t first = i * per_piece;
    groups(first, first + per_piece < count ? first + per_piece : count);
  };
  RunInPieces(CeilDiv(count, per_piece), parallel ? helpers : Helpers{}, piece);
}

}  // namespace

void PackAffine(const Kernels& kernels, const AffineShape& shape,
                const Rounding& rounding, const void* x, const AffineCodes& packed,
                const Helpers& helpers) {
  const auto pack = kernels.pack_affine;
  ForGroups(shape.num_rows, shape.row_elements, ElementNbytes(shape.type), helpers,
            [=](int64_t first, int64_t last) {
              pack(shape, rounding, x, packed, first, last);
            });
}

void UnpackAffine(const Kernels& kernels, const AffineShape& shape,
                  const ConstAffineCodes& packed, void* y, const Helpers& helpers) {
  const auto unpack = kernels.unpack_affine;
  AdviseHugePages(
      y, shape.num_rows * shape.row_elements * ElementNbytes(shape.type));
  ForGroups(shape.num_rows, shape.row_elements, ElementNbytes(shape.type), helpers,
            [=](int64_t first, int64_t last) {
              unpack(shape, packed, y, first, last);
            });
}

void PackBitmask(const Kernels& kernels, int64_t num_rows, int64_t row_elements,
                 const uint8_t* x, uint16_t* words, const Helpers& helpers) {
  const auto pack = kernels.pack_bitmask;
  ForGroups(num_rows, row_elements, 1, helpers, [=](int64_t first, int64_t last) {
    pack(row_elements, x, words, first, last);
  });
}

void UnpackBitmask(const Kernels& kernels, int64_t num_rows, int64_t row_elements,
                   const uint16_t* words, uint8_t* y, const Helpers& helpers) {
  const auto unpack = kernels.unpack_bitmask;
  AdviseHugePages(y, num_rows * row_elements);
  ForGroups(num_rows, row_elements, 1, helpers, [=](int64_t first, int64_t last) {
    unpack(row_elements, words, y, first, last);
  });
}

float Sum(const Kernels& kernels, const float* x, int64_t num_elements,
          const Helpers& helpers) {
  const auto sum = kernels.sum;
  std::atomic<float> total{0.0f};
  ForGroups(1, num_elements, sizeof(float), helpers, [&](int64_t first, int64_t last) {
    const int64_t begin = first * kGroupElements;
    const int64_t end = last * kGroupElements;
    const float part = sum(x + begin, (end < num_elements ? end : num_elements) - begin);
    float before = total.load();
    while (!total.compare_exchange_weak(before, before + part)) {
    }
  });
  return total.load();
}

}  // namespace dafjax
