// A warp's plan: which visits its slice of the line holds, where they lie in memory, and how they come into its ring.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_args.h"
#include "cuda/decode_cluster.cuh"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_line.cuh"
#include "cuda/decode_shared.cuh"
#include "cuda/step_rows.cuh"

namespace kivi::cuda::fast {

static_assert(kRowsAtOnce == 64, "a warp for each half of the rows");

// Finds the place of row r = 32 half + lane on the line; by one warp.
template <class C>
__device__ __forceinline__ void place_row(SharedStorage<C>& shared, int half, int lane, unsigned weight) {
    unsigned end = weight;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const unsigned before = __shfl_up_sync(kAll, end, d);
        if (lane >= d) end += before;
    }
    shared.row_begin[32 * half + lane] = end - weight;
    if (lane == 31) shared.half_weight[half] = end;
}

// Which piece of the line is this block's.
template <class C>
__device__ __forceinline__ BlockPiece find_piece(const SharedStorage<C>& shared, const DecodeArgs& p) {
    if (p.clustered) {
        const unsigned kv_heads = p.kv_heads, cluster = blockIdx.x / kClusterBlocks, rank = cluster_rank();
        const unsigned row = divide(cluster, kv_heads), head = cluster - row * kv_heads;
        const unsigned weight = shared.rows[row].weight;
        if (weight == 0) return {{}, 0, 0, -1};
        const unsigned from = weight * rank / kClusterBlocks, to = weight * (rank + 1) / kClusterBlocks;
        const unsigned begin = shared.row_begin[row] + (row < 32 ? 0 : shared.half_weight[0]) + head * weight;
        return {{}, begin + from, to - from, segment_of(row, head)};
    }
    const unsigned total = shared.half_weight[0] + shared.half_weight[1];
    const Partition partition = partition_of<C>(p, total);
    const unsigned begin = min(partition.begin(blockIdx.x), total), end = min(partition.begin(blockIdx.x + 1), total);
    return {partition, begin, end - begin, -1};
}

// The slice from `begin` to `end`, begin inside the line. Its row is the number of rows if no visit begins there.
template <class C>
__device__ __forceinline__ Slice find_slice(const SharedStorage<C>& shared, const DecodeArgs& p, unsigned begin,
                                            unsigned end, int lane) {
    const unsigned kv_heads = p.kv_heads, batch_rows = p.batch_rows, half = shared.half_weight[0];
    // The last row that begins at or before it: those without tokens come before.
    const unsigned row = __popc(__ballot_sync(kAll, shared.row_begin[lane] <= begin)) +
                         __popc(__ballot_sync(kAll, half + shared.row_begin[32 + lane] <= begin)) - 1;
    Slice slice{end, row, shared.row_begin[row] + (row < 32 ? 0 : half), 0, 0};
    const unsigned rest = begin - slice.row_begin, weight = shared.rows[row].weight;
    const Extent<C> e(p, shared.rows[row]);
    slice.head = divide(rest, weight);
    slice.first = e.visit_at(rest - slice.head * weight);
    if (slice.first == e.visits) {  // begin lies inside the head's last visit: the first is the next head's
        slice.first = 0;
        if (++slice.head == kv_heads) {
            slice.head = 0;
            slice.row_begin += weight * kv_heads;
#pragma unroll 1
            do {
                ++slice.row;
            } while (slice.row < batch_rows && shared.rows[slice.row].weight == 0);
        }
    }
    return slice;
}

// Plans visits `from` .. `from` + `count` - 1 of a slice, one a lane: which segment, which part, where it lies in
// memory. `seen`: the lane's segment.
template <class C>
__device__ __forceinline__ void plan_visits(SharedStorage<C>& shared, const DecodeArgs& p, const Slice& s,
                                             unsigned from, int count, int warp, Seen& seen) {
    int lane = threadIdx.x & 31;
    asm volatile("" : "+r"(lane));  // (as in visit_window)
    const unsigned kv_heads = p.kv_heads, batch_rows = p.batch_rows;
    unsigned i = s.first + from + lane, head = s.head, r = s.row, begin = s.row_begin;
    BatchRow row = shared.rows[min(r, batch_rows - 1)];
    Extent<C> e(p, row);
#pragma unroll 1
    while (i >= e.visits) {  // not in this head
        if (begin + (head + 1) * row.weight >= s.end) {  // nor in the slice
            r = batch_rows;
            break;
        }
        if (e.visits) {
            // In long segments one step forward is enough.
            const unsigned heads = i < 2 * e.visits ? 1 : divide(i, e.visits);
            i -= heads * e.visits;
            head += heads;
            if (head < kv_heads) break;
            i += (head - kv_heads) * e.visits;
            head = 0;
            begin += row.weight * kv_heads;
        }
        if (++r >= batch_rows) break;
        row = shared.rows[r];
        e = Extent<C>(p, row);
    }
    begin += head * row.weight;
    const bool is = lane < count && r < batch_rows && i < e.visits && begin + e.place(i) < s.end;
    const int in_pages = (static_cast<int>(i - e.windows) + row.skip) * C::kVisitTokens;
    int page = 0;  // in the pool
    if (is && (i >= e.windows || (C::kPublished && i < e.sinks))) {
        const int token = i >= e.windows ? in_pages : middle_begin<C>(row, i);
        page = load_fresh(p.table + int64_t{row.sequence} * p.table_stride + token / kPageTokens);
    }
    Visit v{nullptr, -1, kOpens};
    if (is) {
        v.segment = segment_of(r, head);
        const bool opens = i == 0 || from + lane == 0 || (p.invariant && i % C::kRunVisits == 0);
        const int flags = (opens ? kOpens : 0) | (i == e.visits - 1) << 21;
        // From a position on, as info_cut tells it.
        const auto cut = [&](int position, int most) {
            if (p.window_left < 0) return 0;
            return min(max(window_begin(p, row) + p.tokens - 1 - position, 0), most);
        };
        if (C::kPublished && i < e.windows) {
            if constexpr (C::kPublished) {
                const unsigned value_rows = p.tail_rows + kMoreValueRows;
                if (i < e.sinks) {
                    const int begin = middle_begin<C>(row, i), hidden = max(row.packed - begin, 0);
                    v.source = Places(page, (begin + hidden) % value_rows).source();
                    v.info = begin % kBlockTokens / C::kWindowTokens | min(255, row.total() - begin) << 8 |
                             kMiddle << 16 | begin % kPageTokens / kBlockTokens << 18 | hidden << 22 |
                             cut(begin, 31) << 27 | flags;
                } else {
                    const int token = (i - e.sinks) * C::kWindowTokens;
                    const unsigned position = row.packed + row.sink + token;
                    v.source = Places(position % p.tail_rows, position % value_rows).source();
                    v.info = min(C::kWindowTokens, row.tail - token) | min(255, row.tail - token) << 8 | kTail << 16 |
                             cut(position, 31) << 27 | flags;
                }
            }
        } else if (i < e.windows) {
            const bool tail = i >= e.sinks;
            const int token = (i - (tail ? e.sinks : 0)) * C::kWindowTokens;  // in the window
            const int valid = min(C::kWindowTokens, (tail ? row.tail : row.sink) - token);
            const int left = min(255, (tail ? row.tail : row.total()) - token);
            const unsigned capacity = tail ? p.tail_rows : p.sink;
            const unsigned place = tail ? (row.packed + token) % capacity : token;
            const bool has_new_row = p.in_tail && tail && token + valid == row.tail;
            const int straight = min(valid - (has_new_row ? 1 : 0), static_cast<int>(capacity - place));
            v.source = (tail ? p.tail_keys : p.sink_keys) +
                       ((int64_t{row.sequence} * kv_heads + head) * capacity + place) * C::kRowBytes;
            v.info = valid | left << 8 | (tail ? kTail : kSink) << 16 | (has_new_row ? kNewRow : 0) | straight << 22 |
                     cut(tail ? row.sink + row.packed + token : token, 31) << 27 | flags;
        } else if constexpr (C::kPlain) {
            const int valid = min(C::kWindowTokens, row.packed - in_pages);
            v.source = p.pages + (int64_t{page} * kv_heads + head) * p.page_bytes +
                       in_pages % kPageTokens * C::kRowBytes;
            v.info = valid | min(255, row.packed + row.tail - in_pages) << 8 | kRows << 16 | valid << 22 |
                     cut(row.sink + in_pages, 31) << 27 | flags;
        } else {
            const int block = in_pages % kPageTokens / kBlockTokens;
            v.source = p.pages + (int64_t{page} * kv_heads + head) * p.page_bytes + C::key_place(block);
            const int valid = min(C::kVisitTokens, row.packed - in_pages),
                      left = min(255, row.packed + row.after<C>() - in_pages),
                      hidden = cut(row.before<C>() + in_pages, 255);
            const bool plain =
                valid == C::kVisitTokens && left - p.unseen >= valid && hidden == 0 && !(p.cap > 0.0f);
            v.info = valid | left << 8 | kPage << 16 | block << 18 | hidden << 22 | plain << 30 | flags;
        }
    }
    seen = {v.segment, begin, begin + e.place(e.visits - 1), begin + row.weight};
    if (lane < count) shared.plan[warp][(from + lane) % 32] = v;
}

// Rows from `slot` of a ring on; it goes on at its beginning.
template <class C>
__device__ __forceinline__ void copy_ring(uint32_t to, const uint8_t* ring, uint32_t slot, uint32_t rows,
                                          uint32_t ring_rows, uint32_t bar) {
    const uint32_t straight = min(rows, ring_rows - slot);
    bulk_copy(to, ring + int64_t{slot} * C::kRowBytes, straight * C::kRowBytes, bar);
    if (rows > straight) bulk_copy(to + straight * C::kRowBytes, ring, (rows - straight) * C::kRowBytes, bar);
}
// Rows of the tail, or, where only values are rows, also the codes of their keys with the parameters in front.
template <class C>
__device__ __forceinline__ void copy_published(const SharedStorage<C>& shared, const DecodeArgs& p, const Visit& v,
                                               uint32_t to, uint32_t bar) {
    const bool tail = info_kind(v.info) == kTail;
    const int head = head_of(v.segment);
    const Places places(v);
    const int64_t ring = int64_t{shared.rows[row_of(v.segment)].sequence} * p.kv_heads + head;
    const uint32_t key_rows = p.tail_rows, value_rows = key_rows + kMoreValueRows;
    const uint32_t hidden = tail ? 0 : info_hidden(v.info);
    const uint32_t rows = tail ? info_valid(v.info) : C::kWindowTokens - hidden;
    barrier_expect(bar, rows * C::kRowBytes + (tail ? rows * C::kRowBytes : C::kKeyParams + C::kKeyCodes));
    if (tail) {
        copy_ring<C>(to, p.tail_keys + ring * key_rows * C::kRowBytes, places.keys, rows, key_rows, bar);
    } else {
        const int block = info_block(v.info);
        const uint8_t* const group = p.pages + (int64_t{places.keys} * p.kv_heads + head) * p.page_bytes +
                                     block / C::kGroupBlocks * C::kGroupBytes;
        bulk_copy(to, group, C::kKeyParams, bar);
        bulk_copy(to + C::kKeyParams, group + C::kKeyParams + block % C::kGroupBlocks * C::kKeyCodes, C::kKeyCodes,
                  bar);
    }
    copy_ring<C>(to + C::kWindowHalf + hidden * C::kRowBytes, p.tail_values + ring * value_rows * C::kRowBytes,
                 places.values, rows, value_rows, bar);
}

// Calls use(place in the slot, address, bytes) for what a visit to a page consists of; parameters in front of other
// codes may be left out.
template <class C, class Use>
__device__ __forceinline__ void for_each_piece(const DecodeArgs& p, const Visit& v, bool skip, const Use& use) {
    const int block = info_block(v.info), part = info_part<C>(v.info);
    const int params = part == 0 ? 0 : C::kKeyParams;  // that stand in front of other codes
    if (part > 0 && !skip) {
        const int before = C::key_place(block) - C::key_place(block - part * C::kVisitBlocks);
        use(0, v.source - before, C::kKeyParams);
    }
    use(params, v.source, C::kKeyBytes - params);
    int apart = p.value_offset;  // values from keys
#pragma unroll
    for (int b = C::kVisitBlocks; b < kPageTokens / kBlockTokens; b += C::kVisitBlocks) {
        if (block == b) apart += b * C::kValueBlock - C::key_place(b);
    }
    use(C::kKeyBytes, v.source + apart, C::kValueBytes);
}

// Rows of a window or of a page of 16 bits, but for the call's; values stand so many bytes from keys.
template <class C>
__device__ __forceinline__ void copy_rows(const uint8_t* keys, int64_t apart, int info, int32_t ring_rows, uint32_t to,
                                          uint32_t bar) {
    const uint32_t straight = info_straight(info) * C::kRowBytes, all = info_valid(info) * C::kRowBytes;
    const uint32_t rest = all - straight - (info_has_new_row(info) ? C::kRowBytes : 0);
    barrier_expect(bar, 2 * all);
    if (straight > 0) {  // or the call's is the visit's only row
        bulk_copy(to, keys, straight, bar);
        bulk_copy(to + C::kWindowHalf, keys + apart, straight, bar);
    }
    if (rest > 0) {  // the ring goes on at its beginning
        keys -= int64_t{ring_rows} * C::kRowBytes - straight;
        bulk_copy(to + straight, keys, rest, bar);
        bulk_copy(to + C::kWindowHalf + straight, keys + apart, rest, bar);
    }
}
// Beside pages such visits are few.
template <class C>
__device__ __noinline__ void copy_rows_apart(const uint8_t* keys, int64_t apart, int info, int32_t ring_rows,
                                             uint32_t to, uint32_t bar) {
    copy_rows<C>(keys, apart, info, ring_rows, to, bar);
}

// Asks for a visit's bytes, but for the call's row; by one lane. A visit that follows one to the same key group does
// not need its parameters again.
template <class C>
__device__ __forceinline__ void copy_visit(SharedStorage<C>& shared, const DecodeArgs& p, Visit v, int stage,
                                           bool follows, int warp) {
    const uint32_t to = shared_address(shared.ring[warp][stage]), bar = shared_address(&shared.full[warp][stage]);
    if constexpr (C::kPublished) {
        if (info_kind(v.info) != kPage) return copy_published<C>(shared, p, v, to, bar);
    }
    if (C::kPlain || info_kind(v.info) != kPage) {
        const bool tail = info_kind(v.info) == kTail;
        const int64_t apart = info_kind(v.info) == kRows ? p.value_offset
                              : tail                     ? p.tail_values - p.tail_keys
                                                         : p.sink_values - p.sink_keys;
        if constexpr (C::kPlain) return copy_rows<C>(v.source, apart, v.info, p.tail_rows, to, bar);
        return copy_rows_apart<C>(v.source, apart, v.info, p.tail_rows, to, bar);
    }
    const bool skip = info_part<C>(v.info) > 0 && follows;
    barrier_expect(bar, skip ? C::kVisitBytes - C::kKeyParams : C::kVisitBytes);
    for_each_piece<C>(p, v, skip, [&](int at, const uint8_t* from, uint32_t bytes) {
        bulk_copy(to + at, from, bytes, bar);
    });
}

// A visit of the warp's plan, read at once.
template <class C>
__device__ __forceinline__ Visit planned(const SharedStorage<C>& shared, int warp, unsigned number) {
    const uint4 words = *reinterpret_cast<const uint4*>(&shared.plan[warp][number % 32]);
    Visit v;
    memcpy(&v, &words, sizeof v);
    return v;
}

// Asks for the call's row, if a visit has it; it has been counted among the visit's bytes.
template <class C>
__device__ __noinline__ void copy_new_row(SharedStorage<C>& shared, unsigned number, int warp) {
    const Visit v = planned<C>(shared, warp, number);
    if (!info_has_new_row(v.info)) return;
    if (elected()) {
        const DecodeCall& call = shared.call;
        const BatchRow& at = shared.rows[row_of(v.segment)];
        const unsigned stage = number % C::kStages;
        const uint32_t to = shared_address(shared.ring[warp][stage]) + (info_valid(v.info) - 1) * C::kRowBytes;
        const uint32_t bar = shared_address(&shared.full[warp][stage]);
        const int keys = 2 * head_of(v.segment);
        bulk_copy(to, new_row_of(call.k, call.v, at, keys), C::kRowBytes, bar);
        bulk_copy(to + C::kWindowHalf, new_row_of(call.k, call.v, at, keys + 1), C::kRowBytes, bar);
    }
    __syncwarp();  // products of the warp follow
}

}  // namespace kivi::cuda::fast
