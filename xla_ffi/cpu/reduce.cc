#include "cpu/reduce.h"

#include <cstdint>
#include <cstring>
#include <limits>

#include "cpu/flush_subnormals.h"
#include "cpu/work.h"
#include "format/float_type.h"
#include "format/packed.h"
#include "format/reduction.h"

namespace dafjax {
namespace {

// Values that are handled side by side: compilers make vectors of them.
constexpr int kLanes = 16;
// After so many elements sums go on in float64.
constexpr int64_t kShortSum = 4096;
// Bytes of all rows that are worth waking a thread for.
constexpr int64_t kParallelNbytes = int64_t{1} << 20;

uint32_t BitsOf(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof(bits));
  return bits;
}

float FloatOf(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, sizeof(v));
  return v;
}

// Exact. A subnormal float16 is a multiple of 2^-24.
float WidenFloat16(uint16_t v) {
  const uint32_t sign = (v & 0x8000u) << 16;
  const uint32_t magnitude = v & 0x7fffu;
  if (magnitude >= 0x7c00) return FloatOf(sign | 0x70000000 | magnitude << 13);
  if (magnitude >= 0x0400) return FloatOf(sign | ((magnitude << 13) + 0x38000000));
  return FloatOf(sign | BitsOf(static_cast<float>(magnitude) * 0x1p-24f));
}

template <FloatType kType>
float LoadOne(const void* x, int64_t index) {
  if constexpr (kType == FloatType::kFloat32) {
    float v;
    std::memcpy(&v, static_cast<const char*>(x) + 4 * index, sizeof(v));
    return v;
  } else {
    uint16_t v;
    std::memcpy(&v, static_cast<const char*>(x) + 2 * index, sizeof(v));
    return kType == FloatType::kBFloat16 ? FloatOf(uint32_t{v} << 16) : WidenFloat16(v);
  }
}

// As cuda/reduce.h has them: words of which the greater counts, and zeros are neutral.
uint32_t KeyOf(float v) {
  const uint32_t bits = BitsOf(v);
  return (bits & 0x80000000) != 0 ? ~bits : bits | 0x80000000;
}

float ValueOf(uint32_t key) {
  if (key == 0 || key == 0xffffffff) return FloatOf(0x7fc00000);
  const uint32_t bits = (key & 0x80000000) != 0 ? key & 0x7fffffff : ~key;
  return FloatOf(bits) + 0.0f;
}

uint32_t Greater(uint32_t a, uint32_t b) { return a > b ? a : b; }

struct Words {
  uint32_t first;
  uint32_t second;
};

template <FloatType kType>
Words MinMaxOf(const void* x, int64_t begin, int64_t end) {
  float lo[kLanes];
  float hi[kLanes];
  float zeros[kLanes];  // NaN if a value was NaN, or infinite: that is looked at again
  for (int i = 0; i < kLanes; ++i) {
    lo[i] = std::numeric_limits<float>::infinity();
    hi[i] = -std::numeric_limits<float>::infinity();
    zeros[i] = 0.0f;
  }
  const auto add = [&](float v, int i) {
    lo[i] = v < lo[i] ? v : lo[i];
    hi[i] = v > hi[i] ? v : hi[i];
    zeros[i] += v * 0.0f;
  };
  int64_t e = begin;
  for (; e + kLanes <= end; e += kLanes) {
    for (int i = 0; i < kLanes; ++i) add(LoadOne<kType>(x, e + i), i);
  }
  for (; e < end; ++e) add(LoadOne<kType>(x, e), 0);
  Words words = {0, 0};
  bool unusual = false;
  for (int i = 0; i < kLanes; ++i) {
    words.first = Greater(words.first, ~KeyOf(lo[i]));
    words.second = Greater(words.second, KeyOf(hi[i]));
    unusual = unusual || zeros[i] != zeros[i];
  }
  for (e = begin; unusual && e < end; ++e) {
    const float v = LoadOne<kType>(x, e);
    if (v != v) return {0xffffffff, 0xffffffff};
  }
  return words;
}

template <FloatType kType>
float SumOfSquaresOf(const void* x, int64_t begin, int64_t end) {
  double total = 0.0;
  for (int64_t stop; begin < end; begin = stop) {
    stop = begin + kShortSum < end ? begin + kShortSum : end;
    float sums[kLanes] = {};
    int64_t e = begin;
    for (; e + kLanes <= stop; e += kLanes) {
      for (int i = 0; i < kLanes; ++i) {
        const float v = LoadOne<kType>(x, e + i);
        sums[i] += v * v;
      }
    }
    for (; e < stop; ++e) {
      const float v = LoadOne<kType>(x, e);
      sums[0] += v * v;
    }
    for (const float sum : sums) total += sum;
  }
  return static_cast<float>(total);
}

template <FloatType kType>
Words WordsOf(Reduction reduction, const void* x, int64_t begin, int64_t end) {
  if (reduction == Reduction::kMinMax) return MinMaxOf<kType>(x, begin, end);
  return {BitsOf(SumOfSquaresOf<kType>(x, begin, end)), 0};
}

Words WordsOf(Reduction reduction, FloatType type, const void* x, int64_t begin,
              int64_t end) {
  switch (type) {
    case FloatType::kFloat32:
      return WordsOf<FloatType::kFloat32>(reduction, x, begin, end);
    case FloatType::kBFloat16:
      return WordsOf<FloatType::kBFloat16>(reduction, x, begin, end);
    default: return WordsOf<FloatType::kFloat16>(reduction, x, begin, end);
  }
}

Words Combined(Reduction reduction, Words a, Words b) {
  if (reduction == Reduction::kMinMax) {
    return {Greater(a.first, b.first), Greater(a.second, b.second)};
  }
  return {BitsOf(FloatOf(a.first) + FloatOf(b.first)), 0};
}

// Sets `*place` to what it and `words` come to, while others do the same.
void CombineAtomically(Reduction reduction, uint32_t* place, Words words) {
  const uint32_t mine[] = {words.first, words.second};
  for (int i = 0; i < (reduction == Reduction::kMinMax ? 2 : 1); ++i) {
    uint32_t before = __atomic_load_n(place + i, __ATOMIC_RELAXED);
    uint32_t after;
    do {
      after = Combined(reduction, {before, 0}, {mine[i], 0}).first;
    } while (!__atomic_compare_exchange_n(place + i, &before, after, true,
                                          __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  }
}

}  // namespace

void ReduceRows(Reduction reduction, Strategy strategy, FloatType type, int64_t num_rows,
                int64_t row_elements, const void* x, uint32_t* scratch, float* first,
                float* second, const Helpers& helpers) {
  if (num_rows == 0) return;
  const int64_t num_parts = NumParts(row_elements);
  const int64_t part_elements = CeilDiv(row_elements, num_parts);
  uint32_t* const parts = scratch + num_rows * kStateWords;
  // Threads share memory: there is nothing between a part and the row's state. Sums are
  // put together in a fixed order unless the caller says that they need not be.
  const bool by_state =
      strategy == Strategy::kAtomic ||
      (strategy == Strategy::kHybrid && reduction == Reduction::kMinMax);
  if (by_state) {
    std::memset(scratch, 0, num_rows * kStateWords * sizeof(uint32_t));
  }
  const int64_t nbytes = num_rows * row_elements * ElementNbytes(type);
  const auto piece = [=](int64_t i) {
    const FlushSubnormals flush;
    const int64_t row = i / num_parts;
    const int64_t begin = i % num_parts * part_elements;
    const int64_t end =
        begin + part_elements < row_elements ? begin + part_elements : row_elements;
    const Words words = WordsOf(reduction, type, x, row * row_elements + begin,
                                row * row_elements + (begin < end ? end : begin));
    if (by_state) {
      CombineAtomically(reduction, scratch + row * kStateWords, words);
    } else {
      parts[kPartWords * i] = words.first;
      parts[kPartWords * i + 1] = words.second;
    }
  };
  RunInPieces(num_rows * num_parts, nbytes >= kParallelNbytes ? helpers : Helpers{},
              piece);

  const FlushSubnormals flush;
  for (int64_t row = 0; row < num_rows; ++row) {
    Words words = {scratch[row * kStateWords], scratch[row * kStateWords + 1]};
    if (!by_state) {
      words = {0, 0};
      for (int64_t i = row * num_parts; i < (row + 1) * num_parts; ++i) {
        words = Combined(reduction, words,
                         {parts[kPartWords * i], parts[kPartWords * i + 1]});
      }
    }
    if (reduction == Reduction::kMinMax) {
      first[row] = ValueOf(~words.first);
      second[row] = ValueOf(words.second);
    } else {
      first[row] = FloatOf(words.first);
    }
  }
}

}  // namespace dafjax
