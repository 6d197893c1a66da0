#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "cuda/kernels.h"
#include "device_pool/device_pool.h"
#include "ffi/checks.h"
#include "ffi/cuda_handlers.h"
#include "ffi/device_stream.h"
#include "ffi/pool_checks.h"
#include "format/affine.h"
#include "format/float_type.h"
#include "pool/pool.h"
#include "pool/registry.h"
#include "pool/status.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {
namespace {

namespace ffi = xla::ffi;

// Pools, and what packs on the CPU, are in the library of the CPU, which gives these.
std::atomic<pool::AttachablePoolFinder> find_pool{nullptr};
std::atomic<PackBytesFunction> pack_bytes{nullptr};

// A pool, and what serves it to GPUs, for as long as a call takes.
struct Found {
  std::shared_ptr<pool::AttachablePool> pool;
  std::shared_ptr<DevicePool> on_device;
};

ffi::ErrorOr<Found> FindPool(const std::string& call, int64_t hash) {
  Found found;
  const pool::AttachablePoolFinder find = find_pool.load();
  if (find != nullptr) found.pool = find(static_cast<uint64_t>(hash));
  if (found.pool == nullptr) return ffi::Unexpected(NoSuchPool(call));
  pool::AttachablePool* const pool = found.pool.get();
  const auto make = [pool](pool::Memory* system, pool::Status* status) {
    return std::shared_ptr<pool::Attachment>(
        MakeDevicePool(pool, pack_bytes.load(), system, status));
  };
  std::shared_ptr<pool::Attachment> attachment;
  const pool::Status status = pool->Attach(make, &attachment);
  if (!status.ok()) return ffi::Unexpected(ErrorOf(call, status));
  found.on_device = std::static_pointer_cast<DevicePool>(attachment);
  return found;
}

ffi::Error PoolPutHandler(Stream stream, ffi::RunId run_id, int32_t device,
                          ffi::AnyBuffer x, ffi::AnyBuffer seed,
                          ffi::Result<ffi::AnyBuffer> handle, int64_t pool_hash,
                          int64_t site, int64_t bits, int64_t max_bits, int64_t block_size,
                          int64_t columns, int64_t stochastic) {
  const std::string call = "pool_put";
  const ffi::ErrorOr<Entries> entries =
      CheckEntries(call, "x", x, *handle, block_size, columns);
  if (entries.has_error()) return entries.error();
  if (ffi::Error error =
          CheckPut(call, bits, max_bits, block_size, stochastic, seed);
      error.failure()) {
    return error;
  }
  const auto found = FindPool(call, pool_hash);
  if (found.has_error()) return found.error();

  if (entries->nbytes == 0) {
    // Of nothing, the handle is that of zeros.
    return Enqueued(call, ClearOnDevice(stream, handle->untyped_data(),
                                        static_cast<int64_t>(handle->size_bytes())));
  }
  const char* values = static_cast<const char*>(x.untyped_data());
  uint32_t* handles = static_cast<uint32_t*>(handle->untyped_data());
  for (int64_t e = 0; e < entries->count; ++e) {
    const pool::Status status = found->on_device->Put(
        {stream,
         {run_id.run_id, device},
         static_cast<uint64_t>(site),
         static_cast<int>(bits),
         static_cast<int>(max_bits),
         entries->shape,
         stochastic == 1,
         static_cast<const uint32_t*>(seed.untyped_data()),
         values + e * entries->nbytes,
         handles + e * kHandleWords});
    if (!status.ok()) return ErrorOf(call, status);
  }
  return ffi::Error::Success();
}

ffi::Error PoolGetHandler(Stream stream, ffi::AnyBuffer handle, ffi::RemainingArgs,
                          ffi::Result<ffi::AnyBuffer> y, int64_t pool_hash,
                          int64_t reads, int64_t block_size, int64_t columns) {
  const std::string call = "pool_get";
  const ffi::ErrorOr<Entries> entries =
      CheckEntries(call, "y", *y, handle, block_size, columns);
  if (entries.has_error()) return entries.error();
  const auto found = FindPool(call, pool_hash);
  if (found.has_error()) return found.error();

  if (entries->nbytes == 0) return ffi::Error::Success();
  const uint32_t* handles = static_cast<const uint32_t*>(handle.untyped_data());
  char* values = static_cast<char*>(y->untyped_data());
  for (int64_t e = 0; e < entries->count; ++e) {
    const pool::Status status =
        found->on_device->Get(stream, entries->shape, handles + e * kHandleWords,
                              reads, values + e * entries->nbytes);
    if (!status.ok()) return ErrorOf(call, status);
  }
  return ffi::Error::Success();
}

ffi::Error PoolNoteHandler(Stream stream, ffi::Buffer<ffi::F32> sensitivities,
                           ffi::RemainingArgs, ffi::Result<ffi::Buffer<ffi::U8>> done,
                           int64_t pool_hash, ffi::Span<const int64_t> sites) {
  const std::string call = "pool_note";
  const int64_t num_sites = static_cast<int64_t>(sites.size());
  const auto num_rows =
      CheckRowsOfSites(call, "sensitivities", num_sites, sensitivities);
  if (num_rows.has_error()) return num_rows.error();
  const auto found = FindPool(call, pool_hash);
  if (found.has_error()) return found.error();
  const pool::Status status = found->on_device->Note(
      stream, sensitivities.typed_data(), *num_rows, sites.begin(), num_sites);
  if (!status.ok()) return ErrorOf(call, status);
  return Enqueued(call, ClearOnDevice(stream, done->untyped_data(),
                                      static_cast<int64_t>(done->size_bytes())));
}

}  // namespace
}  // namespace dafjax

void dafjax_cuda_serve_pools(void* finder, void* pack_bytes) {
  dafjax::find_pool = reinterpret_cast<dafjax::pool::AttachablePoolFinder>(finder);
  dafjax::pack_bytes = reinterpret_cast<dafjax::PackBytesFunction>(pack_bytes);
}

// None of them is compatible with command buffers: what they decide holds once.
XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_cuda_pool_put, dafjax::PoolPutHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<dafjax::DeviceStream>()
                                  .Ctx<xla::ffi::RunId>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // seed
                                  .Ret<xla::ffi::AnyBuffer>()  // handle
                                  .Attr<int64_t>("pool")
                                  .Attr<int64_t>("site")
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("max_bits")
                                  .Attr<int64_t>("block_size")
                                  .Attr<int64_t>("columns")
                                  .Attr<int64_t>("stochastic"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_cuda_pool_get, dafjax::PoolGetHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<dafjax::DeviceStream>()
                                  .Arg<xla::ffi::AnyBuffer>()  // handle
                                  .RemainingArgs()             // not read
                                  .Ret<xla::ffi::AnyBuffer>()  // y
                                  .Attr<int64_t>("pool")
                                  .Attr<int64_t>("reads")
                                  .Attr<int64_t>("block_size")
                                  .Attr<int64_t>("columns"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_cuda_pool_note, dafjax::PoolNoteHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<dafjax::DeviceStream>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .RemainingArgs()  // not read
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()  // done
                                  .Attr<int64_t>("pool")
                                  .Attr<xla::ffi::Span<const int64_t>>("sites"));
