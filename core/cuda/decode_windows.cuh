// A visit to 16-bit rows: of sinks, tail or a page of 16 bits.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_codes.cuh"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_line.cuh"
#include "cuda/decode_nonfinite.cuh"
#include "cuda/decode_queries.cuh"
#include "cuda/decode_shared.cuh"
#include "cuda/decode_softmax.cuh"

namespace kivi::cuda::fast {

// A pair of numbers as operands beside windows: of fp16; or, since 8 bits are too few for p and for rotated queries, the
// two terms of a sum of bf16.
template <bool BF16>
struct Terms {
    static constexpr int kCount = BF16 ? 2 : 1;
    uint32_t at[kCount];
};
__device__ __forceinline__ Terms<true> split(float2 x) {
    Terms<true> r;
    r.at[0] = to_pair<true>(x.x, x.y);
    const float2 high = from_pair<true>(r.at[0]);
    r.at[1] = to_pair<true>(x.x - high.x, x.y - high.y);
    return r;
}

// q * 2^-exponent of one step and half of its depth.
template <class C>
__device__ __forceinline__ Terms<C::kBf16> window_query(uint32_t pair, int step, int half) {
    const float up = float(1 << C::key_power(step, half));
    if constexpr (C::kBf16) {
        const float2 x = from_pair(pair);
        return split(make_float2(x.x * up, x.y * up));
    } else {
        return {{mul_half2(pair, to_pair(up, up))}};
    }
}

// p of a score tile.
template <class C>
__device__ __forceinline__ void window_probabilities(const float (&score)[2][C::kThreadRows], int lane,
                                                     uint32_t (&p)[Terms<C::kBf16>::kCount][C::kTiles][2]) {
    float x[2][C::kThreadRows];
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
#pragma unroll
        for (int h = 0; h < C::kThreadRows; ++h) x[upper][h] = exp2_fast(score[upper][h]);
    }
    operands<C, C::kBf16>(x, lane, p[0]);
    if constexpr (C::kBf16) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
#pragma unroll
            for (int h = 0; h < C::kThreadRows; ++h) {
                const float high = from_pair<true>(to_pair<true>(x[upper][h], 0.0f)).x;
                x[upper][h] -= high;
            }
        }
        operands<C, true>(x, lane, p[1]);
    }
}

// Adds p * value for the tokens of a score tile. load(k, i): eight bytes of a value row at 64 i, of the token of depth
// k % 2 + 8 * (k / 2) of the thread's column. Their products get accumulators of their own, since out[] is in units of
// 2^step_power * 2^-24.
template <class C, class Load>
__device__ __forceinline__ void row_products(HeadState<C>& s,
                                             const uint32_t (&prob)[Terms<C::kBf16>::kCount][C::kTiles][2], int row,
                                             const Load& load) {
    constexpr bool kB = C::kBf16;
    constexpr uint32_t kOnes = kB ? 0x3F803F80u : 0x3C003C00u;
    const uint32_t ones = row < 4 ? 0u : kOnes;  // rows of the sum of p, see HeadState
#pragma unroll
    for (int t = 0; t < C::kTiles; ++t) {
#pragma unroll
        for (int n = 0; n < Terms<kB>::kCount; ++n) {
            if constexpr (C::kValueGroups > 4) {
                mma<kB>(s.even[t], 0, kOnes, 0, kOnes, prob[n][t][0], prob[n][t][1]);
            } else {
                mma<kB>(s.even[t], ones, 0, ones, 0, prob[n][t][0], prob[n][t][1]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
        const uint2 v0 = load(0, i), v1 = load(1, i), v2 = load(2, i), v3 = load(3, i);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const uint32_t x0 = k ? v0.y : v0.x, x1 = k ? v1.y : v1.x, x2 = k ? v2.y : v2.x, x3 = k ? v3.y : v3.x;
            const uint32_t a0 = __byte_perm(x0, x1, 0x5410), a1 = __byte_perm(x0, x1, 0x7632);
            const uint32_t a2 = __byte_perm(x2, x3, 0x5410), a3 = __byte_perm(x2, x3, 0x7632);
            const int j = 2 * i + k;
            const float unit = float(1 << C::value_power(j)) * kSmallest;
#pragma unroll
            for (int t = 0; t < C::kTiles; ++t) {
                float d[4] = {0, 0, 0, 0};
#pragma unroll
                for (int n = 0; n < Terms<kB>::kCount; ++n) mma<kB>(d, a0, a1, a2, a3, prob[n][t][0], prob[n][t][1]);
#pragma unroll
                for (int e = 0; e < 4; ++e) s.out[t][j][e] = fmaf(d[e], unit, s.out[t][j][e]);
            }
        }
    }
}

// One visit to rows: up to 16 tokens, keys at `slot`, values behind them. Tokens are the rows of the scores, in
// their own order; 16 bytes of a key row are four operand registers as they stand. Values arrive token-major, but a
// register wants two tokens of one channel: one PRMT each.
template <class C>
__device__ __forceinline__ void visit_window(HeadState<C>& s, const SharedStorage<C>& shared, const DecodeArgs& p,
                                             uint8_t* slot, int info, int warp, int lane) {
    // What follows from the lane is computed here again each time: kept ready, it would cost the page loop its
    // registers.
    asm volatile("" : "+r"(lane), "+r"(warp));
    constexpr bool kB = C::kBf16, kFull = C::kWindowTokens == 16;  // otherwise the upper eight rows of the tile are empty
    const int row = lane >> 2, column = lane & 3;
    const int valid = info_valid(info), open = open_tokens(p, info);
    if (valid < C::kWindowTokens) {  // p is 0 there, but 0 * NaN is not
        for (int i = valid * (C::kRowBytes / 16) + lane; i < C::kWindowTokens * (C::kRowBytes / 16); i += 32) {
            reinterpret_cast<uint4*>(slot + C::kWindowHalf)[i] = make_uint4(0, 0, 0, 0);
        }
        hand_to_copies();
    }
    if (partly_seen(p, info)) set_elements_apart<C>(s, p, slot, info, lane);
    float c[C::kTiles][2][4];
#pragma unroll
    for (int t = 0; t < C::kTiles; ++t) {
#pragma unroll
        for (int e = 0; e < 2; ++e) c[t][e][0] = c[t][e][1] = c[t][e][2] = c[t][e][3] = 0.0f;
    }
    const uint8_t* const keys = slot + row * C::kRowBytes + column * 16;
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
        const uint4 a = load16(keys + i * 64);
        const uint4 b = kFull ? load16(keys + i * 64 + 8 * C::kRowBytes) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int t = 0; t < C::kTiles; ++t) {
            const uint4 v = query_vector<C>(shared, t, i, warp, lane);
            const Terms<kB> q[4] = {window_query<C>(v.x, 2 * i, 0), window_query<C>(v.y, 2 * i, 1),
                                    window_query<C>(v.z, 2 * i + 1, 0), window_query<C>(v.w, 2 * i + 1, 1)};
#pragma unroll
            for (int n = 0; n < Terms<kB>::kCount; ++n) {
                mma<kB>(c[t][0], a.x, b.x, a.z, b.z, q[0].at[n], q[1].at[n]);
                mma<kB>(c[t][1], a.y, b.y, a.w, b.w, q[2].at[n], q[3].at[n]);
            }
        }
    }
    float score[1][2][C::kThreadRows];
#pragma unroll
    for (int h = 0; h < C::kThreadRows; ++h) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
            const int t = h / C::kTileRows, e = 2 * upper + h % C::kTileRows;
            // An infinite key must not hide behind exp(-inf).
            const float product = c[t][0][e] + c[t][1][e], finite_or_nan = fmaf(product, 0.0f, product);
            score[0][upper][h] = fmaf(finite_or_nan, s.factor[h] * kSmallest, -s.reference[h]);
        }
    }
    if (p.cap > 0.0f) cap_scores<C>(s, score, p);
    if (!kFull || open < C::kWindowTokens || info_cut(info) > 0) {
#pragma unroll
        for (int h = 0; h < C::kThreadRows; ++h) {
            const Visible sees(p, info, query_row<C>(h, column));
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                if (!sees(row + 8 * upper)) score[0][upper][h] = -INFINITY;
            }
        }
    }
    update_references<C>(s, score);
    uint32_t prob[Terms<kB>::kCount][C::kTiles][2];
    window_probabilities<C>(score[0], lane, prob);
    const uint8_t* const values = slot + C::kWindowHalf + 2 * column * C::kRowBytes + row * 8;
    row_products<C>(s, prob, row, [&](int k, int i) {
        if (!kFull && k >= 2) return make_uint2(0, 0);
        return *reinterpret_cast<const uint2*>(values + (k % 2 + 8 * (k / 2)) * C::kRowBytes + i * 64);
    });
}

}  // namespace kivi::cuda::fast
