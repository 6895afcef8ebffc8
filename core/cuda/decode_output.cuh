// One query row on its way out: added up from partial results, then rotated back, normalised and written.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_args.h"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_line.cuh"
#include "cuda/decode_rows.cuh"

namespace kivi::cuda::fast {

constexpr float kLn2 = 0.69314718056f, kLog2E = 1.4426950408889634f;
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

// A function of its own: it is called from several places, and instructions that run once come from far away.
template <class C>
__device__ __noinline__ void finish_row(Row<C> r, bool rotated, float sink, uint16_t* out, float* lse, int lane) {
    // The sink is one more term of the denominator.
    const float less = exp2_fast(fminf(r.reference - sink, 0.0f)), more = exp2_fast(fminf(sink - r.reference, 0.0f));
    float factor = r.sum > 0.0f ? less / fmaf(r.sum, less, more) : 0.0f;
    if (rotated) {
#pragma unroll
        for (int i = 0; i < C::kRowVectors; ++i) {
            butterfly(r.value[i]);
#pragma unroll
            for (int step = 1; step < C::kDim / C::kRowVectors / 4; step *= 2) across(r.value[i], step, lane);
        }
        if constexpr (C::kRowVectors == 2) butterfly(r.value[0], r.value[1]);
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
template <class C>
__device__ __forceinline__ void write_row(const DecodeArgs& p, const BatchRow& at, int head, int row, int lane,
                                          const Row<C>& r) {
    const float sink = p.learned_sinks != nullptr ? p.learned_sinks[query_head(p, head, row)] * kLog2E : -INFINITY;
    finish_row<C>(r, p.rotated_values, sink,
                  static_cast<uint16_t*>(p.out) + place_of_row(p, at, p.out_strides, head, row),
                  p.lse != nullptr ? p.lse + place_of_row(p, at, p.lse_strides, head, row) : nullptr, lane);
}

}  // namespace kivi::cuda::fast
