#ifndef DAFJAX_POOL_STATUS_H_
#define DAFJAX_POOL_STATUS_H_

#include <string>
#include <utility>

namespace dafjax::pool {

enum class Code {
  kOk,
  // An argument that no pool could serve: a mistake of the caller.
  kInvalidArgument,
  // The budget, or the system's memory, cannot hold the entry even at block means.
  kPoolExhausted,
  // The handle was reclaimed, or never was one of this pool in this process.
  kStaleHandle,
  // The device cannot do what the pool needs of it.
  kUnsupported,
  // The device, or what drives it, failed.
  kDeviceFailure,
};

// What came of a call. `message` is for people; it is empty if `ok()`.
struct [[nodiscard]] Status {
  Code code = Code::kOk;
  std::string message;

  bool ok() const { return code == Code::kOk; }
};

}  // namespace dafjax::pool

#endif  // DAFJAX_POOL_STATUS_H_
