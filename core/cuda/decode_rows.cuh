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
__device__ __forceinline__ void across(float4& x, int step, int lane) {
    x.x = across(x.x, step, lane);
    x.y = across(x.y, step, lane);
    x.z = across(x.z, step, lane);
    x.w = across(x.w, step, lane);
}
template <class C>
__host__ __device__ constexpr float hadamard_norm() {
    return C::kDim == 256 ? 0.0625f : C::kDim == 128 ? 0.08838834764f : 0.125f;
}

}  // namespace kivi::cuda::fast
