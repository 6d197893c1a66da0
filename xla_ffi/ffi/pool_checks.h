#ifndef DAFJAX_FFI_POOL_CHECKS_H_
#define DAFJAX_FFI_POOL_CHECKS_H_

#include <cstdint>
#include <string>

#include "format/affine.h"
#include "pool/status.h"
#include "xla/ffi/api/ffi.h"

namespace dafjax {

// Batches of rows [m, n] and their handles.
struct Entries {
  int64_t count;
  AffineShape shape;  // of one entry; `bits` are known at run time
  int64_t nbytes;     // of one entry
};

// uint32 of a handle.
inline constexpr int64_t kHandleWords = 4;

// Checks everything that putting and getting have in common.
xla::ffi::ErrorOr<Entries> CheckEntries(const std::string& call, const char* values_name,
                                        const xla::ffi::AnyBuffer& values,
                                        const xla::ffi::AnyBuffer& handles,
                                        int64_t block_size, int64_t columns);

// Success, or an error that begins with `call`.
xla::ffi::Error CheckPut(const std::string& call, int64_t bits, int64_t max_bits,
                         int64_t block_size, int64_t stochastic,
                         const xla::ffi::AnyBuffer& seed);

// That of a pool that is not in this process.
xla::ffi::Error NoSuchPool(const std::string& call);

// Requires that `status` is not ok.
xla::ffi::Error ErrorOf(const std::string& call, const pool::Status& status);

}  // namespace dafjax

#endif  // DAFJAX_FFI_POOL_CHECKS_H_
