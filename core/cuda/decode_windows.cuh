// A visit to a 16-bit window: sinks or tail.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_codes.cuh"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_line.cuh"
#include "cuda/decode_queries.cuh"
#include "cuda/decode_shared.cuh"
#include "cuda/decode_softmax.cuh"

namespace kivi::cuda::fast {

// One visit to a window: up to 16 tokens, keys at `slot`, values behind them. Tokens are the rows of the scores, in
// their own order; 16 bytes of a key row are four operand registers as they stand. Values arrive token-major, but a
// register wants two tokens of one channel: one PRMT each. Their products get accumulators of their own, since out[]
// is in units of 2^step_power * 2^-24.
template <class C>
__device__ __forceinline__ void visit_window(HeadState<C>& s, const SharedStorage<C>& shared, const DecodeArgs& p,
                                             uint8_t* slot, int info, int warp, int lane) {
    // What follows from the lane is computed here again each time: kept ready, it would cost the page loop its
    // registers.
    asm volatile("" : "+r"(lane), "+r"(warp));
    constexpr bool kB = C::kBf16;
    const int row = lane >> 2, column = lane & 3;
    const int valid = info_valid(info), open = open_tokens(p, info);
    if (valid < C::kWindowTokens) {  // p is 0 there, but 0 * NaN is not
        for (int i = valid * (C::kRowBytes / 16) + lane; i < C::kWindowTokens * (C::kRowBytes / 16); i += 32) {
            reinterpret_cast<uint4*>(slot + C::kWindowHalf)[i] = make_uint4(0, 0, 0, 0);
        }
        hand_to_copies();
    }
    float c[2][4];
#pragma unroll
    for (int e = 0; e < 2; ++e) c[e][0] = c[e][1] = c[e][2] = c[e][3] = 0.0f;
    const uint8_t* const keys = slot + row * C::kRowBytes + column * 16;
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
        const uint4 a = load16(keys + i * 64), b = load16(keys + i * 64 + 8 * C::kRowBytes);
        const uint4 v = query_vector<C>(shared, i, warp, lane);
        const auto plain = [&](uint32_t x, int step) {  // q * 2^-exponent
            const float up = float(1 << step_power(C::kKeyBits, step));
            if constexpr (kB) {
                const float2 f = from_pair(x);
                return to_pair<true>(f.x * up, f.y * up);
            } else {
                return mul_half2(x, to_pair(up, up));
            }
        };
        mma<kB>(c[0], a.x, b.x, a.z, b.z, plain(v.x, 2 * i), plain(v.y, 2 * i));
        mma<kB>(c[1], a.y, b.y, a.w, b.w, plain(v.z, 2 * i + 1), plain(v.w, 2 * i + 1));
    }
    float score[1][2][C::kThreadRows];
#pragma unroll
    for (int h = 0; h < C::kThreadRows; ++h) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
            const int e = 2 * upper + h;
            score[0][upper][h] = fmaf(c[0][e] + c[1][e], s.factor[h] * kSmallest, -s.reference[h]);
        }
    }
    if (open < C::kWindowTokens) {
#pragma unroll
        for (int h = 0; h < C::kThreadRows; ++h) {
            const int limit = visible(p, info, 2 * column + h);
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                if (row + 8 * upper >= limit) score[0][upper][h] = -INFINITY;
            }
        }
    }
    update_references<C>(s, score);
    uint32_t prob[2];
    probabilities<C, kB>(score[0], prob);
    const uint32_t ones = row < 4 ? 0u : (kB ? 0x3F803F80u : 0x3C003C00u);  // rows of the sum of p, see HeadState
    mma<kB>(s.even, ones, 0, ones, 0, prob[0], prob[1]);
    const uint8_t* const values = slot + C::kWindowHalf + 2 * column * C::kRowBytes + row * 8;
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
        const auto load = [&](int token) {
            return *reinterpret_cast<const uint2*>(values + token * C::kRowBytes + i * 64);
        };
        const uint2 v0 = load(0), v1 = load(1), v2 = load(8), v3 = load(9);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const uint32_t x0 = k ? v0.y : v0.x, x1 = k ? v1.y : v1.x, x2 = k ? v2.y : v2.x, x3 = k ? v3.y : v3.x;
            const uint32_t a0 = __byte_perm(x0, x1, 0x5410), a1 = __byte_perm(x0, x1, 0x7632);
            const uint32_t a2 = __byte_perm(x2, x3, 0x5410), a3 = __byte_perm(x2, x3, 0x7632);
            const int j = 2 * i + k;
            const float unit = float(1 << step_power(C::kValueBits, j)) * kSmallest;
            float d[4] = {0, 0, 0, 0};
            mma<kB>(d, a0, a1, a2, a3, prob[0], prob[1]);
#pragma unroll
            for (int e = 0; e < 4; ++e) s.out[j][e] = fmaf(d[e], unit, s.out[j][e]);
        }
    }
}

}  // namespace kivi::cuda::fast
