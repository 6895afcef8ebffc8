// One query row on its way out: added up from partial results, then rotated back, normalised and written.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_args.h"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_line.cuh"
#include "cuda/decode_rows.cuh"
#include "cuda/decode_shared.cuh"
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
        scale(old);
        return weight;
    }
    __device__ __forceinline__ void scale(float by) {
#pragma unroll
        for (int i = 0; i < C::kRowVectors; ++i) {
            value[i] = make_float4(value[i].x * by, value[i].y * by, value[i].z * by, value[i].w * by);
        }
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

// A row's values times `norm` over its sum, and its LSE.
template <class C>
__device__ __forceinline__ void put_row(const Row<C>& r, float norm, float sink, uint16_t* out, float* lse, int lane) {
    // The sink is one more term of the denominator.
    const float less = exp2_fast(fminf(r.reference - sink, 0.0f)), more = exp2_fast(fminf(sink - r.reference, 0.0f));
    const float factor = r.sum > 0.0f ? less / fmaf(r.sum, less, more) * norm : 0.0f;
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

// Functions of their own: they are called from several places, and instructions that run once come from far away.
template <class C>
__device__ __noinline__ void finish_row(Row<C> r, bool rotated, float sink, uint16_t* out, float* lse, int lane) {
    if (rotated) hadamard<C>(r.value, lane);
    put_row<C>(r, rotated ? hadamard_norm<C>() : 1.0f, sink, out, lse, lane);
}
// With those of the call's keys and values that the row's query sees: one term more each, in the caller's basis.
template <class C>
__device__ __noinline__ void finish_row_with_own(const SharedStorage<C>& shared, int batch_row, int head, int row,
                                                 Row<C> r, int lane) {
    using Channels = uint2[C::kRowVectors];  // four of each 128
    const DecodeCall& call = shared.call;
    const BatchRow& at = shared.rows[batch_row];
    const auto load = [&](Channels& to, const void* data, int64_t place) {
        const uint16_t* const from = static_cast<const uint16_t*>(data) + place;
#pragma unroll
        for (int i = 0; i < C::kRowVectors; ++i) {
            to[i] = __ldcg(reinterpret_cast<const uint2*>(from + lane_channel<C>(lane, i)));
        }
    };
    const auto floats = [](uint2 pairs) {
        const float2 low = from_pair<C::kBf16>(pairs.x), high = from_pair<C::kBf16>(pairs.y);
        return make_float4(low.x, low.y, high.x, high.y);
    };
    int64_t of_key = at.origin(call.k) + head * call.k.head_stride;
    int64_t of_value = at.origin(call.v) + head * call.v.head_stride;
    Channels q, k, v;
    load(q, call.q, place_of_row(call, at, call.q_strides, head, row));
    load(k, call.k.data, of_key);
    load(v, call.v.data, of_value);
    if (call.rotated_values) {
        hadamard<C>(r.value, lane);
        r.scale(hadamard_norm<C>());
    }
#pragma unroll 1
    for (int token = query_token(call, row);; --token) {  // so many tokens before the query's
        float score = 0.0f;
        float4 value[C::kRowVectors];
#pragma unroll
        for (int i = 0; i < C::kRowVectors; ++i) {
            const float4 x = floats(q[i]), y = floats(k[i]);
            score = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, score))));
            value[i] = floats(v[i]);
        }
#pragma unroll
        for (int step = C::kDim / C::kRowVectors / 8; step > 0; step /= 2) score += __shfl_xor_sync(kAll, score, step);
        score *= call.scale_log2;
        score = fmaf(score, 0.0f, call.cap > 0.0f ? capped(call, score) : score);  // a non-finite key must not hide
        const float largest = fmaxf(r.reference, score);
        const float old = exp2_fast(r.reference - largest), weight = exp2_fast(score - largest);
        r.reference = largest;
        r.sum = fmaf(r.sum, old, weight);
        r.scale(old);
        r.add(weight, value);
        if (token == 0) break;
        load(k, call.k.data, of_key += call.k.token_stride);
        load(v, call.v.data, of_value += call.v.token_stride);
    }
    const int query = query_head(call, head, row);
    put_row<C>(r, 1.0f, call.learned_sinks != nullptr ? call.learned_sinks[query] * kLog2E : -INFINITY,
               static_cast<uint16_t*>(call.out) + place_of_row(call, at, call.out_strides, head, row),
               call.lse != nullptr ? call.lse + place_of_row(call, at, call.lse_strides, head, row) : nullptr, lane);
}

template <class C>
__device__ __forceinline__ void write_row(const DecodeArgs& p, const SharedStorage<C>& shared, int batch_row, int head,
                                          int row, int lane, const Row<C>& r) {
    if (p.own) return finish_row_with_own<C>(shared, batch_row, head, row, r, lane);
    const BatchRow& at = shared.rows[batch_row];
    const float sink = p.learned_sinks != nullptr ? p.learned_sinks[query_head(p, head, row)] * kLog2E : -INFINITY;
    finish_row<C>(r, p.rotated_values, sink,
                  static_cast<uint16_t*>(p.out) + place_of_row(p, at, p.out_strides, head, row),
                  p.lse != nullptr ? p.lse + place_of_row(p, at, p.lse_strides, head, row) : nullptr, lane);
}

}  // namespace kivi::cuda::fast
