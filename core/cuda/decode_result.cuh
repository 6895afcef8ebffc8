// What a warp leaves of a segment: an unnormalised partial result.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_codes.cuh"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_softmax.cuh"

namespace kivi::cuda::fast {

// What is needed beside out[] for the result of a segment in plain numbers.
template <class C>
struct Sums {
    float mins[C::kThreadRows];  // in lane 4 * group + column: value mins of the group * p
    float sum[C::kThreadRows];   // of p
};
// Of accumulators: the thread's row h, elements of rows 0..7 or (upper) rows 8..15. At four rows the columns of the two
// halves of the tokens are added.
template <class C>
__device__ __forceinline__ float pick(const float (&x)[4], int h, int upper) {
    return C::kRows == 4 ? x[2 * upper] + x[2 * upper + 1] : x[2 * upper + h % 2];
}
template <class C>
__device__ __forceinline__ Sums<C> finish_sums(const HeadState<C>& s, int lane) {
    Sums<C> r;
#pragma unroll
    for (int h = 0; h < C::kThreadRows; ++h) {
        const int t = h / C::kTileRows;
        r.mins[h] = pick<C>(s.even[t], h, 0) + pick<C>(s.odd[t], h, 1);
        r.sum[h] = C::kValueGroups > 4 ? pick<C>(s.even[t], h, 1) + pick<C>(s.odd[t], h, 0)
                                       : __shfl_sync(kAll, r.mins[h], 16 + (lane & 3));
    }
    return r;
}
// Channels 32 * c + 4 * (lane / 4) + 0..3 of the thread's row h: removes 2^step_power * 2^-24 and adds the mins. By
// the whole warp.
template <class C>
__device__ __forceinline__ float4 channels(const HeadState<C>& s, const Sums<C>& r, int c, int h, int lane) {
    const float m = __shfl_sync(kAll, r.mins[h], 32 * c / (C::kDim / C::kValueGroups) * 4 + (lane & 3));
    const float k0 = 1.0f / kSmallest / float(1 << C::value_power(2 * c));
    const float k1 = 1.0f / kSmallest / float(1 << C::value_power(2 * c + 1));
    const auto& x = s.out[h / C::kTileRows][2 * c];
    const auto& y = s.out[h / C::kTileRows][2 * c + 1];
    return make_float4(fmaf(pick<C>(x, h, 0), k0, m), fmaf(pick<C>(x, h, 1), k0, m), fmaf(pick<C>(y, h, 0), k1, m),
                       fmaf(pick<C>(y, h, 1), k1, m));
}

// Leaves it in `to`, shared or global memory.
template <class C>
__device__ __forceinline__ void deposit(const HeadState<C>& s, float* to, int rows, int lane) {
    const int row = lane >> 2, column = lane & 3;
    const Sums<C> r = finish_sums<C>(s, lane);
#pragma unroll
    for (int h = 0; h < C::kThreadRows; ++h) {
        const int query = query_row<C>(h, column);
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

// The same of a warp without visits, which may stand between warps of one segment.
template <class C>
__device__ __forceinline__ void deposit_nothing(float* to, int rows, int lane) {
#pragma unroll 1
    for (int i = lane; i < rows * C::kPartialRow; i += 32) {
        to[i] = i % C::kPartialRow == C::kPartialExponent ? -INFINITY : 0.0f;
    }
}

}  // namespace kivi::cuda::fast
