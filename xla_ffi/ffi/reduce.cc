#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/reduce.h"
#include "ffi/handlers.h"
#include "ffi/helpers.h"
#include "ffi/reduction_checks.h"
#include "ffi/reduction_timing.h"
#include "format/float_type.h"
#include "format/reduction.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {
namespace {

namespace ffi = xla::ffi;

using Result = ffi::Result<ffi::AnyBuffer>;

ffi::Error MinMaxHandler(ffi::ThreadPool pool, ffi::AnyBuffer x, Result minimum,
                         Result maximum, Result scratch, int64_t strategy) {
  const std::string call = "minmax";
  const ffi::ErrorOr<ReductionCall> of =
      CheckReduction(call, x, *minimum, &*maximum, *scratch, strategy);
  if (of.has_error()) return of.error();
  ReduceRows(Reduction::kMinMax, of->strategy, of->type, of->num_rows,
             of->row_elements, x.untyped_data(), WordsOf(*scratch),
             FloatsOf(*minimum), FloatsOf(*maximum), HelpersOf(pool));
  return ffi::Error::Success();
}

ffi::Error SumOfSquaresHandler(ffi::ThreadPool pool, ffi::AnyBuffer x, Result sum,
                               Result scratch, int64_t strategy) {
  const std::string call = "sum_of_squares";
  const ffi::ErrorOr<ReductionCall> of =
      CheckReduction(call, x, *sum, nullptr, *scratch, strategy);
  if (of.has_error()) return of.error();
  ReduceRows(Reduction::kSumOfSquares, of->strategy, of->type, of->num_rows,
             of->row_elements, x.untyped_data(), WordsOf(*scratch),
             FloatsOf(*sum), nullptr, HelpersOf(pool));
  return ffi::Error::Success();
}

ffi::Error TimeReductionsHandler(ffi::ThreadPool pool, ffi::AnyBuffer x, Result seconds,
                                 Result scratch, Result first, Result second,
                                 ffi::Span<const int64_t> timed) {
  const ffi::ErrorOr<ReductionTiming> timing = CheckReductionTiming(
      "time_reductions", x, *seconds, *scratch, *first, *second, timed);
  if (timing.has_error()) return timing.error();
  const auto run = [&](size_t number) -> const char* {
    const TimedReduction& one = timing->timed[number];
    for (int64_t i = 0; i < one.launches; ++i) {
      ReduceRows(one.reduction, one.strategy, FloatType::kFloat32, one.num_rows,
                 one.row_elements, timing->x, timing->scratch, timing->first,
                 timing->second, HelpersOf(pool));
    }
    return nullptr;
  };
  const char* failure = nullptr;
  const std::vector<float> took = TimeReductions(*timing, 1, run, &failure);
  if (!took.empty()) {
    std::memcpy(FloatsOf(*seconds), took.data(), took.size() * sizeof(float));
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace dafjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_minmax, dafjax::MinMaxHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Ret<xla::ffi::AnyBuffer>()  // minimum
                                  .Ret<xla::ffi::AnyBuffer>()  // maximum
                                  .Ret<xla::ffi::AnyBuffer>()  // scratch
                                  .Attr<int64_t>("strategy"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_sum_of_squares, dafjax::SumOfSquaresHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Ret<xla::ffi::AnyBuffer>()  // sum
                                  .Ret<xla::ffi::AnyBuffer>()  // scratch
                                  .Attr<int64_t>("strategy"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_time_reductions, dafjax::TimeReductionsHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Ret<xla::ffi::AnyBuffer>()  // seconds
                                  .Ret<xla::ffi::AnyBuffer>()  // scratch
                                  .Ret<xla::ffi::AnyBuffer>()  // first
                                  .Ret<xla::ffi::AnyBuffer>()  // second
                                  .Attr<xla::ffi::Span<const int64_t>>("timed"));
