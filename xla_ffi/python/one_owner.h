#ifndef DAFJAX_PYTHON_ONE_OWNER_H_
#define DAFJAX_PYTHON_ONE_OWNER_H_

#include <pybind11/pybind11.h>

namespace dafjax {

// Refuses copies and pickles of what owns native state. `copy` and `pickle` both call
// __reduce__; without one, pickle's protocols 0 and 1 make a bare instance of pybind11's
// base class, which ends the process. `message` must live forever.
template <typename Class>
void RefuseCopies(Class* of_class, const char* message) {
  of_class->def("__reduce__", [message](const pybind11::object&) -> pybind11::object {
    throw pybind11::type_error(message);
  });
}

}  // namespace dafjax

#endif  // DAFJAX_PYTHON_ONE_OWNER_H_
