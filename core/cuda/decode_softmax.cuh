// A warp's running softmax over one segment.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_args.h"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_line.cuh"
#include "cuda/decode_queries.cuh"

namespace kivi::cuda::fast {

// Thread (row, column) = (lane / 4, lane % 4). At 8 or 16 rows it holds rows 8 tile + 2 * column + 0, 1 of everything
// accumulated. At 4 rows accumulated elements 0 and 2 belong to row `column` and the first eight tokens of every score
// tile, elements 1 and 3 to the same row and the other eight tokens.
template <class C>
struct HeadState {
    float factor[C::kThreadRows];       // scale_log2 * 2^exponent * 2^24
    float reference[C::kThreadRows];    // exponents that p is relative to; every p is <= 1
    uint32_t unset;                     // bit h: reference h not yet known, because no visible token has been seen
    float out[C::kTiles][C::kSteps][4]; // [channel tile]: values * p, in units of 2^step_power * 2^-24
    // Sums with the value mins and of p. Up to four value groups: even units in rows 0..7 of `even` (elements 0, 1), odd
    // units in rows 8..15 of `odd` (elements 2, 3); row g < 4: mins of group g * p; rows 4..7: sum of p. Eight groups:
    // row g of the same: mins of group g * p; the other eight rows: sum of p.
    float even[C::kTiles][4], odd[C::kTiles][4];
};
// Row that the thread's accumulators of index h belong to.
template <class C>
__device__ __forceinline__ int query_row(int h, int column) {
    return C::kRows == 4 ? column : 8 * (h / 2) + 2 * column + h % 2;
}

// p is formed relative to (largest score + kHeadroom), in powers of two: a later score may exceed the largest one by
// this much before anything has to be rescaled, and p * value scale cannot overflow fp16. Not a whole number: where
// all scores are nearly equal, p would sit just below a power of two and always be rounded the same way.
constexpr float kHeadroom = 1.5f;

template <class C>
__device__ __forceinline__ void set_factors(HeadState<C>& s, const float (&units)[C::kRows], float scale_log2,
                                            int lane) {
#pragma unroll
    for (int h = 0; h < C::kThreadRows; ++h) {  // of row query_row
        s.factor[h] = scale_log2 * units[query_row<C>(h, lane & 3)];
    }
}
// Nothing seen yet.
template <class C>
__device__ __forceinline__ void clear(HeadState<C>& s) {
#pragma unroll
    for (int h = 0; h < C::kThreadRows; ++h) s.reference[h] = 0.0f;
#pragma unroll
    for (int t = 0; t < C::kTiles; ++t) {
#pragma unroll
        for (int j = 0; j < C::kSteps; ++j) s.out[t][j][0] = s.out[t][j][1] = s.out[t][j][2] = s.out[t][j][3] = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) s.even[t][j] = s.odd[t][j] = 0.0f;
    }
    s.unset = (1u << C::kThreadRows) - 1;
}

// Makes sure that no score exceeds the reference exponents, that is, that all relative scores are <= 0; if not,
// moves the references and rescales what has been summed. In the common case this costs an AND of sign bits and a
// vote. score[score tile][upper or lower eight rows][query row]
template <class C, int COUNT>
__device__ __forceinline__ void update_references(HeadState<C>& s, float (&score)[COUNT][2][C::kThreadRows]) {
    constexpr int kRows = C::kThreadRows;
    uint32_t negative = s.unset ? 0u : kAll;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll
        for (int h = 0; h < kRows; ++h) {
            negative &= __float_as_uint(score[i][0][h]) & __float_as_uint(score[i][1][h]);
        }
    }
    if (!__any_sync(kAll, int(negative) >= 0)) return;
    float down[kRows];
#pragma unroll
    for (int h = 0; h < kRows; ++h) {
        float m = -INFINITY;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) m = fmaxf(m, fmaxf(score[i][0][h], score[i][1][h]));
#pragma unroll
        for (int d = 4; d < 32; d *= 2) m = fmaxf(m, __shfl_xor_sync(kAll, m, d));
        const bool unset = s.unset >> h & 1;
        // A row that has seen no visible token keeps its reference of 0 and p of 0, and stays unset.
        const float up = (unset ? m > -INFINITY : m > 0.0f) ? m + kHeadroom : 0.0f;
        if (m > -INFINITY) s.unset &= ~(1u << h);
        s.reference[h] += up;
        down[h] = exp2_fast(fminf(-up, 0.0f));  // (if it was unset, all sums are 0)
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            score[i][0][h] -= up;
            score[i][1][h] -= up;
        }
    }
#pragma unroll
    for (int t = 0; t < C::kTiles; ++t) {
        const float d0 = down[t * C::kTileRows], d1 = down[t * C::kTileRows + C::kTileRows - 1];
#pragma unroll
        for (int j = 0; j < C::kSteps; ++j) {
            s.out[t][j][0] *= d0;
            s.out[t][j][1] *= d1;
            s.out[t][j][2] *= d0;
            s.out[t][j][3] *= d1;
        }
        s.even[t][0] *= d0;
        s.even[t][1] *= d1;
        s.odd[t][2] *= d0;
        s.odd[t][3] *= d1;
        if constexpr (C::kValueGroups > 4) {
            s.even[t][2] *= d0;
            s.even[t][3] *= d1;
            s.odd[t][0] *= d0;
            s.odd[t][1] *= d1;
        } else {
            s.even[t][2] = s.even[t][3] = s.odd[t][0] = s.odd[t][1] = 0.0f;  // not used, but must stay finite
        }
    }
}

// Numbers of a score tile as B operand of each tile of columns, rounded once.
template <class C, bool BF16>
__device__ __forceinline__ void operands(const float (&x)[2][C::kThreadRows], int lane, uint32_t (&p)[C::kTiles][2]) {
    if constexpr (C::kRows == 4) {
        // Column 2 * row + upper of the transposed tile is the row's tokens 8 * upper .. 8 * upper + 7.
        const uint32_t both = transpose8x8(to_pair<BF16>(x[0][0], x[1][0]));
        p[0][0] = lane & 4 ? 0u : both;
        p[0][1] = lane & 4 ? both : 0u;
    } else {
#pragma unroll
        for (int t = 0; t < C::kTiles; ++t) {
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                p[t][upper] = transpose8x8(to_pair<BF16>(x[upper][2 * t], x[upper][2 * t + 1]));
            }
        }
    }
}
// p of a score tile.
template <class C>
__device__ __forceinline__ void probabilities(const float (&score)[2][C::kThreadRows], int lane,
                                              uint32_t (&p)[C::kTiles][2]) {
    float x[2][C::kThreadRows];
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
#pragma unroll
        for (int h = 0; h < C::kThreadRows; ++h) x[upper][h] = exp2_fast(score[upper][h]);
    }
    operands<C, false>(x, lane, p);
}

// Tokens of a visit that a row sees: query token j of n all but the sequence's last n - 1 - j (all, if the call brings
// the queries' own), and of those before the window's border as many fewer.
struct Visible {
    int begin, end;
    __device__ __forceinline__ Visible(const DecodeArgs& p, int info, int row) {
        const int token = p.tokens == 1 ? 0 : int(p.group.quotient(row));
        begin = info_cut(info) - max(p.tokens - 1 - token, 0);
        end = min(info_valid(info), info_left(info) - max(p.unseen - token, 0));
    }
    __device__ __forceinline__ bool operator()(int token) const { return token >= begin && token < end; }
};
// How many all rows see, but for the border.
__device__ __forceinline__ int open_tokens(const DecodeArgs& p, int info) {
    return min(info_valid(info), info_left(info) - p.unseen);
}

// cap * tanh(score / cap). tanh(x) is 1 - 2 / (1 + e^2x).
__device__ __forceinline__ float capped(const DecodeCall& p, float score) {
    return p.cap - 2.0f * p.cap * reciprocal(1.0f + exp2_fast(score * p.cap_rate));
}
// Scores relative to their references become capped, relative again.
template <class C, int COUNT>
__device__ __forceinline__ void cap_scores(const HeadState<C>& s, float (&score)[COUNT][2][C::kThreadRows],
                                           const DecodeArgs& p) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
#pragma unroll
            for (int h = 0; h < C::kThreadRows; ++h) {
                const float x = score[i][upper][h] + s.reference[h];
                // A non-finite key must not hide behind tanh(inf).
                score[i][upper][h] = fmaf(x, 0.0f, capped(p, x) - s.reference[h]);
            }
        }
    }
}

}  // namespace kivi::cuda::fast
