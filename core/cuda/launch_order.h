// Whether a layer is settled for a kernel: no kernel in front of it changes the layer any more when it starts, though
// some may not have ended.
//
// A kernel launched as a dependent (dependent_launch.cuh) that lets the next one start only when all before it have
// ended is called a gate here: decode kernels are. What is enqueued behind a gate on the same stream, whatever stands
// between them, finds all that the stream had before the gate done and visible from its first instruction on.
//
//   stream   ... change of the layer | gate | attend: settled
//            ... gate | change of the layer | attend: not settled, it waits first
//
// The order of calls is that of the kernels only within a stream, and within a capture or outside of all: a graph may
// be launched at any time, or never. So gates count for their own stream and capture, and so do changes, but for one:
// what a graph begins with waits for all that was enqueued before its launch, so inside of a capture changes made
// outside do not matter.
//
// A kernel may be both: a step's (decode_new_rows.cuh). It is noted as a gate first, then as a change, so that what
// follows on its own layer waits.
#pragma once
#include <cstdint>
#include <mutex>
#include <vector>

#include "cuda/launch.h"

namespace kivi::cuda {

// Where a call is enqueued.
struct LaunchPlace {
    Stream stream = nullptr;
    uint64_t capture = 0;  // 0: none
    bool known = false;    // the stream is one and the same wherever it is named, and what captures it could be asked

    bool is(const LaunchPlace& other) const {
        return known && other.known && stream == other.stream && capture == other.capture;
    }
};

class LaunchOrder {
  public:
    explicit LaunchOrder(size_t layers) : layers_(layers) {}

    // Contents, lengths or page tables of one layer are about to change, or of all.
    void change(int layer, const LaunchPlace& at) {
        const std::lock_guard<std::mutex> lock(mutex_);
        change(layers_[layer], ++number_, at);
    }
    void change(const LaunchPlace& at) {
        const std::lock_guard<std::mutex> lock(mutex_);
        ++number_;
        for (Layer& layer : layers_) change(layer, number_, at);
    }
    // A gate was launched.
    void gate(const LaunchPlace& at) {
        const std::lock_guard<std::mutex> lock(mutex_);
        gate_ = ++number_;
        gate_at_ = at;
    }
    bool settled(int layer, const LaunchPlace& at) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        const Layer& last = layers_[layer];
        if (last.lost || gate_ < last.change || !gate_at_.is(at)) return false;
        if (at.capture == 0) return last.capture == 0 && last.at.is(at);  // else a replay may be what changed it
        return last.capture != at.capture || last.at.is(at);
    }

  private:
    struct Layer {
        int64_t change = 0;  // number of the last one
        LaunchPlace at;      // and where
        uint64_t capture = 0;  // that has captured one last
        bool lost = false;     // nobody knows where one was enqueued
    };
    static void change(Layer& layer, int64_t number, const LaunchPlace& at) {
        layer.change = number;
        layer.at = at;
        if (at.capture != 0) layer.capture = at.capture;
        if (!at.known) layer.lost = true;
    }

    mutable std::mutex mutex_;  // attends may run side by side
    int64_t number_ = 0;        // of the last call that counts
    int64_t gate_ = 0;          // the last gate, and where
    LaunchPlace gate_at_;
    std::vector<Layer> layers_;
};

}  // namespace kivi::cuda
