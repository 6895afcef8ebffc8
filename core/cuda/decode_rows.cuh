// Rows of q and out: where they lie, and the Hadamard transform of four channels a lane.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_args.h"
#include "cuda/decode_instructions.cuh"

namespace kivi::cuda::fast {

// Where query row r of a segment lies.
struct QueryRow {
    int row;  // of the batch
    int token, head;
    __device__ QueryRow(const DecodeArgs& p, int segment, int r) {
        row = divide(segment, p.kv_heads);
        token = p.tokens == 1 ? 0 : divide(r, p.group);
        head = (segment - row * p.kv_heads) * p.group + r - token * p.group;
    }
    __device__ int64_t in(const DecodeArgs& p, const Strides& strides) const {
        int64_t origin;
        if (!p.on_device) {
            origin = strides.ragged ? p.offset[row] * strides.token : p.index[row] * strides.row;
        } else {
            const int position = p.first_row + row;
            int64_t offset = int64_t{position} * p.tokens;
            if (p.offsets != nullptr) {
                offset = p.offsets[position];
            } else if (p.counts != nullptr && strides.ragged) {
                offset = 0;
                for (int i = 0; i < position; ++i) offset += p.counts[i];
            }
            origin = strides.ragged ? offset * strides.token : position * strides.row;
        }
        return origin + token * strides.token + head * strides.head;
    }
};

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
__device__ __forceinline__ float across(float x, int step, int lane) {
    const float other = __shfl_xor_sync(kAll, x, step);
    return (lane & step) != 0 ? other - x : x + other;
}
__device__ __forceinline__ void across(float4& x, int step, int lane) {
    x.x = across(x.x, step, lane);
    x.y = across(x.y, step, lane);
    x.z = across(x.z, step, lane);
    x.w = across(x.w, step, lane);
}
template <class C>
__device__ __forceinline__ float hadamard_norm() {
    return C::kDim == 128 ? 0.08838834764f : 0.125f;
}

}  // namespace kivi::cuda::fast
