#include "python/pool_bytes.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "format/packed.h"
#include "python/pool_errors.h"

namespace dafjax {
namespace {

namespace py = pybind11;

using pool::Handle;
using pool::Pool;
using pool::Status;

using Bytes = py::array_t<uint8_t, py::array::c_style>;
using HandleWords = std::vector<uint32_t>;

Handle HandleOf(const HandleWords& words) {
  if (words.size() != 4) {
    RaisePoolError("StaleHandle", "this is no handle: it has " + std::to_string(words.size()) +
                             " words instead of 4.");
  }
  return {words[0], words[1], words[2], words[3]};
}

HandleWords WordsOf(const Handle& handle) {
  return {handle.slot, handle.generation, handle.pool_id, handle.check};
}

// Copies between contiguous bytes and pages, page by page.
template <typename Byte, typename Copy>
void ForEachStretch(const pool::PlaneTable<Byte>& plane, int64_t num_tiles,
                    const Copy& copy) {
  const int64_t page_nbytes = pool::TileNbytes(plane.width) << plane.log2_page_tiles;
  const int64_t nbytes = num_tiles * pool::TileNbytes(plane.width);
  for (int64_t i = 0; i < plane.num_pages; ++i) {
    const int64_t at = i * page_nbytes;
    copy(plane.pages[i], at, std::min(page_nbytes, nbytes - at));
  }
}

template <typename Byte, typename Copy>
void ForEachStretch(const pool::MetadataTable<Byte>& metadata, const Copy& copy) {
  for (int64_t i = 0; i < metadata.num_pages; ++i) {
    const int64_t at = i * pool::kPageNbytes;
    copy(metadata.pages[i], at, std::min(pool::kPageNbytes, metadata.nbytes - at));
  }
}

// Puts planes of `request.max_bits` bits, as format/packed.h has them: those that the
// pool has room for.
Status Write(Pool* self, const pool::Execution& execution, uint64_t site,
             const pool::PutRequest& request, const uint8_t* codes,
             const uint8_t* metadata, Handle* handle) {
  pool::PutView view;
  Status status = self->Put(execution, site, request, &view, handle);
  if (!status.ok()) return status;
  for (int i = 0; i < view.num_planes; ++i) {
    ForEachStretch(view.planes[i], request.num_tiles,
                   [codes](uint8_t* page, int64_t at, int64_t nbytes) {
                     std::memcpy(page, codes + at, static_cast<size_t>(nbytes));
                   });
    codes += request.num_tiles * pool::TileNbytes(view.planes[i].width);
  }
  ForEachStretch(view.metadata, [metadata](uint8_t* page, int64_t at, int64_t nbytes) {
    std::memcpy(page, metadata + at, static_cast<size_t>(nbytes));
  });
  return status;
}

// Gets what is left. If that is more than the buffers hold, `view` tells and nothing is
// written.
Status Read(Pool* self, const pool::Execution& execution, const Handle& handle,
            uint8_t* codes, int64_t codes_nbytes, uint8_t* metadata,
            int64_t metadata_nbytes, int64_t reads, pool::GetView* view, bool* fits) {
  const Status status = self->Get(execution, handle, view);
  if (!status.ok()) return status;
  *fits = codes_nbytes >= view->num_tiles * pool::TileNbytes(view->bits_kept) &&
          metadata_nbytes >= view->metadata.nbytes;
  for (int i = 0; *fits && i < view->num_planes; ++i) {
    ForEachStretch(view->planes[i], view->num_tiles,
                   [codes](const uint8_t* page, int64_t at, int64_t nbytes) {
                     std::memcpy(codes + at, page, static_cast<size_t>(nbytes));
                   });
    codes += view->num_tiles * pool::TileNbytes(view->planes[i].width);
  }
  if (*fits) {
    ForEachStretch(view->metadata,
                   [metadata](const uint8_t* page, int64_t at, int64_t nbytes) {
                     std::memcpy(metadata + at, page, static_cast<size_t>(nbytes));
                   });
  }
  return self->Unpin(handle, reads);
}

pool::PutRequest RequestOf(int max_bits, const Bytes& codes, const Bytes& metadata) {
  if (max_bits != 1 && max_bits != 2 && max_bits != 4 && max_bits != 8) {
    throw py::value_error("`max_bits` must be 1, 2, 4 or 8, but got " +
                          std::to_string(max_bits) + ".");
  }
  const int64_t tile_nbytes = pool::TileNbytes(max_bits);
  if (codes.size() % tile_nbytes != 0) {
    throw py::value_error("`codes` must be whole tiles of " +
                          std::to_string(tile_nbytes) + " bytes, but has " +
                          std::to_string(codes.size()) + ".");
  }
  return {codes.size() / tile_nbytes, max_bits, metadata.size()};
}

HandleWords Put(Pool& self, int64_t run_id, int32_t device, uint64_t site, int max_bits,
                const Bytes& codes, const Bytes& metadata, bool commit) {
  const pool::PutRequest request = RequestOf(max_bits, codes, metadata);
  const uint8_t* code = codes.data();
  const uint8_t* parameters = metadata.data();
  Handle handle;
  Status status;
  {
    const py::gil_scoped_release release;
    status = Write(&self, {run_id, device}, site, request, code, parameters, &handle);
    if (status.ok() && commit) status = self.Commit(handle);
  }
  Check(status);
  return WordsOf(handle);
}

// (bits_put, bits_kept, bytes of codes, bytes of metadata): what GetInto writes.
std::tuple<int, int, int64_t, int64_t> Describe(Pool& self, const HandleWords& words) {
  const Handle handle = HandleOf(words);
  pool::GetView view;
  Check(self.Get({}, handle, &view));
  Check(self.Unpin(handle));
  return {view.bits_put, view.bits_kept, view.num_tiles * pool::TileNbytes(view.bits_kept),
          view.metadata.nbytes};
}

std::pair<int, int> GetInto(Pool& self, int64_t run_id, int32_t device,
                            const HandleWords& words, Bytes codes, Bytes metadata,
                            int64_t reads) {
  const Handle handle = HandleOf(words);
  const int64_t codes_nbytes = codes.size();
  const int64_t metadata_nbytes = metadata.size();
  uint8_t* code = codes.mutable_data();
  uint8_t* parameters = metadata.mutable_data();
  pool::GetView view;
  Status status;
  bool fits = false;
  {
    const py::gil_scoped_release release;
    status = Read(&self, {run_id, device}, handle, code, codes_nbytes, parameters,
                  metadata_nbytes, reads, &view, &fits);
  }
  Check(status);
  if (!fits) throw py::value_error("`codes` or `metadata` is too short: see `describe`.");
  return {view.bits_put, view.bits_kept};
}

std::tuple<int, int, Bytes, Bytes> Get(Pool& self, int64_t run_id, int32_t device,
                                       const HandleWords& words, int64_t reads) {
  const auto [put, kept, codes_nbytes, metadata_nbytes] = Describe(self, words);
  Bytes codes(codes_nbytes);
  Bytes metadata(metadata_nbytes);
  const auto [bits_put, bits_kept] =
      GetInto(self, run_id, device, words, codes, metadata, reads);
  // Between the two calls the entry may have lost a plane.
  const int64_t left = kept == 0 ? 0 : codes_nbytes / kept * bits_kept;
  return {bits_put, bits_kept, Bytes(left, codes.data()), std::move(metadata)};
}

// Puts the same bytes `count` times and gets them back, from the last to the first.
void CopyThrough(Pool& self, int64_t run_id, int64_t count, int max_bits,
                 const Bytes& codes, const Bytes& metadata, Bytes codes_out,
                 Bytes metadata_out) {
  const pool::PutRequest request = RequestOf(max_bits, codes, metadata);
  const uint8_t* code = codes.data();
  const uint8_t* parameters = metadata.data();
  uint8_t* code_out = codes_out.mutable_data();
  uint8_t* parameters_out = metadata_out.mutable_data();
  const int64_t codes_nbytes = codes_out.size();
  const int64_t metadata_nbytes = metadata_out.size();
  std::vector<Handle> handles(static_cast<size_t>(count));
  Status status;
  {
    const py::gil_scoped_release release;
    for (size_t i = 0; i < handles.size() && status.ok(); ++i) {
      status = Write(&self, {run_id, 0}, i, request, code, parameters, &handles[i]);
      if (status.ok()) status = self.Commit(handles[i]);
    }
    for (size_t i = handles.size(); i > 0 && status.ok(); --i) {
      pool::GetView view;
      bool fits = false;
      status = Read(&self, {run_id, 0}, handles[i - 1], code_out, codes_nbytes,
                    parameters_out, metadata_nbytes, 0, &view, &fits);
    }
  }
  Check(status);
}

// The same through the rows of contiguous memory.
void CopyThroughMemory(Bytes memory, const Bytes& row, Bytes out) {
  if (memory.ndim() != 2 || memory.shape(1) != row.size() || out.size() != row.size()) {
    throw py::value_error("`memory` must have rows as long as `row` and `out`.");
  }
  const size_t nbytes = static_cast<size_t>(row.size());
  const int64_t count = memory.shape(0);
  uint8_t* data = memory.mutable_data();
  const uint8_t* from = row.data();
  uint8_t* to = out.mutable_data();
  const py::gil_scoped_release release;
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(data + i * static_cast<int64_t>(nbytes), from, nbytes);
  }
  for (int64_t i = count - 1; i >= 0; --i) {
    std::memcpy(to, data + i * static_cast<int64_t>(nbytes), nbytes);
  }
}

double ThreadSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Puts `num_entries` entries and gets each once, `rounds` times, an execution each, and
// touches no page. Returns the thread's processor time in seconds, and how many pages
// were given and taken back.
std::pair<double, int64_t> TimeBookkeeping(Pool& self, int64_t first_run, int64_t rounds,
                                           int64_t num_entries, int64_t num_tiles,
                                           int bits, int64_t metadata_nbytes) {
  std::vector<Handle> handles(static_cast<size_t>(num_entries));
  int64_t pages = 0;
  Status status;
  const py::gil_scoped_release release;
  const double start = ThreadSeconds();
  for (int64_t round = 0; round < rounds && status.ok(); ++round) {
    const pool::Execution execution = {first_run + round, 0};
    for (size_t i = 0; i < handles.size() && status.ok(); ++i) {
      pool::PutView view;
      status = self.Put(execution, i, {num_tiles, bits, metadata_nbytes}, &view,
                        &handles[i]);
      if (status.ok()) status = self.Commit(handles[i]);
      pages += view.metadata.num_pages;
      for (int p = 0; p < view.num_planes; ++p) pages += view.planes[p].num_pages;
    }
    for (size_t i = 0; i < handles.size() && status.ok(); ++i) {
      pool::GetView view;
      status = self.Get(execution, handles[i], &view);
      if (status.ok()) status = self.Unpin(handles[i]);
    }
  }
  const double seconds = ThreadSeconds() - start;
  {
    const py::gil_scoped_acquire acquire;
    Check(status);
  }
  return {seconds, 2 * pages};
}

}  // namespace

void AddPoolBytes(py::module_& m, py::class_<Pool, std::shared_ptr<Pool>>* pool) {
  m.def("copy_through_memory", &CopyThroughMemory, py::arg("memory").noconvert(),
        py::arg("row").noconvert(), py::arg("out").noconvert(),
        "What Pool.copy_through does, with the rows of an array.");
  pool->def("put", &Put, py::arg("run_id"), py::arg("device"), py::arg("site"),
           py::arg("max_bits"), py::arg("codes").noconvert(),
           py::arg("metadata").noconvert(), py::arg("commit") = true,
           "Puts bytes and returns the four words of the handle.")
      .def("commit",
           [](Pool& self, const HandleWords& words) {
             Check(self.Commit(HandleOf(words)));
           })
      .def("abort",
           [](Pool& self, const HandleWords& words) {
             Check(self.Abort(HandleOf(words)));
           })
      .def("describe", &Describe, py::arg("handle"),
           "(bits_put, bits_kept, bytes of codes, bytes of metadata).")
      .def("get", &Get, py::arg("run_id"), py::arg("device"), py::arg("handle"),
           py::arg("reads") = 0, "(bits_put, bits_kept, codes, metadata).")
      .def("get_into", &GetInto, py::arg("run_id"), py::arg("device"),
           py::arg("handle"), py::arg("codes").noconvert(),
           py::arg("metadata").noconvert(), py::arg("reads") = 0,
           "(bits_put, bits_kept).")
      .def("copy_through", &CopyThrough, py::arg("run_id"), py::arg("count"),
           py::arg("max_bits"), py::arg("codes").noconvert(),
           py::arg("metadata").noconvert(), py::arg("codes_out").noconvert(),
           py::arg("metadata_out").noconvert(),
           "Puts the same bytes many times and gets them back.")
      .def("time_bookkeeping", &TimeBookkeeping, py::arg("first_run"), py::arg("rounds"),
           py::arg("num_entries"), py::arg("num_tiles"), py::arg("bits"),
           py::arg("metadata_nbytes"), "(seconds, page operations).");
}

}  // namespace dafjax
