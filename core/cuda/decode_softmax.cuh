// A warp's running softmax over one segment.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_args.h"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_line.cuh"

namespace kivi::cuda::fast {

// Queries of one KV head wait in shared memory as B operands. Thread (row, column) = (lane / 4, lane % 4) holds rows
// 2 * column + 0, 1 of everything accumulated.
template <class C>
struct HeadState {
    float factor[C::kThreadRows];     // scale_log2 * 2^exponent * 2^24
    float reference[C::kThreadRows];  // exponents that p is relative to; every p is <= 1
    uint32_t unset;                   // bit h: reference h not yet known, because no visible token has been seen
    float out[C::kSteps][4];          // [channel tile]: values * p, in units of 2^step_power * 2^-24
    // Sums with the value mins and of p: even units in rows 0..7 of `even` (elements 0, 1), odd units in rows 8..15
    // of `odd` (elements 2, 3); row g < 4: mins of group g * p; rows 4..7: sum of p.
    float even[4], odd[4];
};

// p is formed relative to (largest score + kHeadroom), in powers of two: a later score may exceed the largest one by
// this much before anything has to be rescaled, and p * value scale cannot overflow fp16. Not a whole number: where
// all scores are nearly equal, p would sit just below a power of two and always be rounded the same way.
constexpr float kHeadroom = 1.5f;

// `unit` is what prepare_queries gave.
template <class C>
__device__ __forceinline__ void start_segment(HeadState<C>& s, float unit, float scale_log2, int lane) {
#pragma unroll
    for (int h = 0; h < C::kThreadRows; ++h) {
        s.factor[h] = scale_log2 * __shfl_sync(kAll, unit, (lane & 3) * 8 + 4 * h);  // of row 2 * column + h
        s.reference[h] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < C::kSteps; ++j) s.out[j][0] = s.out[j][1] = s.out[j][2] = s.out[j][3] = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) s.even[j] = s.odd[j] = 0.0f;
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
    for (int j = 0; j < C::kSteps; ++j) {
        s.out[j][0] *= down[0];
        s.out[j][1] *= down[1];
        s.out[j][2] *= down[0];
        s.out[j][3] *= down[1];
    }
    s.even[0] *= down[0];
    s.even[1] *= down[1];
    s.odd[2] *= down[0];
    s.odd[3] *= down[1];
    s.even[2] = s.even[3] = s.odd[0] = s.odd[1] = 0.0f;  // not used, but must stay finite
}

// p of a score tile as B operand, rounded once.
template <class C, bool BF16>
__device__ __forceinline__ void probabilities(const float (&score)[2][C::kThreadRows], uint32_t (&p)[2]) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
        p[upper] = transpose8x8(to_pair<BF16>(exp2_fast(score[upper][0]), exp2_fast(score[upper][1])));
    }
}

// How many tokens of a visit a row may see. Query token j of n sees all but the last n - 1 - j tokens.
__device__ __forceinline__ int visible(const DecodeArgs& p, int info, int row) {
    const int token = p.tokens == 1 ? 0 : int(divide(row, p.group));
    return min(info_valid(info), info_left(info) - max(p.tokens - 1 - token, 0));
}
// How many all rows see.
__device__ __forceinline__ int open_tokens(const DecodeArgs& p, int info) {
    return min(info_valid(info), info_left(info) - (p.tokens - 1));
}

}  // namespace kivi::cuda::fast
