// What happens to one sequence in an append or a flush, and how its state moves on.
#pragma once
#include <cuda_runtime.h>

#include "cuda/batch.cuh"

namespace kivi::cuda {

struct Step {
    Span before, after;
    bool possible = false;
};

// From the state before, and how many pages are bound.
__device__ inline Step plan(const WriteArgs& args, const RowArg& row, const Span& before, int32_t bound) {
    const Windows& windows = args.layer.key.windows;
    Step step;
    step.before = before;
    if (args.mode == WriteMode::append) {
        const int64_t length = before.length + row.count;
        step.after = after_append(windows, before, length);
        step.possible = length <= args.layer.max_tokens;
    } else {
        step.after = after_flush(windows, before);
        step.possible = true;
    }
    step.possible = step.possible && blocks_of(windows, step.after) <= bound;
    return step;
}
__device__ inline Step plan(const WriteArgs& args, const RowArg& row) {
    return plan(args, row, args.layer.spans[row.sequence], args.layer.bound[row.sequence]);
}

// One thread of each of a row's blocks calls this when its block has read the state: the last one moves it on, while
// all may still be at work.
__device__ inline void move_on(const Layer& layer, int32_t sequence, const Span& after, unsigned blocks) {
    if (blocks > 1) {
        uint32_t* const arrivals = layer.arrivals + sequence;
        if (atomicAdd(arrivals, 1) + 1 != blocks) return;
        *arrivals = 0;
    }
    layer.spans[sequence] = after;
}

}  // namespace kivi::cuda
