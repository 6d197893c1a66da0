#include <cstdint>
#include <string>

#include "cuda/kernels.h"
#include "ffi/cuda_handlers.h"
#include "ffi/device_stream.h"
#include "ffi/reduction_checks.h"
#include "format/reduction.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {
namespace {

namespace ffi = xla::ffi;

using Result = ffi::Result<ffi::AnyBuffer>;

ffi::Error MinMaxHandler(Stream stream, ffi::AnyBuffer x, Result minimum,
                         Result maximum, Result scratch, int64_t strategy) {
  const std::string call = "minmax";
  const ffi::ErrorOr<ReductionCall> of =
      CheckReduction(call, x, *minimum, &*maximum, *scratch, strategy);
  if (of.has_error()) return of.error();
  return Enqueued(
      call, ReduceOnDevice(stream, Reduction::kMinMax, of->strategy, of->type,
                           of->num_rows, of->row_elements, x.untyped_data(),
                           WordsOf(*scratch), FloatsOf(*minimum), FloatsOf(*maximum)));
}

ffi::Error SumOfSquaresHandler(Stream stream, ffi::AnyBuffer x, Result sum,
                               Result scratch, int64_t strategy) {
  const std::string call = "sum_of_squares";
  const ffi::ErrorOr<ReductionCall> of =
      CheckReduction(call, x, *sum, nullptr, *scratch, strategy);
  if (of.has_error()) return of.error();
  return Enqueued(
      call, ReduceOnDevice(stream, Reduction::kSumOfSquares, of->strategy, of->type,
                           of->num_rows, of->row_elements, x.untyped_data(),
                           WordsOf(*scratch), FloatsOf(*sum), nullptr));
}

}  // namespace
}  // namespace dafjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_cuda_minmax, dafjax::MinMaxHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<dafjax::DeviceStream>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Ret<xla::ffi::AnyBuffer>()  // minimum
                                  .Ret<xla::ffi::AnyBuffer>()  // maximum
                                  .Ret<xla::ffi::AnyBuffer>()  // scratch
                                  .Attr<int64_t>("strategy"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_cuda_sum_of_squares, dafjax::SumOfSquaresHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<dafjax::DeviceStream>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Ret<xla::ffi::AnyBuffer>()  // sum
                                  .Ret<xla::ffi::AnyBuffer>()  // scratch
                                  .Attr<int64_t>("strategy"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
