#include "simulator/device_memory.h"

#include <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>

namespace dafjax::simulator {
namespace {

struct Blocks {
  std::mutex lock;
  std::map<void*, size_t> nbytes;
  int at_work = 0;

  void Allow(int access) {
    for (const auto& [data, size] : nbytes) mprotect(data, size, access);
  }
};

Blocks& TheBlocks() {
  static Blocks* const blocks = new Blocks;
  return *blocks;
}

}  // namespace

void* AllocateOnDevice(size_t nbytes) {
  void* const data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  std::memset(data, 0xab, nbytes);
  Blocks& blocks = TheBlocks();
  const std::lock_guard<std::mutex> guard(blocks.lock);
  blocks.nbytes[data] = nbytes;
  if (blocks.at_work == 0) blocks.Allow(PROT_NONE);
  return data;
}

bool FreeOnDevice(void* data) {
  Blocks& blocks = TheBlocks();
  const std::lock_guard<std::mutex> guard(blocks.lock);
  const auto found = blocks.nbytes.find(data);
  if (found == blocks.nbytes.end()) return false;
  munmap(data, found->second);
  blocks.nbytes.erase(found);
  return true;
}

DeviceAtWork::DeviceAtWork() {
  Blocks& blocks = TheBlocks();
  const std::lock_guard<std::mutex> guard(blocks.lock);
  if (blocks.at_work++ == 0) blocks.Allow(PROT_READ | PROT_WRITE);
}

DeviceAtWork::~DeviceAtWork() {
  Blocks& blocks = TheBlocks();
  const std::lock_guard<std::mutex> guard(blocks.lock);
  if (--blocks.at_work == 0) blocks.Allow(PROT_NONE);
}

}  // namespace dafjax::simulator
