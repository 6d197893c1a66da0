#ifndef DAFJAX_SIMULATOR_DEVICE_MEMORY_H_
#define DAFJAX_SIMULATOR_DEVICE_MEMORY_H_

#include <cstddef>

namespace dafjax::simulator {

// Memory of the device alone. As that of a real one it is not there for the host, which
// crashes where it touches it: it is only while the device is at work. (In that time
// another thread's mistake goes unseen.)

// Null if there is none. What is in it at first is anything.
void* AllocateOnDevice(size_t nbytes);

// False if this was not allocated.
bool FreeOnDevice(void* data);

// The device is at work while any of these exists.
class DeviceAtWork {
 public:
  DeviceAtWork();
  ~DeviceAtWork();
  DeviceAtWork(const DeviceAtWork&) = delete;
  DeviceAtWork& operator=(const DeviceAtWork&) = delete;
};

}  // namespace dafjax::simulator

#endif  // DAFJAX_SIMULATOR_DEVICE_MEMORY_H_
