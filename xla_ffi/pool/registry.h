#ifndef DAFJAX_POOL_REGISTRY_H_
#define DAFJAX_POOL_REGISTRY_H_

#include <cstdint>
#include <memory>
#include <string_view>

#include "pool/pool.h"

namespace dafjax::pool {

// Custom calls carry the hash of a pool's name: the same in every process, so that
// programs that are cached on disk stay valid.
uint64_t HashOfName(std::string_view name);

// Makes `pool` findable. False if a live pool has the same hash.
bool Register(uint64_t hash, const std::shared_ptr<Pool>& pool);

// The live pool of a hash, or null. The registry itself keeps no pool alive.
std::shared_ptr<Pool> FindPool(uint64_t hash);

// FindPool for another library.
using AttachablePoolFinder = std::shared_ptr<AttachablePool> (*)(uint64_t hash);
std::shared_ptr<AttachablePool> FindAttachablePool(uint64_t hash);

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_REGISTRY_H_
