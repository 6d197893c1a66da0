#include "ledger/ledger.h"

#include <cstdint>
#include <cstring>
#include <string>

#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {
namespace {

namespace ffi = xla::ffi;

ffi::Error LedgerNoteHandler(ffi::Buffer<ffi::F32> importances, ffi::RemainingArgs,
                             ffi::Result<ffi::Buffer<ffi::U8>> done,
                             int64_t ledger_hash, ffi::Span<const int64_t> sites) {
  const std::string call = "ledger_note";
  const int64_t num_sites = static_cast<int64_t>(sites.size());
  const auto num_rows = CheckRowsOfSites(call, "importances", num_sites, importances);
  if (num_rows.has_error()) return num_rows.error();
  NoteInLedger(static_cast<uint64_t>(ledger_hash), sites.begin(), num_sites,
               importances.typed_data(), *num_rows);
  std::memset(done->untyped_data(), 0, done->size_bytes());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace dafjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_ledger_note, dafjax::LedgerNoteHandler,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .RemainingArgs()  // not read
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()  // done
                                  .Attr<int64_t>("ledger")
                                  .Attr<xla::ffi::Span<const int64_t>>("sites"));
