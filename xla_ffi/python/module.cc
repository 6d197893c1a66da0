// The extension module dafjax._native._cpu: the handlers, facts about the build, and for
// tests and benchmarks the kernels themselves.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/batch.h"
#include "cpu/instruction_sets.h"
#include "cpu/kernels.h"
#include "cpu/work.h"
#include "ffi/handlers.h"
#include "format/affine.h"
#include "format/columns.h"
#include "format/float_type.h"
#include "format/packed.h"
#include "python/ledger.h"
#include "python/pool.h"

namespace dafjax {
namespace {

namespace py = pybind11;

using Array16 = py::array_t<uint16_t, py::array::c_style>;
using BoolArray = py::array_t<bool, py::array::c_style>;

py::dict Handlers() {
  const auto capsule = [](XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
    return py::capsule(reinterpret_cast<void*>(handler));
  };
  py::dict handlers;
  handlers["dafjax_pack_affine"] = capsule(dafjax_pack_affine);
  handlers["dafjax_unpack_affine"] = capsule(dafjax_unpack_affine);
  handlers["dafjax_pack_bitmask"] = capsule(dafjax_pack_bitmask);
  handlers["dafjax_unpack_bitmask"] = capsule(dafjax_unpack_bitmask);
  handlers["dafjax_pool_put"] = capsule(dafjax_pool_put);
  handlers["dafjax_pool_get"] = capsule(dafjax_pool_get);
  handlers["dafjax_pool_note"] = capsule(dafjax_pool_note);
  handlers["dafjax_ledger_note"] = capsule(dafjax_ledger_note);
  handlers["dafjax_minmax"] = capsule(dafjax_minmax);
  handlers["dafjax_sum_of_squares"] = capsule(dafjax_sum_of_squares);
  handlers["dafjax_time_reductions"] = capsule(dafjax_time_reductions);
  handlers["dafjax_tie"] = capsule(dafjax_tie);
  return handlers;
}

std::vector<std::string> InstructionSetNames() {
  std::vector<std::string> names;
  for (const Kernels* kernels : InstructionSets()) names.push_back(kernels->name);
  return names;
}

const Kernels& KernelsNamed(const std::string& name) {
  std::string valid;
  for (const Kernels* kernels : InstructionSets()) {
    if (name == kernels->name) return *kernels;
    valid += (valid.empty() ? "" : ", ") + std::string(kernels->name);
  }
  throw py::value_error("`instruction_set` must be one of " + valid + ", but got " +
                        name + ".");
}

FloatType FloatTypeNamed(const std::string& name) {
  if (name == "float32") return FloatType::kFloat32;
  if (name == "bfloat16") return FloatType::kBFloat16;
  if (name == "float16") return FloatType::kFloat16;
  throw py::value_error(
      "`dtype` must be one of float32, bfloat16, float16, but got " + name + ".");
}

// Threads of our own: there is no XLA to lend us its pool. They are joined at the end.
class OwnThreads {
 public:
  explicit OwnThreads(int64_t num_threads) {
    if (num_threads < 1 || num_threads > 1024) {
      throw py::value_error("`num_threads` must be in 1 .. 1024, but got " +
                            std::to_string(num_threads) + ".");
    }
    helpers_.count = num_threads - 1;
    helpers_.schedule = [this](std::function<void()> task) {
      threads_.emplace_back(std::move(task));
    };
  }
  ~OwnThreads() {
    for (std::thread& thread : threads_) thread.join();
  }
  OwnThreads(const OwnThreads&) = delete;
  OwnThreads& operator=(const OwnThreads&) = delete;

  const Helpers& helpers() const { return helpers_; }

 private:
  std::vector<std::thread> threads_;
  Helpers helpers_;
};

void CheckCode(int64_t bits, int64_t block_size) {
  if (!IsCodeWidth(bits)) {
    throw py::value_error("`bits` must be 1, 2, 3, 4 or 8, but got " +
                          std::to_string(bits) + ".");
  }
  if (!IsBlockSize(block_size)) {
    throw py::value_error("`block_size` must be 64, 128, 256, 512 or 1024, but got " +
                          std::to_string(block_size) + ".");
  }
}

void CheckColumns(int64_t columns, int64_t row_elements) {
  if (!IsNumberOfColumns(columns, row_elements)) {
    throw py::value_error(
        "`columns` must be 0 or divide the number of elements of a row (" +
        std::to_string(row_elements) + "), but got " + std::to_string(columns) + ".");
  }
}

void CheckShape(const char* name, const py::array& array, int64_t rows,
                int64_t columns) {
  if (array.ndim() != 2 || array.shape(0) != rows || array.shape(1) != columns) {
    throw py::value_error("`" + std::string(name) + "` must have the shape [" +
                          std::to_string(rows) + ", " + std::to_string(columns) + "].");
  }
}

// numpy's dtype that holds values of `type`: bfloat16 is held as uint16.
py::dtype StorageOf(FloatType type) {
  switch (type) {
    case FloatType::kFloat32: return py::dtype("float32");
    case FloatType::kFloat16: return py::dtype("float16");
    default: return py::dtype("uint16");
  }
}

// Contiguous rows; nothing is copied.
void CheckRows(const char* name, const py::array& array, const py::dtype& dtype) {
  if (array.ndim() != 2 || !array.dtype().equal(dtype) ||
      (array.flags() & py::array::c_style) == 0) {
    throw py::value_error("`" + std::string(name) + "` must be a C-contiguous " +
                          std::string(py::str(dtype)) + " array of two dimensions.");
  }
}

std::tuple<Array16, Array16, Array16> PackAffineNow(
    const std::string& instruction_set, const py::array& x, uint32_t seed, int bits,
    int64_t block_size, bool stochastic, int64_t num_threads,
    const std::string& dtype, int64_t columns, bool dithered) {
  const Kernels& kernels = KernelsNamed(instruction_set);
  const FloatType type = FloatTypeNamed(dtype);
  CheckCode(bits, block_size);
  CheckRows("x", x, StorageOf(type));
  CheckColumns(columns, x.shape(1));
  const AffineShape shape = {type,       bits,       block_size,
                             x.shape(0), x.shape(1), columns};
  const int64_t blocks = shape.NumBlocks();
  Array16 codes({shape.num_rows, shape.NumWords()});
  Array16 scale({shape.num_rows, blocks});
  Array16 minimum({shape.num_rows, blocks});
  const PiecesOfCodes<uint8_t> packed = {
      reinterpret_cast<uint8_t*>(codes.mutable_data()),
      reinterpret_cast<uint8_t*>(scale.mutable_data()),
      reinterpret_cast<uint8_t*>(minimum.mutable_data())};
  const void* data = x.data();
  {
    const py::gil_scoped_release release;
    const OwnThreads threads(num_threads);
    PackAffine(kernels, shape, {stochastic, seed, dithered}, data,
               Contiguous(shape, bits, packed), threads.helpers());
  }
  return {std::move(codes), std::move(scale), std::move(minimum)};
}

py::array UnpackAffineNow(const std::string& instruction_set, const Array16& codes,
                          const Array16& scale, const Array16& minimum,
                          int64_t row_elements, int bits, int64_t block_size,
                          const std::string& dtype, int64_t num_threads,
                          int64_t columns, std::optional<int> kept,
                          std::optional<uint32_t> seed) {
  const Kernels& kernels = KernelsNamed(instruction_set);
  const FloatType type = FloatTypeNamed(dtype);
  CheckCode(bits, block_size);
  const int kept_bits = kept.value_or(bits);
  if (seed.has_value() && kept_bits != bits) {
    throw py::value_error("`kept_bits` must be `bits` where there is a `seed`.");
  }
  if (!IsPrefix(kept_bits, bits)) {
    throw py::value_error("`kept_bits` must be what planes of codes of " +
                          std::to_string(bits) + " bits begin with, but got " +
                          std::to_string(kept_bits) + ".");
  }
  if (row_elements < 0) throw py::value_error("`row_elements` must not be negative.");
  if (codes.ndim() != 2) throw py::value_error("`codes` must have two dimensions.");
  const int64_t num_rows = codes.shape(0);
  CheckColumns(columns, row_elements);
  const AffineShape shape = {type, bits, block_size, num_rows, row_elements, columns};
  CheckShape("codes", codes, num_rows, WordsOfTiles(shape.NumTiles(), kept_bits));
  CheckShape("scale", scale, num_rows, shape.NumBlocks());
  CheckShape("minimum", minimum, num_rows, shape.NumBlocks());
  py::array y(StorageOf(type), std::vector<int64_t>{num_rows, row_elements});
  const PiecesOfCodes<const uint8_t> packed = {
      reinterpret_cast<const uint8_t*>(codes.data()),
      reinterpret_cast<const uint8_t*>(scale.data()),
      reinterpret_cast<const uint8_t*>(minimum.data())};
  void* data = y.mutable_data();
  ConstAffineCodes places = Contiguous(shape, kept_bits, packed);
  const std::vector<uint32_t> seeds(num_rows, seed.value_or(0));
  if (seed.has_value()) places.seeds = seeds.data();
  {
    const py::gil_scoped_release release;
    const OwnThreads threads(num_threads);
    UnpackAffine(kernels, shape, places, data, threads.helpers());
  }
  return y;
}

Array16 PackBitmaskNow(const std::string& instruction_set, const BoolArray& x,
                       int64_t num_threads) {
  const Kernels& kernels = KernelsNamed(instruction_set);
  if (x.ndim() != 2) throw py::value_error("`x` must have two dimensions.");
  const int64_t num_rows = x.shape(0);
  const int64_t n = x.shape(1);
  Array16 words({num_rows, NumWords(n, 1)});
  const uint8_t* data = reinterpret_cast<const uint8_t*>(x.data());
  uint16_t* out = words.mutable_data();
  {
    const py::gil_scoped_release release;
    const OwnThreads threads(num_threads);
    PackBitmask(kernels, num_rows, n, data, out, threads.helpers());
  }
  return words;
}

BoolArray UnpackBitmaskNow(const std::string& instruction_set, const Array16& words,
                           int64_t row_elements, int64_t num_threads) {
  const Kernels& kernels = KernelsNamed(instruction_set);
  if (row_elements < 0) throw py::value_error("`row_elements` must not be negative.");
  if (words.ndim() != 2) throw py::value_error("`words` must have two dimensions.");
  const int64_t num_rows = words.shape(0);
  CheckShape("words", words, num_rows, NumWords(row_elements, 1));
  BoolArray y({num_rows, row_elements});
  const uint16_t* data = words.data();
  uint8_t* out = reinterpret_cast<uint8_t*>(y.mutable_data());
  {
    const py::gil_scoped_release release;
    const OwnThreads threads(num_threads);
    UnpackBitmask(kernels, num_rows, row_elements, data, out, threads.helpers());
  }
  return y;
}

float ReadBandwidthPass(const py::array_t<float, py::array::c_style>& array,
                        int64_t num_threads) {
  const float* data = array.data();
  const int64_t size = array.size();
  const py::gil_scoped_release release;
  const OwnThreads threads(num_threads);
  return Sum(BestKernels(), data, size, threads.helpers());
}

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "Custom calls of dafjax for the CPU, and their kernels.";
  m.def("handlers", &Handlers, "The handlers, by the names of their targets.");
  m.def(
      "ffi_api_version",
      [] { return std::make_pair(FfiApiMajorVersion(), FfiApiMinorVersion()); },
      "The version of the XLA FFI headers that the handlers are built with.");
  m.def("instruction_sets", &InstructionSetNames,
        "What this machine can use, best first; \"scalar\" is always the last.");
  m.def(
      "instruction_set", [] { return std::string(BestKernels().name); },
      "What the handlers use.");
  m.def("pack_affine", &PackAffineNow, py::arg("instruction_set"), py::arg("x"),
        py::arg("seed"), py::arg("bits"), py::arg("block_size"), py::arg("stochastic"),
        py::arg("num_threads") = 1, py::arg("dtype") = "float32",
        py::arg("columns") = 0, py::arg("dithered") = false,
        "Packs rows `x` [rows, n]; bfloat16 is given as uint16. Returns `(codes, "
        "scale, minimum)`, all uint16.");
  m.def("unpack_affine", &UnpackAffineNow, py::arg("instruction_set"),
        py::arg("codes").noconvert(), py::arg("scale").noconvert(),
        py::arg("minimum").noconvert(), py::arg("row_elements"), py::arg("bits"),
        py::arg("block_size"), py::arg("dtype") = "float32", py::arg("num_threads") = 1,
        py::arg("columns") = 0, py::arg("kept_bits") = py::none(),
        py::arg("seed") = py::none(),
        "The inverse of `pack_affine`. Of codes that have lost planes, `kept_bits` are "
        "left. With the seed of codes that are dithered, their noise is subtracted. "
        "Returns [rows, row_elements].");
  m.def("pack_bitmask", &PackBitmaskNow, py::arg("instruction_set"),
        py::arg("x").noconvert(), py::arg("num_threads") = 1,
        "Packs rows of booleans into uint16 words.");
  m.def("unpack_bitmask", &UnpackBitmaskNow, py::arg("instruction_set"),
        py::arg("words").noconvert(), py::arg("row_elements"),
        py::arg("num_threads") = 1, "The inverse of `pack_bitmask`.");
  m.def("read_bandwidth_pass", &ReadBandwidthPass, py::arg("array").noconvert(),
        py::arg("num_threads") = 1,
        "Sums a float32 array: as fast as memory can be read.");
  AddPool(m);
  AddLedger(m);
}

}  // namespace
}  // namespace dafjax
