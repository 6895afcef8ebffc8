// Runs: how segments are cut where results must not depend on the batch, on how many blocks there are, on page placement or
// on capacity (DecodeArgs::invariant). Every segment is cut from its first visit on, whatever stands beside it:
//
//   segment   | run 0: kRunVisits visits | run 1 | ... | run 15 | run 16 | ... | the last may be shorter |
//   groups    |------------------ kGroupRuns --------------------|------------------ ...
//
// A warp leaves each of its runs in the workspace, at the run's place on the line. The last of the blocks that share a group
// adds its runs in order and leaves the sum where its first run was; the last of those who do so adds the groups in order.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_args.h"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_merge.cuh"
#include "cuda/decode_output.cuh"
#include "cuda/decode_plan.cuh"
#include "cuda/decode_shared.cuh"

namespace kivi::cuda::fast {

constexpr unsigned kGroupRuns = 16;

template <class C>
__device__ __forceinline__ float* run_of(const DecodeArgs& p, unsigned run, int row = 0) {
    return p.partials + size_t(run) * C::kPartialFloats + row * C::kPartialRow;
}

// Counts `more` of `all` parts of a row's sum: of the runs of the group that begins at run `first`, or of the groups of the
// segment that begins there. Whether they were the last, so that the warp is to add all.
template <class C>
__device__ __forceinline__ bool completes(const DecodeArgs& p, unsigned first, bool of_groups, int row, unsigned more,
                                          unsigned all, int lane) {
    unsigned long long* const ticket = p.tickets + (size_t(first) * 2 + of_groups) * C::kRows + row;
    bool last = false;
    __syncwarp();
    if (lane == 0) {
        last = take_tickets(ticket, more) + more == all;
        if (last) *ticket = kFresh;
    }
    __syncwarp();  // what the ticket makes visible is so for all lanes
    return __shfl_sync(kAll, last, 0);
}

// What this block has left, by all of its warps: a row of a group each. A function of its own: it stays out of the way of
// calls that need it not.
template <class C>
__device__ __noinline__ void merge_runs(const DecodeArgs& p, const SharedStorage<C>& shared, int worker, int lane) {
    const unsigned kv_heads = p.kv_heads, batch_rows = p.batch_rows, end = shared.block.begin + shared.block.weight;
    const int rows = p.query_rows.by;
    const Slice start = find_slice<C>(shared, p, shared.block.begin, end, lane);
    unsigned r = start.row, head = start.head;
    unsigned segment = start.row_begin + head * shared.rows[r].weight;  // its first run
    int task = 0;
#pragma unroll 1
    for (unsigned begin = shared.block.begin; begin < end;) {
        const unsigned runs = shared.rows[r].weight;
        const unsigned group = segment + (begin - segment) / kGroupRuns * kGroupRuns;  // its first run
        const unsigned group_end = min(group + kGroupRuns, segment + runs), own_end = min(end, group_end);
#pragma unroll 1
        for (int row = 0; row < rows; ++row) {
            if (task++ % C::kWarps != worker) continue;
            // The runs of the group, then the groups of the segment.
            unsigned first = group, stride = 1, count = group_end - group, more = own_end - begin;
#pragma unroll 1
            while (completes<C>(p, first, stride > 1, row, more, count, lane)) {
                const Row<C> sum = merge_parts<C>(
                    count - 1, lane, [&](unsigned i) { return run_of<C>(p, first + i * stride, row); });
                if (stride > 1 || runs <= kGroupRuns) {
                    write_row<C>(p, shared, r, head, row, lane, sum);
                    break;
                }
                leave_part<C>(run_of<C>(p, group, row), lane, sum);
                first = segment, stride = kGroupRuns, count = (runs + kGroupRuns - 1) / kGroupRuns, more = 1;
            }
        }
        begin = own_end;
        if (begin < segment + runs) continue;
        segment = begin;
        if (++head < kv_heads) continue;
        head = 0;
        do {
            ++r;
        } while (r < batch_rows && shared.rows[r].weight == 0);
    }
}

}  // namespace kivi::cuda::fast
