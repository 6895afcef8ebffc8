// The call's own keys and values, a token a row. They are the tail's last row, which comes from the caller's memory:
// its visit copies it behind the tail's other rows, and makes of it what windows hold. kivi_step appends it in passing:
//
//   at the start     what has room is found (find_room)
//   in the loop      the warp whose visit has the row stores it in its window too (take_new_row)
//   out of the loop  warps that have left their slices pack what new rows push behind a border (pack_rows)
//   when all blocks  have read lengths and borders, the last one moves these on (move_rows_on)
//
// None reads what is written: the slot of a new row is one that the tail between calls does not hold (tail_capacity in
// format/policy.h), or of a sink window the first that has no row yet; pages are read up to the border of before; and
// no new row is packed at once, which decode_keeps sees to.
//
// What is done for such calls alone are functions of their own, beside what every call runs: instructions that run once
// come from far away. They find the call in shared memory, where parameters would be trips to memory.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_args.h"
#include "cuda/decode_line.cuh"
#include "cuda/decode_shared.cuh"
#include "cuda/step_rows.cuh"

namespace kivi::cuda::fast {

// Rows of 16 bits and those of the published schedule are packed before a new one takes their slot.
template <class C>
constexpr bool can_keep() {
    return !C::kPlain && !C::kPublished;
}

template <class C>
using LayerOf = FastLayer<C::kBf16, C::kDim, C::kKeyBits, C::kValueBits, C::kKeyGroup, C::kDim / C::kValueGroups>;

// What the append makes of a row's sequence.
__device__ __forceinline__ Step step_of(const Windows& windows, const BatchRow& row) {
    Step step;
    const int border = row.packed > 0 ? row.sink + row.packed : 0;
    step.before = {row.total() - 1, border, border};
    step.after = after_append(windows, step.before, row.total());
    return step;
}

// Which rows' sequences get their token; by a warp for a half of the rows, a lane a row.
template <class C>
__device__ __noinline__ void find_room(SharedStorage<C>& shared, int half, int lane) {
    const Layer& layer = shared.layer;
    const int r = 32 * half + lane;
    const DecodeCall& call = shared.call;
    const BatchRow& row = shared.rows[r];
    bool moves = r < call.batch_rows && row.sequence >= 0, fits = false, packs = false;
    if (moves && call.on_device) moves = !stands_earlier(call.arrays, row.index, row.sequence);
    if (moves) {
        const Step step = step_of(layer.key.windows, row);
        fits = step.after.length <= layer.max_tokens &&
               blocks_of(layer.key.windows, step.after) <= load_fresh(layer.bound + row.sequence);
        packs = step.after.key_border != step.before.key_border;
    }
    const auto leave = [&](RowMask& to, bool is) {
        const unsigned mask = __ballot_sync(kAll, is);
        if (lane == 0) to.half[half] = mask;
    };
    leave(shared.keeps, fits), leave(shared.packs, fits && packs), leave(shared.no_room, moves && !fits);
}

// The call's row of a visit that has arrived, the last one: as windows hold it, in the visit's slot; and in its window,
// if it is kept. `row`: of keys.
template <class C>
__device__ __noinline__ void take_new_row(SharedStorage<C>& shared, uint8_t* row, int segment) {
    using Rows = HeadRows<LayerOf<C>>;
    const DecodeCall& call = shared.call;
    const BatchRow& at = shared.rows[row_of(segment)];
    const bool keeps = can_keep<C>() && call.keeps && shared.keeps.has(row_of(segment));
#pragma unroll
    for (int tensor = 0; tensor < 2; ++tensor, row += C::kWindowHalf) {
        typename Rows::Raw raw;
#pragma unroll
        for (int j = 0; j < Rows::kStripes; ++j) {
            const int channel = j * kStripe + kLaneChannels * kivi::cuda::lane();
            raw[j] = channel < C::kDim ? *reinterpret_cast<const uint2*>(row + 2 * channel) : make_uint2(0, 0);
        }
        // Where nothing is kept there may be no layer: it is not looked at then.
        const Rows rows{shared.layer, 2 * head_of(segment) + tensor, at.sequence};
        rows.round(raw, [&](const Rows&) { return tensor == 0 ? call.rotated_keys : call.rotated_values; },
                   [&](const Rows&) { return keeps ? shared.layer.saturated : &shared.not_counted; });
        Rows::store(row, raw);
        if (keeps) Rows::store(rows.window_row(at.total() - 1), raw);
    }
    hand_to_copies();
}

// Packs what new rows push behind a border, a head's keys or values (item, as in HeadRows) at a time, until the block
// has none left; by a warp that has left its slice, while the block's other warps are still in theirs.
template <class C>
__device__ __noinline__ void pack_rows(SharedStorage<C>& shared, int warp, int lane) {
    using Words = StepWords<LayerOf<C>>;
    // Behind what the warp has left of its last segment.
    static_assert(C::kPartialFloats * sizeof(float) + sizeof(Words) <= sizeof shared.ring[0]);
    Words& words = *reinterpret_cast<Words*>(&shared.ring[warp][0][0] + sizeof shared.ring[0] - sizeof(Words));
    const Windows& windows = shared.layer.key.windows;
    const unsigned items = 2 * shared.call.kv_heads, all = shared.call.batch_rows * items;
    for (;;) {
        unsigned number = 0;
        if (lane == 0) number = atomicAdd(&shared.next_item, 1);
        const unsigned i = blockIdx.x + gridDim.x * __shfl_sync(kAll, number, 0);
        if (i >= all) return;
        const unsigned row = divide(i, items);
        if (!shared.packs.has(row)) continue;
        const BatchRow& at = shared.rows[row];
        const Step step = step_of(windows, at);
        const auto tail = [&](const Span& span) {
            return static_cast<int>(tail_begin(windows, span, kivi::Part::key));
        };
        const HeadRows<LayerOf<C>> rows{shared.layer, static_cast<int>(i - row * items), at.sequence};
        rows.template pack_groups<16, 8>(words, tail(step.before), tail(step.after));
    }
}

// Those that have read the state arrive, a warp a block; the last moves all sequences on.
template <class C>
__device__ __noinline__ void move_rows_on(const SharedStorage<C>& shared, int lane) {
    const Layer& layer = shared.layer;
    unsigned before = 0;
    if (lane == 0) before = atomicAdd(layer.arrivals, 1);
    if (__shfl_sync(kAll, before, 0) + 1 != gridDim.x) return;
    if (lane == 0) *layer.arrivals = 0;
#pragma unroll 1
    for (int r = lane; r < shared.call.batch_rows; r += 32) {
        const BatchRow& row = shared.rows[r];
        if (shared.packs.has(r)) {
            layer.spans[row.sequence] = step_of(layer.key.windows, row).after;
        } else if (shared.keeps.has(r)) {
            layer.spans[row.sequence].length = row.total();
        }
        if (shared.no_room.has(r)) layer.full[row.sequence] = 1;
    }
    __syncwarp();
}

}  // namespace kivi::cuda::fast
