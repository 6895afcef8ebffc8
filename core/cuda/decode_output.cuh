// One query row on its way out: added up from partial results, then rotated back, normalised and written.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_args.h"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_line.cuh"
#include "cuda/decode_rows.cuh"
#include "cuda/decode_softmax.cuh"

namespace kivi::cuda::fast {

constexpr float kLn2 = 0.69314718056f;
constexpr float kNoExponent = -1e30f;  // instead of -inf, for rows that see nothing

// Every lane holds four channels of each 128 (at dim 64, lanes 16.. the same as lanes 0..); all lanes know exponent
// and sum.
template <class C>
struct Row {
    float reference = kNoExponent, sum = 0.0f;
    float4 value[C::kRowVectors] = {};
    __device__ __forceinline__ void add(float weight, const float4 (&v)[C::kRowVectors]) {
#pragma unroll
        for (int i = 0; i < C::kRowVectors; ++i) {
            value[i].x = fmaf(weight, v[i].x, value[i].x);
            value[i].y = fmaf(weight, v[i].y, value[i].y);
            value[i].z = fmaf(weight, v[i].z, value[i].z);
            value[i].w = fmaf(weight, v[i].w, value[i].w);
        }
    }
    // Takes the exponents and sums of up to 32 parts, one a lane ((-inf, 0): none), and returns the lane's weight, with
    // which its part's values are to be added.
    __device__ __forceinline__ float weigh(float2 part) {
        const float largest = largest_of_warp(fmaxf(part.x, reference));
        const float old = exp2_fast(reference - largest), weight = exp2_fast(part.x - largest);
        float more = weight * part.y;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) more += __shfl_xor_sync(kAll, more, step);
        sum = fmaf(sum, old, more);
        reference = largest;
#pragma unroll
        for (int i = 0; i < C::kRowVectors; ++i) {
            value[i] = make_float4(value[i].x * old, value[i].y * old, value[i].z * old, value[i].w * old);
        }
        return weight;
    }
};

// The lane's channels of vector i.
template <class C>
__device__ __forceinline__ int lane_channel(int lane, int i) {
    return 128 * i + 4 * (lane % (C::kDim / C::kRowVectors / 4));
}
template <class C>
__device__ __forceinline__ bool lane_writes(int lane) {
    return lane < C::kDim / C::kRowVectors / 4;
}

// Not yet normalised.
template <class C>
__device__ __forceinline__ void hadamard(float4 (&x)[C::kRowVectors], int lane) {
#pragma unroll
    for (int i = 0; i < C::kRowVectors; ++i) {
        butterfly(x[i]);
#pragma unroll
        for (int step = 1; step < C::kDim / C::kRowVectors / 4; step *= 2) across(x[i], step, lane);
    }
    if constexpr (C::kRowVectors == 2) butterfly(x[0], x[1]);
}

// A function of its own: it is called from several places, and instructions that run once come from far away.
template <class C>
__device__ __noinline__ void finish_row(Row<C> r, bool rotated, float sink, uint16_t* out, float* lse, int lane) {
    // The sink is one more term of the denominator.
    const float less = exp2_fast(fminf(r.reference - sink, 0.0f)), more = exp2_fast(fminf(sink - r.reference, 0.0f));
    float factor = r.sum > 0.0f ? less / fmaf(r.sum, less, more) : 0.0f;
    if (rotated) {
        hadamard<C>(r.value, lane);
        factor *= hadamard_norm<C>();
    }
#pragma unroll
    for (int i = 0; i < C::kRowVectors; ++i) {
        const float4& v = r.value[i];
        if (lane_writes<C>(lane)) {
            *reinterpret_cast<uint2*>(out + lane_channel<C>(lane, i)) = make_uint2(
                to_pair<C::kBf16>(v.x * factor, v.y * factor), to_pair<C::kBf16>(v.z * factor, v.w * factor));
        }
    }
    if (lane == 0 && lse != nullptr) *lse = (r.reference + log2f(r.sum)) * kLn2;
}

// The row with those of the call's keys and values that its query sees: more terms, whose scores are in the caller's
// basis and whose values come into that of the others. A function of its own (as finish_row).
template <class C>
__device__ __noinline__ Row<C> with_own_tokens(const DecodeArgs& p, const BatchRow& at, int head, int row, int lane,
                                               Row<C> r) {
    const auto channels = [&](const void* from, int64_t place, int i) {
        const uint2 pairs = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(from) + place +
                                                            lane_channel<C>(lane, i));
        const float2 low = from_pair<C::kBf16>(pairs.x), high = from_pair<C::kBf16>(pairs.y);
        return make_float4(low.x, low.y, high.x, high.y);
    };
    const int64_t of_query = place_of_row(p, at, p.q_strides, head, row);
    int64_t of_key = at.origin(p.own_key_strides) + head * p.own_key_strides.head;
    int64_t of_value = at.origin(p.own_value_strides) + head * p.own_value_strides.head;
    float4 q[C::kRowVectors];
#pragma unroll
    for (int i = 0; i < C::kRowVectors; ++i) q[i] = channels(p.q, of_query, i);
#pragma unroll 1
    for (int token = query_token(p, row); token >= 0; --token) {  // so many tokens before the query's
        float4 value[C::kRowVectors];
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < C::kRowVectors; ++i) {
            const float4 k = channels(p.own_keys, of_key, i);
            value[i] = channels(p.own_values, of_value, i);
            score = fmaf(q[i].x, k.x, fmaf(q[i].y, k.y, fmaf(q[i].z, k.z, fmaf(q[i].w, k.w, score))));
        }
#pragma unroll
        for (int step = C::kDim / C::kRowVectors / 8; step > 0; step /= 2) score += __shfl_xor_sync(kAll, score, step);
        score *= p.scale_log2;
        score = fmaf(score, 0.0f, p.cap > 0.0f ? capped(p, score) : score);  // a non-finite key must not hide
        if (p.rotated_values) {
            hadamard<C>(value, lane);
#pragma unroll
            for (int i = 0; i < C::kRowVectors; ++i) {
                constexpr float kNorm = hadamard_norm<C>();
                value[i] = make_float4(value[i].x * kNorm, value[i].y * kNorm, value[i].z * kNorm, value[i].w * kNorm);
            }
        }
        const float weight = r.weigh(lane == 0 ? make_float2(score, 1.0f) : make_float2(-INFINITY, 0.0f));
        r.add(__shfl_sync(kAll, weight, 0), value);
        of_key += p.own_key_strides.token, of_value += p.own_value_strides.token;
    }
    return r;
}

template <class C>
__device__ __forceinline__ void write_row(const DecodeArgs& p, const BatchRow& at, int head, int row, int lane,
                                          Row<C> r) {
    if (p.own) r = with_own_tokens<C>(p, at, head, row, lane, r);
    const float sink = p.learned_sinks != nullptr ? p.learned_sinks[query_head(p, head, row)] * kLog2E : -INFINITY;
    finish_row<C>(r, p.rotated_values, sink,
                  static_cast<uint16_t*>(p.out) + place_of_row(p, at, p.out_strides, head, row),
                  p.lse != nullptr ? p.lse + place_of_row(p, at, p.lse_strides, head, row) : nullptr, lane);
}

}  // namespace kivi::cuda::fast
