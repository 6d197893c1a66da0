#include "ffi/handlers.h"
#include "xla/ffi/api/c_api.h"

namespace dafjax {

int FfiApiMajorVersion() { return XLA_FFI_API_MAJOR; }
int FfiApiMinorVersion() { return XLA_FFI_API_MINOR; }

}  // namespace dafjax
