#include <cstdint>
#include <string>

#include "cuda/kernels.h"
#include "ffi/bitmask_checks.h"
#include "ffi/checks.h"
#include "ffi/cuda_handlers.h"
#include "ffi/device_stream.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {
namespace {

namespace ffi = xla::ffi;

ffi::Error PackBitmaskHandler(Stream stream, ffi::AnyBuffer x,
                              ffi::Result<ffi::AnyBuffer> words) {
  const std::string call = "pack_bitmask";
  const ffi::ErrorOr<Rows> rows = CheckBitmask(call, "x", x, *words);
  if (rows.has_error()) return rows.error();

  return Enqueued(
      call, PackBitmaskOnDevice(stream, rows->num_rows, rows->row_elements,
                                static_cast<const uint8_t*>(x.untyped_data()),
                                static_cast<uint16_t*>(words->untyped_data())));
}

ffi::Error UnpackBitmaskHandler(Stream stream, ffi::AnyBuffer words, ffi::RemainingArgs,
                                ffi::Result<ffi::AnyBuffer> y) {
  const std::string call = "unpack_bitmask";
  const ffi::ErrorOr<Rows> rows = CheckBitmask(call, "y", *y, words);
  if (rows.has_error()) return rows.error();

  return Enqueued(
      call, UnpackBitmaskOnDevice(stream, rows->num_rows, rows->row_elements,
                                  static_cast<const uint16_t*>(words.untyped_data()),
                                  static_cast<uint8_t*>(y->untyped_data())));
}

}  // namespace
}  // namespace dafjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_cuda_pack_bitmask, dafjax::PackBitmaskHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<dafjax::DeviceStream>()
                                  .Arg<xla::ffi::AnyBuffer>()   // x
                                  .Ret<xla::ffi::AnyBuffer>(),  // words
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_cuda_unpack_bitmask, dafjax::UnpackBitmaskHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<dafjax::DeviceStream>()
                                  .Arg<xla::ffi::AnyBuffer>()   // words
                                  .RemainingArgs()              // not read
                                  .Ret<xla::ffi::AnyBuffer>(),  // y
                              {xla::ffi::Traits::kCmdBufferCompatible});
