#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/graph.h"
#include "cuda/kernels.h"
#include "ffi/cuda_handlers.h"
#include "ffi/device_stream.h"
#include "ffi/reduction_checks.h"
#include "ffi/reduction_timing.h"
#include "format/float_type.h"
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

// So many that waiting for the device, and launching the first, are little of the time.
constexpr int kGraphsAtOnce = 8;

ffi::Error TimeReductionsHandler(Stream stream, ffi::AnyBuffer x, Result seconds,
                                 Result scratch, Result first, Result second,
                                 ffi::Span<const int64_t> timed) {
  const std::string call = "time_reductions";
  const ffi::ErrorOr<ReductionTiming> timing =
      CheckReductionTiming(call, x, *seconds, *scratch, *first, *second, timed);
  if (timing.has_error()) return timing.error();
  std::vector<Graph> graphs(timing->timed.size());
  for (size_t i = 0; i < graphs.size(); ++i) {
    const Failure failure =
        graphs[i].Record([&, one = timing->timed[i]](Stream recorded) -> Failure {
          for (int64_t launch = 0; launch < one.launches; ++launch) {
            const Failure of_one = ReduceOnDevice(
                recorded, one.reduction, one.strategy, FloatType::kFloat32,
                one.num_rows, one.row_elements, timing->x, timing->scratch,
                timing->first, timing->second);
            if (of_one != nullptr) return of_one;
          }
          return nullptr;
        });
    if (failure != nullptr) return Enqueued(call, failure);
  }
  const auto run = [&](size_t number) -> Failure {
    for (int i = 0; i < kGraphsAtOnce; ++i) {
      if (const Failure failure = graphs[number].Launch(stream)) return failure;
    }
    return WaitForStream(stream);
  };
  // What was enqueued before is not timed.
  Failure failure = WaitForStream(stream);
  if (failure != nullptr) return Enqueued(call, failure);
  const std::vector<float> took =
      TimeReductions(*timing, kGraphsAtOnce, run, &failure);
  if (failure != nullptr) return Enqueued(call, failure);
  return Enqueued(call, CopyToDevice(stream, took.data(),
                                     static_cast<int64_t>(took.size() * sizeof(float)),
                                     seconds->untyped_data()));
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

// It waits for the device, and cannot be captured.
XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_cuda_time_reductions, dafjax::TimeReductionsHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<dafjax::DeviceStream>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Ret<xla::ffi::AnyBuffer>()  // seconds
                                  .Ret<xla::ffi::AnyBuffer>()  // scratch
                                  .Ret<xla::ffi::AnyBuffer>()  // first
                                  .Ret<xla::ffi::AnyBuffer>()  // second
                                  .Attr<xla::ffi::Span<const int64_t>>("timed"));
