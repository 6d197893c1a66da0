// The class _cpu.Ledger: what backward passes have measured, for Python to read.

#include "python/ledger.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ledger/ledger.h"
#include "pool/by_hash.h"
#include "pool/registry.h"
#include "python/one_owner.h"

namespace dafjax {
namespace {

namespace py = pybind11;

std::shared_ptr<Ledger> MakeLedger(const std::string& name,
                                   const std::vector<uint64_t>& sites) {
  auto made = std::make_shared<Ledger>(sites);
  if (!ByHash<Ledger>::All().Register(pool::HashOfName(name), made)) {
    throw py::value_error("`name` must differ from that of every other ledger that is "
                          "in use, but there is one named \"" + name + "\" already.");
  }
  return made;
}

using Rows = py::array_t<float, py::array::c_style | py::array::forcecast>;

// What the custom call does, for platforms that have none.
void NoteLedger(uint64_t ledger, const std::vector<uint64_t>& sites, const Rows& rows) {
  const auto num_sites = static_cast<int64_t>(sites.size());
  if (rows.ndim() != 2 || rows.shape(1) != num_sites + 1) {
    throw py::value_error("`rows` must be [m, " + std::to_string(num_sites + 1) +
                          "] for so many sites.");
  }
  const std::vector<int64_t> hashes(sites.begin(), sites.end());
  const float* const data = rows.data();
  const int64_t num_rows = rows.shape(0);
  const py::gil_scoped_release release;
  NoteInLedger(ledger, hashes.data(), num_sites, data, num_rows);
}

py::dict Take(Ledger& self) {
  const Measured taken = [&self] {
    const py::gil_scoped_release release;
    return self.Take();
  }();
  py::dict dict;
  dict["importances"] = taken.importances;
  dict["gradient_energy"] = taken.gradient_energy;
  dict["notes"] = taken.notes;
  dict["refused"] = taken.refused;
  return dict;
}

}  // namespace

void AddLedger(py::module_& m) {
  py::class_<Ledger, std::shared_ptr<Ledger>> ledger(
      m, "Ledger", "Sums of what backward passes measure (ledger/ledger.h).");
  ledger.def(py::init(&MakeLedger), py::arg("name"), py::arg("sites"))
      .def("take", &Take, "Returns the sums and begins anew.");
  RefuseCopies(&ledger, "a ledger has one owner in one process, and cannot be copied or "
                        "pickled. Make another with a name of its own.");
  m.def("note_ledger", &NoteLedger, py::arg("ledger"), py::arg("sites"), py::arg("rows"),
        "Adds rows of importances and a squared norm, if there is still such a ledger.");
  m.def(
      "note_function", [] { return reinterpret_cast<uintptr_t>(&NoteInLedger); },
      "The address of the function by which the CUDA library adds to ledgers.");
}

}  // namespace dafjax
