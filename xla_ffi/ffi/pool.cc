#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "cpu/batch.h"
#include "cpu/instruction_sets.h"
#include "cpu/kernels.h"
#include "cpu/paged_words.h"
#include "ffi/checks.h"
#include "ffi/handlers.h"
#include "ffi/helpers.h"
#include "ffi/pool_checks.h"
#include "format/affine.h"
#include "format/packed.h"
#include "pool/pool.h"
#include "pool/registry.h"
#include "pool/status.h"
#include "pool/tables.h"
#include "pool/writing.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {
namespace {

namespace ffi = xla::ffi;

ffi::ErrorOr<std::shared_ptr<pool::Pool>> FindPool(const std::string& call,
                                                   int64_t hash) {
  std::shared_ptr<pool::Pool> found = pool::FindPool(static_cast<uint64_t>(hash));
  if (found == nullptr) return ffi::Unexpected(NoSuchPool(call));
  if (found->attachment() == nullptr) return found;
  return ffi::Unexpected(ffi::Error(
      ffi::ErrorCode::kFailedPrecondition,
      call + ": the page pool serves programs for a GPU, which may have yet to read what "
             "a program for CPUs would write over. Make another "
             "`dafjax.stores.PagePool` for programs for CPUs."));
}

// Scales, then minima.
template <typename Byte>
void SetParameters(const AffineShape& shape, const pool::MetadataTable<Byte>& table,
                   PlacesOfCodes<Byte>* places) {
  constexpr int kShift = pool::kLog2PageNbytes - 1;
  places->scale = {table.pages, kShift, 0};
  places->minimum = {table.pages, kShift, shape.num_rows * shape.NumBlocks()};
}

template <typename Byte>
PlacesOfCodes<Byte> PlacesIn(const AffineShape& shape, int kept_bits,
                             const pool::PlaneTable<Byte>* planes,
                             const pool::MetadataTable<Byte>& metadata) {
  PlacesOfCodes<Byte> places = {};
  places.kept_bits = kept_bits;
  const int64_t num_tiles = shape.NumTiles();
  for (int i = 0; i < PlanesOf(kept_bits).count; ++i) {
    const int width = PlanesOf(kept_bits).widths[i];
    int tile_shift = 0;
    while ((1 << tile_shift) < kTileLanes * width) ++tile_shift;
    places.planes[i] = {planes[i].pages, planes[i].log2_page_tiles + tile_shift, 0};
    places.words_per_row[i] = WordsOfTiles(num_tiles, width);
  }
  SetParameters(shape, metadata, &places);
  return places;
}

class Reading {
 public:
  Reading(pool::Pool* pool, const pool::Handle& handle, int64_t reads)
      : pool_(pool), handle_(handle), reads_(reads) {}
  ~Reading() { static_cast<void>(pool_->Unpin(handle_, reads_)); }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

 private:
  pool::Pool* const pool_;
  const pool::Handle handle_;
  const int64_t reads_;
};

// Of the blocks of an entry with `levels` steps between the least and greatest value.
double MeanSquaredRange(const pool::MetadataTable<uint8_t>& metadata, int64_t num_blocks,
                        int levels) {
  double sum = 0;
  constexpr int64_t kWords = pool::kPageNbytes / 2;
  for (int64_t block = 0; block < num_blocks; ++block) {
    uint16_t scale;
    std::memcpy(&scale, metadata.pages[block / kWords] + block % kWords * 2, 2);
    const uint32_t bits = static_cast<uint32_t>(scale & ~kFlaggedBit) << 16;
    float step;
    std::memcpy(&step, &bits, sizeof(step));
    sum += static_cast<double>(step) * static_cast<double>(step);
  }
  return num_blocks == 0 ? 0 : sum * levels * levels / static_cast<double>(num_blocks);
}

pool::Status PutEntry(pool::Pool* pool, const pool::Execution& execution,
                      pool::SiteId site, int bits, int max_bits, AffineShape shape,
                      const Rounding& rounding, const void* x, const Helpers& helpers,
                      pool::Handle* handle) {
  const pool::PutRequest request = {shape.num_rows * shape.NumTiles(), max_bits,
                                    shape.ParametersNbytes(), bits};
  pool::PutView view;
  pool::Status status = pool->Put(execution, site, request, &view, handle);
  if (!status.ok()) return status;
  pool::Writing writing(pool, *handle);
  shape.bits = view.bits;
  PackAffine(BestKernels(), shape, rounding, x,
             PlacesIn(shape, view.num_planes == 0 ? 0 : view.bits, view.planes,
                      view.metadata),
             helpers);
  if (pool->measures()) {
    const int64_t num_blocks = shape.num_rows * shape.NumBlocks();
    pool->NoteRange(site,
                    MeanSquaredRange(view.metadata, num_blocks, (1 << view.bits) - 1),
                    request.num_tiles);
  }
  return writing.Commit();
}

pool::Status GetEntry(pool::Pool* pool, const pool::Execution& execution,
                      AffineShape shape, const pool::Handle& handle, int64_t reads,
                      void* y, const Helpers& helpers) {
  pool::GetView view;
  pool::Status status = pool->Get(execution, handle, &view);
  if (!status.ok()) return status;
  const Reading reading(pool, handle, reads);
  const int64_t num_tiles = shape.num_rows * shape.NumTiles();
  if (view.num_tiles != num_tiles || view.metadata.nbytes != shape.ParametersNbytes()) {
    return {pool::Code::kInvalidArgument,
            "the handle is that of an entry of " + std::to_string(view.num_tiles) +
                " tiles and " + std::to_string(view.metadata.nbytes) +
                " bytes of metadata, but the result has " + std::to_string(num_tiles) +
                " and " + std::to_string(shape.ParametersNbytes()) + "."};
  }
  shape.bits = view.bits_put;
  UnpackAffine(BestKernels(), shape,
               PlacesIn(shape, view.bits_kept, view.planes, view.metadata), y, helpers);
  return {};
}

ffi::Error PoolPutHandler(ffi::ThreadPool threads, ffi::RunId run_id, int32_t device,
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

  const Rounding rounding = {stochastic == 1,
                             *static_cast<const uint32_t*>(seed.untyped_data())};
  const char* values = static_cast<const char*>(x.untyped_data());
  char* handles = static_cast<char*>(handle->untyped_data());
  for (int64_t e = 0; e < entries->count; ++e) {
    // Of nothing, the handle is that of zeros.
    pool::Handle made;
    if (entries->nbytes > 0) {
      const pool::Status status = PutEntry(
          found->get(), {run_id.run_id, device}, static_cast<uint64_t>(site),
          static_cast<int>(bits), static_cast<int>(max_bits), entries->shape, rounding,
          values + e * entries->nbytes, HelpersOf(threads), &made);
      if (!status.ok()) return ErrorOf(call, status);
    }
    std::memcpy(handles + e * sizeof(made), &made, sizeof(made));
  }
  return ffi::Error::Success();
}

ffi::Error PoolGetHandler(ffi::ThreadPool threads, ffi::RunId run_id, int32_t device,
                          ffi::AnyBuffer handle, ffi::RemainingArgs,
                          ffi::Result<ffi::AnyBuffer> y, int64_t pool_hash,
                          int64_t reads, int64_t block_size, int64_t columns) {
  const std::string call = "pool_get";
  const ffi::ErrorOr<Entries> entries =
      CheckEntries(call, "y", *y, handle, block_size, columns);
  if (entries.has_error()) return entries.error();
  const auto found = FindPool(call, pool_hash);
  if (found.has_error()) return found.error();

  const char* handles = static_cast<const char*>(handle.untyped_data());
  char* values = static_cast<char*>(y->untyped_data());
  for (int64_t e = 0; e < entries->count; ++e) {
    pool::Handle of_entry;
    std::memcpy(&of_entry, handles + e * sizeof(of_entry), sizeof(of_entry));
    char* out = values + e * entries->nbytes;
    if (of_entry == pool::Handle{}) {
      std::memset(out, 0, entries->nbytes);
      continue;
    }
    const pool::Status status =
        GetEntry(found->get(), {run_id.run_id, device}, entries->shape, of_entry, reads,
                 out, HelpersOf(threads));
    if (!status.ok()) return ErrorOf(call, status);
  }
  return ffi::Error::Success();
}

// Sensitivities of sites, then the squared norm of the gradient; rows are added up.
ffi::Error PoolNoteHandler(ffi::Buffer<ffi::F32> sensitivities, ffi::RemainingArgs,
                           ffi::Result<ffi::Buffer<ffi::U8>> done, int64_t pool_hash,
                           ffi::Span<const int64_t> sites) {
  const std::string call = "pool_note";
  const int64_t n = static_cast<int64_t>(sites.size()) + 1;
  const auto num_rows = CheckRowsOfSites(call, "sensitivities", n - 1, sensitivities);
  if (num_rows.has_error()) return num_rows.error();
  const auto found = FindPool(call, pool_hash);
  if (found.has_error()) return found.error();
  const float* values = sensitivities.typed_data();
  for (int64_t i = 0; i < *num_rows * n; ++i) {
    if (i % n == n - 1) {
      (*found)->NoteGradient(values[i]);
    } else {
      (*found)->NoteSensitivity(static_cast<uint64_t>(sites[i % n]), values[i]);
    }
  }
  std::memset(done->untyped_data(), 0, done->size_bytes());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace dafjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_pool_put, dafjax::PoolPutHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_pool_get, dafjax::PoolGetHandler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Ctx<xla::ffi::RunId>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()  // handle
                                  .RemainingArgs()             // not read
                                  .Ret<xla::ffi::AnyBuffer>()  // y
                                  .Attr<int64_t>("pool")
                                  .Attr<int64_t>("reads")
                                  .Attr<int64_t>("block_size")
                                  .Attr<int64_t>("columns"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(dafjax_pool_note, dafjax::PoolNoteHandler,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .RemainingArgs()  // not read
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()  // done
                                  .Attr<int64_t>("pool")
                                  .Attr<xla::ffi::Span<const int64_t>>("sites"));
