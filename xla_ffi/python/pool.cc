// The class _cpu.Pool: control of a page pool.

#include "python/pool.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/batch.h"
#include "cpu/instruction_sets.h"
#include "cpu/paged_words.h"
#include "pool/allocation.h"
#include "pool/attachment.h"
#include "pool/pool.h"
#include "pool/registry.h"
#include "python/one_owner.h"
#include "python/pool_bytes.h"
#include "python/pool_errors.h"

namespace dafjax {
namespace {

namespace py = pybind11;

using pool::Pool;

// On the thread that calls it, which is the CUDA driver's.
void PackBytesOnHost(int64_t num_tiles, const uint16_t* bytes,
                     const AffineCodes& planes) {
  PackBytes(BestKernels(), num_tiles, bytes, planes, {});
}

pool::Packer PackerNamed(const std::string& name) {
  if (name == "auto") return pool::Packer::kAuto;
  if (name == "gpu") return pool::Packer::kGpu;
  if (name == "cpu") return pool::Packer::kCpu;
  throw py::value_error("`packer` must be auto, gpu or cpu, but got " + name + ".");
}

std::shared_ptr<Pool> MakePool(const std::string& name, std::optional<int64_t> budget,
                               std::optional<double> growth_share,
                               std::optional<int64_t> growth_nbytes,
                               int executions_in_flight, bool backward_once,
                               const std::string& packer) {
  pool::Options options;
  options.packer = PackerNamed(packer);
  options.budget = budget.value_or(std::numeric_limits<int64_t>::max());
  options.executions_in_flight = executions_in_flight;
  options.backward_once = backward_once;
  if (growth_nbytes.has_value()) {
    options.growth = std::make_shared<const pool::FixedGrowth>(*growth_nbytes);
  } else if (growth_share.has_value()) {
    options.growth = std::make_shared<const pool::AdaptiveGrowth>(*growth_share);
  }
  auto made = std::make_shared<Pool>(options);
  if (!pool::Register(pool::HashOfName(name), made)) {
    throw py::value_error("`name` must differ from that of every other pool that is in "
                          "use, but there is one named \"" + name + "\" already.");
  }
  return made;
}

pool::Target::Kind TargetKind(const std::string& kind) {
  if (kind == "none") return pool::Target::kNone;
  if (kind == "average_bits") return pool::Target::kAverageBits;
  if (kind == "nbytes") return pool::Target::kNbytes;
  if (kind == "relative_variance") return pool::Target::kRelativeVariance;
  throw py::value_error("`kind` must be none, average_bits, nbytes or "
                        "relative_variance, but got " + kind + ".");
}

py::dict DictOf(const pool::Amount& amount) {
  py::dict dict;
  dict["current"] = amount.current;
  dict["peak"] = amount.peak;
  dict["total"] = amount.total;
  return dict;
}

py::dict StatsOf(const Pool& self) {
  const std::shared_ptr<pool::Attachment> attachment = self.attachment();
  const pool::Stats stats = [&] {
    const py::gil_scoped_release release;
    pool::Stats of_host = self.Snapshot();
    if (attachment != nullptr) of_host.refused_handles += attachment->num_refused();
    return of_host;
  }();
  py::dict sites;
  for (const auto& [id, site] : stats.sites) {
    py::dict facts;
    facts["puts"] = site.puts;
    facts["evictions"] = site.evictions;
    facts["max_bits"] = site.max_bits;
    facts["bits_put"] = site.bits_put;
    facts["bits_kept"] = site.bits_kept;
    facts["importance"] =
        site.importance_known ? py::object(py::float_(site.importance)) : py::none();
    sites[py::int_(id)] = facts;
  }
  py::dict dict;
  dict["budget"] = stats.budget;
  dict["bytes"] = DictOf(stats.bytes);
  dict["entries"] = DictOf(stats.entries);
  dict["committed"] = DictOf(stats.committed);
  dict["entries_live"] = stats.entries_live;
  dict["entries_reclaimable"] = stats.entries_reclaimable;
  dict["entries_writing"] = stats.entries_writing;
  dict["bytes_live"] = stats.bytes_live;
  dict["pages_used"] = stats.pages_used;
  dict["pages_free"] = stats.pages_free;
  dict["page_nbytes"] = pool::kPageNbytes;
  dict["growths"] = stats.growths;
  dict["evictions"] = stats.evictions;
  dict["reclaims"] = stats.reclaims;
  dict["degraded_nbytes"] = stats.degraded_nbytes;
  dict["exhausted"] = stats.exhausted;
  dict["refused_importances"] = stats.refused_importances;
  dict["refused_handles"] = stats.refused_handles;
  dict["executions"] = stats.executions;
  dict["expected_variance"] = stats.expected_variance;
  dict["gradient_energy"] = stats.gradient_energy;
  dict["packer"] = py::none();
  if (attachment != nullptr) {
    dict["packer"] = attachment->packer() == pool::Packer::kGpu ? "gpu" : "cpu";
  }
  dict["sites"] = sites;
  return dict;
}

std::vector<pool::SiteDemand> DemandsOf(
    const std::vector<std::tuple<int64_t, double, int, int>>& sites) {
  std::vector<pool::SiteDemand> demands;
  for (const auto& [num_elements, importance, minimum, maximum] : sites) {
    demands.push_back({num_elements, importance, minimum, maximum});
  }
  return demands;
}

void Collect(Pool* self, bool all) {
  Check([self, all]() -> pool::Status {
    const py::gil_scoped_release release;
    const std::shared_ptr<pool::Attachment> attachment = self->attachment();
    pool::Status told;
    if (attachment != nullptr) told = attachment->TellReads();
    all ? self->CollectAll() : self->Collect();
    if (attachment == nullptr) return told;
    const pool::Status settled = attachment->Settle();
    return told.ok() ? settled : told;
  }());
}

std::optional<std::string> Violation(const Pool& self) {
  std::string why;
  const py::gil_scoped_release release;
  if (self.IsValid(&why)) return std::nullopt;
  return why;
}

}  // namespace

void AddPool(py::module_& m) {
  m.def(
      "pool_hash", [](const std::string& name) { return pool::HashOfName(name); },
      py::arg("name"), "What custom calls carry in place of a pool's name.");
  m.def(
      "attachable_pool_finder",
      [] { return reinterpret_cast<uintptr_t>(&pool::FindAttachablePool); },
      "The address of the function by which the CUDA library finds pools.");
  m.def(
      "pack_bytes_function",
      [] { return reinterpret_cast<uintptr_t>(&PackBytesOnHost); },
      "The address of the function by which it has codes packed.");
  m.def(
      "find_pool", [](uint64_t hash) { return pool::FindPool(hash); }, py::arg("hash"),
      "The pool in use whose name has this hash, or None.");
  m.def(
      "allocate",
      [](const std::vector<std::tuple<int64_t, double, int, int>>& sites, int64_t budget) {
        return pool::Allocate(DemandsOf(sites), budget);
      },
      py::arg("sites"), py::arg("budget"), "dafjax.allocation.allocate, for its tests.");
  m.def(
      "allocate_to_variance",
      [](const std::vector<std::tuple<int64_t, double, int, int>>& sites,
         double ceiling) { return pool::AllocateToVariance(DemandsOf(sites), ceiling); },
      py::arg("sites"), py::arg("ceiling"));
  m.def("minimum_bits", &pool::MinimumBits, py::arg("asked"),
        "Of a site that asks for so many, for the tests of _meet_target.py.");
  py::class_<Pool, std::shared_ptr<Pool>> pool(m, "Pool", "A pool of pages (pool/pool.h).");
  pool.def(py::init(&MakePool), py::arg("name"), py::kw_only(),
           py::arg("budget") = py::none(), py::arg("growth_share") = py::none(),
           py::arg("growth_nbytes") = py::none(), py::arg("executions_in_flight") = 1,
           py::arg("backward_once") = false, py::arg("packer") = "auto")
      .def("stats", &StatsOf, "A consistent snapshot.")
      .def("violation", &Violation, "The invariant that does not hold, or None.")
      .def_property("budget", &Pool::budget,
                    [](Pool& self, int64_t nbytes) { Check(self.SetBudget(nbytes)); })
      .def(
          "set_bits",
          [](Pool& self, uint64_t site, int bits) { Check(self.SetBits(site, bits)); },
          py::arg("site"), py::arg("bits"))
      .def("set_importance", &Pool::SetImportance, py::arg("site"),
           py::arg("importance"))
      .def(
          "set_target",
          [](Pool& self, const std::string& kind, double value) {
            self.SetTarget({TargetKind(kind), value});
          },
          py::arg("kind"), py::arg("value"))
      .def("add_importance", &Pool::AddImportance, py::arg("site"), py::arg("sample"))
      .def(
          "collect", [](Pool& self) { Collect(&self, false); },
          "Frees what executions left that are over, and what has been read.")
      .def("collect_all", [](Pool& self) { Collect(&self, true); },
           "The same, and counts all executions as over.");
  RefuseCopies(&pool, "a page pool has one owner in one process, and cannot be copied or "
                      "pickled. Pass the pool itself, or make another with a name of its "
                      "own.");
  AddPoolBytes(m, &pool);
}

}  // namespace dafjax
