#ifndef DAFJAX_PYTHON_POOL_H_
#define DAFJAX_PYTHON_POOL_H_

#include <pybind11/pybind11.h>

namespace dafjax {

// Adds the class Pool to the extension module.
void AddPool(pybind11::module_& m);

}  // namespace dafjax

#endif  // DAFJAX_PYTHON_POOL_H_
