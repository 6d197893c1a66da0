#ifndef DAFJAX_CUDA_BITMASK_H_
#define DAFJAX_CUDA_BITMASK_H_

#include <cstdint>

#include "cuda/device.h"
#include "cuda/planes.h"
#include "cuda/tile_values.h"
#include "format/packed.h"

namespace dafjax {

inline constexpr int kBitmaskThreads = 128;
inline constexpr int kBitmaskTiles = kBitmaskThreads / kTileThreads;  // of a launch block

// Booleans are handled four at a time, as the bytes of a word. A thread has the bits of
// its four lanes in two words: byte `i` of one are lane `i`'s rows 0 .. 7, of the other
// its rows 8 .. 15.
struct LaneBits {
  uint32_t low;
  uint32_t high;
};

struct BitmaskJob {
  int64_t num_rows;
  int64_t row_elements;
  int64_t tiles_per_row;
  bool aligned_bytes;
  bool aligned_words;
};

// Where a thread of a bitmask kernel is.
struct BitmaskPlace {
  DAFJAX_DEVICE explicit BitmaskPlace(const BitmaskJob& job) {
    const int part = static_cast<int>(threadIdx.x % kTileThreads);
    const int64_t slot = int64_t{blockIdx.x} * kBitmaskTiles +
                         static_cast<int>(threadIdx.x / kTileThreads);
    const TilePlace place = PlaceOfSlot(slot, job.tiles_per_row, job.num_rows);
    const int64_t first = place.tile * kTileElements + part * kThreadLanes;
    exists = place.row < job.num_rows && place.tile < job.tiles_per_row;
    byte = place.row * job.row_elements + first;
    word = slot * kTileLanes + part * kThreadLanes;
    piece = {kTileLanes, exists ? job.row_elements - first : 0};
  }

  bool exists;
  int64_t byte;
  int64_t word;
  Piece piece;
};

// The lowest bit of each byte: whether the byte is not 0.
DAFJAX_DEVICE uint32_t BytesThatAreTrue(uint32_t bytes) {
  const uint32_t top = ((bytes & 0x7f7f7f7f) + 0x7f7f7f7f) | bytes;
  return top >> 7 & 0x01010101;
}

// Bits of one row: `bytes` has a 0 or a 1 for each lane.
DAFJAX_DEVICE void AddRow(int row, uint32_t bytes, LaneBits* bits) {
  if (row < 8) bits->low |= bytes << row;
  if (row >= 8) bits->high |= bytes << (row - 8);
}

DAFJAX_DEVICE uint32_t RowOf(int row, const LaneBits& bits) {
  return (row < 8 ? bits.low : bits.high) >> row % 8 & 0x01010101;
}

DAFJAX_KERNEL(kBitmaskThreads)
PackBitmaskKernel(const BitmaskJob job, const uint8_t* x, uint16_t* words) {
  const BitmaskPlace place(job);
  if (!place.exists) return;
  const uint8_t* const from = x + place.byte;
  LaneBits bits = {0, 0};
  if (job.aligned_bytes && place.piece.IsWhole()) {
    uint32_t bytes[kTileRows];
    DAFJAX_UNROLL
    for (int row = 0; row < kTileRows; ++row) {
      bytes[row] = *reinterpret_cast<const uint32_t*>(from + row * kTileLanes);
    }
    DAFJAX_UNROLL
    for (int row = 0; row < kTileRows; ++row) {
      AddRow(row, BytesThatAreTrue(bytes[row]), &bits);
    }
  } else {
    DAFJAX_NO_UNROLL
    for (int row = 0; row < kTileRows; ++row) {
      const int present = place.piece.NumPresent(row);
      uint32_t bytes = 0;
      DAFJAX_UNROLL
      for (int i = 0; i < kThreadLanes; ++i) {
        if (i < present) bytes |= uint32_t{from[row * kTileLanes + i]} << 8 * i;
      }
      AddRow(row, BytesThatAreTrue(bytes), &bits);
    }
  }
  StoreWords(words + place.word, job.aligned_words,
             make_uint2(__byte_perm(bits.low, bits.high, 0x5140),
                        __byte_perm(bits.low, bits.high, 0x7362)));
}

DAFJAX_KERNEL(kBitmaskThreads)
UnpackBitmaskKernel(const BitmaskJob job, const uint16_t* words, uint8_t* y) {
  const BitmaskPlace place(job);
  if (!place.exists) return;
  const uint2 of_lanes = LoadWords(words + place.word, job.aligned_words);
  const LaneBits bits = {__byte_perm(of_lanes.x, of_lanes.y, 0x6420),
                         __byte_perm(of_lanes.x, of_lanes.y, 0x7531)};
  uint8_t* const to = y + place.byte;
  if (job.aligned_bytes && place.piece.IsWhole()) {
    DAFJAX_UNROLL
    for (int row = 0; row < kTileRows; ++row) {
      *reinterpret_cast<uint32_t*>(to + row * kTileLanes) = RowOf(row, bits);
    }
    return;
  }
  DAFJAX_NO_UNROLL
  for (int row = 0; row < kTileRows; ++row) {
    const int present = place.piece.NumPresent(row);
    const uint32_t bytes = RowOf(row, bits);
    DAFJAX_UNROLL
    for (int i = 0; i < kThreadLanes; ++i) {
      if (i < present) to[row * kTileLanes + i] = static_cast<uint8_t>(bytes >> 8 * i);
    }
  }
}

}  // namespace dafjax

#endif  // DAFJAX_CUDA_BITMASK_H_
