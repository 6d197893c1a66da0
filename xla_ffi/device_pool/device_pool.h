#ifndef DAFJAX_DEVICE_POOL_DEVICE_POOL_H_
#define DAFJAX_DEVICE_POOL_DEVICE_POOL_H_

#include <cstdint>
#include <memory>

#include "cpu/paged_words.h"
#include "cuda/kernels.h"
#include "format/affine.h"
#include "pool/attachment.h"
#include "pool/execution.h"
#include "pool/pool.h"
#include "pool/status.h"

namespace dafjax {

// A put that is to be enqueued. Pointers are the device's.
struct DevicePut {
  Stream stream;
  pool::Execution execution;
  pool::SiteId site;
  int bits;
  int max_bits;
  AffineShape shape;  // of one entry, with elements; `bits` are the pool's to say
  bool stochastic;
  const uint32_t* seed;
  const void* x;
  uint32_t* handle;
};

// A page pool for programs of a GPU, which runs behind the host.
//
// All that a pool decides (bits, pages, what is evicted or reclaimed) it decides when a
// put is enqueued, in the order in which the host enqueues. What is enqueued with it, in
// the same order, are the changes of a table that only kernels read; a load finds the
// entry that its handle names there when it runs. So a load sees what the host had decided
// before it enqueued the load, and nothing later: an entry that is evicted or whose pages
// are given away afterwards is read first. Nothing waits for the GPU.
//
// A load whose handle names nothing gives NaN and is counted; the next call says so.
class DevicePool : public pool::Attachment {
 public:
  // Enqueues what encodes an entry into its pages, and the handle.
  virtual pool::Status Put(const DevicePut& put) = 0;
  // Enqueues what decodes one entry, with elements; `shape.bits` is not read.
  // `reads`: how many loads of the entry one backward pass makes; 0 if that is unknown.
  virtual pool::Status Get(Stream stream, const AffineShape& shape,
                           const uint32_t* handle, int64_t reads, void* y) = 0;
  // Enqueues what tells the pool, some time later, of `sensitivities` [num_rows,
  // sites + 1]: those of sites, then the squared norm of the gradient. Rows are added up.
  virtual pool::Status Note(Stream stream, const float* sensitivities, int64_t num_rows,
                            const int64_t* sites, int64_t num_sites) = 0;
};

// Makes planes of codes that are there already (cpu/kernels.h).
using PackBytesFunction = void (*)(int64_t num_tiles, const uint16_t* bytes,
                                   const AffineCodes& planes);

// For the current device. Null, and why not, if it cannot map memory of the host.
std::shared_ptr<DevicePool> MakeDevicePool(pool::AttachablePool* pool,
                                           PackBytesFunction pack, pool::Memory* system,
                                           pool::Status* status);

}  // namespace dafjax

#endif  // DAFJAX_DEVICE_POOL_DEVICE_POOL_H_
