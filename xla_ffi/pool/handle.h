#ifndef DAFJAX_POOL_HANDLE_H_
#define DAFJAX_POOL_HANDLE_H_

#include <cstdint>

namespace dafjax::pool {

// What a program holds of an entry: 128 bits, a uint32[4] in JAX. `check` is a keyed
// hash of the other three with a random key of the pool, so that a handle that this pool
// did not make in this process is refused before anything is looked up.
struct Handle {
  uint32_t slot = 0;
  uint32_t generation = 0;
  uint32_t pool_id = 0;
  uint32_t check = 0;
};

static_assert(sizeof(Handle) == 16);

inline bool operator==(const Handle& a, const Handle& b) {
  return a.slot == b.slot && a.generation == b.generation && a.pool_id == b.pool_id &&
         a.check == b.check;
}

struct HandleKey {
  uint64_t words[2] = {0, 0};
};

// A key from the system's source of randomness.
HandleKey RandomHandleKey();

// SipHash-2-4 of slot, generation and pool id, folded to 32 bits.
uint32_t HandleCheck(const HandleKey& key, const Handle& handle);

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_HANDLE_H_
