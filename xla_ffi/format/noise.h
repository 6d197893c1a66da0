#ifndef DAFJAX_FORMAT_NOISE_H_
#define DAFJAX_FORMAT_NOISE_H_

#include <cstdint>

#include "format/packed.h"

namespace dafjax {

// The noise of stochastic rounding, README.md section 3. A lane's first word is drawn
// from the tile's key; every row multiplies it, modulo 2^16.
inline constexpr uint16_t kNoiseFactor = 0x9f27;
inline constexpr uint32_t kNoiseStep = 0x9e3779b9;

// The key depends on the values in the tile's rows 0, 2, 4 ...
constexpr bool IsInChecksum(int element) { return element / kTileLanes % 2 == 0; }

constexpr uint32_t MixNoise(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352d;
  x ^= x >> 15;
  x *= 0x846ca68b;
  x ^= x >> 16;
  return x;
}

constexpr uint32_t NoiseStream(uint32_t seed) { return MixNoise(seed + kNoiseStep); }

// `checksum`: the wrapping sum of the float32 bit patterns of the tile's finite values in
// the rows that count.
constexpr uint32_t NoiseKey(uint32_t stream, uint32_t tile, uint32_t checksum) {
  return MixNoise(MixNoise(stream ^ tile) + checksum);
}

// The noise words of lanes `2 * pair` and `2 * pair + 1` in row 0: the lower and the upper
// half.
constexpr uint32_t FirstNoiseOfPair(uint32_t key, int pair) {
  return MixNoise(key + static_cast<uint32_t>(pair) * kNoiseStep);
}

constexpr uint16_t FirstNoise(uint32_t key, int lane) {
  return static_cast<uint16_t>(FirstNoiseOfPair(key, lane / 2) >> lane % 2 * 16);
}

constexpr uint16_t NextNoise(uint16_t word) {
  return static_cast<uint16_t>(uint32_t{word} * kNoiseFactor);
}

// What the word of row 0 is multiplied with for the word of another row.
constexpr uint16_t NoisePower(int row) {
  uint16_t power = 1;
  for (int i = 0; i < row; ++i) power = NextNoise(power);
  return power;
}

// Of noise that the decoder subtracts, the key depends on what is stored of two blocks of
// the tile, those of these elements: the scale, with its flag, above the minimum. Of a
// block that is not stored it is 0.
inline constexpr int kFirstDitherRow = 0, kFirstDitherLane = 0;
inline constexpr int kLastDitherRow = 14, kLastDitherLane = 28;

constexpr uint32_t DitherChecksum(uint32_t of_first_block, uint32_t of_last_block) {
  return of_first_block + of_last_block * kNoiseStep;
}

// A code of `16 - fraction` bits and noise word `word` stand for this number of steps,
// times 2^fraction.
constexpr int32_t DitheredSteps(int code, int fraction, uint16_t word) {
  const int noise = word >> (16 - fraction);
  return (code << fraction) + (1 << fraction) / 2 - noise;
}

}  // namespace dafjax

#endif  // DAFJAX_FORMAT_NOISE_H_
