#include "pool/fork.h"

#include <pthread.h>

#include <atomic>

namespace dafjax::pool {
namespace {

std::atomic<uint32_t> num_forks{0};

// Set when the library is loaded: before any pool, and so before any fork that matters.
[[maybe_unused]] const int registered = pthread_atfork(
    nullptr, nullptr, [] { num_forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

uint32_t NumForks() { return num_forks.load(std::memory_order_relaxed); }

}  // namespace dafjax::pool
