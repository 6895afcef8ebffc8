// Decode attention over pages in the fragment order and 16-bit windows: one launch, lengths read on the device, no
// block waits for another.
//
// Each warp takes a piece of the line of work (decode_line.cuh). It has a ring of visits in shared memory, filled by
// bulk copies, and a softmax of its own. What warps of a block leave of one segment is merged in the block; what
// blocks leave of one segment is merged by the last of them to arrive (decode_merge.cuh).
//
// Codes are operands of the tensor cores as they stand (fragment_order.h): key scales are multiplied into q, value
// scales into p, mins are products of their own.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_args.h"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_line.cuh"
#include "cuda/decode_merge.cuh"
#include "cuda/decode_pages.cuh"
#include "cuda/decode_queries.cuh"
#include "cuda/decode_result.cuh"
#include "cuda/decode_shared.cuh"
#include "cuda/decode_softmax.cuh"
#include "cuda/decode_windows.cuh"
#include "cuda/fragment_order.h"

namespace kivi::cuda::fast {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) decode_kernel(const __grid_constant__ DecodeArgs p) {
#if defined(__CUDA_ARCH__) && KIVI_FRAGMENT_KERNELS
    extern __shared__ __align__(128) uint8_t raw_shared[];
    SharedStorage<C>& shared = *reinterpret_cast<SharedStorage<C>*>(raw_shared);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int kv_heads = p.kv_heads, batch_rows = p.batch_rows;

    // Every warp finds the weight of the line and its own place on it; lane i looks at `chunk` batch rows.
    const auto weight_of = [&](int r) {
        const Extent<C> e(lengths_of(p, r));
        return e.place(e.visits) * kv_heads;
    };
    const int chunk = (batch_rows + 31) / 32;
    unsigned upto = 0;
    for (int i = 0, r = lane * chunk; i < chunk && r < batch_rows; ++i, ++r) upto += weight_of(r);

    const uint32_t full = shared_address(shared.full[warp]);
    if (lane == 0) {
        for (int i = 0; i < C::kStages; ++i) barrier_init(full + 8 * i);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (lane < 2) shared.deposits[warp + 16 * lane].segment = -1;
    if (C::kWarps < 16 && warp == 0 && (lane & 15) >= C::kWarps) shared.deposits[lane].segment = -1;
    if (threadIdx.x < 16) shared.ones[threadIdx.x] = 0x3C003C00u;

    const unsigned own = upto;
    for (int d = 1; d < 32 && d < batch_rows; d *= 2) {
        const unsigned below = __shfl_up_sync(kAll, upto, d);
        if (lane >= d) upto += below;
    }
    const unsigned total = __shfl_sync(kAll, upto, min(31, batch_rows - 1));
    const unsigned blocks = blocks_for<C>(total, batch_rows * kv_heads, gridDim.x);
    const Partition partition(total, max(blocks, 1u));
    const unsigned block_begin = partition.begin(blockIdx.x);
    const unsigned block_weight =
        blockIdx.x < blocks ? partition.quotient + (blockIdx.x < partition.remainder) : 0;
    // Warps 0, 4, 8 share a scheduler: they take neighbouring slices, so that where slices are unequal (or empty) the
    // four schedulers still get equal shares.
    const unsigned order = warp % 4 * (C::kWarps / 4) + warp / 4;
    const unsigned slice_begin = block_begin + block_weight * order / C::kWarps;
    Slice slice;
    slice.end = block_begin + block_weight * (order + 1) / C::kWarps;

    // Plans visits `from` .. `from` + `count` - 1, one a lane: which segment, which part, where it lies in memory.
    // `l`: lengths of the slice's first row. `reach`: of the lane's segment.
    const auto plan = [&](const Slice& s, Lengths l, unsigned from, int count, Reach* reach) {
        int lane = threadIdx.x & 31;
        asm volatile("" : "+r"(lane));  // (as in visit_window)
        unsigned i = s.first + from + lane, head = s.head, r = s.row, begin = s.row_begin;
        Extent<C> e(l);
        while (i >= e.visits) {  // not in this head
            if (e.visits) {
                // In long segments one step forward is enough; a division costs 150 clocks.
                const unsigned heads = i < 2 * e.visits ? 1 : divide(i, e.visits);
                i -= heads * e.visits;
                head += heads;
                if (head < unsigned(kv_heads)) break;
                i += (head - kv_heads) * e.visits;
                head = 0;
                begin += e.place(e.visits) * kv_heads;
            }
            if (++r >= unsigned(batch_rows)) break;
            l = lengths_of(p, r);
            e = Extent<C>(l);
        }
        begin += head * e.place(e.visits);
        Visit v;
        v.source = nullptr;
        v.segment = -1;
        v.info = 0;
        if (lane < count && r < unsigned(batch_rows) && begin + e.place(i) < s.end) {
            v.segment = r * kv_heads + head;
            const int sequence = sequence_of(p, r);
            const int flags = (i == 0) << 20 | (i == e.visits - 1) << 21;
            if (i < e.windows) {
                const bool tail = i >= e.sinks;
                const int token = (i - (tail ? e.sinks : 0)) * C::kWindowTokens;  // in the window
                const int valid = min(C::kWindowTokens, (tail ? l.tail : l.sink) - token);
                const int left = min(255, (tail ? l.tail : l.total()) - token);
                const int capacity = tail ? p.tail_rows : p.sink;
                const int place = tail ? (l.packed + token) % capacity : token;
                const int straight = min(valid, capacity - place);
                v.source = (tail ? p.tail_keys : p.sink_keys) +
                           ((int64_t{sequence} * kv_heads + head) * capacity + place) * C::kRowBytes;
                v.info = valid | left << 8 | (tail ? kTail : kSink) << 16 | straight << 22 | flags;
            } else {
                const int token = (i - e.windows) * C::kVisitTokens;
                const int page = p.table[int64_t{sequence} * p.table_stride + token / kPageTokens];
                v.source = p.pages + (int64_t{page} * kv_heads + head) * p.page_bytes;
                v.info = min(C::kVisitTokens, l.packed - token) | min(255, l.packed + l.tail - token) << 8 | kPage << 16 |
                         token % kPageTokens / kBlockTokens << 18 | flags;
            }
        }
        if (reach) *reach = Reach(begin, e);
        if (lane < count) shared.plan[warp][(from + lane) % 32] = v;
        return v;
    };
    // By one lane. A visit that follows one to the same key group does not need its parameters again.
    const auto fetch = [&](const Visit& v, int stage, bool follows) {
        const uint32_t to = shared_address(shared.ring[warp][stage]), bar = full + 8 * stage;
        if (info_kind(v.info) != kPage) {
            const bool tail = info_kind(v.info) == kTail;
            const uint8_t* const values =
                (tail ? p.tail_values : p.sink_values) + (v.source - (tail ? p.tail_keys : p.sink_keys));
            const uint32_t straight = info_straight(v.info) * C::kRowBytes;
            const uint32_t rest = info_valid(v.info) * C::kRowBytes - straight;
            barrier_expect(bar, 2 * (straight + rest));
            bulk_copy(to, v.source, straight, bar);
            bulk_copy(to + C::kWindowHalf, values, straight, bar);
            if (rest > 0) {  // the ring goes on at its beginning
                const int64_t back = int64_t{p.tail_rows} * C::kRowBytes - straight;
                bulk_copy(to + straight, v.source - back, rest, bar);
                bulk_copy(to + C::kWindowHalf + straight, values - back, rest, bar);
            }
            return;
        }
        const int block = info_block(v.info), part = info_part<C>(v.info);
        const uint8_t* const group = v.source + block / C::kGroupBlocks * C::kGroupBytes;
        const bool skip = part > 0 && follows;
        barrier_expect(bar, skip ? C::kVisitBytes - C::kKeyParams : C::kVisitBytes);
        if (part == 0) {
            bulk_copy(to, group, C::kKeyBytes, bar);
        } else {
            if (!skip) bulk_copy(to, group, C::kKeyParams, bar);
            bulk_copy(to + C::kKeyParams, group + C::kKeyParams + part * C::kVisitBlocks * C::kKeyCodes,
                      C::kKeyBytes - C::kKeyParams, bar);
        }
        bulk_copy(to + C::kKeyBytes, v.source + p.value_offset + block * C::kValueBlock, C::kValueBytes, bar);
    };

    const auto prepare = [&](const RawQueries<C>& queries) {
        return prepare_queries<C>(queries, p.rotated_keys, shared.queries[warp], lane);
    };
    // What the warp will see of a segment; by one lane.
    const auto note = [&](int segment, const Reach& reach, int info) {
        shared.from_start[warp] = info_first(info);
        shared.seen[warp] = {segment, reach.begin, reach.last, partition.owner(reach.begin)};
        shared.next_begin[warp] = reach.end;
    };
    float unit = 0;
    unsigned long long ticket = kFresh;
    unsigned ticket_at = 0;
    if (slice_begin < slice.end) {
        const int owner = __ffs(__ballot_sync(kAll, slice_begin >= upto - own && slice_begin < upto)) - 1;
        slice.row = owner * chunk;
        slice.row_begin = __shfl_sync(kAll, upto - own, owner);
        Lengths l;
        for (;; ++slice.row) {  // (lane `owner` knows only where its first row begins)
            l = lengths_of(p, slice.row);
            const Extent<C> e(l);
            const unsigned weight = e.place(e.visits), rest = slice_begin - slice.row_begin;
            if (rest < weight * kv_heads) {
                slice.head = divide(rest, weight);
                slice.first = e.visit_at(rest - slice.head * weight);
                if (slice.first == e.visits) {  // the slice begins inside the head's last visit, which is not its own
                    slice.first = 0;
                    if (++slice.head == unsigned(kv_heads)) {
                        slice.head = 0;
                        slice.row_begin += weight * kv_heads;
                        ++slice.row;
                        l = slice.row < unsigned(batch_rows) ? lengths_of(p, slice.row) : Lengths{0, 0, 0};
                    }
                }
                break;
            }
            slice.row_begin += weight * kv_heads;
        }
        // The first queries before the first pages: behind those of the block's other warps they would wait for
        // megabytes. (Rows without tokens may lie between: then these are not the first queries, see below.)
        const int expected = slice.row < unsigned(batch_rows) ? slice.row * kv_heads + slice.head : 0;
        RawQueries<C> queries = fetch_queries<C>(p, expected, lane);
        if (lane == 0) shared.slices[warp] = slice;
        Reach reach;
        const Visit v = plan(slice, l, 0, 32, &reach);
        const int first_segment = __shfl_sync(kAll, v.segment, 0);
        if (first_segment >= 0 && first_segment != expected) queries = fetch_queries<C>(p, first_segment, lane);
        unit = prepare(queries);
        if (lane == 0 && first_segment >= 0) {
            fetch(v, 0, false);
            note(first_segment, reach, v.info);
            ticket_at = shared.seen[warp].block;
            ticket = look_at_ticket(p, ticket_at);
        }
    } else if (lane == 0) {
        shared.plan[warp][0].segment = -1;
    }
    if (threadIdx.x == 0) shared.block = {partition, block_begin, block_weight};

    // Rows without tokens: one warp of one block writes their zeros while the first visit's data is on its way.
    for (int r = blockIdx.x + gridDim.x * warp; r < batch_rows; r += gridDim.x * C::kWarps) {
        if (sequence_of(p, r) < 0 || lengths_of(p, r).total() > 0) continue;
        for (int i = 0; i < kv_heads * p.query_rows; ++i) {
            write_row<C>(p, r * kv_heads + divide(i, p.query_rows), i % p.query_rows, lane, Row{});
        }
    }
    __syncthreads();  // shared.ones, shared.block
    // All warps' first visits before anyone's second.
    if (slice_begin < slice.end && lane > 0 && lane < C::kStages) {
        const Visit& v = shared.plan[warp][lane];
        if (v.segment >= 0) fetch(v, lane, true);
    }
    if (block_weight == 0) return;
    make_ticket(p, ticket_at, ticket);

    HeadState<C> state;
    KeyContext<C> key;
    int segment = -1;
    const int rows = p.query_rows;
    for (unsigned visit = 0;; ++visit) {
        const int stage = visit % C::kStages, parity = visit / C::kStages % 2;
        const int next_segment = shared.plan[warp][visit % 32].segment, info = shared.plan[warp][visit % 32].info;
        if (next_segment != segment || next_segment < 0) {
            if (segment >= 0) {  // leave the old segment
                if (shared.from_start[warp] && info_last(shared.plan[warp][(visit - 1) % 32].info)) {
                    write_output<C>(state, p, segment, lane);
                } else {
                    const bool last = next_segment < 0;
                    deposit<C>(state,
                               last ? reinterpret_cast<float*>(shared.ring[warp])
                                    : p.spills + (size_t(blockIdx.x) * C::kWarps + warp) * C::kPartialFloats,
                               rows, lane);
                    if (lane == 0) shared.deposits[warp + (last ? 0 : 16)] = shared.seen[warp];
                }
            }
            if (next_segment < 0) break;
            if (segment >= 0) {
                unit = prepare(fetch_queries<C>(p, next_segment, lane));
                if (lane == 0) {
                    const Extent<C> e(lengths_of(p, divide(next_segment, kv_heads)));
                    note(next_segment, Reach(shared.next_begin[warp], e), info);
                    const unsigned at = shared.seen[warp].block;
                    make_ticket(p, at, look_at_ticket(p, at));
                }
            }
            segment = next_segment;
            start_segment<C>(state, unit, p.scale_log2, lane);
            __syncwarp();
        }

        barrier_wait(full + 8 * stage, parity);
        if (info_kind(info) != kPage) {
            visit_window<C>(state, shared, p, shared.ring[warp][stage], info, warp, lane);
        } else {
            visit_page<C>(state, key, shared, p, shared.ring[warp][stage], info, visit > 0 && info_part<C>(info) > 0,
                          warp, lane);
        }
        __syncwarp();  // all lanes have read the slot

        // The plan holds 32 visits; now and then 16 new ones replace those that were visited long ago.
        const unsigned wanted = visit + C::kStages;
        if (wanted % 16 == 0 && wanted >= 32) {
            plan(shared.slices[warp], lengths_of(p, shared.slices[warp].row), wanted, 16, nullptr);
            __syncwarp();
        }
        if (lane == 0) {
            const Visit& v = shared.plan[warp][wanted % 32];
            if (v.segment >= 0) fetch(v, stage, true);
        }
    }

    // Merge inside the block; what is shared with other blocks is left in the workspace.
    __syncthreads();
    const BlockPiece piece = shared.block;
    const Seen mine = shared.deposits[lane];
    const unsigned mates = __match_any_sync(kAll, mine.segment);  // lanes with deposits of the same segment
    const bool speaks = mine.segment >= 0 && __ffs(mates) - 1 == lane;
    const bool is_shared = mine.last >= piece.begin + piece.weight || mine.begin < piece.begin;
    const unsigned speakers = __ballot_sync(kAll, speaks);
    const unsigned sharing = __ballot_sync(kAll, speaks && is_shared);
    // The number-th speaker of a mask.
    const auto speaker_of = [](unsigned mask, int number) {
        for (; number > 0; --number) mask &= mask - 1;
        return __ffs(mask) - 1;
    };
#pragma unroll 1
    for (int task = warp; task < __popc(speakers) * rows; task += C::kWarps) {
        const int number = divide(task, rows), row = task - number * rows, speaker = speaker_of(speakers, number);
        const Row r = merge_warps<C>(p, shared, __shfl_sync(kAll, mates, speaker), row, lane);
        if ((sharing >> speaker & 1) == 0) {
            write_row<C>(p, __shfl_sync(kAll, mine.segment, speaker), row, lane, r);
            continue;
        }
        const bool begins_here = __shfl_sync(kAll, mine.block, speaker) == blockIdx.x;
        float* const to = p.partials + place_of(blockIdx.x, begins_here) * C::kPartialFloats + row * C::kPartialRow;
        if (lane < C::kDim / 4) *reinterpret_cast<float4*>(to + lane_channel<C>(lane)) = r.value;
        if (lane == 0) *reinterpret_cast<float2*>(to + C::kPartialExponent) = make_float2(r.reference, r.sum);
    }
    if (sharing == 0) return;

    // The last to arrive merges over blocks. A warp for each of the (one or two) segments takes its ticket.
    if (threadIdx.x == 0) shared.complete = 0;
    __syncthreads();
    if (warp < __popc(sharing)) {
        const int speaker = speaker_of(sharing, warp);
        const unsigned first = __shfl_sync(kAll, mine.block, speaker);
        const unsigned last = piece.partition.owner(__shfl_sync(kAll, mine.last, speaker));
        if (lane == 0 && take_ticket(p, first) == last - first) atomicOr(&shared.complete, 1u << speaker);
    }
    __syncthreads();
    const unsigned complete = shared.complete;
#pragma unroll 1
    for (int task = warp; task < __popc(complete) * rows; task += C::kWarps) {
        const int number = divide(task, rows), row = task - number * rows, speaker = speaker_of(complete, number);
        const unsigned first = __shfl_sync(kAll, mine.block, speaker);
        const unsigned last = piece.partition.owner(__shfl_sync(kAll, mine.last, speaker));
        const Row r = merge_blocks<C>(p, first, last, row, lane);
        write_row<C>(p, __shfl_sync(kAll, mine.segment, speaker), row, lane, r);
        if (row == 0 && lane == 0) p.tickets[first].word = kFresh;
    }
#endif
}

}  // namespace kivi::cuda::fast
