// A row of q as operands of tensor cores want it: rotated if the keys are, and scaled so that it fits fp16.
#pragma once
#include "cuda/attend_results.cuh"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_queries.cuh"

namespace kivi::cuda::prompt {

// A row of four lanes, channels 32 i + 8 (lane % 4) + 0..7 of each, to the basis of storage, or back.
template <class C>
__device__ __forceinline__ void rotate_row(float (&x)[C::kPairs][8], int lane) {
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
        for (int step = 1; step < 8; step *= 2) {
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                if ((k & step) == 0) fast::butterfly(x[i][k], x[i][k + step]);
            }
        }
#pragma unroll
        for (int k = 0; k < 8; ++k) x[i][k] = fast::across(fast::across(x[i][k], 1, lane), 2, lane);
    }
#pragma unroll
    for (int step = 1; step < C::kPairs; step *= 2) {
#pragma unroll
        for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                if ((i & step) == 0) fast::butterfly(x[i][k], x[i + step][k]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
        for (int k = 0; k < 8; ++k) x[i][k] *= fast::hadamard_norm<C>();
    }
}

// By four lanes of a warp each: row `index` of the sequence and KV head, of `rows`; a row that does not exist is zeros.
template <class C>
struct QueryRow {
    uint32_t pair[C::kPairs][4];  // channels 32 i + 8 (lane % 4) + 2 k + 0, 1, over `unit`
    float unit;                   // 2^exponent

    __device__ __forceinline__ QueryRow(const AttendArgs& args, const RowArg& row, int head, int index, int rows,
                                        bool rotated, int lane) {
        const bool exists = index < rows;
        const Query query(args, row, Span{}, head, exists ? index : 0);
        const uint4* const from = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(args.q.data) +
                                                                 query.in(args.q, row)) +
                                  lane % 4;
        float x[C::kPairs][8];
#pragma unroll
        for (int i = 0; i < C::kPairs; ++i) {
            const uint4 v = exists ? from[4 * i] : make_uint4(0, 0, 0, 0);
            const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float2 both = fast::from_pair<C::kBf16>(w[k]);
                x[i][2 * k] = both.x, x[i][2 * k + 1] = both.y;
            }
        }
        if (rotated) rotate_row<C>(x, lane);
        float largest = 0;
#pragma unroll
        for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
            for (int k = 0; k < 8; ++k) largest = fmaxf(largest, fabsf(x[i][k]));
        }
        const int exponent = fast::exponent_of(largest, -90);
        const float down = fast::power_of_two(-exponent);
        unit = fast::power_of_two(exponent);
#pragma unroll
        for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
            for (int k = 0; k < 4; ++k) pair[i][k] = fast::to_pair(x[i][2 * k] * down, x[i][2 * k + 1] * down);
        }
    }
};

}  // namespace kivi::cuda::prompt
