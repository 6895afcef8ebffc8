// Queries of one KV head: from memory to B operands in shared memory, rotated and scaled.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_codes.cuh"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_rows.cuh"
#include "cuda/decode_shared.cuh"

namespace kivi::cuda::fast {

template <class C>
struct RawQueries {
    uint4 v[C::kPairs];
};
template <class C>
__device__ __forceinline__ RawQueries<C> fetch_queries(const DecodeArgs& p, int segment, int lane) {
    const int row = lane >> 2, column = lane & 3;
    RawQueries<C> raw;
    const bool used = row < p.query_rows;
    const QueryRow at(p, segment, used ? row : 0);
    const uint4* const from = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.q) +
                                                             2 * at.in(p, p.q_strides) + column * 16);
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) raw.v[i] = used ? from[i * 4] : make_uint4(0, 0, 0, 0);
    return raw;
}

// Channels 32 i + 8 column + 0..7 of row lane / 4.
template <class C>
__device__ __forceinline__ void rotate(float (&x)[C::kPairs][8], int lane) {
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
        for (int step = 1; step < 8; step *= 2) {
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                if ((k & step) == 0) butterfly(x[i][k], x[i][k + step]);
            }
        }
#pragma unroll
        for (int k = 0; k < 8; ++k) x[i][k] = across(across(x[i][k], 1, lane), 2, lane);
    }
#pragma unroll
    for (int step = 1; step < C::kPairs; step *= 2) {
#pragma unroll
        for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                if ((i & step) == 0) butterfly(x[i][k], x[i + step][k]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
        for (int k = 0; k < 8; ++k) x[i][k] *= hadamard_norm<C>();
    }
}

// Leaves q * 2^-exponent * 2^-step_power as B operands in `to`; returns 2^(exponent + 24), of row lane / 4. A function
// of its own, so that its instructions are in the cache when a later segment begins: fetched behind pages they would
// take microseconds.
template <class C>
__device__ __noinline__ float prepare_queries(RawQueries<C> raw, bool rotated, uint32_t (*to)[32][4], int lane) {
    float x[C::kPairs][8];
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
        const uint32_t w[4] = {raw.v[i].x, raw.v[i].y, raw.v[i].z, raw.v[i].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float2 pair = from_pair<C::kBf16>(w[k]);
            x[i][2 * k] = pair.x, x[i][2 * k + 1] = pair.y;
        }
    }
    if (rotated) rotate<C>(x, lane);
    float largest = 0;
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
        for (int k = 0; k < 8; ++k) largest = fmaxf(largest, fabsf(x[i][k]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 2));
    // largest < 2^exponent, so |q * 2^-exponent| < 1 and q * key scale stays below the largest fp16 scale.
    const int exponent = min(max(int(__float_as_uint(largest) >> 23) - 126, -90), 90);
    const float down = __uint_as_float(unsigned(127 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
        uint32_t q[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {  // word k: k-step 2i + k % 2, half k / 2 of the depth
            const float power = down / float(1 << step_power(C::kKeyBits, 2 * i + k % 2));
            q[k % 2 * 2 + k / 2] = to_pair(x[i][2 * k] * power, x[i][2 * k + 1] * power);
        }
        *reinterpret_cast<uint4*>(to[i][lane]) = make_uint4(q[0], q[1], q[2], q[3]);
    }
    __syncwarp();
    return __uint_as_float(unsigned(127 + 24 + exponent) << 23);
}

// Both halves of k-steps 2i and 2i + 1.
template <class C>
__device__ __forceinline__ uint4 query_vector(const SharedStorage<C>& shared, int i, int warp, int lane) {
    return *reinterpret_cast<const uint4*>(shared.queries[warp][i][lane]);
}

}  // namespace kivi::cuda::fast
