#ifndef DAFJAX_FORMAT_NOISE_H_
#define DAFJAX_FORMAT_NOISE_H_

#include <cstdint>

namespace dafjax {

// The noise of stochastic rounding, README.md section 3. A tile has 16 xorshift
// generators; generator `k` gives, for each row, the 16-bit words of lanes 2k and 2k+1.
inline constexpr int kNoiseStates = 16;
inline constexpr uint32_t kNoiseStep = 0x9e3779b9;

constexpr uint32_t MixNoise(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352d;
  x ^= x >> 15;
  x *= 0x846ca68b;
  x ^= x >> 16;
  return x;
}

// `checksum`: the wrapping sum of the float32 bit patterns of the tile's finite values.
constexpr uint32_t NoiseKey(uint32_t seed, uint32_t tile, uint32_t checksum) {
  return MixNoise(MixNoise(MixNoise(seed + kNoiseStep) ^ tile) + checksum);
}

constexpr uint32_t NoiseState(uint32_t key, uint32_t k) {
  return MixNoise(key + k * kNoiseStep) | 1;
}

constexpr uint32_t NextNoise(uint32_t state) {
  state ^= state << 13;
  state ^= state >> 17;
  state ^= state << 5;
  return state;
}

}  // namespace dafjax

#endif  // DAFJAX_FORMAT_NOISE_H_
