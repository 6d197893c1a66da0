#ifndef DAFJAX_PYTHON_LEDGER_H_
#define DAFJAX_PYTHON_LEDGER_H_

#include <pybind11/pybind11.h>

namespace dafjax {

// Adds the class Ledger to the extension module.
void AddLedger(pybind11::module_& m);

}  // namespace dafjax

#endif  // DAFJAX_PYTHON_LEDGER_H_
