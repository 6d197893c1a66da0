#ifndef DAFJAX_FFI_HELPERS_H_
#define DAFJAX_FFI_HELPERS_H_

#include <functional>
#include <utility>

#include "cpu/work.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {

// XLA's own threads; the caller of a handler is one of them, or stands for one.
inline Helpers HelpersOf(xla::ffi::ThreadPool pool) {
  return {pool.num_threads() - 1,
          [pool](std::function<void()> task) mutable { pool.Schedule(std::move(task)); }};
}

}  // namespace dafjax

#endif  // DAFJAX_FFI_HELPERS_H_
