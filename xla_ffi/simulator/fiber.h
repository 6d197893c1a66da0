#ifndef DAFJAX_SIMULATOR_FIBER_H_
#define DAFJAX_SIMULATOR_FIBER_H_

#include <cstddef>

namespace dafjax::simulator {

// A function with a stack of its own, which runs until it leaves and goes on where it
// left. Address and thread sanitizers know of it: to the latter it is a thread, and to
// enter or leave it orders nothing.
class Fiber {
 public:
  Fiber(void (*run)(void*), void* argument);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Runs the fiber until it leaves. Called from outside of any fiber.
  void Enter();

  // To be called when all fibers of a launch are gone. Later ones may follow them.
  static void EndLaunch();

  // Called within the fiber. After the last time it cannot be entered again.
  void Leave(bool is_last);

 private:
  static void Begin();

  void (*const run_)(void*);
  void* const argument_;
  void* stack_ = nullptr;
  void* inside_ = nullptr;   // the stack pointer where the fiber goes on,
  void* outside_ = nullptr;  // and where whoever entered it does
  bool has_returned_ = false;
  // What the sanitizers need to know of a switch.
  void* inside_frames_ = nullptr;
  void* outside_frames_ = nullptr;
  const void* outside_stack_ = nullptr;
  size_t outside_nbytes_ = 0;
  void* inside_thread_ = nullptr;
  void* outside_thread_ = nullptr;
};

// Orders what the caller did before a release before what it does after an acquire of the
// same object. Only the thread sanitizer notices.
void Release(void* object);
void Acquire(void* object);

}  // namespace dafjax::simulator

#endif  // DAFJAX_SIMULATOR_FIBER_H_
