// Queries of one KV head: from memory to B operands in shared memory, rotated and scaled.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_codes.cuh"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_rows.cuh"
#include "cuda/decode_shared.cuh"

namespace kivi::cuda::fast {

// A thread's part: of row lane / 4 (of row lane / 8, if there are four), channels 32 i + 8 (lane % 4) + 0..7.
template <class C>
struct RawQueries {
    uint4 v[C::kPairs];
    __device__ __forceinline__ uint32_t word(int i, int k) const {
        return k == 0 ? v[i].x : k == 1 ? v[i].y : k == 2 ? v[i].z : v[i].w;
    }
};
template <class C>
__device__ __forceinline__ RawQueries<C> fetch_queries(const DecodeArgs& p, const SharedStorage<C>& shared, int segment,
                                                       int tile, int lane) {
    const int row = C::kRows == 4 ? lane >> 3 : (lane >> 2) + 8 * tile, column = lane & 3;
    RawQueries<C> raw;
    const bool used = row < static_cast<int>(p.query_rows.by);
    const int64_t place = place_of_row(p, shared.rows[row_of(segment)], p.q_strides, head_of(segment), used ? row : 0);
    const uint4* const from =
        reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.q) + 2 * place + column * 16);
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) raw.v[i] = used ? from[i * 4] : make_uint4(0, 0, 0, 0);
    return raw;
}
// Which of SharedStorage::queries are a lane's.
template <class C>
__device__ __forceinline__ int query_lane(int lane) {
    return C::kRows == 4 ? lane / 8 * 4 + lane % 4 : lane;
}

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

// largest < 2^exponent, so |q * 2^-exponent| < 1 and q * key scale stays below the largest fp16 scale.
__device__ __forceinline__ int exponent_of(float largest, int least) {
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 2));
    return min(max(int(__float_as_uint(largest) >> 23) - 126, least), 90);
}
__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(unsigned(127 + exponent) << 23); }

// Leaves q * 2^-exponent * 2^-step_power as B operands in `to`; returns 2^(exponent + 24) of the thread's row. A function
// of its own, so that its instructions are in the cache when a later segment begins: fetched behind pages they would
// take microseconds.
template <class C>
__device__ __noinline__ float prepare_queries(RawQueries<C> raw, bool rotated, uint32_t (*to)[C::kQueryLanes][4],
                                              int lane) {
    // Word k of a vector: k-step 2i + k % 2, half k / 2 of the depth.
    const auto power_at = [](int i, int k) { return 1.0f / float(1 << C::key_power(2 * i + k % 2, k / 2)); };
    int exponent;
    uint32_t q[C::kPairs][4];
    if (!C::kBf16 && !rotated) {
        uint32_t largest = 0;  // a pair
#pragma unroll
        for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
            for (int k = 0; k < 4; ++k) largest = largest_half2(largest, raw.word(i, k));
        }
        const float2 both = from_pair(largest);
        exponent = exponent_of(fmaxf(both.x, both.y), -14);
        const float down = power_of_two(-exponent);
#pragma unroll
        for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float power = down * power_at(i, k);
                q[i][k] = mul_half2(raw.word(i, k), to_pair(power, power));
            }
        }
    } else {
        float x[C::kPairs][8];
#pragma unroll
        for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float2 pair = from_pair<C::kBf16>(raw.word(i, k));
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
        exponent = exponent_of(largest, -90);
        const float down = power_of_two(-exponent);
#pragma unroll
        for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float power = down * power_at(i, k);
                q[i][k] = to_pair(x[i][2 * k] * power, x[i][2 * k + 1] * power);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
        *reinterpret_cast<uint4*>(to[i][query_lane<C>(lane)]) = make_uint4(q[i][0], q[i][2], q[i][1], q[i][3]);
    }
    __syncwarp();
    return power_of_two(24 + exponent);
}

// The same of all tiles of a segment; `first`: of tile 0, if they are there already.
template <class C>
__device__ __forceinline__ void prepare_segment(const DecodeArgs& p, SharedStorage<C>& shared,
                                                const RawQueries<C>& first, int segment, int warp, int lane) {
#pragma unroll
    for (int t = 0; t < C::kTiles; ++t) {
        const RawQueries<C> raw = t == 0 ? first : fetch_queries<C>(p, shared, segment, t, lane);
        const float unit = prepare_queries<C>(raw, p.rotated_keys, shared.queries[warp] + t * C::kPairs, lane);
        shared.units[warp][C::kRows == 4 ? lane / 8 : 8 * t + lane / 4] = unit;  // the same of all lanes of a row
    }
    __syncwarp();
}

// Both halves of k-steps 2i and 2i + 1.
template <class C>
__device__ __forceinline__ uint4 query_vector(const SharedStorage<C>& shared, int tile, int i, int warp, int lane) {
    return *reinterpret_cast<const uint4*>(shared.queries[warp][tile * C::kPairs + i][query_lane<C>(lane)]);
}

}  // namespace kivi::cuda::fast
