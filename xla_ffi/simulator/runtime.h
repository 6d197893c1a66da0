#ifndef DAFJAX_SIMULATOR_RUNTIME_H_
#define DAFJAX_SIMULATOR_RUNTIME_H_

#include <cstddef>
#include <cstdint>
#include <functional>

#include "simulator/grid.h"

// The part of the CUDA runtime that this project calls, under CUDA's own names.
//
// What is enqueued on a stream is done when somebody waits for it, or before that as a
// seed decides: what the host does when it enqueues, and what the device does later, are
// apart, and of several streams none is bound to the order in which the host went. The
// null stream does everything at once; handlers run there inside of XLA on the CPU.

using cudaError_t = int;
struct CUstream_st;
struct CUevent_st;
struct CUgraph_st;
struct CUgraphNode_st;
struct CUgraphExec_st;
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;
using cudaGraph_t = CUgraph_st*;
using cudaGraphNode_t = CUgraphNode_st*;
using cudaGraphExec_t = CUgraphExec_st*;
using cudaHostFn_t = void (*)(void*);

inline constexpr cudaError_t cudaSuccess = 0;
inline constexpr cudaError_t cudaErrorInvalidValue = 1;
inline constexpr cudaError_t cudaErrorMemoryAllocation = 2;
inline constexpr cudaError_t cudaErrorInvalidResourceHandle = 400;
inline constexpr cudaError_t cudaErrorNotReady = 600;
inline constexpr cudaError_t cudaErrorHostMemoryAlreadyRegistered = 712;
inline constexpr cudaError_t cudaErrorHostMemoryNotRegistered = 713;
inline constexpr cudaError_t cudaErrorLaunchFailure = 719;
inline constexpr cudaError_t cudaErrorNotPermitted = 800;
inline constexpr cudaError_t cudaErrorStreamCaptureUnsupported = 900;

enum cudaMemcpyKind {
  cudaMemcpyDeviceToDevice,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
};
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone,
  cudaStreamCaptureStatusActive,
};
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal };
enum cudaDeviceAttr {
  cudaDevAttrCanMapHostMemory,
  cudaDevAttrHostRegisterSupported,
  cudaDevAttrIntegrated,
};
inline constexpr unsigned cudaHostAllocPortable = 1;
inline constexpr unsigned cudaHostAllocMapped = 2;
inline constexpr unsigned cudaHostRegisterPortable = 1;
inline constexpr unsigned cudaHostRegisterMapped = 2;
inline constexpr unsigned cudaStreamNonBlocking = 1;
inline constexpr unsigned cudaStreamSetCaptureDependencies = 1;
inline constexpr unsigned cudaEventDisableTiming = 2;

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* to, int value, size_t nbytes, cudaStream_t stream);
const char* cudaGetErrorString(cudaError_t error);
// What failed before is told by the call that failed alone.
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
// `function` must not call CUDA: whatever it calls fails.
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data);

// Graphs: what a stream is told while it is captured, in order. They have the signatures
// of CUDA 13; edges have no data here, and a node waits for all before it.
#define CUDART_VERSION 13000
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const void* edges, size_t* num_dependencies);
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream,
                                                cudaGraphNode_t* dependencies,
                                                const void* edges,
                                                size_t num_dependencies, unsigned flags);
cudaError_t cudaGraphAddEmptyNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                  const cudaGraphNode_t* dependencies,
                                  size_t num_dependencies);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* to, cudaGraph_t graph,
                                 unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph);

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end);

// The device's memory: the host crashes that touches it (device_memory.h).
cudaError_t cudaMalloc(void** data, size_t nbytes);
cudaError_t cudaFree(void* data);

// Host memory that the device sees, at the same addresses.
cudaError_t cudaHostAlloc(void** data, size_t nbytes, unsigned flags);
cudaError_t cudaFreeHost(void* data);
cudaError_t cudaHostRegister(void* data, size_t nbytes, unsigned flags);
cudaError_t cudaHostUnregister(void* data);
cudaError_t cudaHostGetDevicePointer(void** on_device, void* data, unsigned flags);

namespace dafjax::simulator {

// The device, and when it does what it is told.
struct Device {
  int ordinal = 0;
  int can_map_host_memory = 1;
  int host_register_supported = 1;
  int integrated = 0;
  // Of 100 chances to do the next thing of some stream, how many it lets pass. Each time
  // that something is enqueued is the first of some; at 100 all waits as long as it can.
  unsigned delay = 100;
  // What events show that are recorded from now on.
  float milliseconds = 0;
  // How many ranges of host memory can be registered at once.
  size_t most_registered = ~size_t{0};
};

// One thread only, while nothing is enqueued.
Device& CurrentDevice();

// Ranges of host memory that are registered.
size_t NumRegistered();

// Puts a launch of a kernel at the end of a stream. Of the null stream it says what went
// wrong, as Run; of others, whoever waits for the stream is told.
const char* Launch(cudaStream_t stream, Index grid, Index block,
                   std::function<void()> kernel);

}  // namespace dafjax::simulator

#endif  // DAFJAX_SIMULATOR_RUNTIME_H_
