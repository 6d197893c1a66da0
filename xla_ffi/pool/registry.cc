#include "pool/registry.h"

#include <pthread.h>

#include <mutex>
#include <unordered_map>

namespace dafjax::pool {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<uint64_t, std::weak_ptr<Pool>> pools;
};

// Never destroyed: handlers may still run while the process exits.
Registry& TheRegistry() {
  static Registry* const registry = [] {
    Registry* made = new Registry;
    // A child must not inherit the lock from a thread that it does not have.
    pthread_atfork([] { TheRegistry().mutex.lock(); },
                   [] { TheRegistry().mutex.unlock(); },
                   [] { TheRegistry().mutex.unlock(); });
    return made;
  }();
  return *registry;
}

}  // namespace

uint64_t HashOfName(std::string_view name) {
  // FNV-1a: the same on every machine.
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : name) {
    hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  }
  return hash;
}

bool Register(uint64_t hash, const std::shared_ptr<Pool>& pool) {
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  std::weak_ptr<Pool>& place = registry.pools[hash];
  if (!place.expired()) return false;
  place = pool;
  return true;
}

std::shared_ptr<Pool> FindPool(uint64_t hash) {
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.pools.find(hash);
  return found == registry.pools.end() ? nullptr : found->second.lock();
}

}  // namespace dafjax::pool
