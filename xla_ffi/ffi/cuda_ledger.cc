#include <atomic>
#include <cstdint>
#include <string>

#include "cuda/kernels.h"
#include "ffi/checks.h"
#include "ffi/cuda_handlers.h"
#include "ffi/device_stream.h"
#include "ledger/device_notes.h"
#include "ledger/ledger.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {
namespace {

namespace ffi = xla::ffi;

// Ledgers are in the library of the CPU, which gives this.
std::atomic<NoteFunction> note_in_ledger{nullptr};

ffi::Error LedgerNoteHandler(Stream stream, ffi::Buffer<ffi::F32> importances,
                             ffi::RemainingArgs, ffi::Result<ffi::Buffer<ffi::U8>> done,
                             int64_t ledger_hash, ffi::Span<const int64_t> sites) {
  const std::string call = "ledger_note";
  const int64_t num_sites = static_cast<int64_t>(sites.size());
  const auto num_rows = CheckRowsOfSites(call, "importances", num_sites, importances);
  if (num_rows.has_error()) return num_rows.error();
  Failure failure =
      NoteFromDevice(stream, note_in_ledger.load(), static_cast<uint64_t>(ledger_hash),
                     sites.begin(), num_sites, importances.typed_data(), *num_rows);
  if (failure == nullptr) {
    failure = ClearOnDevice(stream, done->untyped_data(),
                            static_cast<int64_t>(done->size_bytes()));
  }
  return Enqueued(call, failure);
}

}  // namespace
}  // namespace dafjax

void dafjax_cuda_serve_ledgers(void* note) {
  dafjax::note_in_ledger = reinterpret_cast<dafjax::NoteFunction>(note);
}

// Not compatible with command buffers: what the host is called with is used once.
XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_cuda_ledger_note, dafjax::LedgerNoteHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<dafjax::DeviceStream>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .RemainingArgs()  // not read
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()  // done
                                  .Attr<int64_t>("ledger")
                                  .Attr<xla::ffi::Span<const int64_t>>("sites"));
