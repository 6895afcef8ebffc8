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

// largest < 2^exponent, so |q * 2^-exponent| < 1 and q * key scale stays below the largest fp16 scale.
__device__ __forceinline__ int exponent_of(float largest, int least) {
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 2));
    return min(max(int(__float_as_uint(largest) >> 23) - 126, least), 90);
}
__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(unsigned(127 + exponent) << 23); }

// The Hadamard of raw queries on the tensor cores, not yet normalised. Sixteen channels of a row are a row of A, so
// that B is signs, and four of the stages are one product; the others are left to sums:
//
//   channel          32 i + 8 column + 4 upper + 2 half + place
//   in the product   column, upper, place
//   sums             half, which are rows lane / 4 and lane / 4 + 8 of A, and i
//
// Of four rows two lanes have the same numbers. One keeps those with even i, the other those with odd i: sums and
// differences of neighbours, which are two products each.
template <class C>
constexpr int kRotated = C::kRows == 4 ? C::kPairs / 2 : C::kPairs;
template <class C>
__device__ __forceinline__ void rotate_queries(const RawQueries<C>& raw, float (&x)[kRotated<C>][8], int lane) {
    constexpr uint32_t kBothSigns = 0x80008000u;
    // Where (column, upper, place) meets itself: -1 to the power of the bits that both have.
    const unsigned column = lane & 3, to = lane >> 2;
    uint32_t signs = C::kBf16 ? 0x3F803F80u : 0x3C003C00u;
    if (__popc(column & to >> 1) & 1) signs ^= kBothSigns;
    signs ^= to << 31;
#pragma unroll
    for (int i = 0; i < kRotated<C>; ++i) {
        float lower[4] = {}, upper[4] = {};
        const auto add = [&](int number, uint32_t sign) {
            uint32_t a[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) a[k] = raw.word(number, k) ^ sign;
            mma<C::kBf16>(lower, a[0], a[1], a[2], a[3], signs, signs);
            mma<C::kBf16>(upper, a[0], a[1], a[2], a[3], signs, signs ^ kBothSigns);
        };
        if constexpr (C::kRows == 4) {
            add(2 * i, 0), add(2 * i + 1, (lane & 4) != 0 ? kBothSigns : 0);
        } else {
            add(i, 0);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) x[i][k] = lower[k], x[i][k + 4] = upper[k];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            if ((k & 2) == 0) butterfly(x[i][k], x[i][k + 2]);
        }
    }
#pragma unroll
    for (int step = 1; step < kRotated<C>; step *= 2) {
#pragma unroll
        for (int i = 0; i < kRotated<C>; ++i) {
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                if ((i & step) == 0) butterfly(x[i][k], x[i + step][k]);
            }
        }
    }
}

// What word k of a vector, k-step 2i + k % 2 and half k / 2 of the depth, is multiplied by beside 2^-exponent.
template <class C>
__device__ __forceinline__ float key_unit(int i, int k) {
    return 1.0f / float(1 << C::key_power(2 * i + k % 2, k / 2));
}

// Rows times `norm` as B operands in `to`: eight numbers of each 32 a lane, or of every other 32 (rotate_queries).
// Returns the exponent.
template <class C, int N>
__device__ __forceinline__ int store_operands(const float (&x)[N][8], float norm, uint32_t (*to)[C::kQueryLanes][4],
                                              int lane) {
    constexpr int kApart = C::kPairs / N;
    const bool odd = kApart == 2 && (lane & 4) != 0;
    float largest[2] = {};  // of two chains
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int k = 0; k < 8; ++k) largest[k % 2] = fmaxf(largest[k % 2], fabsf(x[i][k]));
    }
    largest[0] = fmaxf(largest[0], largest[1]);
    if (kApart == 2) largest[0] = fmaxf(largest[0], __shfl_xor_sync(kAll, largest[0], 4));
    const int exponent = exponent_of(largest[0] * norm, -90);
    const float down = power_of_two(-exponent) * norm;
    uint32_t(*const at)[C::kQueryLanes][4] = to + (odd ? 1 : 0);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const auto rounded = [&](int k) {
            const float by = down * (odd ? key_unit<C>(kApart * i + 1, k) : key_unit<C>(kApart * i, k));
            return to_pair(x[i][2 * k] * by, x[i][2 * k + 1] * by);
        };
        *reinterpret_cast<uint4*>(at[kApart * i][query_lane<C>(lane)]) =
            make_uint4(rounded(0), rounded(2), rounded(1), rounded(3));
    }
    return exponent;
}

// Leaves q * 2^-exponent * 2^-step_power as B operands in `to`; returns 2^(exponent + 24) of the thread's row. A
// function of its own, so that its instructions are in the cache when a later segment begins: fetched behind pages they
// would take microseconds.
template <class C>
__device__ __noinline__ float prepare_queries(RawQueries<C> raw, bool rotated, uint32_t (*to)[C::kQueryLanes][4],
                                              int lane) {
    int exponent;
    if (rotated) {
        float x[kRotated<C>][8];
        rotate_queries<C>(raw, x, lane);
        exponent = store_operands<C>(x, hadamard_norm<C>(), to, lane);
    } else if constexpr (C::kBf16) {
        float x[C::kPairs][8];
#pragma unroll
        for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float2 pair = from_pair<true>(raw.word(i, k));
                x[i][2 * k] = pair.x, x[i][2 * k + 1] = pair.y;
            }
        }
        exponent = store_operands<C>(x, 1.0f, to, lane);
    } else {
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
            const auto scaled = [&](int k) {
                const float by = down * key_unit<C>(i, k);
                return mul_half2(raw.word(i, k), to_pair(by, by));
            };
            *reinterpret_cast<uint4*>(to[i][query_lane<C>(lane)]) =
                make_uint4(scaled(0), scaled(2), scaled(1), scaled(3));
        }
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
