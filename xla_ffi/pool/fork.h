#ifndef DAFJAX_POOL_FORK_H_
#define DAFJAX_POOL_FORK_H_

#include <cstdint>

namespace dafjax::pool {

// How many forks lie between the process that loaded the library and this one: another
// number means another process.
uint32_t NumForks();

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_FORK_H_
