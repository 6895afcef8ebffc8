// What a block of one kernel leaves to another, and which tokens are whose.
#pragma once
#include "cuda/attend_results.cuh"
#include "cuda/prefill_config.h"

namespace kivi::cuda::prompt {

// What blocks leave of rows that are not finished: [batch row][head][tile][part] of ROWS sums, then of ROWS rows of DIM.
template <int ROWS, int DIM>
struct Partials {
    Sum* sums;
    float* rows;
    // `tile` is that of the launch.
    __device__ Partials(const Args& p, float* workspace, int parts, int batch_row, int head, int tile, int part) {
        const int64_t items = static_cast<int64_t>(p.attend.batch.size) * p.attend.layer.key.heads * p.tiles;
        const int64_t item = (static_cast<int64_t>(batch_row) * p.attend.layer.key.heads + head) * p.tiles + tile;
        const int64_t slot = item * parts + part;
        sums = reinterpret_cast<Sum*>(workspace) + slot * ROWS;
        rows = workspace + 2 * items * parts * ROWS + slot * ROWS * DIM;
    }
    // Floats of `blocks` blocks.
    static constexpr int64_t floats(int64_t blocks) { return blocks * ROWS * (DIM + 2); }
};
template <class C>
using PartialsOf = Partials<C::kRows, C::kDim>;

// What prefill_pages.cuh does for a tile: what all of its rows see.
__device__ inline Done done_before(const Args& p, const RowArg& row, const Span& span, int first_row) {
    if (p.page_parts == 0) return {0, 0};
    const auto whole_pieces = [](int64_t tokens) {
        return static_cast<int>(max(tokens, int64_t{0})) / kPieceTokens * kPieceTokens;
    };
    const Query first(p.attend, row, span, 0, first_row);
    const int64_t packed = min(span.key_border, span.value_border);
    return {whole_pieces(min(packed, first.last + 1) - p.attend.layer.key.windows.sink),
            p.attend.k ? whole_pieces(first.token + 1) : 0};
}

}  // namespace kivi::cuda::prompt
