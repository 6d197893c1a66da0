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

// The units of work that a kernel takes: groups, panels or tiles, of all rows.
struct Units {
  int64_t count;
  int64_t nbytes;  // of unpacked data in one
  int64_t total_nbytes;
};

Units GroupsOf(int64_t num_rows, int64_t row_elements, int64_t element_nbytes) {
  return {num_rows * NumGroups(row_elements), kGroupElements * element_nbytes,
          num_rows * row_elements * element_nbytes};
}

Units GroupsOf(const AffineShape& shape) {
  return GroupsOf(shape.num_rows, shape.row_elements, ElementNbytes(shape.type));
}

Units PanelsOf(const AffineShape& shape) {
  const int64_t row_nbytes = shape.row_elements * ElementNbytes(shape.type);
  const int64_t per_row = PanelLayout(shape).PerRow();
  return {shape.num_rows * per_row, per_row == 0 ? 0 : CeilDiv(row_nbytes, per_row),
          shape.num_rows * row_nbytes};
}

Units TilesOf(const AffineShape& shape) {
  const int64_t element_nbytes = ElementNbytes(shape.type);
  return {shape.num_rows * shape.NumTiles(), kTileElements * element_nbytes,
          shape.num_rows * shape.row_elements * element_nbytes};
}

// Calls `run(first, last)` for stretches of the units.
void ForUnits(const Units& units, const Helpers& helpers,
              const std::function<void(int64_t, int64_t)>& run) {
  if (units.count == 0) return;
  const int64_t count = units.count;
  const bool is_small = units.nbytes < kPieceNbytes;
  const int64_t per_piece = is_small ? kPieceNbytes / units.nbytes : 1;
  const auto piece = [=](int64_t i) {
    const FlushSubnormals flush;
    const int64_t first = i * per_piece;
    run(first, first + per_piece < count ? first + per_piece : count);
  };
  const bool parallel = units.total_nbytes >= kParallelNbytes;
  RunInPieces(CeilDiv(count, per_piece), parallel ? helpers : Helpers{}, piece);
}

}  // namespace

void PackAffine(const Kernels& kernels, const AffineShape& shape,
                const Rounding& rounding, const void* x, const AffineCodes& packed,
                const Helpers& helpers) {
  const bool has_columns = shape.columns != 0;
  const auto pack = has_columns ? kernels.pack_columns : kernels.pack_rows;
  ForUnits(has_columns ? PanelsOf(shape) : GroupsOf(shape), helpers,
           [=](int64_t first, int64_t last) {
             pack(shape, rounding, x, packed, first, last);
           });
}

void PackBytes(const Kernels& kernels, int64_t num_tiles, const uint16_t* bytes,
               const AffineCodes& packed, const Helpers& helpers) {
  ForUnits({num_tiles, kTileElements, num_tiles * kTileElements}, helpers,
           [=](int64_t first, int64_t last) {
             kernels.pack_bytes(bytes, packed, first, last);
           });
}

void UnpackAffine(const Kernels& kernels, const AffineShape& shape,
                  const ConstAffineCodes& packed, void* y, const Helpers& helpers) {
  const bool has_columns = shape.columns != 0;
  const auto unpack = has_columns ? kernels.unpack_columns : kernels.unpack_rows;
  AdviseHugePages(
      y, shape.num_rows * shape.row_elements * ElementNbytes(shape.type));
  ForUnits(
      has_columns ? TilesOf(shape) : GroupsOf(shape), helpers,
      [=](int64_t first, int64_t last) { unpack(shape, packed, y, first, last); });
}

void PackBitmask(const Kernels& kernels, int64_t num_rows, int64_t row_elements,
                 const uint8_t* x, uint16_t* words, const Helpers& helpers) {
  const auto pack = kernels.pack_bitmask;
  ForUnits(GroupsOf(num_rows, row_elements, 1), helpers,
           [=](int64_t first, int64_t last) {
    pack(row_elements, x, words, first, last);
  });
}

void UnpackBitmask(const Kernels& kernels, int64_t num_rows, int64_t row_elements,
                   const uint16_t* words, uint8_t* y, const Helpers& helpers) {
  const auto unpack = kernels.unpack_bitmask;
  AdviseHugePages(y, num_rows * row_elements);
  ForUnits(GroupsOf(num_rows, row_elements, 1), helpers,
           [=](int64_t first, int64_t last) {
    unpack(row_elements, words, y, first, last);
  });
}

float Sum(const Kernels& kernels, const float* x, int64_t num_elements,
          const Helpers& helpers) {
  const auto sum = kernels.sum;
  std::atomic<float> total{0.0f};
  ForUnits(GroupsOf(1, num_elements, sizeof(float)), helpers,
           [&](int64_t first, int64_t last) {
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
