// The CUDA kernels, run by the simulator, against the CPU's, byte for byte: over a grid of
// dtypes, widths, block sizes, roundings, lengths, columns and kinds of data.
//
//   cuda_kernels_test          every value of every parameter
//   cuda_kernels_test spread   every combination, apart from lengths
//   cuda_kernels_test all      and with every length

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cpu/batch.h"
#include "cpu/instruction_sets.h"
#include "cpu/kernels.h"
#include "cpu/paged_words.h"
#include "cuda/divisor.h"
#include "cuda/graph.h"
#include "cuda/kernels.h"
#include "cuda/tile_values.h"
#include "format/affine.h"
#include "format/columns.h"
#include "format/float_type.h"
#include "format/packed.h"
#include "simulator/grid.h"
#include "simulator/runtime.h"
#include "values.h"

namespace dafjax {
namespace {

// Memory that ends where the array ends, `offset` elements after an aligned address, so
// that the address sanitizer finds whoever goes beyond.
template <typename T>
class Array {
 public:
  Array(int64_t size, int64_t offset, T fill)
      : size_(size), offset_(offset), memory_(new T[size + offset]) {
    for (int64_t i = 0; i < size + offset; ++i) memory_[i] = fill;
  }
  T* data() const { return memory_.get() + offset_; }
  int64_t nbytes() const { return size_ * static_cast<int64_t>(sizeof(T)); }
  bool operator==(const Array& other) const {
    return size_ == other.size_ &&
           (size_ == 0 || std::memcmp(data(), other.data(), nbytes()) == 0);
  }

 private:
  int64_t size_;
  int64_t offset_;
  std::unique_ptr<T[]> memory_;
};

constexpr uint16_t kGarbage = 0xbead;

struct Packed {
  Packed(const AffineShape& shape, int64_t offset)
      : codes(shape.num_rows * shape.NumWords(), offset, kGarbage),
        scale(shape.num_rows * shape.NumBlocks(), offset, kGarbage),
        minimum(shape.num_rows * shape.NumBlocks(), offset, kGarbage) {}

  bool operator==(const Packed& other) const {
    return codes == other.codes && scale == other.scale && minimum == other.minimum;
  }

  Array<uint16_t> codes, scale, minimum;
};

void CheckLaunched(const char* failure) {
  if (failure == nullptr) return;
  std::fprintf(stderr, "%s\n", failure);
  std::exit(1);
}

struct Case {
  AffineShape shape;
  bool stochastic, dithered;
  uint32_t seed;
  Kind kind;
  int64_t offset;  // of arrays, in elements

  std::string Text() const {
    return "type " + std::to_string(static_cast<int>(shape.type)) + " bits " +
           std::to_string(shape.bits) + " block_size " +
           std::to_string(shape.block_size) + " rows " +
           std::to_string(shape.num_rows) + " elements " +
           std::to_string(shape.row_elements) + " columns " +
           std::to_string(shape.columns) + " stochastic " + std::to_string(stochastic) +
           " dithered " + std::to_string(dithered) +
           " kind " + std::to_string(kind) + " offset " + std::to_string(offset);
  }
};

void FailUnless(bool condition, const char* what, const Case& of) {
  if (condition) return;
  std::fprintf(stderr, "%s differ from the CPU's: %s\n", what, of.Text().c_str());
  std::exit(1);
}

int64_t num_cases = 0;

// Whether a sum is what is expected, for terms whose magnitudes have the sum `size`. Taken
// in another order it may overflow where they are large.
bool IsSum(float found, double expected, double size) {
  if (std::fabs(found - expected) <= 1e-5 * size + 1e-30) return true;
  return !(size < 1e38) && !std::isfinite(found);
}

// Sums of the blocks of columns, a value at a time.
void CheckSums(const Case& of, const void* x, const float* sum, const float* square) {
  const AffineShape& shape = of.shape;
  const ColumnLayout layout(shape.row_elements, shape.columns);
  const int64_t blocks = shape.NumBlocks();
  std::vector<double> sums(3 * shape.num_rows * blocks, 0.0);
  for (int64_t i = 0; i < shape.num_rows * shape.row_elements; ++i) {
    const int64_t row = i / shape.row_elements, place = i % shape.row_elements;
    const int64_t down = place / layout.width / shape.block_size;
    const int64_t block = row * blocks + down * layout.width + place % layout.width;
    const double v = LoadValue({static_cast<const char*>(x), shape.type, true}, i);
    sums[3 * block] += v;
    sums[3 * block + 1] += v * v;
    sums[3 * block + 2] += std::fabs(v);
  }
  for (int64_t b = 0; b < shape.num_rows * blocks; ++b) {
    FailUnless(IsSum(sum[b], sums[3 * b], sums[3 * b + 2]), "sums", of);
    FailUnless(IsSum(square[b], sums[3 * b + 1], sums[3 * b + 1]), "squares", of);
  }
}

void TestAffine(const Case& of, Random* random) {
  ++num_cases;
  simulator::CurrentSettings().seed = random->Next();
  const AffineShape& shape = of.shape;
  const int64_t nbytes = ElementNbytes(shape.type);
  const int64_t count = shape.num_rows * shape.row_elements;
  const std::vector<uint8_t> values = MakeValues(of.kind, shape.type, count, random);
  const Array<uint8_t> x(count * nbytes, of.offset * nbytes, 0);
  if (count > 0) std::memcpy(x.data(), values.data() + nbytes, x.nbytes());

  const Packed expected(shape, 0);
  const PiecesOfCodes<uint8_t> pieces = {
      reinterpret_cast<uint8_t*>(expected.codes.data()),
      reinterpret_cast<uint8_t*>(expected.scale.data()),
      reinterpret_cast<uint8_t*>(expected.minimum.data())};
  PackAffine(BestKernels(), shape, {of.stochastic, of.seed, of.dithered}, x.data(),
             Contiguous(shape, shape.bits, pieces), {});
  const Packed packed(shape, of.offset);
  const bool has_sums = shape.columns > 0 && random->Next() % 2 == 0;
  const int64_t num_sums = has_sums ? shape.num_rows * shape.NumBlocks() : 0;
  const Array<float> sum(num_sums, of.offset, 1e9f);
  const Array<float> square(num_sums, of.offset, 1e9f);
  CheckLaunched(PackAffineOnDevice(
      nullptr, shape, {of.stochastic, of.stochastic ? &of.seed : nullptr, of.dithered},
      x.data(),
      {packed.codes.data(), packed.scale.data(), packed.minimum.data()},
      has_sums ? BlockSums{sum.data(), square.data()} : BlockSums{}));
  if (has_sums) CheckSums(of, x.data(), sum.data(), square.data());
  FailUnless(packed.scale == expected.scale, "scales", of);
  FailUnless(packed.minimum == expected.minimum, "minima", of);
  FailUnless(packed.codes == expected.codes, "codes", of);

  const Array<uint8_t> y(count * nbytes, 0, 0xee);
  const PiecesOfCodes<const uint8_t> const_pieces = {pieces.codes, pieces.scale,
                                                     pieces.minimum};
  ConstAffineCodes places = Contiguous(shape, shape.bits, const_pieces);
  const std::vector<uint32_t> seeds(shape.num_rows, of.seed);
  if (of.dithered) places.seeds = seeds.data();
  UnpackAffine(BestKernels(), shape, places, y.data(), {});
  const Array<uint8_t> z(count * nbytes, of.offset * nbytes, 0xdd);
  CheckLaunched(UnpackAffineOnDevice(
      nullptr, shape, {packed.codes.data(), packed.scale.data(), packed.minimum.data()},
      z.data(), places.seeds));
  FailUnless(z == y, "decoded values", of);
}

// A matrix of few and of many rows, with all foldings; 0 columns stand for row blocks.
struct Extent {
  int64_t row_elements;
  int64_t columns;
};

std::vector<Extent> Extents() {
  std::vector<Extent> extents;
  for (const int64_t n : {1, 3, 31, 32, 33, 63, 64, 65, 127, 129, 500, 511, 512, 513,
                          1023, 1024, 1025, 1536, 2048, 2049, 5000}) {
    extents.push_back({n, 0});
  }
  for (const int64_t columns : {1, 3, 32, 48, 100}) {
    for (const int64_t rows : {1, 2, 15, 17, 64, 65, 130, 300}) {
      extents.push_back({rows * columns, columns});
    }
  }
  extents.push_back({1030 * 3, 3});
  extents.push_back({1090 * 32, 32});
  return extents;
}

enum class Depth { kEveryValue, kSpread, kAll };

// Every combination, but of what `depth` leaves to take turns.
void TestGrid(Depth depth, Random* random) {
  const std::vector<Extent> extents = Extents();
  size_t turn = 0;
  const auto test = [&](FloatType type, int bits, int64_t block_size, bool stochastic,
                        int kind, const Extent& extent) {
    const int64_t num_rows = extent.row_elements > 3000 ? 1 : 1 + turn % 3;
    const AffineShape shape = {type,     bits, block_size, num_rows, extent.row_elements,
                               extent.columns};
    const bool dithered = stochastic && random->Next() % 2 == 0;
    TestAffine({shape, stochastic, dithered, random->Next(), static_cast<Kind>(kind),
                static_cast<int64_t>(turn % 2)},
               random);
    ++turn;
  };
  for (const FloatType type : kTypes) {
    for (const int bits : kWidths) {
      for (int kind = 0; kind < kNumKinds; ++kind) {
        if (depth == Depth::kEveryValue) {
          test(type, bits, kBlockSizes[turn % 5], turn % 3 != 0, kind,
               extents[turn % extents.size()]);
          continue;
        }
        for (const int64_t block_size : kBlockSizes) {
          for (const bool stochastic : {false, true}) {
            const size_t count = depth == Depth::kAll ? extents.size() : 1;
            for (size_t i = 0; i < count; ++i) {
              test(type, bits, block_size, stochastic, kind,
                   extents[turn % extents.size()]);
            }
          }
        }
      }
    }
  }
}

// Every extent with every width; the rest takes turns.
void TestExtents(Random* random) {
  int turn = 0;
  for (const Extent extent : Extents()) {
    for (const int bits : kWidths) {
      TestAffine({{kTypes[turn % 3], bits, kBlockSizes[turn % 5], 1 + turn % 2,
                   extent.row_elements, extent.columns},
                  turn % 4 != 0,
                  turn % 4 > 1,
                  random->Next(),
                  static_cast<Kind>(random->Next() % kNumKinds),
                  turn % 3 == 0 ? 1 : 0},
                 random);
      turn += 1 + static_cast<int>(random->Next() & 1);
    }
  }
  for (const int bits : kWidths) {
    TestAffine({{FloatType::kFloat32, bits, 64, 3, 0, 0}, true, true, 1, kSmooth, 0}, random);
    TestAffine({{FloatType::kFloat32, bits, 64, 0, 70, 0}, true, true, 1, kSmooth, 0}, random);
    TestAffine({{FloatType::kFloat32, bits, 64, 2, 0, 3}, true, true, 1, kSmooth, 0}, random);
  }
}

void TestBitmask(int64_t num_rows, int64_t n, int64_t offset, Random* random) {
  ++num_cases;
  simulator::CurrentSettings().seed = random->Next();
  const Array<uint8_t> x(num_rows * n, offset, 0);
  const int32_t any = random->Next() % 2 == 0 ? 2 : 256;
  for (int64_t i = 0; i < num_rows * n; ++i) {
    const uint32_t r = random->Next();
    x.data()[i] = r >> 31 == 0 ? 0 : static_cast<uint8_t>(1 + r % (any - 1));
  }
  const int64_t num_words = num_rows * NumWords(n, 1);
  const Array<uint16_t> expected(num_words, 0, kGarbage);
  PackBitmask(BestKernels(), num_rows, n, x.data(), expected.data(), {});
  const Array<uint16_t> words(num_words, offset, kGarbage);
  CheckLaunched(PackBitmaskOnDevice(nullptr, num_rows, n, x.data(), words.data()));
  CHECK(words == expected);
  const Array<uint8_t> y(num_rows * n, offset, 0xee);
  CheckLaunched(UnpackBitmaskOnDevice(nullptr, num_rows, n, words.data(), y.data()));
  for (int64_t i = 0; i < num_rows * n; ++i) {
    CHECK(y.data()[i] == (x.data()[i] != 0 ? 1 : 0));
  }
}

void TestBitmasks(Random* random) {
  for (const int64_t n : {0, 1, 3, 31, 32, 33, 127, 511, 512, 513, 516, 1024, 2600}) {
    for (const int64_t num_rows : {1, 2, 5}) {
      TestBitmask(num_rows, n, 0, random);
      TestBitmask(num_rows, n, 1, random);
    }
  }
}

void TestCopies() {
  const Array<uint8_t> x(100, 0, 7);
  const Array<uint8_t> y(100, 0, 0);
  CheckLaunched(CopyOnDevice(nullptr, x.data(), x.nbytes(), y.data()));
  CHECK(x == y);
}

// What is recorded is done as often as it is launched, and no earlier.
void TestGraphs() {
  const Array<uint8_t> x(100, 0, 7);
  const Array<uint8_t> y(100, 0, 0);
  Graph graph;
  CheckLaunched(graph.Record(
      [&](Stream stream) { return CopyOnDevice(stream, x.data(), x.nbytes(), y.data()); }));
  CHECK(!(x == y));
  for (int launch = 0; launch < 2; ++launch) {
    CheckLaunched(ClearOnDevice(nullptr, y.data(), y.nbytes()));
    CheckLaunched(graph.Launch(nullptr));
    CHECK(x == y);
  }
  Graph other;
  CHECK(other.Record([](Stream) -> Failure { return "no"; }) != nullptr);
  CHECK(other.Launch(nullptr) != nullptr);
}

// A node for a stream that is captured, nothing for others.
void TestEmptyGraphs() {
  CheckLaunched(FillEmptyGraph(nullptr));
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  for (size_t wanted = 0; wanted < 3; ++wanted) {
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    for (size_t i = 0; i < wanted; ++i) CheckLaunched(FillEmptyGraph(stream));
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(stream, &graph);
    size_t count = 0;
    cudaGraphGetNodes(graph, nullptr, &count);
    CHECK(count == wanted);
    cudaGraphDestroy(graph);
  }
  cudaStreamDestroy(stream);
}

// Around multiples, where rounding would show, up to the greatest number of blocks.
void TestDivisors(Random* random) {
  std::vector<uint32_t> divisors = {1, 2, 3, 5, 7, 641, 65535, 65536, 65537, 0x7fffffff};
  for (int shift = 1; shift < 32; ++shift) {
    divisors.push_back(1 + (random->Next() >> shift));
  }
  for (const uint32_t d : divisors) {
    const Divisor divisor(d);
    const uint32_t most = 0x7fffffff / d;
    for (const uint32_t multiple : {0u, 1u, most / 2, most - 1, most}) {
      for (const int64_t near : {-1, 0, 1}) {
        const int64_t n = int64_t{multiple} * d + near;
        if (n < 0 || n > 0x7fffffff) continue;
        const uint32_t quotient = divisor.Quotient(static_cast<uint32_t>(n));
        CHECK(quotient == n / d);
        CHECK(divisor.Remainder(static_cast<uint32_t>(n), quotient) == n % d);
      }
    }
  }
}

// What no grid covers is refused, before anything is touched.
void TestHugeArrays() {
  const AffineShape rows = {FloatType::kFloat32, 1, 64, 1, int64_t{1} << 50};
  const AffineShape columns = {FloatType::kFloat32, 1, 64, 1, int64_t{1} << 50, 32};
  for (const AffineShape& shape : {rows, columns}) {
    CHECK(PackAffineOnDevice(nullptr, shape, {false, nullptr}, nullptr, {}) != nullptr);
    CHECK(UnpackAffineOnDevice(nullptr, shape, {}, nullptr) != nullptr);
  }
  CHECK(PackBitmaskOnDevice(nullptr, 1, int64_t{1} << 50, nullptr, nullptr) != nullptr);
  CHECK(UnpackBitmaskOnDevice(nullptr, 1, int64_t{1} << 50, nullptr, nullptr) != nullptr);
}

int Main(const std::string& depth) {
  Random random;
  TestCopies();
  TestGraphs();
  TestEmptyGraphs();
  TestDivisors(&random);
  TestHugeArrays();
  TestBitmasks(&random);
  TestExtents(&random);
  TestGrid(depth == "all"      ? Depth::kAll
           : depth == "spread" ? Depth::kSpread
                               : Depth::kEveryValue,
           &random);
  std::printf("%lld cases\n", static_cast<long long>(num_cases));
  return 0;
}

}  // namespace
}  // namespace dafjax

int main(int argc, char** argv) { return dafjax::Main(argc > 1 ? argv[1] : ""); }
