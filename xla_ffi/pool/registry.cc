#include "pool/registry.h"

#include "pool/by_hash.h"

namespace dafjax::pool {

uint64_t HashOfName(std::string_view name) {
  // FNV-1a: the same on every machine.
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : name) {
    hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  }
  return hash;
}

bool Register(uint64_t hash, const std::shared_ptr<Pool>& pool) {
  return ByHash<Pool>::All().Register(hash, pool);
}

std::shared_ptr<Pool> FindPool(uint64_t hash) {
  return ByHash<Pool>::All().Find(hash);
}

std::shared_ptr<AttachablePool> FindAttachablePool(uint64_t hash) {
  return FindPool(hash);
}

}  // namespace dafjax::pool
