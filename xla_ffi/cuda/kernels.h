#ifndef DAFJAX_CUDA_KERNELS_H_
#define DAFJAX_CUDA_KERNELS_H_

#include <cstdint>

#include "format/affine.h"
#include "format/float_type.h"
#include "format/reduction.h"

// What cudaStream_t points to.
struct CUstream_st;

namespace dafjax {

using Stream = CUstream_st*;

// Enqueues work and returns null, or says what went wrong. Pointers are to the device.
// Arrays need no alignment beyond that of their elements; aligned to 16 bytes they are
// faster. Every function enqueues something even if there is nothing to do, while the
// stream is captured: a graph must not be empty.
using Failure = const char*;

struct DeviceCodes {
  uint16_t* codes;    // [num_rows, shape.NumWords()]
  uint16_t* scale;    // [num_rows, shape.NumBlocks()], bfloat16
  uint16_t* minimum;  // as `scale`
};

struct ConstDeviceCodes {
  const uint16_t* codes;
  const uint16_t* scale;
  const uint16_t* minimum;
};

// Sums of the values of each column block, and of their squares, as float32. Null: they
// are not asked for. Of row blocks there are none.
struct BlockSums {
  float* sum = nullptr;  // [num_rows, shape.NumBlocks()]
  float* square = nullptr;  // as `sum`
};

// How codes are rounded.
struct DeviceRounding {
  bool stochastic;
  const uint32_t* seed;  // on the device; not read if not stochastic
  bool dithered = false;  // stochastic, and the decoder subtracts the noise
};

Failure PackAffineOnDevice(Stream stream, const AffineShape& shape,
                           const DeviceRounding& rounding, const void* x,
                           const DeviceCodes& packed, const BlockSums& sums = {});

// `seeds`: of noise that is subtracted, one for each row; null if there is none.
Failure UnpackAffineOnDevice(Stream stream, const AffineShape& shape,
                             const ConstDeviceCodes& packed, void* y,
                             const uint32_t* seeds = nullptr);

// One byte per boolean; any byte but 0 is true.
Failure PackBitmaskOnDevice(Stream stream, int64_t num_rows, int64_t row_elements,
                            const uint8_t* x, uint16_t* words);

Failure UnpackBitmaskOnDevice(Stream stream, int64_t num_rows, int64_t row_elements,
                              const uint16_t* words, uint8_t* y);

// Reduces each row to one float32, or two: `second` is unused for a sum. `scratch` has
// ScratchWords(row_elements) words for each row and need not hold anything.
Failure ReduceOnDevice(Stream stream, Reduction reduction, Strategy strategy,
                       FloatType type, int64_t num_rows, int64_t row_elements,
                       const void* x, uint32_t* scratch, float* first, float* second);

Failure CopyOnDevice(Stream stream, const void* from, int64_t nbytes, void* to);

// Copies from the host, and waits until that is done.
Failure CopyToDevice(Stream stream, const void* from, int64_t nbytes, void* to);

// Copies to the host, when all that was enqueued is done, and waits until that is.
Failure CopyToHost(Stream stream, const void* from, int64_t nbytes, void* to);

// Waits for all that was enqueued; a stream that is captured must not be waited for.
Failure WaitForStream(Stream stream);

// Sets bytes to 0.
Failure ClearOnDevice(Stream stream, void* data, int64_t nbytes);

}  // namespace dafjax

#endif  // DAFJAX_CUDA_KERNELS_H_
