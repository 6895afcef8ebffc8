// The published schedule packs keys a residual at a time and values one by one, so that between the pages and the tail
// there is a middle whose keys are codes of a page and whose values are rows of the tail:
//
//   keys     | codes ............................... | rows ...... |
//   values   | codes ............. | rows .......................  |
//              pages               | middle          | tail
//
// Visits to the middle begin at multiples of kWindowTokens: part of a block of 32 tokens, of which the first visit may
// have tokens hidden that belong to the pages. Keys are multiplied as in a visit to a page, values as in one to rows: no
// key is decoded to 16 bits, which a large one would not fit.
#pragma once
#include "cuda/decode_pages.cuh"
#include "cuda/decode_windows.cuh"

namespace kivi::cuda::fast {

// The slot holds the parameters of a key group, codes of a block, and value rows where those of a window would stand.
template <class C>
__device__ __forceinline__ void visit_middle(HeadState<C>& s, const SharedStorage<C>& shared, const DecodeArgs& p,
                                             uint8_t* slot, int info, int warp, int lane) {
    asm volatile("" : "+r"(lane), "+r"(warp));  // (as in visit_window)
    constexpr bool kB = C::kBf16;
    const int row = lane >> 2, column = lane & 3;
    const int first = info_part_of_block(info) * C::kWindowTokens, hidden = info_hidden(info);
    info = (info & ~255) | C::kWindowTokens;  // all of them exist
    if (hidden > 0) {  // p is 0 there, but 0 * NaN is not
        for (int i = lane; i < hidden * (C::kRowBytes / 16); i += 32) {
            reinterpret_cast<uint4*>(slot + C::kWindowHalf)[i] = make_uint4(0, 0, 0, 0);
        }
        hand_to_copies();
    }
    if (partly_seen(p, info)) set_elements_apart<C>(s, p, slot, info, lane);
    float score[2][2][C::kThreadRows];
    {
        float c[2][C::kTiles][4], term[C::kThreadRows];
        key_min_terms<C>(s, shared, slot, warp, lane, term);
        ScaledQueries<C> scaled[1];
        scale_queries<C>(shared, slot, 0, warp, lane, scaled[0]);
        key_products<C, 1>(slot, 0, lane, scaled, c);
#pragma unroll
        for (int h = 0; h < C::kThreadRows; ++h) {
            const int t = h / C::kTileRows, e = h % C::kTileRows;
            const float bias = __shfl_sync(kAll, term[h], column) - s.reference[h];
#pragma unroll
            for (int u = 0; u < 2; ++u) {
#pragma unroll
                for (int upper = 0; upper < 2; ++upper) {
                    score[u][upper][h] = fmaf(c[u][t][2 * upper + e], s.factor[h], bias);
                }
            }
        }
    }
    if (p.cap > 0.0f) cap_scores<C>(s, score, p);
#pragma unroll
    for (int h = 0; h < C::kThreadRows; ++h) {
        const Visible sees(p, info, query_row<C>(h, column));
#pragma unroll
        for (int u = 0; u < 2; ++u) {
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                const int token = token_of_row(u, row, upper) - first;
                if (token < hidden || !sees(token)) score[u][upper][h] = -INFINITY;
            }
        }
    }
    update_references<C>(s, score);
    // Tokens of a column are neighbours: those of the visit are whole columns.
    const int token = 8 * column - first;
    const bool held = token >= 0 && token < C::kWindowTokens;
    const uint8_t* const values = slot + C::kWindowHalf + (held ? token : 0) * C::kRowBytes + row * 8;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
        uint32_t prob[Terms<kB>::kCount][C::kTiles][2];
        window_probabilities<C>(score[u], lane, prob);
        row_products<C>(s, prob, row, [&](int k, int i) {
            const int of_column = 2 * u + k % 2 + 4 * (k / 2);
            return held ? *reinterpret_cast<const uint2*>(values + of_column * C::kRowBytes + i * 64)
                        : make_uint2(0, 0);
        });
    }
}

}  // namespace kivi::cuda::fast
