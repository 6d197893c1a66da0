#ifndef DAFJAX_FORMAT_TAPE_H_
#define DAFJAX_FORMAT_TAPE_H_

#include <cstdint>

namespace dafjax {

// A tape: operations on scalars, one after another, README.md section 11. Each is 64 bits:
// which, then the places of its operands. Places count what is given first, then results.
enum class TapeOperation : uint32_t { kAdd, kMultiply, kDivide };

inline constexpr int kTapePlaceBits = 30;

constexpr uint32_t TapeOperationOf(uint64_t entry) {
  return static_cast<uint32_t>(entry >> 2 * kTapePlaceBits);
}
constexpr uint32_t FirstPlaceOf(uint64_t entry) {
  return static_cast<uint32_t>(entry >> kTapePlaceBits) & ((1u << kTapePlaceBits) - 1);
}
constexpr uint32_t SecondPlaceOf(uint64_t entry) {
  return static_cast<uint32_t>(entry) & ((1u << kTapePlaceBits) - 1);
}

// Whether an entry is an operation on what comes before `place`.
constexpr bool IsTapeEntry(uint64_t entry, int64_t place) {
  return TapeOperationOf(entry) <= static_cast<uint32_t>(TapeOperation::kDivide) &&
         FirstPlaceOf(entry) < place && SecondPlaceOf(entry) < place;
}

}  // namespace dafjax

#endif  // DAFJAX_FORMAT_TAPE_H_
