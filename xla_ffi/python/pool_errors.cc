#include "python/pool_errors.h"

#include <pybind11/pybind11.h>

#include <stdexcept>

namespace dafjax {

namespace py = pybind11;

// The classes of errors are Python's: dafjax can name them without loading this library.
void RaisePoolError(const char* name, const std::string& message) {
  const py::object type = py::module_::import("dafjax._native._pool").attr(name);
  PyErr_SetString(type.ptr(), message.c_str());
  throw py::error_already_set();
}

void Check(const pool::Status& status) {
  switch (status.code) {
    case pool::Code::kOk: return;
    case pool::Code::kInvalidArgument: throw py::value_error(status.message);
    case pool::Code::kPoolExhausted: RaisePoolError("PoolExhausted", status.message);
    case pool::Code::kStaleHandle: RaisePoolError("StaleHandle", status.message);
    case pool::Code::kUnsupported:
    case pool::Code::kDeviceFailure: throw std::runtime_error(status.message);
  }
}

}  // namespace dafjax
