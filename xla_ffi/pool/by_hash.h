#ifndef DAFJAX_POOL_BY_HASH_H_
#define DAFJAX_POOL_BY_HASH_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "pool/fork_safe_lock.h"

namespace dafjax {

// What custom calls find by the hash of its name. It keeps nothing alive itself.
template <typename T>
class ByHash {
 public:
  // Never destroyed: handlers may still run while the process exits.
  static ByHash& All() {
    static ByHash* const all = new ByHash;
    return *all;
  }

  // False if something live has the hash.
  bool Register(uint64_t hash, const std::shared_ptr<T>& item) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::weak_ptr<T>& place = items_[hash];
    if (!place.expired()) return false;
    place = item;
    return true;
  }

  // What is live, or null.
  std::shared_ptr<T> Find(uint64_t hash) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = items_.find(hash);
    return found == items_.end() ? nullptr : found->second.lock();
  }

 private:
  static inline std::mutex& mutex_ = ForkSafeLock<ByHash>();
  std::unordered_map<uint64_t, std::weak_ptr<T>> items_;
};

}  // namespace dafjax

#endif  // DAFJAX_POOL_BY_HASH_H_
