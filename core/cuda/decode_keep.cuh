// Appends the call's own keys and values, a token a row, in the kernel that attends to them (kivi_step).
//
//   at the start     what has room is found (find_room), and a new row for each warp is asked for (find_new_row)
//   out of the loop  warps that have left their slices write rows, and pack what these push behind a border (keep_rows)
//   when all blocks  have read lengths and borders, the last one moves these on (move_rows_on)
//
// No warp that is still in its slice waits for that, and none reads what is written: the slot of a new row is one that
// the tail between calls does not hold (tail_capacity in format/policy.h), and pages are read up to the border of before.
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

// What they are appended to.
template <class C>
__device__ __forceinline__ const Layer& layer_of(const DecodeArgs& p, const SharedStorage<C>& shared) {
    if constexpr (C::kHoldsLayer) return shared.layers[0];
    return p.layer;
}

// What the append makes of a row's sequence.
__device__ __forceinline__ Step step_of(const Windows& windows, const BatchRow& row) {
    Step step;
    const int border = row.packed > 0 ? row.sink + row.packed : 0;
    step.before = {row.total(), border, border};
    step.after = after_append(windows, step.before, row.total() + 1);
    return step;
}

// Which rows' sequences get their token; by a warp for a half of the rows, a lane a row.
template <class C>
__device__ __noinline__ void find_room(SharedStorage<C>& shared, const Layer& layer, int half, int lane) {
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

// The number-th of this block's new rows: of a batch row, and a head's keys (item 2 h) or values (2 h + 1).
template <class C>
struct NewPlace {
    unsigned row = 0, item = 0;
    bool is;
    __device__ __forceinline__ NewPlace(const SharedStorage<C>& shared, unsigned number) {
        const unsigned items = 2 * shared.call.kv_heads, i = blockIdx.x + gridDim.x * number;
        is = i < shared.call.batch_rows * items;
        if (is) row = divide(i, items), item = i - row * items;
    }
};

// Where it is, in the caller's memory; or NULL. It is asked for with the queries: behind pages it would take
// microseconds.
template <class C>
__device__ __noinline__ const uint8_t* find_new_row(const SharedStorage<C>& shared, unsigned number) {
    const NewPlace<C> place(shared, number);
    if (!place.is) return nullptr;
    const BatchRow& at = shared.rows[place.row];
    return at.sequence >= 0 ? new_row_of(shared.call.k, shared.call.v, at, place.item) : nullptr;
}

// Once in many steps, so it is a function of its own.
template <class L>
__device__ __noinline__ void pack_new_groups(HeadRows<L> rows, const BatchRow& at, StepWords<L>& words) {
    const Windows& windows = rows.layer.key.windows;
    const Step step = step_of(windows, at);
    const auto tail = [&](const Span& span) {
        return static_cast<int>(tail_begin(windows, span, kivi::Part::key));
    };
    rows.template pack_groups<16, 8>(words, tail(step.before), tail(step.after));
}

// Takes new rows until the block has none left; by a warp that has left its slice, while the block's other warps are
// still in theirs.
template <class C>
__device__ __noinline__ void keep_rows(SharedStorage<C>& shared, const Layer& layer, int warp, int lane) {
    using Words = StepWords<LayerOf<C>>;
    // Behind what the warp has left of its last segment.
    static_assert(C::kPartialFloats * sizeof(float) + sizeof(Words) <= sizeof shared.ring[0]);
    for (;;) {
        unsigned number = 0;
        if (lane == 0) number = atomicAdd(&shared.next_new, 1);
        number = __shfl_sync(kAll, number, 0);
        const NewPlace<C> place(shared, number);
        if (!place.is) return;
        const BatchRow& at = shared.rows[place.row];
        // Those that were asked for come, also where nothing is kept of them: before the block ends.
        if (number < C::kNewRows && at.sequence >= 0) barrier_wait(shared_address(&shared.new_full[number]), 0);
        if (!shared.keeps.has(place.row)) continue;
        const HeadRows<LayerOf<C>> rows{layer, static_cast<int>(place.item), at.sequence};
        typename HeadRows<LayerOf<C>>::Raw raw;
        if (number < C::kNewRows) {
#pragma unroll
            for (int j = 0; j < stripes(C::kDim); ++j) {
                // Lanes beyond the row have its end again: nothing is stored of them.
                const int channel = min(j * kStripe + kLaneChannels * lane, C::kDim - kLaneChannels);
                raw[j] = *reinterpret_cast<const uint2*>(shared.new_rows[number] + 2 * channel);
            }
        } else {
            rows.load(find_new_row<C>(shared, number), raw);
        }
        rows.keep(raw, at.total());
        if (!shared.packs.has(place.row)) continue;
        uint8_t* const words = &shared.ring[warp][0][0] + sizeof shared.ring[0] - sizeof(Words);
        pack_new_groups<LayerOf<C>>(rows, at, *reinterpret_cast<Words*>(words));
    }
}

// Those that have read the state arrive, a warp a block; the last moves all sequences on.
template <class C>
__device__ __noinline__ void move_rows_on(const SharedStorage<C>& shared, const Layer& layer, int lane) {
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
            layer.spans[row.sequence].length = row.total() + 1;
        }
        if (shared.no_room.has(r)) layer.full[row.sequence] = 1;
    }
}

}  // namespace kivi::cuda::fast
