#include "ledger/ledger.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "pool/by_hash.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {
namespace {

namespace ffi = xla::ffi;

ffi::Error LedgerNoteHandler(ffi::Buffer<ffi::F32> importances, ffi::RemainingArgs,
                             ffi::Result<ffi::Buffer<ffi::U8>> done,
                             int64_t ledger_hash, ffi::Span<const int64_t> sites) {
  const std::string call = "ledger_note";
  const int64_t num_sites = static_cast<int64_t>(sites.size());
  const auto dimensions = importances.dimensions();
  if (dimensions.size() < 1 || dimensions.back() != num_sites + 1) {
    return InvalidArgument(call, "importances must be [*batch, " +
                                     std::to_string(num_sites + 1) +
                                     "] for so many sites, but has dimensions " +
                                     DimensionsToString(dimensions) + ".");
  }
  // A program may outlive what its bits are adapted by. Then nobody wants to know.
  const std::shared_ptr<Ledger> found =
      ByHash<Ledger>::All().Find(static_cast<uint64_t>(ledger_hash));
  if (found != nullptr) {
    const int64_t count = static_cast<int64_t>(importances.element_count());
    found->Note(sites.begin(), num_sites, importances.typed_data(),
                count / (num_sites + 1));
  }
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
