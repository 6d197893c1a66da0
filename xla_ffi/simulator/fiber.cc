#include "simulator/fiber.h"

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

// Saves what a function has to keep on the stack and the stack pointer in `*from`, and goes
// on where the stack pointer `to` was saved. swapcontext() would do, but asks the system
// for the signal mask every time, which takes most of the time of a simulation.
extern "C" void dafjax_switch_stack(void** from, void* to);
#if defined(__x86_64__)
asm(R"(
.pushsection .text
.type dafjax_switch_stack, @function
dafjax_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size dafjax_switch_stack, . - dafjax_switch_stack
.popsection
)");
#elif defined(__aarch64__)
asm(R"(
.pushsection .text
.type dafjax_switch_stack, %function
dafjax_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size dafjax_switch_stack, . - dafjax_switch_stack
.popsection
)");
#endif

// Of the sanitizers; null where they are not linked in. This file itself is compiled
// without the thread sanitizer, which would take a switch of stacks for a race.
extern "C" {
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** frames,
                                                          const void* bottom,
                                                          size_t nbytes);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* frames,
                                                           const void** bottom,
                                                           size_t* nbytes);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* address,
                                                         size_t nbytes);
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
__attribute__((weak)) void __tsan_acquire(void* object);
__attribute__((weak)) void __tsan_release(void* object);
}

namespace dafjax::simulator {
namespace {

// Frames are large under sanitizers.
constexpr size_t kStackNbytes = size_t{256} << 10;
constexpr size_t kGuardNbytes = 4096;
// Words that dafjax_switch_stack saves, and which of them is the address to return to.
#if defined(__x86_64__)
constexpr size_t kSavedWords = 8;  // one more, so that Begin finds the stack as after a call
constexpr size_t kReturnWord = 6;
#elif defined(__aarch64__)
constexpr size_t kSavedWords = 20;
constexpr size_t kReturnWord = 11;
#else
#error "the simulator runs on x86-64 and aarch64 only"
#endif
constexpr unsigned kOrdersNothing = 1;  // __tsan_switch_to_fiber_no_sync

// The one that is entered. Callers hold the simulator's lock.
Fiber* entered = nullptr;

bool HasThreadSanitizer() { return __tsan_create_fiber != nullptr; }

// What a fiber runs on. They stay together: to the thread sanitizer, what one thread leaves
// on a stack is not for another one to overwrite.
struct Ground {
  void* stack;
  void* thread;  // the sanitizer's
};

// Callers hold the simulator's lock.
struct Grounds {
  std::vector<Ground> free;
  std::vector<Ground> used;  // in this launch, by threads that have returned
  size_t count = 0;
};

Grounds& AllGrounds() {
  static auto* const grounds = new Grounds;
  return *grounds;
}

// A thread costs the sanitizer half a megabyte. With more of them those of a launch that
// have returned are followed by others of the same launch.
constexpr size_t kMaxGrounds = 1600;

Ground NewGround() {
  void* const stack = mmap(nullptr, kStackNbytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED || mprotect(stack, kGuardNbytes, PROT_NONE) != 0) {
    std::perror("simulator: no memory for the stack of a thread");
    std::abort();
  }
  return {stack, HasThreadSanitizer() ? __tsan_create_fiber(0) : nullptr};
}

Ground TakeGround() {
  Grounds& grounds = AllGrounds();
  if (grounds.free.empty() && grounds.count >= kMaxGrounds) Fiber::EndLaunch();
  if (grounds.free.empty()) {
    ++grounds.count;
    return NewGround();
  }
  const Ground ground = grounds.free.back();
  grounds.free.pop_back();
  return ground;
}

}  // namespace

Fiber::Fiber(void (*run)(void*), void* argument) : run_(run), argument_(argument) {
  const Ground ground = TakeGround();
  stack_ = ground.stack;
  inside_thread_ = ground.thread;
  auto* const top = reinterpret_cast<uintptr_t*>(static_cast<char*>(stack_) +
                                                 kStackNbytes);
  uintptr_t* const saved = top - kSavedWords;
  for (size_t i = 0; i < kSavedWords; ++i) saved[i] = 0;
  saved[kReturnWord] = reinterpret_cast<uintptr_t>(&Fiber::Begin);
  inside_ = saved;
}

// A thread that goes on with the ground of another one of its launch would know of all
// that the other has done: the thread sanitizer could miss a race of the two.
Fiber::~Fiber() {
  // Frames that were never left are still marked on the stack.
  if (!has_returned_ && __asan_unpoison_memory_region != nullptr) {
    __asan_unpoison_memory_region(static_cast<char*>(stack_) + kGuardNbytes,
                                  kStackNbytes - kGuardNbytes);
  }
  Grounds& grounds = AllGrounds();
  (HasThreadSanitizer() ? grounds.used : grounds.free).push_back({stack_, inside_thread_});
}

void Fiber::EndLaunch() {
  Grounds& grounds = AllGrounds();
  grounds.free.insert(grounds.free.end(), grounds.used.begin(), grounds.used.end());
  grounds.used.clear();
}

void Fiber::Enter() {
  entered = this;
  if (HasThreadSanitizer()) {
    outside_thread_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(inside_thread_, kOrdersNothing);
  }
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(&outside_frames_, stack_, kStackNbytes);
  }
  dafjax_switch_stack(&outside_, inside_);
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
  dafjax_switch_stack(&inside_, outside_);
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(inside_frames_, &outside_stack_, &outside_nbytes_);
  }
}

void Fiber::Begin() {
  Fiber* const fiber = entered;
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(nullptr, &fiber->outside_stack_,
                                    &fiber->outside_nbytes_);
  }
  fiber->run_(fiber->argument_);
  fiber->has_returned_ = true;
  fiber->Leave(true);
}

void Release(void* object) {
  if (HasThreadSanitizer()) __tsan_release(object);
}

void Acquire(void* object) {
  if (HasThreadSanitizer()) __tsan_acquire(object);
}

}  // namespace dafjax::simulator
