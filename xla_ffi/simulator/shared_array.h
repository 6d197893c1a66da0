#ifndef DAFJAX_SIMULATOR_SHARED_ARRAY_H_
#define DAFJAX_SIMULATOR_SHARED_ARRAY_H_

#include <cstddef>

#include "simulator/grid.h"

namespace dafjax::simulator {

// An array in the shared memory of a block: memory of its own, full of garbage, with
// margins that nobody may write to.
class SharedMemory {
 public:
  SharedMemory(size_t nbytes, Site site);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }
  Site site() const { return site_; }

  // Whether the margins are as they were. The address sanitizer finds reads too, at once.
  bool HasIntactMargins() const;

 private:
  const size_t nbytes_;
  const Site site_;
  size_t mapped_nbytes_;
  unsigned char* mapped_;
  unsigned char* data_;
};

}  // namespace dafjax::simulator

#endif  // DAFJAX_SIMULATOR_SHARED_ARRAY_H_
