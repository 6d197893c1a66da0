#include <cstdint>
#include <cstdio>

#include "cuda_runtime_api.h"
#include "ffi/cuda_handlers.h"
#include "xla/ffi/api/c_api.h"

int32_t dafjax_cuda_num_devices(int32_t* count) {
  int n = 0;
  const cudaError_t error = cudaGetDeviceCount(&n);
  *count = error == cudaSuccess ? n : 0;
  return error;
}

int32_t dafjax_cuda_device(int32_t index, DafjaxCudaDevice* device) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, index);
  if (error != cudaSuccess) return error;
  std::snprintf(device->name, sizeof(device->name), "%s", properties.name);
  device->major = properties.major;
  device->minor = properties.minor;
  device->integrated = properties.integrated;
  return cudaSuccess;
}

int32_t dafjax_cuda_driver_version(int32_t* version) {
  int v = 0;
  const cudaError_t error = cudaDriverGetVersion(&v);
  *version = v;
  return error;
}

const char* dafjax_cuda_error(int32_t error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

int32_t dafjax_cuda_runtime_version() { return CUDART_VERSION; }
const char* dafjax_cuda_architectures() { return DAFJAX_CUDA_ARCHITECTURES; }
int32_t dafjax_cuda_ffi_major() { return XLA_FFI_API_MAJOR; }
int32_t dafjax_cuda_ffi_minor() { return XLA_FFI_API_MINOR; }
