// What a warp leaves of a segment: a partial for a later merge, or the output.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_codes.cuh"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_rows.cuh"
#include "cuda/decode_softmax.cuh"

namespace kivi::cuda::fast {

constexpr float kLn2 = 0.69314718056f;

// What is needed beside out[] for the result of a segment in plain numbers.
template <class C>
struct Sums {
    float mins[C::kThreadRows];  // in lane 4 * group + column: value mins of the group * p
    float sum[C::kThreadRows];   // of p
};
template <class C>
__device__ __forceinline__ Sums<C> finish_sums(const HeadState<C>& s, int lane) {
    Sums<C> r;
#pragma unroll
    for (int h = 0; h < C::kThreadRows; ++h) {
        r.mins[h] = s.even[h] + s.odd[2 + h];
        r.sum[h] = __shfl_sync(kAll, r.mins[h], 16 + (lane & 3));
    }
    return r;
}
// Channels 32 * c + 4 * (lane / 4) + 0..3 of the thread's row h: removes 2^step_power * 2^-24 and adds the mins. By
// the whole warp.
template <class C>
__device__ __forceinline__ float4 channels(const HeadState<C>& s, const Sums<C>& r, int c, int h, int lane) {
    const float m = __shfl_sync(kAll, r.mins[h], 32 * c / (C::kDim / C::kValueGroups) * 4 + (lane & 3));
    const float k0 = 1.0f / kSmallest / float(1 << step_power(C::kValueBits, 2 * c));
    const float k1 = 1.0f / kSmallest / float(1 << step_power(C::kValueBits, 2 * c + 1));
    const auto& x = s.out[2 * c];
    const auto& y = s.out[2 * c + 1];
    return make_float4(fmaf(x[h], k0, m), fmaf(x[2 + h], k0, m), fmaf(y[h], k1, m), fmaf(y[2 + h], k1, m));
}
__device__ __forceinline__ float inverse_of(float sum) { return sum > 0.0f ? 1.0f / sum : 0.0f; }
__device__ __forceinline__ float lse_of(float reference, float sum) { return (reference + log2f(sum)) * kLn2; }
template <class C>
__device__ __forceinline__ uint2 to_output(const float4& v, float factor) {
    return make_uint2(to_pair<C::kBf16>(v.x * factor, v.y * factor), to_pair<C::kBf16>(v.z * factor, v.w * factor));
}
__device__ __forceinline__ void write_lse(const DecodeArgs& p, const QueryRow& row, float lse) {
    if (p.lse != nullptr) p.lse[row.in(p, p.lse_strides)] = lse;
}

// Leaves the (unnormalised) result in `to`, shared or global memory, for a later merge.
template <class C>
__device__ __forceinline__ void deposit(const HeadState<C>& s, float* to, int rows, int lane) {
    const int row = lane >> 2, column = lane & 3;
    const Sums<C> r = finish_sums<C>(s, lane);
#pragma unroll
    for (int h = 0; h < C::kThreadRows; ++h) {
        const int query = 2 * column + h;
        float* const at = to + query * C::kPartialRow;
#pragma unroll
        for (int c = 0; c < C::kPairs; ++c) {
            const float4 v = channels<C>(s, r, c, h, lane);
            if (query < rows) *reinterpret_cast<float4*>(at + 32 * c + 4 * row) = v;
        }
        if (row == 0 && query < rows) {
            *reinterpret_cast<float2*>(at + C::kPartialExponent) =
                make_float2(s.unset >> h & 1 ? -INFINITY : s.reference[h], r.sum[h]);
        }
    }
}

// Writes the final result of a segment that this warp has seen whole.
template <class C>
__device__ __forceinline__ void write_output(const HeadState<C>& s, const DecodeArgs& p, int segment, int lane) {
    const int row = lane >> 2, column = lane & 3;
    const Sums<C> r = finish_sums<C>(s, lane);
    const bool rotated = p.rotated_values;
#pragma unroll
    for (int h = 0; h < C::kThreadRows; ++h) {
        const int query = 2 * column + h;
        const bool used = query < p.query_rows;
        const QueryRow to(p, segment, used ? query : 0);
        float4 v[C::kPairs];
#pragma unroll
        for (int c = 0; c < C::kPairs; ++c) v[c] = channels<C>(s, r, c, h, lane);
        if (rotated) {
#pragma unroll
            for (int c = 0; c < C::kPairs; ++c) {
                butterfly(v[c]);
#pragma unroll
                for (int step = 4; step < 32; step *= 2) across(v[c], step, lane);
            }
#pragma unroll
            for (int step = 1; step < C::kPairs; step *= 2) {
#pragma unroll
                for (int c = 0; c < C::kPairs; ++c) {
                    if ((c & step) != 0) continue;
                    butterfly(v[c].x, v[c + step].x);
                    butterfly(v[c].y, v[c + step].y);
                    butterfly(v[c].z, v[c + step].z);
                    butterfly(v[c].w, v[c + step].w);
                }
            }
        }
        const float factor = inverse_of(r.sum[h]) * (rotated ? hadamard_norm<C>() : 1.0f);
        uint8_t* const out = static_cast<uint8_t*>(p.out) + 2 * to.in(p, p.out_strides) + 8 * row;
#pragma unroll
        for (int c = 0; c < C::kPairs; ++c) {
            if (used) *reinterpret_cast<uint2*>(out + 64 * c) = to_output<C>(v[c], factor);
        }
        if (row == 0 && used) write_lse(p, to, lse_of(s.reference[h], r.sum[h]));
    }
}

}  // namespace kivi::cuda::fast
