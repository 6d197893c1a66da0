#include "simulator/runtime.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "simulator/device_memory.h"

namespace {

// Does something; returns null, or what went wrong.
using Work = std::function<const char*()>;

}  // namespace

// The nodes are work, in order; an empty one is work that does nothing.
struct CUgraph_st {
  std::vector<Work> nodes;
};

struct CUgraphExec_st {
  std::vector<Work> nodes;
};

// Invariant: done + pending.size() is how much was ever enqueued.
struct CUstream_st {
  std::deque<Work> pending;
  uint64_t done = 0;
  std::string error;
  cudaGraph_t captured = nullptr;  // null: it is not
};

// The work of a stream up to some place; none before it was recorded.
struct CUevent_st {
  cudaStream_t stream = nullptr;
  uint64_t place = 0;
  float milliseconds = 0;
};

namespace dafjax::simulator {
namespace {

struct Runtime {
  // Recursive: what a stream does may wait for another.
  std::recursive_mutex lock;
  std::vector<cudaStream_t> streams;
  std::map<const char*, size_t> registered;
  std::map<const char*, size_t> allocated;
  uint64_t chances = 0;
};

Runtime& TheRuntime() {
  static Runtime* const runtime = new Runtime;
  return *runtime;
}

thread_local bool in_host_function = false;

// splitmix64 of a counter.
uint64_t NextChance(Runtime* runtime) {
  uint64_t z = CurrentSettings().seed * 0x9e3779b97f4a7c15 + ++runtime->chances;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

void DoNext(cudaStream_t stream) {
  // Taken off first: it may wait for other streams, which may wait for what is before it.
  const Work work = std::move(stream->pending.front());
  stream->pending.pop_front();
  const char* const failure = work();
  ++stream->done;
  if (failure != nullptr && stream->error.empty()) stream->error = failure;
}

void DoUpTo(cudaStream_t stream, uint64_t place) {
  while (stream->done < place) DoNext(stream);
}

void DoSome(Runtime* runtime) {
  while (NextChance(runtime) % 100 >= CurrentDevice().delay) {
    std::vector<cudaStream_t> busy;
    for (const cudaStream_t stream : runtime->streams) {
      if (!stream->pending.empty()) busy.push_back(stream);
    }
    if (busy.empty()) return;
    DoNext(busy[NextChance(runtime) % busy.size()]);
  }
}

const char* Enqueue(cudaStream_t stream, Work work) {
  if (stream == nullptr) return work();
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::recursive_mutex> guard(runtime.lock);
  if (stream->captured != nullptr) {
    stream->captured->nodes.push_back(std::move(work));
    return nullptr;
  }
  stream->pending.push_back(std::move(work));
  DoSome(&runtime);
  return nullptr;
}

// The registered or allocated range that an address is in; null if it is in none.
const char* RangeOf(const std::map<const char*, size_t>& ranges, const char* data) {
  auto next = ranges.upper_bound(data);
  if (next == ranges.begin()) return nullptr;
  --next;
  return data < next->first + next->second ? next->first : nullptr;
}

}  // namespace

Device& CurrentDevice() {
  static Device device;
  return device;
}

size_t NumRegistered() {
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::recursive_mutex> guard(runtime.lock);
  return runtime.registered.size();
}

const char* Launch(cudaStream_t stream, Index grid, Index block,
                   std::function<void()> kernel) {
  if (in_host_function) return "simulator: a host function launches a kernel.";
  return Enqueue(stream, [grid, block, kernel = std::move(kernel)] {
    const DeviceAtWork at_work;
    return Run(grid, block, kernel);
  });
}

}  // namespace dafjax::simulator

using dafjax::simulator::CurrentDevice;
using dafjax::simulator::DeviceAtWork;
using dafjax::simulator::DoUpTo;
using dafjax::simulator::Enqueue;
using dafjax::simulator::in_host_function;
using dafjax::simulator::RangeOf;
using dafjax::simulator::Runtime;
using dafjax::simulator::TheRuntime;

#define DAFJAX_REFUSE_IN_HOST_FUNCTIONS() \
  if (in_host_function) return cudaErrorNotPermitted

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  Enqueue(stream, [=]() -> const char* {
    const DeviceAtWork at_work;
    std::memcpy(to, from, nbytes);
    return nullptr;
  });
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t nbytes, cudaStream_t stream) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  Enqueue(stream, [=]() -> const char* {
    const DeviceAtWork at_work;
    std::memset(to, value, nbytes);
    return nullptr;
  });
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorHostMemoryAlreadyRegistered:
      return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered:
      return "pointer does not correspond to a registered memory region";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorNotPermitted: return "operation not permitted";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    default: return "unrecognized error code";
  }
}

cudaError_t cudaGetDevice(int* device) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  *device = CurrentDevice().ordinal;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  CurrentDevice().ordinal = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrCanMapHostMemory: *value = CurrentDevice().can_map_host_memory; break;
    case cudaDevAttrHostRegisterSupported:
      *value = CurrentDevice().host_register_supported;
      break;
    case cudaDevAttrIntegrated: *value = CurrentDevice().integrated; break;
  }
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::recursive_mutex> guard(runtime.lock);
  *stream = new CUstream_st;
  runtime.streams.push_back(*stream);
  return cudaSuccess;
}

// What is pending is done, as CUDA does it: later, but it is done.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::recursive_mutex> guard(runtime.lock);
  DoUpTo(stream, stream->done + stream->pending.size());
  // Kept: events may still refer to it.
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  if (stream == nullptr) return cudaSuccess;
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::recursive_mutex> guard(runtime.lock);
  DoUpTo(stream, stream->done + stream->pending.size());
  if (stream->error.empty()) return cudaSuccess;
  std::fprintf(stderr, "%s\n", stream->error.c_str());
  return cudaErrorLaunchFailure;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  // As it was recorded last when this is called, not when the stream gets there.
  const CUevent_st now = *event;
  Enqueue(stream, [now]() -> const char* {
    if (now.stream != nullptr) DoUpTo(now.stream, now.place);
    return nullptr;
  });
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  Enqueue(stream, [=]() -> const char* {
    in_host_function = true;
    function(data);
    in_host_function = false;
    return nullptr;
  });
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  if (stream == nullptr) return cudaErrorStreamCaptureUnsupported;
  stream->captured = new CUgraph_st;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  if (stream->captured == nullptr) return cudaErrorInvalidValue;
  *graph = std::exchange(stream->captured, nullptr);
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long*, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies, const void*,
                                     size_t* num_dependencies) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  const bool active = stream != nullptr && stream->captured != nullptr;
  *status = active ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  *graph = active ? stream->captured : nullptr;
  *dependencies = nullptr;
  *num_dependencies = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t*,
                                                const void*, size_t, unsigned) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  return stream->captured != nullptr ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaGraphAddEmptyNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                  const cudaGraphNode_t*, size_t) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  graph->nodes.push_back([]() -> const char* { return nullptr; });
  *node = nullptr;
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = graph->nodes.size();
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* to, cudaGraph_t graph,
                                 unsigned long long) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  *to = new CUgraphExec_st{graph->nodes};
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  if (graph == nullptr) return cudaErrorInvalidValue;
  for (const Work& work : graph->nodes) {
    if (Enqueue(stream, work) != nullptr) return cudaErrorLaunchFailure;
  }
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  *event = new CUevent_st;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  if (stream == nullptr) {
    *event = {nullptr, 0, CurrentDevice().milliseconds};
    return cudaSuccess;
  }
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::recursive_mutex> guard(runtime.lock);
  *event = {stream, stream->done + stream->pending.size(),
            CurrentDevice().milliseconds};
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::recursive_mutex> guard(runtime.lock);
  const bool done = event->stream == nullptr || event->stream->done >= event->place;
  return done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::recursive_mutex> guard(runtime.lock);
  if (event->stream != nullptr) DoUpTo(event->stream, event->place);
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start,
                                 cudaEvent_t end) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  *milliseconds = end->milliseconds - start->milliseconds;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, size_t nbytes) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  *data = dafjax::simulator::AllocateOnDevice(nbytes);
  return *data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

cudaError_t cudaFree(void* data) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  return dafjax::simulator::FreeOnDevice(data) ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaHostAlloc(void** data, size_t nbytes, unsigned) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::recursive_mutex> guard(runtime.lock);
  // Rounded up, as aligned_alloc asks for.
  *data = std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
  if (*data == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*data, 0xab, nbytes);
  runtime.allocated[static_cast<const char*>(*data)] = nbytes;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* data) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::recursive_mutex> guard(runtime.lock);
  if (runtime.allocated.erase(static_cast<const char*>(data)) == 0) {
    return cudaErrorInvalidValue;
  }
  std::free(data);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* data, size_t nbytes, unsigned) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::recursive_mutex> guard(runtime.lock);
  const char* const begin = static_cast<const char*>(data);
  const auto next = runtime.registered.lower_bound(begin);
  const bool meets_next =
      next != runtime.registered.end() && next->first < begin + nbytes;
  if (meets_next || RangeOf(runtime.registered, begin) != nullptr) {
    return cudaErrorHostMemoryAlreadyRegistered;
  }
  if (runtime.registered.size() >= CurrentDevice().most_registered) {
    return cudaErrorMemoryAllocation;
  }
  runtime.registered[begin] = nbytes;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* data) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::recursive_mutex> guard(runtime.lock);
  return runtime.registered.erase(static_cast<const char*>(data)) == 1
             ? cudaSuccess
             : cudaErrorHostMemoryNotRegistered;
}

cudaError_t cudaHostGetDevicePointer(void** on_device, void* data, unsigned) {
  DAFJAX_REFUSE_IN_HOST_FUNCTIONS();
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::recursive_mutex> guard(runtime.lock);
  const char* const place = static_cast<const char*>(data);
  if (RangeOf(runtime.registered, place) == nullptr &&
      RangeOf(runtime.allocated, place) == nullptr) {
    return cudaErrorInvalidValue;
  }
  *on_device = data;
  return cudaSuccess;
}
