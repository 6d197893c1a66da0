#ifndef DAFJAX_POOL_FORK_SAFE_LOCK_H_
#define DAFJAX_POOL_FORK_SAFE_LOCK_H_

#include <pthread.h>

#include <mutex>

namespace dafjax {

// The lock of all that is a T. A child of fork() does not inherit it from a thread that
// it does not have: no other thread holds it while a process forks. To be asked for when
// the library is loaded, before there are threads that could fork in the midst of it.
template <typename T>
std::mutex& ForkSafeLock() {
  // Never destroyed: handlers may still run while the process exits.
  static std::mutex* const lock = [] {
    pthread_atfork([] { ForkSafeLock<T>().lock(); }, [] { ForkSafeLock<T>().unlock(); },
                   [] { ForkSafeLock<T>().unlock(); });
    return new std::mutex;
  }();
  return *lock;
}

}  // namespace dafjax

#endif  // DAFJAX_POOL_FORK_SAFE_LOCK_H_
