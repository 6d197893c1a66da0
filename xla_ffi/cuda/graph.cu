#include "cuda/graph.h"

#include <cstddef>
#include <functional>

#include "cuda/device.h"
#include "cuda/kernels.h"

namespace dafjax {
namespace {

// What a stream is captured into, and what of it the next node has to wait for.
struct Capture {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
  const cudaGraphNode_t* dependencies = nullptr;
  size_t num_dependencies = 0;
};

// CUDA 13 has put data of edges into the two functions, which are all zeros here.
#if CUDART_VERSION >= 13000

cudaError_t FindCapture(Stream stream, Capture* capture) {
  return cudaStreamGetCaptureInfo(stream, &capture->status, nullptr, &capture->graph,
                                  &capture->dependencies, nullptr,
                                  &capture->num_dependencies);
}

cudaError_t GoOnBehind(Stream stream, cudaGraphNode_t* node) {
  return cudaStreamUpdateCaptureDependencies(stream, node, nullptr, 1,
                                             cudaStreamSetCaptureDependencies);
}

#else

cudaError_t FindCapture(Stream stream, Capture* capture) {
  return cudaStreamGetCaptureInfo_v2(stream, &capture->status, nullptr, &capture->graph,
                                     &capture->dependencies, &capture->num_dependencies);
}

cudaError_t GoOnBehind(Stream stream, cudaGraphNode_t* node) {
  return cudaStreamUpdateCaptureDependencies(stream, node, 1,
                                             cudaStreamSetCaptureDependencies);
}

#endif

// Records on a stream of its own, and makes of that what can be launched.
Failure RecordOn(Stream stream, const std::function<Failure(Stream)>& enqueue,
                 cudaGraphExec_t* to) {
  if (const Failure failure = WhatFailed(
          cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal))) {
    return failure;
  }
  Failure failure = enqueue(stream);
  cudaGraph_t graph = nullptr;
  const Failure of_capture = WhatFailed(cudaStreamEndCapture(stream, &graph));
  if (of_capture != nullptr) return failure != nullptr ? failure : of_capture;
  if (failure == nullptr) failure = WhatFailed(cudaGraphInstantiate(to, graph, 0));
  const Failure of_end = WhatFailed(cudaGraphDestroy(graph));
  return failure != nullptr ? failure : of_end;
}

}  // namespace

Graph::~Graph() {
  if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
}

Failure Graph::Record(const std::function<Failure(Stream)>& enqueue) {
  cudaStream_t stream = nullptr;
  if (const Failure failure =
          WhatFailed(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking))) {
    return failure;
  }
  const Failure failure = RecordOn(stream, enqueue, &graph_);
  const Failure of_end = WhatFailed(cudaStreamDestroy(stream));
  return failure != nullptr ? failure : of_end;
}

Failure Graph::Launch(Stream stream) const {
  return WhatFailed(cudaGraphLaunch(graph_, stream));
}

Failure FillEmptyGraph(Stream stream) {
  Capture capture;
  if (const Failure failure = WhatFailed(FindCapture(stream, &capture))) return failure;
  if (capture.status == cudaStreamCaptureStatusNone) return nullptr;
  cudaGraphNode_t node = nullptr;
  if (const Failure failure =
          WhatFailed(cudaGraphAddEmptyNode(&node, capture.graph, capture.dependencies,
                                           capture.num_dependencies))) {
    return failure;
  }
  return WhatFailed(GoOnBehind(stream, &node));
}

}  // namespace dafjax
