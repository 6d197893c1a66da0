#ifndef DAFJAX_PYTHON_POOL_ERRORS_H_
#define DAFJAX_PYTHON_POOL_ERRORS_H_

#include <string>

#include "pool/status.h"

namespace dafjax {

// Raises an error of the class `name` in dafjax._native._pool.
[[noreturn]] void RaisePoolError(const char* name, const std::string& message);

// Raises the error that a status stands for, unless it is none.
void Check(const pool::Status& status);

}  // namespace dafjax

#endif  // DAFJAX_PYTHON_POOL_ERRORS_H_
