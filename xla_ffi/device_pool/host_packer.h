#ifndef DAFJAX_DEVICE_POOL_HOST_PACKER_H_
#define DAFJAX_DEVICE_POOL_HOST_PACKER_H_

#include <array>
#include <cstdint>
#include <vector>

#include "cpu/paged_words.h"
#include "cuda/device.h"
#include "cuda/kernels.h"
#include "device_pool/device_pool.h"

namespace dafjax {

// Has the CPU pack what the GPU has quantized, while the GPU goes on: for GPUs that share
// the host's memory.
//
// The GPU writes codes into a slot, a byte each; a stream of the packer's own waits for
// that and calls a function of the host, which packs the slot into pages. Slots are used in
// turn: a stream that comes to one waits until it has been packed, so that the GPU is at
// most kSlots entries ahead.
//
// Packs are numbered from 1 and happen in this order.
class HostPacker {
 public:
  static constexpr int kSlots = 3;
  // An entry with more codes is left to the GPU.
  static constexpr int64_t kMaxSlotNbytes = int64_t{64} << 20;

  HostPacker() = default;
  ~HostPacker();
  HostPacker(const HostPacker&) = delete;
  HostPacker& operator=(const HostPacker&) = delete;

  // Before all others. `pack` makes planes of bytes.
  Failure Start(PackBytesFunction pack);

  static bool Fits(int64_t num_tiles);

  // Gives the next slot, with the device's address: what is enqueued on `stream` after
  // this may write it. Requires that the entry fits.
  Failure Begin(Stream stream, int64_t num_tiles, uint16_t** slot);
  // Packs what is written to that slot before this, into planes of `bits` bits whose pages
  // follow each other in `pages`. Returns the number of the pack through `number`.
  Failure End(Stream stream, int bits, int64_t num_tiles, std::vector<uint8_t*> pages,
              uint64_t* number);

  // Has `stream` wait for a pack, and all before; 0: for none.
  Failure WaitFor(Stream stream, uint64_t number);
  Failure WaitForAll(Stream stream) { return WaitFor(stream, last_number_); }
  // Returns when all packs are done.
  void Synchronize();

 private:
  struct Slot {
    uint16_t* data = nullptr;
    uint16_t* on_device = nullptr;
    int64_t nbytes = 0;
    cudaEvent_t written = nullptr;
    cudaEvent_t packed = nullptr;
  };

  Slot& SlotOf(uint64_t number) { return slots_[(number - 1) % kSlots]; }
  Failure Grow(Slot* slot, int64_t nbytes);

  PackBytesFunction pack_ = nullptr;
  Stream stream_ = nullptr;
  std::array<Slot, kSlots> slots_;
  // Slots that have become too small: the last pack may still read one.
  std::vector<void*> allocated_;
  uint64_t last_number_ = 0;
};

}  // namespace dafjax

#endif  // DAFJAX_DEVICE_POOL_HOST_PACKER_H_
