// A block's shared memory.
#pragma once
#include <cstdint>

#include "cuda/decode_line.cuh"

namespace kivi::cuda::fast {

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
    Slice slices[C::kWarps];
    Seen seen[C::kWarps];       // what the warp is working on
    int from_start[C::kWarps];  // the warp began with the segment's first visit
    unsigned next_run[C::kWarps];    // to be left
    Seen deposits[32];               // [0..15] last segment of warp i, [16..31] first segment of warp i
};

}  // namespace kivi::cuda::fast
