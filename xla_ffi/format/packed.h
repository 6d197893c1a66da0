#ifndef DAFJAX_FORMAT_PACKED_H_
#define DAFJAX_FORMAT_PACKED_H_

#include <cstdint>

namespace dafjax {

// The packed layout, README.md section 1.
//
// A row of `n` elements is cut into tiles of 512, each seen as 16 rows of 32 lanes:
// element `e` of a tile is in lane `e % 32` and row `e / 32`. A plane of `w` bits of
// one tile is `w * 32` uint16; word `p * 32 + l` holds, in bits `[w*i, w*i + w)`, the
// field of the element in lane `l` and row `p * (16 / w) + i`.
//
// The codes of a row are its planes, most significant first; a plane is its tiles, one
// after another. Fields of padding elements are zero.
inline constexpr int kTileLanes = 32;
inline constexpr int kTileRows = 16;
inline constexpr int kTileElements = kTileLanes * kTileRows;

inline constexpr int kMaxPlanes = 4;

// Widths of the planes that make up a code, most significant first. The tables of 1, 2,
// 4 and 8 bits are prefixes of each other.
struct Planes {
  int count;
  int widths[kMaxPlanes];

  // Bits of the code above plane `index`.
  constexpr int Above(int index) const {
    int bits = 0;
    for (int i = 0; i < index; ++i) bits += widths[i];
    return bits;
  }
};

constexpr bool IsCodeWidth(int64_t bits) {
  return bits == 1 || bits == 2 || bits == 3 || bits == 4 || bits == 8;
}

// Requires IsCodeWidth(bits), or no bits.
constexpr Planes PlanesOf(int bits) {
  return bits == 0   ? Planes{0, {0, 0, 0, 0}}
         : bits == 1 ? Planes{1, {1, 0, 0, 0}}
         : bits == 2 ? Planes{2, {1, 1, 0, 0}}
         : bits == 3 ? Planes{3, {1, 1, 1, 0}}
         : bits == 4 ? Planes{3, {1, 1, 2, 0}}
                     : Planes{4, {1, 1, 2, 4}};
}

// Whether codes of `bits` bits may lose planes until `kept_bits` are left.
// Requires IsCodeWidth(bits).
constexpr bool IsPrefix(int64_t kept_bits, int64_t bits) {
  const Planes planes = PlanesOf(static_cast<int>(bits));
  for (int i = 0; i <= planes.count; ++i) {
    if (planes.Above(i) == kept_bits) return true;
  }
  return false;
}

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// Of a power of two.
constexpr int Log2(int64_t n) { return n <= 1 ? 0 : 1 + Log2(n / 2); }

constexpr int64_t NumTiles(int64_t num_elements) {
  return CeilDiv(num_elements, kTileElements);
}

// uint16 words that hold the codes of tiles.
constexpr int64_t WordsOfTiles(int64_t num_tiles, int bits) {
  return num_tiles * kTileLanes * bits;
}

// uint16 words that hold `num_elements` codes of `bits` bits.
constexpr int64_t NumWords(int64_t num_elements, int bits) {
  return WordsOfTiles(NumTiles(num_elements), bits);
}

// First word of tile `tile` in plane `index` of a row of `num_tiles` tiles.
constexpr int64_t PlaneOffset(int bits, int index, int64_t num_tiles, int64_t tile) {
  const Planes planes = PlanesOf(bits);
  return kTileLanes *
         (planes.Above(index) * num_tiles + planes.widths[index] * tile);
}

static_assert(NumWords(0, 8) == 0 && NumWords(1, 3) == 96 && NumWords(513, 2) == 128);
static_assert(IsPrefix(0, 1) && IsPrefix(4, 8) && !IsPrefix(3, 8) && !IsPrefix(4, 3));
static_assert(PlanesOf(8).Above(3) + PlanesOf(8).widths[3] == 8);

}  // namespace dafjax

#endif  // DAFJAX_FORMAT_PACKED_H_
