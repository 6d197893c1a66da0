#include "pool/handle.h"

#include <chrono>
#include <random>

namespace dafjax::pool {
namespace {

constexpr uint64_t RotateLeft(uint64_t x, int by) { return (x << by) | (x >> (64 - by)); }

// Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012.
struct SipState {
  uint64_t a, b, c, d;

  void Round() {
    a += b;
    b = RotateLeft(b, 13) ^ a;
    a = RotateLeft(a, 32);
    c += d;
    d = RotateLeft(d, 16) ^ c;
    a += d;
    d = RotateLeft(d, 21) ^ a;
    c += b;
    b = RotateLeft(b, 17) ^ c;
    c = RotateLeft(c, 32);
  }

  void Absorb(uint64_t word) {
    d ^= word;
    Round();
    Round();
    a ^= word;
  }
};

}  // namespace

HandleKey RandomHandleKey() {
  HandleKey key;
  try {
    std::random_device device;
    for (uint64_t& word : key.words) {
      word = uint64_t{device()} << 32 | device();
    }
  } catch (...) {
    // No source of randomness: a key that differs between processes and pools is left.
    // Handles guard against mistakes, not against who can read this process.
    const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
    key.words[0] = static_cast<uint64_t>(now) * 0x9e3779b97f4a7c15;
    key.words[1] = reinterpret_cast<uintptr_t>(&key) ^ static_cast<uint64_t>(now);
  }
  return key;
}

uint32_t HandleCheck(const HandleKey& key, const Handle& handle) {
  SipState state = {
      key.words[0] ^ 0x736f6d6570736575, key.words[1] ^ 0x646f72616e646f6d,
      key.words[0] ^ 0x6c7967656e657261, key.words[1] ^ 0x7465646279746573};
  state.Absorb(uint64_t{handle.generation} << 32 | handle.slot);
  // The last word of SipHash holds the remaining bytes and, on top, the length.
  state.Absorb(uint64_t{12} << 56 | handle.pool_id);
  state.c ^= 0xff;
  for (int i = 0; i < 4; ++i) state.Round();
  const uint64_t hash = state.a ^ state.b ^ state.c ^ state.d;
  return static_cast<uint32_t>(hash ^ hash >> 32);
}

}  // namespace dafjax::pool
