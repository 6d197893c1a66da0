#ifndef DAFJAX_DEVICE_POOL_PAGE_LISTS_H_
#define DAFJAX_DEVICE_POOL_PAGE_LISTS_H_

#include <cstdint>
#include <vector>

#include "cuda/kernels.h"
#include "device_pool/device_blocks.h"

namespace dafjax {

// Space in the device's memory for the pages' addresses of entries, one list for each slot
// of the table. A slot keeps its list from one entry to the next while it is long enough,
// then it goes to whoever needs one of that length. Only kernels write lists, in the order
// of the stream: those that read the entry before come first.
class PageLists {
 public:
  // It must outlive this.
  explicit PageLists(DeviceBlocks* blocks) : blocks_(blocks) {}

  // Sets `list` to space for the addresses of an entry's pages, at least one.
  Failure Of(uint32_t slot, int64_t num_pages, uint8_t*** list);

 private:
  struct List {
    uint8_t** data = nullptr;
    // It has room for 2^size addresses.
    int size = 0;
  };

  Failure Take(int size, uint8_t*** list);

  DeviceBlocks* const blocks_;
  std::vector<List> of_slots_;
  // By size.
  std::vector<std::vector<uint8_t**>> free_;
  // What is left of the block that was allocated last.
  uint8_t** rest_ = nullptr;
  int64_t rest_pages_ = 0;
};

}  // namespace dafjax

#endif  // DAFJAX_DEVICE_POOL_PAGE_LISTS_H_
