#ifndef DAFJAX_PYTHON_POOL_BYTES_H_
#define DAFJAX_PYTHON_POOL_BYTES_H_

#include <pybind11/pybind11.h>

#include <memory>

#include "pool/pool.h"

namespace dafjax {

// Adds puts and gets of bytes to the class Pool, and what times them: for tests and
// benchmarks.
void AddPoolBytes(pybind11::module_& m,
                  pybind11::class_<pool::Pool, std::shared_ptr<pool::Pool>>* pool);

}  // namespace dafjax

#endif  // DAFJAX_PYTHON_POOL_BYTES_H_
