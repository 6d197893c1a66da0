#ifndef DAFJAX_CPU_PAGED_WORDS_H_
#define DAFJAX_CPU_PAGED_WORDS_H_

#include <cstdint>
#include <type_traits>

#include "format/affine.h"
#include "format/packed.h"

namespace dafjax {

// An array of uint16 that lies in pages of `1 << page_shift` words, wherever these are.
// Its word 0 is word `first` of the pages. `Byte` is uint8_t or const uint8_t.
template <typename Byte>
struct PagedWords {
  using Word = std::conditional_t<std::is_const_v<Byte>, const uint16_t, uint16_t>;

  Word* At(int64_t index) const {
    const int64_t place = first + index;
    const int64_t in_page = place & ((int64_t{1} << page_shift) - 1);
    return reinterpret_cast<Word*>(pages[place >> page_shift]) + in_page;
  }
  // How many words from word `index` on lie one after another.
  int64_t Neighbors(int64_t index) const {
    const int64_t page_words = int64_t{1} << page_shift;
    return page_words - ((first + index) & (page_words - 1));
  }

  Byte* const* pages;
  int page_shift;
  int64_t first;
};

// The shift of a page without end: that of an array in one piece.
inline constexpr int kEndlessPage = 62;

// Where a batch of rows is, encoded or to be encoded.
template <typename Byte>
struct PlacesOfCodes {
  // The planes that are there are those of so many bits of each code, the most
  // significant ones. Kernels that encode take shape.bits, or 0: scales and minima alone.
  int kept_bits;
  // A plane has its tiles one after another, `words_per_row` words from a row to the
  // next.
  PagedWords<Byte> planes[kMaxPlanes];
  int64_t words_per_row[kMaxPlanes];
  PagedWords<Byte> scale;    // [num_rows, shape.NumBlocks()], bfloat16
  PagedWords<Byte> minimum;  // as `scale`
  // Of noise that was added and is to be subtracted: one for each row. Null: there is none.
  const uint32_t* seeds = nullptr;
};

using AffineCodes = PlacesOfCodes<uint8_t>;
using ConstAffineCodes = PlacesOfCodes<const uint8_t>;

// Three arrays in one piece each.
template <typename Byte>
struct PiecesOfCodes {
  Byte* codes;  // [num_rows, shape.NumWords()], uint16; with the bits that are kept
  Byte* scale;
  Byte* minimum;
};

// The result refers to `pieces`.
template <typename Byte>
PlacesOfCodes<Byte> Contiguous(const AffineShape& shape, int kept_bits,
                               const PiecesOfCodes<Byte>& pieces) {
  PlacesOfCodes<Byte> places = {};
  places.kept_bits = kept_bits;
  const int64_t num_tiles = shape.NumTiles();
  for (int i = 0; i < PlanesOf(kept_bits).count; ++i) {
    places.planes[i] = {&pieces.codes, kEndlessPage,
                        PlaneOffset(kept_bits, i, num_tiles, 0)};
    places.words_per_row[i] = WordsOfTiles(num_tiles, kept_bits);
  }
  places.scale = {&pieces.scale, kEndlessPage, 0};
  places.minimum = {&pieces.minimum, kEndlessPage, 0};
  return places;
}

}  // namespace dafjax

#endif  // DAFJAX_CPU_PAGED_WORDS_H_
