#ifndef DAFJAX_POOL_ATTACHMENT_H_
#define DAFJAX_POOL_ATTACHMENT_H_

#include <cstdint>

#include "pool/memory.h"
#include "pool/status.h"

namespace dafjax::pool {

// Who packs residuals of a GPU: that which is faster, the GPU, or the CPU.
enum class Packer { kAuto, kGpu, kCpu };

// What has become of an entry that had been put: which of its bits are left, or that it is
// gone.
struct Change {
  static constexpr int32_t kGone = -1;

  uint32_t slot = 0;
  int32_t bits_kept = kGone;
};

// What serves a pool's entries to a device that runs behind the host. The pool owns it, and
// gives it the memory that pages come from.
class Attachment {
 public:
  virtual ~Attachment() = default;

  // Where pages come from. What is released there may still be read by what the device has
  // yet to do.
  virtual Memory* memory() = 0;
  // Tells the pool of the entries that loads have read as often as their readers say, of
  // all loads that have been enqueued; waits for these.
  virtual Status TellReads() = 0;
  // Waits until the device has done what it was told, tells it what has changed, and gives
  // released memory back. Returns what loads found wrong that ran since the last call.
  virtual Status Settle() = 0;
  // Loads whose handle named nothing, of all that have run.
  virtual int64_t num_refused() const = 0;
  // Who packs in the execution that was enqueued last: not kAuto.
  virtual Packer packer() const = 0;
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_ATTACHMENT_H_
