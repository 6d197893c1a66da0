#include <algorithm>
#include <cstdint>
#include <string>

#include "cpu/batch.h"
#include "cpu/instruction_sets.h"
#include "cpu/kernels.h"
#include "ffi/affine_checks.h"
#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "ffi/helpers.h"
#include "format/affine.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {
namespace {

namespace ffi = xla::ffi;

// Where the seed of each row is written: the result after the minima. Null if the code
// is not dithered.
ffi::ErrorOr<uint32_t*> PlaceOfSeeds(const std::string& call, bool dithered,
                                     const ffi::RemainingRets& results,
                                     int64_t num_rows) {
  if (results.size() != (dithered ? 1 : 0)) {
    return ffi::Unexpected(InvalidArgument(
        call, "there must be a fourth result exactly where dithered is 1."));
  }
  if (!dithered) return nullptr;
  ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> seeds = results.get<ffi::AnyBuffer>(0);
  if (seeds.has_error()) return ffi::Unexpected(seeds.error());
  const ffi::AnyBuffer& buffer = **seeds;
  if (buffer.element_type() != ffi::DataType::U32 ||
      static_cast<int64_t>(buffer.element_count()) != num_rows) {
    return ffi::Unexpected(InvalidArgument(
        call, "the fourth result must have a uint32 seed for each of the " +
                  std::to_string(num_rows) + " rows."));
  }
  return static_cast<uint32_t*>(buffer.untyped_data());
}

ffi::Error PackAffineHandler(ffi::ThreadPool pool, ffi::AnyBuffer x,
                             ffi::AnyBuffer seed, ffi::Result<ffi::AnyBuffer> codes,
                             ffi::Result<ffi::AnyBuffer> scale,
                             ffi::Result<ffi::AnyBuffer> minimum,
                             ffi::RemainingRets others, int64_t bits,
                             int64_t block_size, int64_t columns, int64_t stochastic,
                             int64_t dithered, int64_t salt) {
  const std::string call = "pack_affine";
  const ffi::ErrorOr<AffineShape> shape =
      CheckAffine(call, "x", x, *codes, *scale, *minimum, bits, block_size, columns);
  if (shape.has_error()) return shape.error();
  if (ffi::Error error = CheckRounding(call, stochastic, dithered, seed); error.failure()) {
    return error;
  }
  const ffi::ErrorOr<uint32_t*> seeds =
      PlaceOfSeeds(call, dithered == 1, others, shape->num_rows);
  if (seeds.has_error()) return seeds.error();
  const uint32_t own_seed =
      *static_cast<const uint32_t*>(seed.untyped_data()) + static_cast<uint32_t>(salt);
  if (*seeds != nullptr) std::fill_n(*seeds, shape->num_rows, own_seed);

  const PiecesOfCodes<uint8_t> packed = {static_cast<uint8_t*>(codes->untyped_data()),
                                         static_cast<uint8_t*>(scale->untyped_data()),
                                         static_cast<uint8_t*>(minimum->untyped_data())};
  const Rounding rounding = {stochastic == 1, own_seed, dithered == 1};
  PackAffine(BestKernels(), *shape, rounding, x.untyped_data(),
             Contiguous(*shape, shape->bits, packed), HelpersOf(pool));
  return ffi::Error::Success();
}

ffi::Error UnpackAffineHandler(ffi::ThreadPool pool, ffi::AnyBuffer codes,
                               ffi::AnyBuffer scale, ffi::AnyBuffer minimum,
                               ffi::RemainingArgs others,
                               ffi::Result<ffi::AnyBuffer> y, int64_t bits,
                               int64_t block_size, int64_t columns, int64_t dithered) {
  const std::string call = "unpack_affine";
  const ffi::ErrorOr<AffineShape> shape =
      CheckAffine(call, "y", *y, codes, scale, minimum, bits, block_size, columns);
  if (shape.has_error()) return shape.error();
  const ffi::ErrorOr<const uint32_t*> seeds =
      SeedsOf(call, dithered, others, shape->num_rows);
  if (seeds.has_error()) return seeds.error();

  const PiecesOfCodes<const uint8_t> packed = {
      static_cast<const uint8_t*>(codes.untyped_data()),
      static_cast<const uint8_t*>(scale.untyped_data()),
      static_cast<const uint8_t*>(minimum.untyped_data())};
  ConstAffineCodes places = Contiguous(*shape, shape->bits, packed);
  places.seeds = *seeds;
  UnpackAffine(BestKernels(), *shape, places, y->untyped_data(), HelpersOf(pool));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace dafjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_pack_affine, dafjax::PackAffineHandler,
                       xla::ffi::Ffi::Bind()
                           .Ctx<xla::ffi::ThreadPool>()
                           .Arg<xla::ffi::AnyBuffer>()  // x
                           .Arg<xla::ffi::AnyBuffer>()  // seed
                           .Ret<xla::ffi::AnyBuffer>()  // codes
                           .Ret<xla::ffi::AnyBuffer>()  // scale
                           .Ret<xla::ffi::AnyBuffer>()  // minimum
                           .RemainingRets()             // seeds if dithered
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("block_size")
                           .Attr<int64_t>("columns")
                           .Attr<int64_t>("stochastic")
                           .Attr<int64_t>("dithered")
                           .Attr<int64_t>("salt"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_unpack_affine, dafjax::UnpackAffineHandler,
                       xla::ffi::Ffi::Bind()
                           .Ctx<xla::ffi::ThreadPool>()
                           .Arg<xla::ffi::AnyBuffer>()  // codes
                           .Arg<xla::ffi::AnyBuffer>()  // scale
                           .Arg<xla::ffi::AnyBuffer>()  // minimum
                           .RemainingArgs()  // seeds if dithered; what must exist before
                           .Ret<xla::ffi::AnyBuffer>()  // y
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("block_size")
                           .Attr<int64_t>("columns")
                           .Attr<int64_t>("dithered"));
