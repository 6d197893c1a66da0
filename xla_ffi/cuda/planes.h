#ifndef DAFJAX_CUDA_PLANES_H_
#define DAFJAX_CUDA_PLANES_H_

#include <cstdint>
#include <type_traits>

#include "cuda/device.h"
#include "cuda/tile_values.h"
#include "format/packed.h"

namespace dafjax {

// Four words of a plane, for the thread's lanes: two in each half of an uint2.
DAFJAX_DEVICE uint2 LoadWords(const uint16_t* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const uint2*>(from);
  return make_uint2(from[0] | uint32_t{from[1]} << 16,
                    from[2] | uint32_t{from[3]} << 16);
}

DAFJAX_DEVICE void StoreWords(uint16_t* to, bool aligned, uint2 words) {
  if (aligned) {
    *reinterpret_cast<uint2*>(to) = words;
    return;
  }
  to[0] = static_cast<uint16_t>(words.x);
  to[1] = static_cast<uint16_t>(words.x >> 16);
  to[2] = static_cast<uint16_t>(words.y);
  to[3] = static_cast<uint16_t>(words.y >> 16);
}

template <int kBits, int kPlane = 0>
struct PlaneWriter;
template <int kBits>
struct ByteWriter;

// Where the planes of the codes of one array row are.
template <typename Word>
struct CodesOfRow {
  // What stores codes here.
  template <int kBits>
  using Writer = PlaneWriter<kBits>;

  // The words of plane `kPlane`, in tile `tile`, for the lanes from `lane` on.
  template <int kBits, int kPlane>
  DAFJAX_DEVICE Word* At(int64_t tile, int lane) const {
    constexpr int kAbove = PlanesOf(kBits).Above(kPlane);
    constexpr int kWidth = PlanesOf(kBits).widths[kPlane];
    return words + kTileLanes * (kAbove * num_tiles + kWidth * tile) + lane;
  }

  Word* words;
  int64_t num_tiles;
  bool aligned;  // to four words
};

// Where the planes of one tile are, each in some page.
template <typename Word>
struct CodesOfTile {
  template <int kBits>
  using Writer = PlaneWriter<kBits>;

  template <int kBits, int kPlane>
  DAFJAX_DEVICE Word* At(int64_t, int lane) const {
    return planes[kPlane] + lane;
  }

  static constexpr bool aligned = true;
  Word* planes[kMaxPlanes];
};

// Where the codes of one tile are, a byte each, as the CPU packs them (cpu/kernels.h).
struct BytesOfTile {
  template <int kBits>
  using Writer = ByteWriter<kBits>;

  uint16_t* words;
};

// Where a thread's words are. `Row` is CodesOfRow; or, of this tile, CodesOfTile
// or BytesOfTile.
template <typename Row>
struct CodesOfThread {
  Row row;
  int64_t tile;
  int lane;
  bool exists;  // otherwise nothing is stored
};

template <int kBits, int kPlane>
struct Plane {
  static constexpr int kWidth = PlanesOf(kBits).widths[kPlane];
  static constexpr int kBelow = kBits - PlanesOf(kBits).Above(kPlane) - kWidth;
  static constexpr int kFields = 16 / kWidth;
  static constexpr uint32_t kMask = ((1u << kWidth) - 1) * 0x00010001;
};

// Takes codes row by row and stores the words of planes as soon as they are full. Codes
// come in pairs of neighboring lanes, one in each half.
template <int kBits, int kPlane>
struct PlaneWriter {
  using P = Plane<kBits, kPlane>;

  // After unrolling `row` is known, and so is what this does.
  template <typename Row>
  DAFJAX_DEVICE void AddRow(int row, uint2 codes, const CodesOfThread<Row>& to) {
    const int place = row % P::kFields;
    const uint2 fields =
        make_uint2((codes.x >> P::kBelow & P::kMask) << place * P::kWidth,
                   (codes.y >> P::kBelow & P::kMask) << place * P::kWidth);
    words = place == 0 ? fields : make_uint2(words.x | fields.x, words.y | fields.y);
    if (place == P::kFields - 1 && to.exists) {
      uint16_t* const plane = to.row.template At<kBits, kPlane>(to.tile, to.lane);
      StoreWords(plane + row / P::kFields * kTileLanes, to.row.aligned, words);
    }
    if constexpr (kPlane + 1 < PlanesOf(kBits).count) lower.AddRow(row, codes, to);
  }

  struct Nothing {};
  static constexpr bool kIsLast = kPlane + 1 >= PlanesOf(kBits).count;
  uint2 words = {0, 0};
  std::conditional_t<kIsLast, Nothing, PlaneWriter<kBits, kIsLast ? 0 : kPlane + 1>> lower;
};

// Takes codes as PlaneWriter does, and stores a byte for each.
template <int kBits>
struct ByteWriter {
  template <typename Row>
  DAFJAX_DEVICE void AddRow(int row, uint2 codes, const CodesOfThread<Row>& to) {
    constexpr int kBelow = 8 - kBits;
    const uint2 bytes = make_uint2(codes.x << kBelow, codes.y << kBelow);
    if (row % 2 == 0) {
      words = bytes;
    } else if (to.exists) {
      StoreWords(to.row.words + row / 2 * kTileLanes + to.lane, true,
                 make_uint2(words.x | bytes.x << 8, words.y | bytes.y << 8));
    }
  }

  uint2 words = {0, 0};
};

// Gives codes row by row, in pairs as PlaneWriter takes them.
template <int kBits, int kPlane = 0>
struct PlaneReader {
  using P = Plane<kBits, kPlane>;
  static constexpr int kWords = kTileRows / P::kFields;

  template <typename Of>
  DAFJAX_DEVICE void Load(const CodesOfThread<Of>& from) {
    const uint16_t* const plane = from.row.template At<kBits, kPlane>(from.tile, from.lane);
    DAFJAX_UNROLL
    for (int i = 0; i < kWords; ++i) {
      words[i] = LoadWords(plane + i * kTileLanes, from.row.aligned);
    }
    if constexpr (!kIsLast) lower.Load(from);
  }

  DAFJAX_DEVICE uint2 Row(int row) const {
    const uint2 of_row = words[row / P::kFields];
    const int shift = row % P::kFields * P::kWidth;
    uint2 codes = make_uint2((of_row.x >> shift & P::kMask) << P::kBelow,
                             (of_row.y >> shift & P::kMask) << P::kBelow);
    if constexpr (!kIsLast) {
      const uint2 rest = lower.Row(row);
      codes = make_uint2(codes.x | rest.x, codes.y | rest.y);
    }
    return codes;
  }

  struct Nothing {};
  static constexpr bool kIsLast = kPlane + 1 >= PlanesOf(kBits).count;
  uint2 words[kWords];
  std::conditional_t<kIsLast, Nothing, PlaneReader<kBits, kIsLast ? 0 : kPlane + 1>> lower;
};

// No planes: all codes are 0.
template <>
struct PlaneReader<0, 0> {
  template <typename Of>
  DAFJAX_DEVICE void Load(const CodesOfThread<Of>&) {}
  DAFJAX_DEVICE uint2 Row(int) const { return make_uint2(0, 0); }
};

// The codes of one row, as PlaneReader gives them. Requires kBits > 0.
template <int kBits, int kPlane = 0, typename Of>
DAFJAX_DEVICE uint2 LoadCodes(int row, const CodesOfThread<Of>& from) {
  using P = Plane<kBits, kPlane>;
  const uint16_t* const plane = from.row.template At<kBits, kPlane>(from.tile, from.lane);
  const uint2 words =
      LoadWords(plane + row / P::kFields * kTileLanes, from.row.aligned);
  const int shift = row % P::kFields * P::kWidth;
  uint2 codes = make_uint2((words.x >> shift & P::kMask) << P::kBelow,
                           (words.y >> shift & P::kMask) << P::kBelow);
  if constexpr (kPlane + 1 < PlanesOf(kBits).count) {
    const uint2 rest = LoadCodes<kBits, kPlane + 1>(row, from);
    codes = make_uint2(codes.x | rest.x, codes.y | rest.y);
  }
  return codes;
}

}  // namespace dafjax

#endif  // DAFJAX_CUDA_PLANES_H_
