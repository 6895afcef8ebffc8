// Decode attention over pages in the fragment order or of 16 bits, and over 16-bit windows: one launch, lengths read on
// the device, no block waits for another, but for those of its cluster, which run at the same time.
//
// Each warp takes a piece of the line of work (decode_line.cuh). It has a ring of visits in shared memory, filled by
// bulk copies, and a softmax of its own. What warps of a block leave of one segment is merged in the block; what
// blocks leave of one segment is merged by the last of them to arrive (decode_merge.cuh), or by the cluster whose it is
// (decode_cluster.cuh).
//
// Codes are operands of the tensor cores as they stand (fragment_order.h): key scales are multiplied into q, value
// scales into p, mins are products of their own.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_args.h"
#include "cuda/decode_cluster.cuh"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_line.cuh"
#include "cuda/decode_merge.cuh"
#include "cuda/decode_middle.cuh"
#include "cuda/decode_new_rows.cuh"
#include "cuda/decode_output.cuh"
#include "cuda/decode_pages.cuh"
#include "cuda/decode_plan.cuh"
#include "cuda/decode_queries.cuh"
#include "cuda/decode_result.cuh"
#include "cuda/decode_runs.cuh"
#include "cuda/decode_shared.cuh"
#include "cuda/decode_softmax.cuh"
#include "cuda/decode_windows.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/fragment_order.h"

namespace kivi::cuda::fast {

// All of a block's work on the line.
template <class C>
__device__ __forceinline__ void attend_piece(const DecodeArgs& p, SharedStorage<C>& shared) {
    // Neighbouring slices go to warps of one scheduler: where slices are unequal (or empty), the four schedulers still
    // get equal shares.
    // The compiler does not see that all of a warp have the same `worker`, but by a shuffle.
    const int lane = threadIdx.x & 31, worker = __shfl_sync(kAll, threadIdx.x >> 5, 0),
              warp = worker % 4 * (C::kWarps / 4) + worker / 4;
    const int kv_heads = p.kv_heads, batch_rows = p.batch_rows, rows = p.query_rows.by;

    const uint32_t full = shared_address(shared.full[warp]);
    if (lane == 0) {
        for (int i = 0; i < C::kStages; ++i) barrier_init(full + 8 * i);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (lane < 2) shared.deposits[warp + 16 * lane].segment = -1;
    if (C::kWarps < 16 && worker == 0 && (lane & 15) >= C::kWarps) shared.deposits[lane].segment = -1;
    if (threadIdx.x < 16) shared.ones[threadIdx.x] = 0x3C003C00u;
    // Where the cache is known to be settled (launch_order.h), all is planned, and the first visits' bytes are asked
    // for, before the kernels in front have ended. Queries wait for these in any case.
    const auto begin = [] {
        wait_for_earlier_kernels();
        let_next_kernel_start();
    };
    if (!p.ahead) begin();
    if (worker < 2) {
        const int r = 32 * worker + lane;
        const BatchRow row = r < batch_rows ? read_row<C>(p, r) : BatchRow{};
        shared.rows[r] = row;
        place_row<C>(shared, worker, lane, row.weight * kv_heads);
    } else if (p.own || p.in_tail) {
        if (worker == 2) copy_parameters<DecodeCall>(shared.call, p, lane);
        if (worker == 3 && p.keeps) copy_parameters(shared.layer, p.layer, lane);
    }
    __syncthreads();
    // Every warp finds its own place on the line.
    const BlockPiece block = find_piece<C>(shared, p);
    const unsigned slice_begin = block.begin + block.weight * warp / C::kWarps;
    const unsigned slice_end = block.begin + block.weight * (warp + 1) / C::kWarps;
    const bool works = slice_begin < slice_end;
    if (threadIdx.x == 0) shared.block = block, shared.next_item = 0;
    int first_segment = -1;
    Seen seen;
    RawQueries<C> queries;
    if (works) {
        const Slice slice = find_slice<C>(shared, p, slice_begin, slice_end, lane);
        if (lane == 0) shared.slices[warp] = slice;
        first_segment = slice.row < batch_rows ? segment_of(slice.row, slice.head) : 0;
        // While the page table is read, and before the first pages are asked for: behind those of the block's other
        // warps queries would wait for megabytes.
        if (!p.ahead) queries = fetch_queries<C>(p, shared, first_segment, 0, lane);
        plan_visits<C>(shared, p, slice, 0, 32, warp, seen);
        __syncwarp();
    }
    const auto ask = [&](int number) {  // for a visit's bytes, the first or the second
        const Visit v = planned<C>(shared, warp, number);
        if (v.segment >= 0 && elected()) copy_visit<C>(shared, p, v, number, number > 0, warp);
    };
    if (works && p.ahead) ask(0);
    if constexpr (can_keep<C>()) {
        if (p.keeps && worker >= C::kWarps - 2) find_room<C>(shared, C::kWarps - 1 - worker, lane);
    }
    if (p.ahead) {
        begin();
        if (works) queries = fetch_queries<C>(p, shared, first_segment, 0, lane);
    } else if (works) {
        ask(0);
    }
    const bool in_tail = !C::kPublished && p.in_tail && works;
    if (in_tail) copy_new_row<C>(shared, 0, warp);
    if (works) {
        prepare_segment<C>(p, shared, queries, first_segment, warp, lane);
        if (lane == 0) {
            shared.seen[warp] = seen;
            shared.from_start[warp] = shared.slices[warp].first == 0 && !p.clustered;  // clusters merge at the end
            shared.next_run[warp] = slice_begin;
        }
    } else if (lane == 0) {
        shared.plan[warp][0] = {nullptr, -1, kOpens};
    }

    // Rows without tokens: one warp of one block writes their zeros while the first visit's data is on its way.
#pragma unroll 1
    for (int r = blockIdx.x + gridDim.x * worker; r < batch_rows; r += gridDim.x * C::kWarps) {
        const BatchRow& row = shared.rows[r];
        if (row.sequence < 0 || row.total() > 0) continue;
#pragma unroll 1
        for (int head = 0; head < kv_heads; ++head) {
#pragma unroll 1
            for (int i = 0; i < rows; ++i) write_row<C>(p, shared, r, head, i, lane, Row<C>{});
        }
    }
    __syncthreads();
    if (shared.block.weight == 0 && shared.block.segment < 0 && !p.keeps) return;
    // All first visits before anyone's second: warps that get their first one late finish late.
    static_assert(C::kStages == 2, "a second visit");
    if (works) ask(1);
    if (in_tail) copy_new_row<C>(shared, 1, warp);

    HeadState<C> state;
    KeyContext<C> key;
    int segment = -1;
    Visit next = shared.plan[warp][0];
    for (unsigned visit = 0;; ++visit) {
        const int stage = visit % C::kStages, parity = visit / C::kStages % 2;
        const int next_segment = next.segment, info = next.info;
        if (info_opens(info)) {
            int own_lane = lane;
            asm volatile("" : "+r"(own_lane));  // (as in visit_window)
            if (segment >= 0) {  // leave the old segment, or the run
                const bool whole = shared.from_start[warp] && info_last(shared.plan[warp][(visit - 1) % 32].info);
                const bool last = next_segment < 0;
                float* const to = p.invariant ? run_of<C>(p, shared.next_run[warp])
                                  : last      ? reinterpret_cast<float*>(shared.ring[warp])
                                              : spill_of<C>(p, warp, whole);
                deposit<C>(state, to, rows, own_lane);
                if (p.invariant) {
                    __syncwarp();
                    if (own_lane == 0) ++shared.next_run[warp];
                } else if (whole) {
                    __syncwarp();
#pragma unroll 1
                    for (int row = 0; row < rows; ++row) {
                        const float* const part = to + row * C::kPartialRow;
                        const float2 its = exponent_of<C>(part);
                        Part<C> v;
                        v.load(part, own_lane);
                        Row<C> r;
                        const float weight = r.weigh(own_lane == 0 ? its : make_float2(-INFINITY, 0.0f));
                        r.add(__shfl_sync(kAll, weight, 0), v.value);
                        write_row<C>(p, shared, row_of(segment), head_of(segment), row, own_lane, r);
                    }
                    __syncwarp();
                } else if (own_lane == 0) {
                    shared.deposits[warp + (last ? 0 : 16)] = shared.seen[warp];
                }
            }
            if (next_segment < 0) {
                if (segment < 0) deposit_nothing<C>(reinterpret_cast<float*>(shared.ring[warp]), rows, own_lane);
                break;
            }
            if (segment >= 0 && next_segment != segment) {
                prepare_segment<C>(p, shared, fetch_queries<C>(p, shared, next_segment, 0, own_lane), next_segment,
                                   warp, own_lane);
                if (own_lane == 0) {
                    const BatchRow& row = shared.rows[row_of(next_segment)];
                    const Extent<C> e(p, row);
                    const unsigned begin = shared.seen[warp].end;
                    shared.seen[warp] = {next_segment, begin, begin + e.place(e.visits - 1), begin + row.weight};
                    shared.from_start[warp] = true;
                }
            }
            if (next_segment != segment) set_factors<C>(state, shared.units[warp], p.scale_log2, own_lane);
            segment = next_segment;
            clear<C>(state);
            __syncwarp();
        }

        barrier_wait(full + 8 * stage, parity);
        if (C::kPublished && info_kind(info) == kMiddle) {
            if constexpr (C::kPublished) visit_middle<C>(state, shared, p, shared.ring[warp][stage], info, warp, lane);
        } else if (C::kPlain || info_kind(info) != kPage) {
            if constexpr (!C::kPublished) {
                if (info_has_new_row(info)) {
                    take_new_row<C>(shared, shared.ring[warp][stage] + (info_valid(info) - 1) * C::kRowBytes, segment);
                }
            }
            visit_window<C>(state, shared, p, shared.ring[warp][stage], info, warp, lane);
        } else if constexpr (!C::kPlain) {
            visit_page<C>(state, key, shared, p, shared.ring[warp][stage], info, visit > 0 && info_part<C>(info) > 0,
                          warp, lane);
        }
        __syncwarp();  // all lanes have read the slot

        // The plan holds 32 visits; now and then 16 new ones replace those that were visited long ago.
        const unsigned wanted = visit + C::kStages;
        if (wanted % 16 == 0 && wanted >= 32) {
            Seen seen;
            plan_visits<C>(shared, p, shared.slices[warp], wanted, 16, warp, seen);
            __syncwarp();
        }
        next = shared.plan[warp][(visit + 1) % 32];
        const Visit v = planned<C>(shared, warp, wanted);
        if (elected()) {
            if (v.segment >= 0) copy_visit<C>(shared, p, v, stage, true, warp);
        }
        if (!C::kPublished && info_has_new_row(v.info)) copy_new_row<C>(shared, wanted, warp);
    }

    if constexpr (can_keep<C>()) {
        if (p.keeps && (shared.packs.half[0] | shared.packs.half[1]) != 0) pack_rows<C>(shared, warp, lane);
    }
    __syncthreads();
    if constexpr (can_keep<C>()) {
        if (p.keeps && worker == C::kWarps - 1) move_rows_on<C>(shared, lane);
    }
    if (p.invariant) {
        merge_runs<C>(p, shared, worker, lane);
        return;
    }
    const BlockPiece piece = shared.block;
    if (piece.segment >= 0) {
        merge_cluster<C>(p, shared, piece.segment, worker, lane);
        return;
    }
    // Merge inside the block; what is shared with other blocks is left in the workspace. A warp a row.
    const Seen mine = shared.deposits[lane];
    const unsigned mates = __match_any_sync(kAll, mine.segment);  // lanes with deposits of the same segment
    const bool speaks = mine.segment >= 0 && __ffs(mates) - 1 == lane, begins_here = mine.begin >= piece.begin;
    const bool is_shared = mine.last >= piece.begin + piece.weight || !begins_here;
    const unsigned beginning = __ballot_sync(kAll, begins_here);
    const unsigned sharing = __ballot_sync(kAll, speaks && is_shared), own = __ballot_sync(kAll, speaks && !is_shared);
    // Segments that blocks share come first: others wait for them. The number-th one's speaker.
    const auto speaker_of = [&](int number) {
        unsigned mask = number < __popc(sharing) ? sharing : own;
        number -= mask == sharing ? 0 : __popc(sharing);
#pragma unroll 1
        for (; number > 0; --number) mask &= mask - 1;
        return __ffs(mask) - 1;
    };
#pragma unroll 1
    for (int task = worker; task < __popc(sharing | own) * rows; task += C::kWarps) {
        const int number = p.query_rows.quotient(task), row = task - number * rows, speaker = speaker_of(number);
        const int its_segment = __shfl_sync(kAll, mine.segment, speaker);
        const Row<C> r = merge_warps<C>(p, shared, __shfl_sync(kAll, mates, speaker), row, lane);
        if (sharing >> speaker & 1) {
            leave_part<C>(part_of<C>(p, blockIdx.x, beginning >> speaker & 1, row), lane, r);
        } else {
            write_row<C>(p, shared, row_of(its_segment), head_of(its_segment), row, lane, r);
        }
    }

    // The last to arrive merges over blocks. Tickets are trips to the L2: a warp takes those of its rows at once, one a
    // lane. A block shares its first and its last segment at most.
    if (sharing == 0) return;
    const unsigned first = piece.partition.owner(mine.begin), last = piece.partition.owner(mine.last);  // blocks
    const int task = worker + lane * C::kWarps;
    const bool of_last = task >= rows;
    const int row = of_last ? task - rows : task, speaker = of_last ? 31 - __clz(sharing) : __ffs(sharing) - 1;
    const int its_segment = __shfl_sync(kAll, mine.segment, speaker);
    const unsigned its_first = __shfl_sync(kAll, first, speaker), its_last = __shfl_sync(kAll, last, speaker);
    unsigned long long* const ticket = p.tickets + its_first * C::kRows + row;
    bool is_complete = false;
    __syncwarp();  // all lanes have left their shares
    if (task < __popc(sharing) * rows) is_complete = take_tickets(ticket, 1) == its_last - its_first;
    __syncwarp();
#pragma unroll 1
    for (unsigned left = __ballot_sync(kAll, is_complete); left != 0; left &= left - 1) {
        const int taker = __ffs(left) - 1, taken_row = __shfl_sync(kAll, row, taker);
        const int taken_segment = __shfl_sync(kAll, its_segment, taker);
        const unsigned begin = __shfl_sync(kAll, its_first, taker), end = __shfl_sync(kAll, its_last, taker);
        const float* parts = part_of<C>(p, begin, false, taken_row);
        asm volatile("" : "+l"(parts));  // (or every address is worked out from the beginning)
        const Row<C> r = merge_parts<C>(end - begin, lane, [&](unsigned block) {
            return parts + (block == 0 ? 1 : 2 * block) * C::kPartialFloats;
        });
        if (lane == taker) *ticket = kFresh;
        write_row<C>(p, shared, row_of(taken_segment), head_of(taken_segment), taken_row, lane, r);
    }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) decode_kernel(const __grid_constant__ DecodeArgs p) {
#if defined(__CUDA_ARCH__) && KIVI_FRAGMENT_KERNELS
    static_assert(sizeof(SharedStorage<C>) <= 227 * 1024, "shared memory of a block");
    extern __shared__ __align__(128) uint8_t raw_shared[];
    uint32_t base = shared_address(raw_shared);
    asm volatile("" : "+r"(base));  // kept in a register: found anew in every turn of the loop, it takes its time there
    SharedStorage<C>& shared = *static_cast<SharedStorage<C>*>(__cvta_shared_to_generic(base));
    attend_piece<C>(p, shared);
#endif
}

}  // namespace kivi::cuda::fast
