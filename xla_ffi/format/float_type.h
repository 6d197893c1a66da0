#ifndef DAFJAX_FORMAT_FLOAT_TYPE_H_
#define DAFJAX_FORMAT_FLOAT_TYPE_H_

#include <cstdint>

namespace dafjax {

// Element types that the affine code takes and gives back.
enum class FloatType { kFloat32, kBFloat16, kFloat16 };

constexpr int64_t ElementNbytes(FloatType type) {
  return type == FloatType::kFloat32 ? 4 : 2;
}

}  // namespace dafjax

#endif  // DAFJAX_FORMAT_FLOAT_TYPE_H_
