// A block's shared memory.
#pragma once
#include <cstdint>

#include "cuda/decode_line.cuh"

namespace kivi::cuda::fast {

// A bit for each row of the batch.
struct RowMask {
    unsigned half[2];
    __device__ __forceinline__ bool has(unsigned row) const { return half[row / 32] >> row % 32 & 1; }
};

template <class C>
struct SharedStorage {
    alignas(128) uint8_t ring[C::kWarps][C::kStages][C::kSlotBytes];
    alignas(128) uint32_t queries[C::kWarps][C::kTiles * C::kPairs][C::kQueryLanes][4];
    float units[C::kWarps][C::kRows];  // 2^(exponent + 24) of the queries
    // Operand rows 4..7 of the product with up to four value mins: their "mins" are 1, which makes them sums of p.
    alignas(128) uint32_t ones[16];
    uint64_t full[C::kWarps][C::kStages];
    Visit plan[C::kWarps][32];  // visit i of the warp at [i % 32]
    BatchRow rows[kRowsAtOnce];
    unsigned row_begin[kRowsAtOnce];  // on the line; from the first row of the half on
    unsigned half_weight[2];          // of rows 0 .. 31, and of rows 32 .. 63
    // What is not needed in the main loop waits here; registers are scarce there.
    BlockPiece block;
    // Where the call brings keys and values: what it is about, for functions of their own, which would reach parameters
    // through memory; and what they are appended to.
    DecodeCall call;
    Layer layer;
    // Of the batch's rows (decode_new_rows.cuh): the token is appended, pushes others behind a border, has no room.
    RowMask keeps, packs, no_room;
    unsigned next_item;  // number of this block's next one that a warp looks at, see pack_rows
    unsigned long long not_counted;  // in place of Layer::saturated, for rows that are not kept
    Slice slices[C::kWarps];
    Seen seen[C::kWarps];       // what the warp is working on
    int from_start[C::kWarps];  // the warp began with the segment's first visit
    unsigned next_run[C::kWarps];    // to be left
    Seen deposits[32];               // [0..15] last segment of warp i, [16..31] first segment of warp i
};

// Copies a piece of the parameters; by a warp.
template <class T>
__device__ __forceinline__ void copy_parameters(T& to, const T& from, int lane) {
    static_assert(sizeof(T) % sizeof(uint2) == 0 && alignof(T) % sizeof(uint2) == 0);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T) / sizeof(uint2)); i += 32) {
        if (i + lane < static_cast<int>(sizeof(T) / sizeof(uint2))) {
            reinterpret_cast<uint2*>(&to)[i + lane] = reinterpret_cast<const uint2*>(&from)[i + lane];
        }
    }
}

}  // namespace kivi::cuda::fast
