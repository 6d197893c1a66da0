#ifndef DAFJAX_DEVICE_POOL_ENTRY_PACKER_H_
#define DAFJAX_DEVICE_POOL_ENTRY_PACKER_H_

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "cuda/device.h"
#include "cuda/entry_table.h"
#include "device_pool/device_pool.h"
#include "device_pool/host_packer.h"
#include "device_pool/lap_timer.h"
#include "device_pool/packer_choice.h"
#include "format/affine.h"
#include "pool/attachment.h"
#include "pool/pool.h"

namespace dafjax {

// Enqueues what encodes entries: by the GPU alone, or by the GPU and the CPU, whichever is
// wanted or turns out to be faster.
class EntryPacker {
 public:
  // Before all others. kAuto measures both.
  Failure Start(PackBytesFunction pack, pool::Packer wanted);

  // Before each put: who packs changes between executions alone.
  Failure Choose(const DevicePut& put);
  Failure Pack(const DevicePut& put, const AffineShape& shape, const pool::PutView& view,
               const DeviceEntry& entry);

  // Has `stream` wait for what the CPU has yet to write: into all entries, or into those
  // that have changed, whose pages may have been taken away.
  Failure WaitForAll(Stream stream) { return host_.WaitForAll(stream); }
  Failure WaitForChanged(Stream stream, const pool::Change* changes, int count);
  // Returns when the CPU has packed all.
  void Synchronize() { host_.Synchronize(); }

  pool::Packer packer() const { return packer_; }

 private:
  HostPacker host_;
  // Of each entry by its slot, the number of the pack that the CPU makes of it, or 0.
  std::vector<uint64_t> packs_;
  std::atomic<pool::Packer> packer_{pool::Packer::kGpu};
  PackerChoice choice_{pool::Packer::kGpu};
  LapTimer timer_;
  std::optional<int64_t> last_run_id_;
};

}  // namespace dafjax

#endif  // DAFJAX_DEVICE_POOL_ENTRY_PACKER_H_
