// Whether a layer is settled for a kernel: no kernel in front of it on its stream changes the layer any more when it
// starts, though some may not have ended.
//
// A kernel launched as a dependent (dependent_launch.cuh) that lets the next one start only when all before it have ended
// is called a gate here: decode kernels are. What is enqueued behind a gate on the same stream, whatever stands between
// them, finds all that was enqueued before the gate done and visible from its first instruction on.
//
//   stream   ... change of the layer | gate | attend: settled
//            ... gate | change of the layer | attend: not settled, it waits first
//
// In a captured graph the order is the same at every replay, and what a graph begins with waits for all that the stream
// had before.
#pragma once
#include <cstdint>
#include <mutex>
#include <vector>

#include "cuda/launch.h"

namespace kivi::cuda {

class LaunchOrder {
  public:
    explicit LaunchOrder(size_t layers) : changed_(layers, 0) {}

    // Contents, lengths or page tables of one layer are about to change, or of all.
    void change(int layer) {
        const std::lock_guard<std::mutex> lock(mutex_);
        changed_[layer] = ++number_;
    }
    void change() {
        const std::lock_guard<std::mutex> lock(mutex_);
        changed_.assign(changed_.size(), ++number_);
    }
    // A gate was launched.
    void gate(Stream stream) {
        const std::lock_guard<std::mutex> lock(mutex_);
        // cudaStreamPerThread names another stream in each thread.
        if (reinterpret_cast<uintptr_t>(stream) == 2) return;
        gate_ = ++number_;
        gate_stream_ = stream;
    }
    bool settled(int layer, Stream stream) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        return gate_stream_ == stream && gate_ > changed_[layer];
    }

  private:
    mutable std::mutex mutex_;  // attends may run side by side
    int64_t number_ = 0;        // of the last call that counts
    int64_t gate_ = 0;          // the last gate, and its stream
    Stream gate_stream_ = nullptr;
    std::vector<int64_t> changed_;  // by the last change of each layer
};

}  // namespace kivi::cuda
