#ifndef DAFJAX_CUDA_GRAPH_H_
#define DAFJAX_CUDA_GRAPH_H_

#include <functional>

#include "cuda/kernels.h"

struct CUgraphExec_st;

namespace dafjax {

// Work that is recorded once, and then enqueued as a whole: what starts a kernel in it
// takes less than a launch does, as in programs of which XLA makes graphs.
class Graph {
 public:
  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph();

  // Records what is enqueued on a stream. At most once.
  Failure Record(const std::function<Failure(Stream)>& enqueue);

  // Enqueues what was recorded.
  Failure Launch(Stream stream) const;

 private:
  CUgraphExec_st* graph_ = nullptr;
};

// Adds a node that does nothing if the stream is captured, and nothing otherwise: XLA
// refuses graphs without nodes.
Failure FillEmptyGraph(Stream stream);

}  // namespace dafjax

#endif  // DAFJAX_CUDA_GRAPH_H_
