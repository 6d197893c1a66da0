#include <cstdint>
#include <string>

#include "cuda/kernels.h"
#include "ffi/affine_checks.h"
#include "ffi/checks.h"
#include "ffi/cuda_handlers.h"
#include "ffi/device_stream.h"
#include "format/affine.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {
namespace {

namespace ffi = xla::ffi;

ffi::Error PackAffineHandler(Stream stream, ffi::AnyBuffer x, ffi::AnyBuffer seed,
                             ffi::Result<ffi::AnyBuffer> codes,
                             ffi::Result<ffi::AnyBuffer> scale,
                             ffi::Result<ffi::AnyBuffer> minimum, int64_t bits,
                             int64_t block_size, int64_t columns, int64_t stochastic) {
  const std::string call = "pack_affine";
  const ffi::ErrorOr<AffineShape> shape =
      CheckAffine(call, "x", x, *codes, *scale, *minimum, bits, block_size, columns);
  if (shape.has_error()) return shape.error();
  if (ffi::Error error = CheckRounding(call, stochastic, seed); error.failure()) {
    return error;
  }

  const DeviceCodes packed = {static_cast<uint16_t*>(codes->untyped_data()),
                              static_cast<uint16_t*>(scale->untyped_data()),
                              static_cast<uint16_t*>(minimum->untyped_data())};
  return Enqueued(
      call, PackAffineOnDevice(stream, *shape, stochastic == 1,
                               static_cast<const uint32_t*>(seed.untyped_data()),
                               x.untyped_data(), packed));
}

ffi::Error UnpackAffineHandler(Stream stream, ffi::AnyBuffer codes, ffi::AnyBuffer scale,
                               ffi::AnyBuffer minimum, ffi::RemainingArgs,
                               ffi::Result<ffi::AnyBuffer> y, int64_t bits,
                               int64_t block_size, int64_t columns) {
  const std::string call = "unpack_affine";
  const ffi::ErrorOr<AffineShape> shape =
      CheckAffine(call, "y", *y, codes, scale, minimum, bits, block_size, columns);
  if (shape.has_error()) return shape.error();

  const ConstDeviceCodes packed = {
      static_cast<const uint16_t*>(codes.untyped_data()),
      static_cast<const uint16_t*>(scale.untyped_data()),
      static_cast<const uint16_t*>(minimum.untyped_data())};
  return Enqueued(call, UnpackAffineOnDevice(stream, *shape, packed, y->untyped_data()));
}

}  // namespace
}  // namespace dafjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_cuda_pack_affine, dafjax::PackAffineHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<dafjax::DeviceStream>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // seed
                                  .Ret<xla::ffi::AnyBuffer>()  // codes
                                  .Ret<xla::ffi::AnyBuffer>()  // scale
                                  .Ret<xla::ffi::AnyBuffer>()  // minimum
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("block_size")
                                  .Attr<int64_t>("columns")
                                  .Attr<int64_t>("stochastic"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_cuda_unpack_affine, dafjax::UnpackAffineHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<dafjax::DeviceStream>()
                                  .Arg<xla::ffi::AnyBuffer>()  // codes
                                  .Arg<xla::ffi::AnyBuffer>()  // scale
                                  .Arg<xla::ffi::AnyBuffer>()  // minimum
                                  .RemainingArgs()             // what must exist before
                                  .Ret<xla::ffi::AnyBuffer>()  // y
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("block_size")
                                  .Attr<int64_t>("columns"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
