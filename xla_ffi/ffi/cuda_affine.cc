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

// What both kinds of packing are told.
struct PackArguments {
  Stream stream;
  ffi::AnyBuffer x;
  ffi::AnyBuffer seed;
  ffi::Result<ffi::AnyBuffer> codes;
  ffi::Result<ffi::AnyBuffer> scale;
  ffi::Result<ffi::AnyBuffer> minimum;
  int64_t bits;
  int64_t block_size;
  int64_t columns;
  int64_t stochastic;
  int64_t dithered;

  ffi::ErrorOr<AffineShape> Check(const std::string& call) {
    const ffi::ErrorOr<AffineShape> shape =
        CheckAffine(call, "x", x, *codes, *scale, *minimum, bits, block_size, columns);
    if (shape.has_error()) return shape;
    if (ffi::Error error = CheckRounding(call, stochastic, dithered, seed); error.failure()) {
      return ffi::Unexpected(error);
    }
    return shape;
  }

  ffi::Error Enqueue(const std::string& call, const AffineShape& shape,
                     const BlockSums& sums) {
    const DeviceCodes packed = {static_cast<uint16_t*>(codes->untyped_data()),
                                static_cast<uint16_t*>(scale->untyped_data()),
                                static_cast<uint16_t*>(minimum->untyped_data())};
    const DeviceRounding rounding = {stochastic == 1,
                                     static_cast<const uint32_t*>(seed.untyped_data()),
                                     dithered == 1};
    return Enqueued(call, PackAffineOnDevice(stream, shape, rounding, x.untyped_data(),
                                             packed, sums));
  }
};

ffi::Error PackAffineHandler(Stream stream, ffi::AnyBuffer x, ffi::AnyBuffer seed,
                             ffi::Result<ffi::AnyBuffer> codes,
                             ffi::Result<ffi::AnyBuffer> scale,
                             ffi::Result<ffi::AnyBuffer> minimum, int64_t bits,
                             int64_t block_size, int64_t columns, int64_t stochastic,
                             int64_t dithered) {
  const std::string call = "pack_affine";
  PackArguments arguments = {stream,  x,    seed,       codes,   scale,
                             minimum, bits, block_size, columns, stochastic, dithered};
  const ffi::ErrorOr<AffineShape> shape = arguments.Check(call);
  if (shape.has_error()) return shape.error();
  return arguments.Enqueue(call, *shape, {});
}

ffi::Error PackAffineAndSumHandler(
    Stream stream, ffi::AnyBuffer x, ffi::AnyBuffer seed,
    ffi::Result<ffi::AnyBuffer> codes, ffi::Result<ffi::AnyBuffer> scale,
    ffi::Result<ffi::AnyBuffer> minimum, ffi::Result<ffi::AnyBuffer> sum,
    ffi::Result<ffi::AnyBuffer> square, int64_t bits, int64_t block_size,
    int64_t columns, int64_t stochastic, int64_t dithered) {
  const std::string call = "pack_affine_and_sum";
  PackArguments arguments = {stream,  x,    seed,       codes,   scale,
                             minimum, bits, block_size, columns, stochastic, dithered};
  const ffi::ErrorOr<AffineShape> shape = arguments.Check(call);
  if (shape.has_error()) return shape.error();
  if (columns == 0) return InvalidArgument(call, "columns must be positive.");
  const int64_t blocks = shape->NumBlocks();
  for (const ffi::Error& error :
       {CheckBuffer(call, "sum", *sum, ffi::DataType::F32, "float32", x, blocks),
        CheckBuffer(call, "square", *square, ffi::DataType::F32, "float32", x, blocks)}) {
    if (error.failure()) return error;
  }
  return arguments.Enqueue(call, *shape,
                           {static_cast<float*>(sum->untyped_data()),
                            static_cast<float*>(square->untyped_data())});
}

ffi::Error UnpackAffineHandler(Stream stream, ffi::AnyBuffer codes, ffi::AnyBuffer scale,
                               ffi::AnyBuffer minimum, ffi::RemainingArgs others,
                               ffi::Result<ffi::AnyBuffer> y, int64_t bits,
                               int64_t block_size, int64_t columns, int64_t dithered) {
  const std::string call = "unpack_affine";
  const ffi::ErrorOr<AffineShape> shape =
      CheckAffine(call, "y", *y, codes, scale, minimum, bits, block_size, columns);
  if (shape.has_error()) return shape.error();
  const ffi::ErrorOr<const uint32_t*> seeds =
      SeedsOf(call, dithered, others, shape->num_rows);
  if (seeds.has_error()) return seeds.error();

  const ConstDeviceCodes packed = {
      static_cast<const uint16_t*>(codes.untyped_data()),
      static_cast<const uint16_t*>(scale.untyped_data()),
      static_cast<const uint16_t*>(minimum.untyped_data())};
  return Enqueued(call, UnpackAffineOnDevice(stream, *shape, packed, y->untyped_data(),
                                             *seeds));
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
                                  .Attr<int64_t>("stochastic")
                                  .Attr<int64_t>("dithered"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_cuda_pack_affine_and_sum,
                              dafjax::PackAffineAndSumHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<dafjax::DeviceStream>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // seed
                                  .Ret<xla::ffi::AnyBuffer>()  // codes
                                  .Ret<xla::ffi::AnyBuffer>()  // scale
                                  .Ret<xla::ffi::AnyBuffer>()  // minimum
                                  .Ret<xla::ffi::AnyBuffer>()  // sum
                                  .Ret<xla::ffi::AnyBuffer>()  // square
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("block_size")
                                  .Attr<int64_t>("columns")
                                  .Attr<int64_t>("stochastic")
                                  .Attr<int64_t>("dithered"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_cuda_unpack_affine, dafjax::UnpackAffineHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<dafjax::DeviceStream>()
                                  .Arg<xla::ffi::AnyBuffer>()  // codes
                                  .Arg<xla::ffi::AnyBuffer>()  // scale
                                  .Arg<xla::ffi::AnyBuffer>()  // minimum
                                  .RemainingArgs()  // seeds if dithered; what is awaited
                                  .Ret<xla::ffi::AnyBuffer>()  // y
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("block_size")
                                  .Attr<int64_t>("columns")
                                  .Attr<int64_t>("dithered"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
