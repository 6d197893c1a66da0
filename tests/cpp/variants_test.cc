// Known rows, sizes, and every instruction set against the scalar one, byte for byte, over
// a grid of lengths, columns, widths, block sizes, roundings, dtypes and kinds of data.
// Prints one hash of all bytes: it is the same on every machine.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/batch.h"
#include "cpu/instruction_sets.h"
#include "cpu/kernels.h"
#include "cpu/paged_words.h"
#include "cpu/work.h"
#include "format/affine.h"
#include "format/columns.h"
#include "format/float_type.h"
#include "format/packed.h"
#include "values.h"

namespace dafjax {

#if defined(DAFJAX_TEST_SIMDE)
const Kernels& EmulatedAvx512Kernels();
#endif

namespace {

std::vector<const Kernels*> Variants() {
  std::vector<const Kernels*> variants = InstructionSets();
#if defined(DAFJAX_TEST_SIMDE)
  variants.push_back(&EmulatedAvx512Kernels());
#endif
  return variants;
}

// FNV-1a.
class Hash {
 public:
  void Add(const std::vector<uint8_t>& bytes) {
    for (const uint8_t byte : bytes) value_ = (value_ ^ byte) * 0x100000001b3;
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325;
};

float FloatOf(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, sizeof(v));
  return v;
}

// Joins its threads when it goes.
class TestThreads {
 public:
  explicit TestThreads(int count) {
    helpers_.count = count - 1;
    helpers_.schedule = [this](std::function<void()> task) {
      threads_.emplace_back(std::move(task));
    };
  }
  ~TestThreads() {
    for (std::thread& thread : threads_) thread.join();
  }
  TestThreads(const TestThreads&) = delete;
  TestThreads& operator=(const TestThreads&) = delete;
  const Helpers& helpers() const { return helpers_; }

 private:
  std::vector<std::thread> threads_;
  Helpers helpers_;
};

struct Packed {
  explicit Packed(const AffineShape& shape)
      : codes(shape.num_rows * shape.NumWords(), 0xbead),
        scale(shape.num_rows * shape.NumBlocks(), 0xbead),
        minimum(scale) {}

  bool operator==(const Packed& other) const {
    return codes == other.codes && scale == other.scale && minimum == other.minimum;
  }

  PiecesOfCodes<uint8_t> Pieces() {
    return {reinterpret_cast<uint8_t*>(codes.data()),
            reinterpret_cast<uint8_t*>(scale.data()),
            reinterpret_cast<uint8_t*>(minimum.data())};
  }
  PiecesOfCodes<const uint8_t> Pieces() const {
    return {reinterpret_cast<const uint8_t*>(codes.data()),
            reinterpret_cast<const uint8_t*>(scale.data()),
            reinterpret_cast<const uint8_t*>(minimum.data())};
  }

  std::vector<uint16_t> codes, scale, minimum;
};

std::vector<uint8_t> BytesOf(const std::vector<uint16_t>& words) {
  std::vector<uint8_t> bytes(words.size() * 2);
  if (!words.empty()) std::memcpy(bytes.data(), words.data(), bytes.size());
  return bytes;
}

Packed Pack(const Kernels& kernels, const AffineShape& shape, const Rounding& rounding,
            const uint8_t* x, int num_threads) {
  Packed packed(shape);
  const TestThreads threads(num_threads);
  PackAffine(kernels, shape, rounding, x,
             Contiguous(shape, shape.bits, packed.Pieces()), threads.helpers());
  return packed;
}

std::vector<uint8_t> Unpack(const Kernels& kernels, const AffineShape& shape,
                            const Rounding& rounding, const Packed& packed,
                            int num_threads) {
  std::vector<uint8_t> y(shape.num_rows * shape.row_elements *
                         ElementNbytes(shape.type));
  const TestThreads threads(num_threads);
  ConstAffineCodes places = Contiguous(shape, shape.bits, packed.Pieces());
  const std::vector<uint32_t> seeds(shape.num_rows, rounding.seed);
  if (rounding.dithered) places.seeds = seeds.data();
  UnpackAffine(kernels, shape, places, y.data(), threads.helpers());
  return y;
}

void TestSizes() {
  CHECK(NumTiles(0) == 0 && NumTiles(1) == 1 && NumTiles(512) == 1);
  CHECK(NumTiles(513) == 2);
  CHECK(NumWords(512, 1) == 32 && NumWords(513, 8) == 512);
  CHECK(NumBlocks(0, 64) == 0 && NumBlocks(65, 64) == 2);
  for (const int bits : kWidths) {
    const Planes planes = PlanesOf(bits);
    CHECK(planes.Above(planes.count) == bits);
    const int last = planes.count - 1;
    CHECK(PlaneOffset(bits, last, 3, 2) + kTileLanes * planes.widths[last] ==
          NumWords(3 * kTileElements, bits));
  }
  CHECK(ColumnLayout(0, 5).NumTiles() == 0 && ColumnLayout(0, 5).NumBlocks(64) == 0);
  CHECK(ColumnLayout(33 * 40, 40).width == 160 && ColumnLayout(33 * 40, 40).num_rows == 9);
  CHECK(ColumnLayout(17 * 64, 64).NumTiles() == 4);
  CHECK(ColumnLayout(65 * 64, 64).NumBlocks(64) == 128);
  CHECK(IsNumberOfColumns(0, 7) && IsNumberOfColumns(7, 0) && IsNumberOfColumns(7, 21));
  CHECK(!IsNumberOfColumns(-1, 7) && !IsNumberOfColumns(2, 7));
  CHECK(!IsNumberOfColumns(kMaxColumns + 1, 0));
  CHECK(!IsCodeWidth(0) && !IsCodeWidth(5) && !IsCodeWidth(16));
  CHECK(!IsBlockSize(32) && !IsBlockSize(65) && !IsBlockSize(2048));
}

// 0, 1, 2, 3 at two bits: the scale is 1, and the codes are the values.
void TestKnownRow(const Kernels& kernels) {
  const std::vector<float> x = {0.0f, 1.0f, 2.0f, 3.0f};
  const AffineShape shape = {FloatType::kFloat32, 2, 64, 1, 4};
  const Packed packed =
      Pack(kernels, shape, {false, 0}, reinterpret_cast<const uint8_t*>(x.data()), 1);
  std::vector<uint16_t> codes(64, 0);
  codes[2] = codes[3] = 1;            // the upper bits
  codes[32 + 1] = codes[32 + 3] = 1;  // the lower bits
  CHECK(packed.codes == codes);
  CHECK(packed.scale == std::vector<uint16_t>{0x3f80});
  CHECK(packed.minimum == std::vector<uint16_t>{0});
}

// NaN, +Inf, -Inf and -1, 2 at three bits: two bits are left for the finite ones.
void TestKnownFlaggedRow(const Kernels& kernels) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> x = {-1.0f, 2.0f, FloatOf(0x7fc00000), infinity, -infinity};
  const AffineShape shape = {FloatType::kFloat32, 3, 64, 1, 5};
  const Packed packed =
      Pack(kernels, shape, {false, 0}, reinterpret_cast<const uint8_t*>(x.data()), 1);
  std::vector<uint16_t> codes(96, 0);
  const int expected[] = {0, 3, 4, 6, 7};
  for (int e = 0; e < 5; ++e) {
    for (int plane = 0; plane < 3; ++plane) {
      codes[32 * plane + e] = static_cast<uint16_t>(expected[e] >> (2 - plane) & 1);
    }
  }
  CHECK(packed.codes == codes);
  CHECK(packed.scale == std::vector<uint16_t>{0xbf80});
  CHECK(packed.minimum == std::vector<uint16_t>{0xbf80});
  const std::vector<uint8_t> y = Unpack(kernels, shape, {}, packed, 1);
  CHECK(std::memcmp(y.data(), x.data(), y.size()) == 0);
}

// Two channels, 0 1 3 and 10 30 20, in a matrix of 32 columns: to nearest at two bits.
void TestKnownColumns(const Kernels& kernels) {
  std::vector<float> x(3 * 32, 0.0f);
  x[32] = 1.0f;
  x[64] = 3.0f;
  x[1] = 10.0f;
  x[33] = 30.0f;
  x[65] = 20.0f;
  const AffineShape shape = {FloatType::kFloat32, 2, 64, 1, 96, 32};
  const Packed packed =
      Pack(kernels, shape, {false, 0}, reinterpret_cast<const uint8_t*>(x.data()), 1);
  std::vector<uint16_t> codes(64, 0);
  codes[0] = 0b100;  // the upper bits of 0 1 3
  codes[1] = 0b010;  // of 0 3 1
  codes[32] = codes[33] = 0b110;
  std::vector<uint16_t> scale(32, 0);
  scale[0] = 0x3f80;  // 1
  scale[1] = 0x40d6;  // 6.6875, 20/3 rounded up
  std::vector<uint16_t> minimum(32, 0);
  minimum[1] = 0x4120;
  CHECK(packed.scale == scale && packed.minimum == minimum);
  CHECK(packed.codes == codes);
}

void TestAffine(const std::vector<const Kernels*>& variants, const AffineShape& shape,
                const Rounding& rounding, Kind kind, int num_threads, Random* random,
                Hash* hash) {
  const std::vector<uint8_t> values =
      MakeValues(kind, shape.type, shape.num_rows * shape.row_elements, random);
  const uint8_t* x = values.data() + ElementNbytes(shape.type);
  const Kernels& scalar = *InstructionSets().back();
  const Packed packed = Pack(scalar, shape, rounding, x, 1);
  const std::vector<uint8_t> y = Unpack(scalar, shape, rounding, packed, 1);
  for (const Kernels* kernels : variants) {
    if (kernels == &scalar && num_threads == 1) continue;
    const bool same_packed = Pack(*kernels, shape, rounding, x, num_threads) == packed;
    const bool same_unpacked = Unpack(*kernels, shape, rounding, packed, num_threads) == y;
    if (!same_packed || !same_unpacked) {
      std::fprintf(stderr,
                   "%s %s differently from scalar: type %d bits %d block_size %d rows %d "
                   "elements %d columns %d stochastic %d dithered %d kind %d threads %d\n",
                   kernels->name, same_packed ? "unpacks" : "packs",
                   static_cast<int>(shape.type), shape.bits,
                   static_cast<int>(shape.block_size), static_cast<int>(shape.num_rows),
                   static_cast<int>(shape.row_elements),
                   static_cast<int>(shape.columns), rounding.stochastic,
                   rounding.dithered, kind, num_threads);
      std::exit(1);
    }
  }
  hash->Add(BytesOf(packed.codes));
  hash->Add(BytesOf(packed.scale));
  hash->Add(BytesOf(packed.minimum));
  hash->Add(y);
}

void TestBitmask(const std::vector<const Kernels*>& variants, int64_t rows, int64_t n,
                 Random* random, Hash* hash) {
  std::vector<uint8_t> x(rows * n);
  for (uint8_t& v : x) v = random->Next() % 2;
  for (const Kernels* kernels : variants) {
    std::vector<uint16_t> words(rows * NumWords(n, 1), 0xbead);
    PackBitmask(*kernels, rows, n, x.data(), words.data(), {});
    for (int64_t row = 0; row < rows; ++row) {
      const uint16_t* plane = words.data() + row * NumWords(n, 1);
      for (int64_t e = 0; e < NumTiles(n) * kTileElements; ++e) {
        const int lane = e % kTileLanes;
        const int place = e / kTileLanes % kTileRows;
        const int bit = plane[e / kTileElements * kTileLanes + lane] >> place & 1;
        CHECK(bit == (e < n ? x[row * n + e] : 0));
      }
    }
    std::vector<uint8_t> y(x.size(), 0xee);
    UnpackBitmask(*kernels, rows, n, words.data(), y.data(), {});
    CHECK(y == x);
    if (kernels == variants.front()) hash->Add(BytesOf(words));
  }
}

// Matrices of few and of many rows, with all foldings.
void TestColumns(const std::vector<const Kernels*>& variants, Random* random, Hash* hash) {
  constexpr int64_t kNumElements = 30'000;  // at most
  int turn = 0;
  for (const int64_t columns : {1, 3, 31, 32, 33, 48, 64, 100, 160, 768}) {
    for (const int64_t rows : {0, 1, 2, 15, 16, 17, 33, 64, 65, 130, 300, 1030}) {
      if (rows * columns > kNumElements) continue;
      for (const int bits : kWidths) {
        for (const int64_t block_size : kBlockSizes) {
          const AffineShape shape = {kTypes[turn % 3],
                                     bits,
                                     block_size,
                                     1 + turn % 2,
                                     rows * columns,
                                     columns};
          const bool dithered = turn % 4 == 3;
          TestAffine(variants, shape, {turn % 4 > 0, random->Next(), dithered},
                     static_cast<Kind>(turn % kNumKinds), 1, random, hash);
          turn += 1 + (random->Next() & 1);
        }
      }
    }
  }
  for (const int num_threads : {1, 2, 4, 8}) {
    for (const FloatType type : kTypes) {
      TestAffine(variants, {type, 2, 256, 3, 1042 * 288, 96}, {true, 5}, kSmooth,
                 num_threads, random, hash);
    }
  }
}

// An array of words in pages that lie in memory in another order, with gaps.
class Pages {
 public:
  Pages(int64_t num_words, int page_shift, int64_t first)
      : page_shift_(page_shift), first_(first) {
    const int64_t page_words = int64_t{1} << page_shift;
    const int64_t num_pages = CeilDiv(first + num_words, page_words);
    memory_.assign(num_pages * (page_words + 1), 0xbead);
    for (int64_t p = num_pages; p-- > 0;) {
      pages_.push_back(
          reinterpret_cast<uint8_t*>(memory_.data() + p * (page_words + 1)));
    }
  }

  PagedWords<uint8_t> words() const { return {pages_.data(), page_shift_, first_}; }
  PagedWords<const uint8_t> const_words() const {
    return {pages_.data(), page_shift_, first_};
  }

 private:
  int page_shift_;
  int64_t first_;
  std::vector<uint16_t> memory_;
  std::vector<uint8_t*> pages_;
};

// The batch in pages of one or two tiles and of eight scales, as a pool may have it: the
// planes of all rows one after another.
class PagedBatch {
 public:
  explicit PagedBatch(const AffineShape& shape)
      : shape_(shape),
        scale_(shape.num_rows * shape.NumBlocks(), 3, 5),
        minimum_(shape.num_rows * shape.NumBlocks(), 3, 0) {
    const Planes layout = PlanesOf(shape.bits);
    for (int i = 0; i < layout.count; ++i) {
      const int width = layout.widths[i];
      planes_.emplace_back(WordsOfTiles(shape.num_rows * shape.NumTiles(), width),
                           5 + i % 2 + (width == 1 ? 0 : width == 2 ? 1 : 2), 0);
    }
  }

  AffineCodes Places(int kept_bits) const {
    AffineCodes places = {};
    Fill(kept_bits, &Pages::words, &places);
    return places;
  }
  ConstAffineCodes ConstPlaces(int kept_bits) const {
    ConstAffineCodes places = {};
    Fill(kept_bits, &Pages::const_words, &places);
    return places;
  }

  Packed Gather() const {
    Packed packed(shape_);
    const Planes layout = PlanesOf(shape_.bits);
    uint16_t* codes = packed.codes.data();
    for (int64_t row = 0; row < shape_.num_rows; ++row) {
      for (int i = 0; i < layout.count; ++i) {
        const int64_t words = WordsOfTiles(shape_.NumTiles(), layout.widths[i]);
        for (int64_t w = 0; w < words; ++w) {
          *codes++ = *planes_[i].words().At(row * words + w);
        }
      }
    }
    for (size_t b = 0; b < packed.scale.size(); ++b) {
      packed.scale[b] = *scale_.words().At(b);
      packed.minimum[b] = *minimum_.words().At(b);
    }
    return packed;
  }

 private:
  template <typename Words, typename Places>
  void Fill(int kept_bits, Words words, Places* places) const {
    places->kept_bits = kept_bits;
    for (int i = 0; i < PlanesOf(kept_bits).count; ++i) {
      places->planes[i] = (planes_[i].*words)();
      places->words_per_row[i] =
          WordsOfTiles(shape_.NumTiles(), PlanesOf(kept_bits).widths[i]);
    }
    places->scale = (scale_.*words)();
    places->minimum = (minimum_.*words)();
  }

  AffineShape shape_;
  std::vector<Pages> planes_;
  Pages scale_, minimum_;
};

// Pages change no byte, and without planes scales and minima are the same.
void TestPages(const Kernels& kernels, const AffineShape& shape, Kind kind,
               Random* random) {
  const std::vector<uint8_t> values =
      MakeValues(kind, shape.type, shape.num_rows * shape.row_elements, random);
  const uint8_t* x = values.data() + ElementNbytes(shape.type);
  const Rounding rounding = {true, random->Next()};
  const Packed packed = Pack(kernels, shape, rounding, x, 1);
  const PagedBatch paged(shape);
  PackAffine(kernels, shape, rounding, x, paged.Places(shape.bits), {});
  CHECK(paged.Gather() == packed);

  const PagedBatch only_parameters(shape);
  PackAffine(kernels, shape, rounding, x, only_parameters.Places(0), {});
  Packed parameters = packed;
  std::fill(parameters.codes.begin(), parameters.codes.end(), uint16_t{0xbead});
  CHECK(only_parameters.Gather() == parameters);

  std::vector<uint8_t> y(values.size() - ElementNbytes(shape.type));
  UnpackAffine(kernels, shape, paged.ConstPlaces(shape.bits), y.data(), {});
  CHECK(y == Unpack(kernels, shape, {}, packed, 1));

  // What is left after planes are lost decodes as by the scalar kernels.
  for (int kept_bits = 0; kept_bits < shape.bits; ++kept_bits) {
    if (!IsPrefix(kept_bits, shape.bits)) continue;
    std::vector<uint8_t> left(y.size());
    UnpackAffine(kernels, shape, paged.ConstPlaces(kept_bits), left.data(), {});
    std::vector<uint8_t> expected(y.size());
    UnpackAffine(*InstructionSets().back(), shape, paged.ConstPlaces(kept_bits),
                 expected.data(), {});
    CHECK(left == expected);
  }
}

void TestPages(const std::vector<const Kernels*>& variants) {
  Random random;
  int turn = 0;
  for (const Kernels* kernels : variants) {
    for (int k = 0; k < kNumKinds; ++k) {
      for (const int bits : kWidths) {
        for (const int64_t columns : {0, 3, 96}) {
          for (const int64_t n : {0, 96, 2016, 9024}) {
            const AffineShape shape = {kTypes[turn % 3], bits, kBlockSizes[turn % 5],
                                       1 + turn % 3,     n,    columns};
            TestPages(*kernels, shape, static_cast<Kind>(k), &random);
            ++turn;
          }
        }
      }
    }
  }
}

// 0, 1, 2, 3 at two bits: without the lower bits 0.5 and 2.5, without any 1.5. With a
// value that is not finite, and no bits, nothing is known.
void TestKnownRest(const Kernels& kernels) {
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> x(128, 3.0f);
  for (int e = 0; e < 4; ++e) x[e] = x[64 + e] = static_cast<float>(e);
  x[127] = infinity;
  const AffineShape shape = {FloatType::kFloat32, 2, 64, 1, 128};
  const PagedBatch paged(shape);
  PackAffine(kernels, shape, {false, 0}, x.data(), paged.Places(2), {});
  std::vector<float> y(128);
  UnpackAffine(kernels, shape, paged.ConstPlaces(1), y.data(), {});
  // The flagged block has one bit for finite values: 0 or 3, of which none is left.
  const float expected[] = {0.5f, 0.5f, 2.5f, 2.5f, 1.5f, 1.5f, 1.5f, 1.5f};
  for (int e = 0; e < 4; ++e) {
    CHECK(y[e] == expected[e] && y[64 + e] == expected[4 + e]);
  }
  CHECK(y[127] != y[127]);
  UnpackAffine(kernels, shape, paged.ConstPlaces(0), y.data(), {});
  for (int e = 0; e < 64; ++e) CHECK(y[e] == 1.5f && y[64 + e] != y[64 + e]);
}

// The caller finishes alone when no helper ever starts, and late helpers do nothing.
// Planes of codes that are there already, against README.md section 1.
void TestBytes(const Kernels& kernels) {
  Random random;
  constexpr int64_t kTiles = 5;
  for (const int bits : kWidths) {
    std::vector<uint16_t> bytes(kTiles * kTileElements / 2);
    for (uint16_t& pair : bytes) pair = static_cast<uint16_t>(random.Next());
    // What is below the code is not there.
    const uint16_t mask = static_cast<uint16_t>((0xff00 >> bits & 0xff) * 0x0101);
    for (uint16_t& pair : bytes) pair &= mask;
    std::vector<uint16_t> codes(WordsOfTiles(kTiles, bits), 0xbead);
    uint8_t* data = reinterpret_cast<uint8_t*>(codes.data());
    const AffineShape shape = {FloatType::kFloat32, bits, 64, 1, kTiles * kTileElements};
    const PiecesOfCodes<uint8_t> pieces = {data, nullptr, nullptr};
    PackBytes(kernels, kTiles, bytes.data(), Contiguous(shape, bits, pieces), {});
    for (int64_t e = 0; e < kTiles * kTileElements; ++e) {
      const int64_t tile = e / kTileElements;
      const int row = static_cast<int>(e % kTileElements / kTileLanes);
      const int lane = static_cast<int>(e % kTileLanes);
      const uint16_t pair = bytes[tile * kTileElements / 2 + row / 2 * kTileLanes + lane];
      const int code = (row % 2 == 0 ? pair & 0xff : pair >> 8) >> (8 - bits);
      int below = bits;
      for (int i = 0; i < PlanesOf(bits).count; ++i) {
        const int width = PlanesOf(bits).widths[i];
        below -= width;
        const uint16_t word = codes[PlaneOffset(bits, i, kTiles, tile) +
                                    row / (16 / width) * kTileLanes + lane];
        const int field = word >> row % (16 / width) * width & ((1 << width) - 1);
        CHECK(field == (code >> below & ((1 << width) - 1)));
      }
    }
  }
}

void TestHelpersThatNeverStart() {
  std::vector<std::function<void()>> late;
  int calls = 0;
  const Helpers helpers = {3, [&](std::function<void()> task) { late.push_back(task); }};
  RunInPieces(5, helpers, [&](int64_t) { ++calls; });
  CHECK(calls == 5 && late.size() == 3);
  for (const auto& task : late) task();
  CHECK(calls == 5);
}

int Main() {
  const std::vector<const Kernels*> variants = Variants();
  TestSizes();
  TestHelpersThatNeverStart();
  Random random;
  Hash hash;
  for (const Kernels* kernels : variants) {
    TestKnownRow(*kernels);
    TestKnownFlaggedRow(*kernels);
    TestKnownColumns(*kernels);
    TestKnownRest(*kernels);
    TestBytes(*kernels);
  }
  int kind = 0;
  for (int64_t n = 0; n <= 2 * kTileElements + 1; ++n) {
    for (const int bits : kWidths) {
      for (const int64_t block_size : kBlockSizes) {
        for (const auto [stochastic, dithered] :
             {std::pair(false, false), std::pair(true, false), std::pair(true, true)}) {
          // Lengths, not dtypes, are what goes wrong: the dtypes take turns.
          const FloatType type = kTypes[(kind + kind / 3) % 3];
          TestAffine(variants, {type, bits, block_size, 1, n},
                     {stochastic, random.Next(), dithered},
                     static_cast<Kind>(kind % kNumKinds), 1,
                     &random, &hash);
          kind += 1 + (random.Next() & 1);
        }
      }
    }
    TestBitmask(variants, 1, n, &random, &hash);
  }
  // Every kind with every dtype, over several rows and groups.
  for (int k = 0; k < kNumKinds; ++k) {
    for (const FloatType type : kTypes) {
      for (const int bits : kWidths) {
        for (const int64_t block_size : kBlockSizes) {
          TestAffine(variants, {type, bits, block_size, 2, 2748},
                     {(block_size >> 7) % 2 == 0, random.Next()}, static_cast<Kind>(k), 1,
                     &random, &hash);
        }
      }
    }
  }
  for (const int num_threads : {1, 2, 4, 8}) {
    for (const FloatType type : kTypes) {
      TestAffine(variants, {type, 2, 256, 3, 300'001}, {true, 5}, kSmooth, num_threads,
                 &random, &hash);
    }
  }
  TestBitmask(variants, 3, 5000, &random, &hash);
  TestColumns(variants, &random, &hash);
  TestPages(variants);
  std::fprintf(stderr, "instruction sets:");
  for (const Kernels* kernels : variants) std::fprintf(stderr, " %s", kernels->name);
  std::fprintf(stderr, "\n");
  std::printf("%016llx\n", static_cast<unsigned long long>(hash.value()));
  return 0;
}

}  // namespace
}  // namespace dafjax

int main() { return dafjax::Main(); }
