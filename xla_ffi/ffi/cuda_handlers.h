#ifndef DAFJAX_FFI_CUDA_HANDLERS_H_
#define DAFJAX_FFI_CUDA_HANDLERS_H_

#include <cstdint>

struct XLA_FFI_Error;
struct XLA_FFI_CallFrame;

// All else in the library is hidden, and XLA's macro, which defines handlers, says nothing
// of that: it is said here, before.
#define DAFJAX_EXPORT __attribute__((visibility("default")))

// The custom calls on NVIDIA GPUs, as handlers.h describes those of the CPU: the same
// operands, results, attributes and bytes; and pack_affine_and_sum, which has two more
// results, the sums of each block of columns and of the squares (cuda/kernels.h). They only
// enqueue kernels, but for time_reductions. Those on memory that XLA has planned can be
// captured into CUDA graphs; those of page pools and ledgers cannot.
extern "C" {

DAFJAX_EXPORT XLA_FFI_Error* dafjax_cuda_pack_affine(XLA_FFI_CallFrame* call_frame);
DAFJAX_EXPORT XLA_FFI_Error* dafjax_cuda_pack_affine_and_sum(
    XLA_FFI_CallFrame* call_frame);
DAFJAX_EXPORT XLA_FFI_Error* dafjax_cuda_unpack_affine(XLA_FFI_CallFrame* call_frame);
DAFJAX_EXPORT XLA_FFI_Error* dafjax_cuda_pack_bitmask(XLA_FFI_CallFrame* call_frame);
DAFJAX_EXPORT XLA_FFI_Error* dafjax_cuda_unpack_bitmask(XLA_FFI_CallFrame* call_frame);
DAFJAX_EXPORT XLA_FFI_Error* dafjax_cuda_minmax(XLA_FFI_CallFrame* call_frame);
DAFJAX_EXPORT XLA_FFI_Error* dafjax_cuda_sum_of_squares(XLA_FFI_CallFrame* call_frame);
DAFJAX_EXPORT XLA_FFI_Error* dafjax_cuda_time_reductions(XLA_FFI_CallFrame* call_frame);
DAFJAX_EXPORT XLA_FFI_Error* dafjax_cuda_tie(XLA_FFI_CallFrame* call_frame);
DAFJAX_EXPORT XLA_FFI_Error* dafjax_cuda_pool_put(XLA_FFI_CallFrame* call_frame);
DAFJAX_EXPORT XLA_FFI_Error* dafjax_cuda_pool_get(XLA_FFI_CallFrame* call_frame);
DAFJAX_EXPORT XLA_FFI_Error* dafjax_cuda_pool_note(XLA_FFI_CallFrame* call_frame);
DAFJAX_EXPORT XLA_FFI_Error* dafjax_cuda_ledger_note(XLA_FFI_CallFrame* call_frame);

// Pools of pages are in the library of the CPU: where its pool::FindAttachablePool is, and
// a PackBytesFunction (device_pool/device_pool.h).
DAFJAX_EXPORT void dafjax_cuda_serve_pools(void* finder, void* pack_bytes);

// So are ledgers: where its NoteInLedger is.
DAFJAX_EXPORT void dafjax_cuda_serve_ledgers(void* note);

// What a GPU is, for those who ask through ctypes.
struct DafjaxCudaDevice {
  char name[256];
  int32_t major;  // compute capability
  int32_t minor;
  int32_t integrated;  // shares the host's memory
};

// The functions below return 0 or an error of the CUDA runtime, whose text
// dafjax_cuda_error gives. They start nothing on any device.
DAFJAX_EXPORT int32_t dafjax_cuda_num_devices(int32_t* count);
DAFJAX_EXPORT int32_t dafjax_cuda_device(int32_t index, DafjaxCudaDevice* device);
DAFJAX_EXPORT int32_t dafjax_cuda_driver_version(int32_t* version);  // 0: no driver
DAFJAX_EXPORT const char* dafjax_cuda_error(int32_t error);

// Facts of the build: the runtime's version, the architectures as CMake has them, and the
// version of the XLA headers.
DAFJAX_EXPORT int32_t dafjax_cuda_runtime_version();
DAFJAX_EXPORT const char* dafjax_cuda_architectures();
DAFJAX_EXPORT int32_t dafjax_cuda_ffi_major();
DAFJAX_EXPORT int32_t dafjax_cuda_ffi_minor();

}  // extern "C"

#endif  // DAFJAX_FFI_CUDA_HANDLERS_H_
