#include "simulator/fiber.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

// Of the sanitizers; null where they are not linked in. This file itself is compiled
// without the thread sanitizer, which would take a switch of stacks for a race.
extern "C" {
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** frames,
                                                          const void* bottom,
                                                          size_t nbytes);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* frames,
                                                           const void** bottom,
                                                           size_t* nbytes);
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_destroy_fiber(void* fiber);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
__attribute__((weak)) void __tsan_acquire(void* object);
__attribute__((weak)) void __tsan_release(void* object);
}

namespace dafjax::simulator {
namespace {

// Frames are large under sanitizers.
constexpr size_t kStackNbytes = size_t{256} << 10;
constexpr size_t kGuardNbytes = 4096;
constexpr unsigned kOrdersNothing = 1;  // __tsan_switch_to_fiber_no_sync

bool HasThreadSanitizer() { return __tsan_create_fiber != nullptr; }

// Stacks that wait for another fiber. Callers hold the simulator's lock.
std::vector<void*>& SpareStacks() {
  static auto* const stacks = new std::vector<void*>;
  return *stacks;
}

void* NewStack() {
  std::vector<void*>& spare = SpareStacks();
  if (!spare.empty()) {
    void* const stack = spare.back();
    spare.pop_back();
    return stack;
  }
  void* const stack = mmap(nullptr, kStackNbytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED || mprotect(stack, kGuardNbytes, PROT_NONE) != 0) {
    std::perror("simulator: no memory for the stack of a thread");
    std::abort();
  }
  return stack;
}

void FreeStack(void* stack) {
  // The thread sanitizer forgets who used memory only when it is unmapped.
  if (HasThreadSanitizer()) {
    munmap(stack, kStackNbytes);
  } else {
    SpareStacks().push_back(stack);
  }
}

}  // namespace

Fiber::Fiber(void (*run)(void*), void* argument)
    : run_(run), argument_(argument), stack_(NewStack()) {
  getcontext(&inside_);
  inside_.uc_stack.ss_sp = stack_;
  inside_.uc_stack.ss_size = kStackNbytes;
  inside_.uc_link = nullptr;
  const auto address = reinterpret_cast<uintptr_t>(this);
  makecontext(&inside_, reinterpret_cast<void (*)()>(&Fiber::Begin), 2,
              static_cast<unsigned>(address >> 32), static_cast<unsigned>(address));
  if (HasThreadSanitizer()) inside_thread_ = __tsan_create_fiber(0);
}

Fiber::~Fiber() {
  if (HasThreadSanitizer()) __tsan_destroy_fiber(inside_thread_);
  FreeStack(stack_);
}

void Fiber::Enter() {
  if (HasThreadSanitizer()) {
    outside_thread_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(inside_thread_, kOrdersNothing);
  }
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(&outside_frames_, stack_, kStackNbytes);
  }
  swapcontext(&outside_, &inside_);
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(outside_frames_, nullptr, nullptr);
  }
}

void Fiber::Leave(bool is_last) {
  if (HasThreadSanitizer()) __tsan_switch_to_fiber(outside_thread_, kOrdersNothing);
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(is_last ? nullptr : &inside_frames_, outside_stack_,
                                   outside_nbytes_);
  }
  swapcontext(&inside_, &outside_);
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(inside_frames_, &outside_stack_, &outside_nbytes_);
  }
}

void Fiber::Begin(unsigned high, unsigned low) {
  auto* const fiber =
      reinterpret_cast<Fiber*>(static_cast<uintptr_t>(high) << 32 | low);
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(nullptr, &fiber->outside_stack_,
                                    &fiber->outside_nbytes_);
  }
  fiber->run_(fiber->argument_);
  fiber->Leave(true);
}

void Release(void* object) {
  if (HasThreadSanitizer()) __tsan_release(object);
}

void Acquire(void* object) {
  if (HasThreadSanitizer()) __tsan_acquire(object);
}

}  // namespace dafjax::simulator
