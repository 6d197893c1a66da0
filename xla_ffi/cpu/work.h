#ifndef DAFJAX_CPU_WORK_H_
#define DAFJAX_CPU_WORK_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace dafjax {

// Threads that may help a caller.
struct Helpers {
  int64_t count = 0;
  // Has `task` run on another thread, some time.
  std::function<void(std::function<void()> task)> schedule;
};

// `count` independent pieces of work, claimed one by one by whoever has time.
//
// Invariant: 0 <= completed <= min(next, count).
class Work {
 public:
  Work(int64_t count, std::function<void(int64_t)> piece)
      : count_(count), piece_(std::move(piece)) {}

  // Runs pieces until none is left to claim.
  void Participate() {
    int64_t mine = 0;
    for (int64_t i; (i = next_.fetch_add(1)) < count_; ++mine) piece_(i);
    if (mine == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    completed_ += mine;
    if (completed_ == count_) done_.notify_all();
  }

  // Waits for the pieces that others have claimed.
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return completed_ == count_; });
  }

 private:
  const int64_t count_;
  const std::function<void(int64_t)> piece_;
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable done_;
  int64_t completed_ = 0;
};

// Calls `piece(i)` for i = 0 .. count - 1. The caller takes part and never waits for a
// helper that has not started: it may be on a thread that the helper would need. A late
// helper finds nothing to claim, and keeps only the Work alive.
inline void RunInPieces(int64_t count, const Helpers& helpers,
                        std::function<void(int64_t)> piece) {
  const int64_t wanted = count - 1 < helpers.count ? count - 1 : helpers.count;
  if (wanted <= 0) {
    for (int64_t i = 0; i < count; ++i) piece(i);
    return;
  }
  const auto work = std::make_shared<Work>(count, std::move(piece));
  for (int64_t h = 0; h < wanted; ++h) {
    helpers.schedule([work] { work->Participate(); });
  }
  work->Participate();
  work->Wait();
}

}  // namespace dafjax

#endif  // DAFJAX_CPU_WORK_H_
