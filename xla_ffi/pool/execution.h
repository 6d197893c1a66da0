#ifndef DAFJAX_POOL_EXECUTION_H_
#define DAFJAX_POOL_EXECUTION_H_

#include <cstdint>

namespace dafjax::pool {

// One run of a compiled program on a device.
struct Execution {
  int64_t run_id = 0;
  int32_t device = 0;
};

// What identifies a residual over executions: bits and importance are kept by site.
using SiteId = uint64_t;

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_EXECUTION_H_
