#ifndef DAFJAX_FFI_DEVICE_STREAM_H_
#define DAFJAX_FFI_DEVICE_STREAM_H_

#include <optional>
#include <string>

#include "cuda/kernels.h"
#include "xla/ffi/api/ffi.h"

#if defined(DAFJAX_SIMULATED)

namespace dafjax {
struct OnlyStream {};
using DeviceStream = OnlyStream;
}  // namespace dafjax

// In tests handlers run on XLA's CPU backend, with simulated kernels and no stream.
template <>
struct xla::ffi::CtxDecoding<dafjax::OnlyStream> {
  using Type = dafjax::Stream;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*,
                                    DiagnosticEngine&) {
    return Type{nullptr};
  }
};

#else

namespace dafjax {
using DeviceStream = xla::ffi::PlatformStream<Stream>;
}  // namespace dafjax

#endif

namespace dafjax {

// What a handler returns that has enqueued its work, or could not.
inline xla::ffi::Error Enqueued(const std::string& call, Failure failure) {
  if (failure == nullptr) return xla::ffi::Error::Success();
  return xla::ffi::Error::Internal(call + ": CUDA could not enqueue the kernel: " +
                                   failure +
                                   " (`python -m dafjax doctor` tells what CUDA has.)");
}

}  // namespace dafjax

#endif  // DAFJAX_FFI_DEVICE_STREAM_H_
