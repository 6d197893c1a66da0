#ifndef DAFJAX_DEVICE_POOL_PACKER_CHOICE_H_
#define DAFJAX_DEVICE_POOL_PACKER_CHOICE_H_

#include <algorithm>
#include <cstddef>
#include <deque>
#include <vector>

#include "pool/attachment.h"

namespace dafjax {

// Has the GPU and the CPU pack in turns, until each has done so often enough; then the one
// with which the median execution took less time. What it takes is whatever the packer
// costs: kernels, the bus, and what waits for the CPU.
class PackerChoice {
 public:
  // Of each; the first executions of all do not count: memory is allocated then.
  static constexpr int kExecutions = 5;
  static constexpr int kWarmUp = 2;

  // Of a packer that is set there is nothing to choose.
  explicit PackerChoice(pool::Packer packer) : chosen_(packer) {}

  // Who packs in the execution that begins.
  pool::Packer Begin() {
    if (chosen_ != pool::Packer::kAuto) return chosen_;
    const pool::Packer next =
        num_begun_++ % 2 == 0 ? pool::Packer::kGpu : pool::Packer::kCpu;
    untimed_.push_back(next);
    return next;
  }

  // How long executions took, in the order in which they began.
  void Add(float time) {
    if (chosen_ != pool::Packer::kAuto || untimed_.empty()) return;
    const bool by_gpu = untimed_.front() == pool::Packer::kGpu;
    untimed_.pop_front();
    if (num_timed_++ < kWarmUp) return;
    (by_gpu ? by_gpu_ : by_cpu_).push_back(time);
    if (by_gpu_.size() < kExecutions || by_cpu_.size() < kExecutions) return;
    const bool gpu_is_faster = Median(by_gpu_) <= Median(by_cpu_);
    chosen_ = gpu_is_faster ? pool::Packer::kGpu : pool::Packer::kCpu;
  }

  bool is_open() const { return chosen_ == pool::Packer::kAuto; }

 private:
  static float Median(std::vector<float> times) {
    const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end());
    return *middle;
  }

  pool::Packer chosen_;
  int num_begun_ = 0;
  int num_timed_ = 0;
  std::deque<pool::Packer> untimed_;
  std::vector<float> by_gpu_;
  std::vector<float> by_cpu_;
};

}  // namespace dafjax

#endif  // DAFJAX_DEVICE_POOL_PACKER_CHOICE_H_
