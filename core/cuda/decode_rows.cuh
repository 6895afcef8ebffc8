// Rows of q and out: where they lie, and the Hadamard transform of four channels a lane.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_args.h"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_line.cuh"

namespace kivi::cuda::fast {

// Query row `r` of a KV head is of this query token and query head.
__device__ __forceinline__ int query_token(const DecodeCall& p, int r) {
    return p.tokens == 1 ? 0 : p.group.quotient(r);
}
__device__ __forceinline__ int query_head(const DecodeCall& p, int head, int r) {
    return (head - query_token(p, r)) * static_cast<int>(p.group.by) + r;
}
// Where it lies: elements from the tensor's beginning.
__device__ __forceinline__ int64_t place_of_row(const DecodeCall& p, const BatchRow& row,
                                                const Strides& strides, int head, int r) {
    return row.origin(strides) + query_token(p, r) * strides.token + query_head(p, head, r) * strides.head;
}

__device__ __forceinline__ void butterfly(float& a, float& b) {
    const float left = a, right = b;
    a = left + right;
    b = left - right;
}
__device__ __forceinline__ void butterfly(float4& x) {
    butterfly(x.x, x.y);
    butterfly(x.z, x.w);
    butterfly(x.x, x.z);
    butterfly(x.y, x.w);
}
__device__ __forceinline__ void butterfly(float4& a, float4& b) {
    butterfly(a.x, b.x);
    butterfly(a.y, b.y);
    butterfly(a.z, b.z);
    butterfly(a.w, b.w);
}
__device__ __forceinline__ float across(float x, int step, int lane) {
    return fmaf(x, (lane & step) != 0 ? -1.0f : 1.0f, __shfl_xor_sync(kAll, x, step));
}
// All four on their way before the first is used: in functions of their own the compiler keeps this order.
__device__ __forceinline__ void across(float4& x, int step, int lane) {
    const auto other = [&](float mine) { return __shfl_xor_sync(kAll, mine, step); };
    const float4 y = make_float4(other(x.x), other(x.y), other(x.z), other(x.w));
    const float sign = (lane & step) != 0 ? -1.0f : 1.0f;
    x = make_float4(fmaf(x.x, sign, y.x), fmaf(x.y, sign, y.y), fmaf(x.z, sign, y.z), fmaf(x.w, sign, y.w));
}
template <class C>
__host__ __device__ constexpr float hadamard_norm() {
    return C::kDim == 256 ? 0.0625f : C::kDim == 128 ? 0.08838834764f : 0.125f;
}

}  // namespace kivi::cuda::fast
