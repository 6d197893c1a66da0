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

template <int kBits>
struct CodeWriter;
template <int kBits>
struct ByteWriter;

// Where the planes of the codes of one array row are.
template <typename Word>
struct CodesOfRow {
  // What stores codes here.
  template <int kBits>
  using Writer = CodeWriter<kBits>;

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
  using Writer = CodeWriter<kBits>;

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

// The words of planes of four lanes, or their codes of one row, are two in each half of
// an uint2. A shift, to the left if negative, takes bits from one half into the other;
// what is selected does not have them.
DAFJAX_DEVICE uint2 ShiftRight(uint2 v, int bits) {
  return bits >= 0 ? make_uint2(v.x >> bits, v.y >> bits)
                   : make_uint2(v.x << -bits, v.y << -bits);
}

// Bits of `a` where those of `mask` are set, else of `b`.
DAFJAX_DEVICE uint2 Select(uint32_t mask, uint2 a, uint2 b) {
  return make_uint2((a.x & mask) | (b.x & ~mask), (a.y & mask) | (b.y & ~mask));
}

DAFJAX_DEVICE constexpr uint32_t InBothHalves(uint32_t mask) {
  return mask * 0x00010001;
}

template <int kBits, int kPlane, typename Row>
DAFJAX_DEVICE auto* PlaneOf(const CodesOfThread<Row>& codes) {
  return codes.row.template At<kBits, kPlane>(codes.tile, codes.lane);
}

// A plane on its own.
template <int kBits, int kPlane>
struct Plane {
  static constexpr int kWidth = PlanesOf(kBits).widths[kPlane];
  static constexpr int kAbove = PlanesOf(kBits).Above(kPlane);
  static constexpr int kBelow = kBits - kAbove - kWidth;
  static constexpr int kFields = 16 / kWidth;
  static constexpr int kWords = kTileRows / kFields;
  static constexpr uint32_t kMask = InBothHalves((1u << kWidth) - 1);

  // Takes codes in the top bits of 16.
  struct Writer {
    template <typename Row>
    DAFJAX_DEVICE void AddRow(int row, uint2 codes, const CodesOfThread<Row>& to) {
      const int place = row % kFields * kWidth;
      const uint2 field = ShiftRight(codes, 16 - kAbove - kWidth - place);
      words = Select(kMask << place, field, place == 0 ? make_uint2(0, 0) : words);
      if (place == 16 - kWidth && to.exists) {
        StoreWords(PlaneOf<kBits, kPlane>(to) + row / kFields * kTileLanes,
                   to.row.aligned, words);
      }
    }
    uint2 words = {0, 0};
  };

  // Gives codes as numbers, of which the bits of the plane are set.
  struct Reader {
    template <typename Of>
    DAFJAX_DEVICE void Load(const CodesOfThread<Of>& from) {
      DAFJAX_UNROLL
      for (int i = 0; i < kWords; ++i) {
        words[i] =
            LoadWords(PlaneOf<kBits, kPlane>(from) + i * kTileLanes, from.row.aligned);
      }
    }
    DAFJAX_DEVICE uint2 Row(int row) const {
      return FieldOf(words[row / kFields], row);
    }
    uint2 words[kWords];
  };

  template <typename Of>
  static DAFJAX_DEVICE uint2 LoadRow(int row, const CodesOfThread<Of>& from) {
    return FieldOf(LoadWords(PlaneOf<kBits, kPlane>(from) + row / kFields * kTileLanes,
                             from.row.aligned),
                   row);
  }

  static DAFJAX_DEVICE uint2 FieldOf(uint2 words, int row) {
    return Select(kMask << kBelow, ShiftRight(words, row % kFields * kWidth - kBelow),
                  make_uint2(0, 0));
  }
};

// The two topmost planes together, which have a bit each. Fields of two bits are taken
// and given row by row, of even and of odd rows apart; with 16 rows, the bits of the
// words change places between the two.
template <int kBits>
struct TopPlanes {
  static_assert(PlanesOf(kBits).widths[0] == 1 && PlanesOf(kBits).widths[1] == 1);
  static constexpr int kBelow = kBits - 2;
  static constexpr uint32_t kTop = InBothHalves(0xc000);
  static constexpr uint32_t kOddBits = InBothHalves(0xaaaa);

  struct Writer {
    template <typename Row>
    DAFJAX_DEVICE void AddRow(int row, uint2 codes, const CodesOfThread<Row>& to) {
      if (row % 2 == 0) even = Select(kTop, codes, ShiftRight(even, 2));
      if (row % 2 != 0) odd = Select(kTop, codes, ShiftRight(odd, 2));
      if (row == kTileRows - 1 && to.exists) {
        StoreWords(PlaneOf<kBits, 0>(to), to.row.aligned,
                   Select(kOddBits, odd, ShiftRight(even, 1)));
        StoreWords(PlaneOf<kBits, 1>(to), to.row.aligned,
                   Select(kOddBits, ShiftRight(odd, -1), even));
      }
    }
    uint2 even = {0, 0};
    uint2 odd = {0, 0};
  };

  struct Reader {
    template <typename Of>
    DAFJAX_DEVICE void Load(const CodesOfThread<Of>& from) {
      const uint2 first = LoadWords(PlaneOf<kBits, 0>(from), from.row.aligned);
      const uint2 second = LoadWords(PlaneOf<kBits, 1>(from), from.row.aligned);
      even = Select(kOddBits, ShiftRight(first, -1), second);
      odd = Select(kOddBits, first, ShiftRight(second, 1));
    }
    DAFJAX_DEVICE uint2 Row(int row) const {
      return Select(InBothHalves(3) << kBelow,
                    ShiftRight(row % 2 == 0 ? even : odd, row / 2 * 2 - kBelow),
                    make_uint2(0, 0));
    }
    uint2 even, odd;
  };

  template <typename Of>
  static DAFJAX_DEVICE uint2 LoadRow(int row, const CodesOfThread<Of>& from) {
    Reader reader;
    reader.Load(from);
    return reader.Row(row);
  }
};

// No more planes.
struct NoPlane {
  struct Writer {
    template <typename Row>
    DAFJAX_DEVICE void AddRow(int, uint2, const CodesOfThread<Row>&) {}
  };
  struct Reader {
    template <typename Of>
    DAFJAX_DEVICE void Load(const CodesOfThread<Of>&) {}
    DAFJAX_DEVICE uint2 Row(int) const { return make_uint2(0, 0); }
  };
  template <typename Of>
  static DAFJAX_DEVICE uint2 LoadRow(int, const CodesOfThread<Of>&) {
    return make_uint2(0, 0);
  }
};

template <int kBits, int kPlane>
using PlaneOrNone =
    std::conditional_t<(kPlane < PlanesOf(kBits).count), Plane<kBits, kPlane>, NoPlane>;

// What a code of `kBits` is made of: the topmost plane or planes, and two more.
template <int kBits>
struct CodePlanes {
  using Top = std::conditional_t<(kBits >= 2), TopPlanes<kBits>, PlaneOrNone<kBits, 0>>;
  using Third = PlaneOrNone<kBits, 2>;
  using Fourth = PlaneOrNone<kBits, 3>;
};

// Takes codes row by row, in the top bits of 16, and stores the words of planes as soon
// as they are full. After unrolling `row` is known, and so is what this does.
template <int kBits>
struct CodeWriter {
  template <typename Row>
  DAFJAX_DEVICE void AddRow(int row, uint2 codes, const CodesOfThread<Row>& to) {
    top.AddRow(row, codes, to);
    third.AddRow(row, codes, to);
    fourth.AddRow(row, codes, to);
  }

  typename CodePlanes<kBits>::Top::Writer top;
  typename CodePlanes<kBits>::Third::Writer third;
  typename CodePlanes<kBits>::Fourth::Writer fourth;
};

// Takes codes as CodeWriter does, and stores a byte for each.
template <int kBits>
struct ByteWriter {
  template <typename Row>
  DAFJAX_DEVICE void AddRow(int row, uint2 codes, const CodesOfThread<Row>& to) {
    constexpr uint32_t kUpper = InBothHalves(0xff00);
    if (row % 2 == 0) {
      words = ShiftRight(codes, 8);
    } else if (to.exists) {
      StoreWords(to.row.words + row / 2 * kTileLanes + to.lane, true,
                 Select(kUpper, codes, words));
    }
  }

  uint2 words = {0, 0};
};

// Gives codes row by row, as numbers.
template <int kBits>
struct CodeReader {
  template <typename Of>
  DAFJAX_DEVICE void Load(const CodesOfThread<Of>& from) {
    top.Load(from);
    third.Load(from);
    fourth.Load(from);
  }

  DAFJAX_DEVICE uint2 Row(int row) const {
    return JoinPlanes(top.Row(row), third.Row(row), fourth.Row(row));
  }

  static DAFJAX_DEVICE uint2 JoinPlanes(uint2 a, uint2 b, uint2 c) {
    return make_uint2(a.x | b.x | c.x, a.y | b.y | c.y);
  }

  typename CodePlanes<kBits>::Top::Reader top;
  typename CodePlanes<kBits>::Third::Reader third;
  typename CodePlanes<kBits>::Fourth::Reader fourth;
};

// The codes of one row, as CodeReader gives them.
template <int kBits, typename Of>
DAFJAX_DEVICE uint2 LoadCodes(int row, const CodesOfThread<Of>& from) {
  using Planes = CodePlanes<kBits>;
  return CodeReader<kBits>::JoinPlanes(Planes::Top::LoadRow(row, from),
                                       Planes::Third::LoadRow(row, from),
                                       Planes::Fourth::LoadRow(row, from));
}

}  // namespace dafjax

#endif  // DAFJAX_CUDA_PLANES_H_
