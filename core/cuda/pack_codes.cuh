// Codes without a division and without a branch, and their places in the words of the fragment order.
//
// A code is the nearest integer, ties to even, of the fp32 quotient (y - min) / scale. Scales are f16, so a tie
// (k + 1/2) * scale has at most 15 significant bits and is an fp32 number. A difference y - min that is not equal to it
// is an fp32 number beside it, at least 2^-24 of itself away: its quotient stays on its side of the tie when rounded to
// fp32, and so does anything nearer to the quotient than that. The reciprocal as a sum of two fp32 numbers gives it
// within 2^-46, and a tie exactly.
#pragma once
#include "cuda/fragment_order.h"
#include "cuda/pack_math.cuh"
#include "cuda/warp_row.cuh"

namespace kivi::cuda {

__host__ __device__ constexpr float power_of_two(int exponent) {
    float x = 1;
    for (; exponent > 0; --exponent) x *= 2;
    for (; exponent < 0; ++exponent) x /= 2;
    return x;
}

// Parameters of a group as codes are made with: high + low is 1 / scale in units of 2^-BITS; 0 where every code is 0.
struct Coding {
    float min = 0, high = 0, low = 0;
};
template <int BITS>
__device__ __forceinline__ Coding coding_of(const GroupParams& params) {
    Coding coding;
    if (params.scale > 0.0f) {
        const float inverse = __frcp_rn(params.scale);
        coding.min = params.min;
        coding.high = inverse * power_of_two(-BITS);
        coding.low = __fmaf_rn(-params.scale, inverse, 1.0f) * coding.high;
    }
    return coding;
}

// The code of y in the lowest bits of kCodeOne. A number from 0 to 1 in units of 2^-BITS plus 2^(23 - BITS) is rounded
// to such units. NaN (of damaged groups) gives 0.
template <int BITS>
constexpr uint32_t kCodeOne = static_cast<uint32_t>(127 + 23 - BITS) << 23;
template <int BITS>
__device__ __forceinline__ uint32_t code_of_distance(float distance, float high, float low) {
    const float steps = fma_clamped(distance, high, distance * low);
    return __float_as_uint(fminf(steps, 1.0f - power_of_two(-BITS)) + power_of_two(23 - BITS));
}
template <int BITS>
__device__ __forceinline__ uint32_t code_of(float y, float min, float high, float low) {
    return code_of_distance<BITS>(y - min, high, low);
}

// The vectors of a lane for one block of 32 tokens (fragment_order.h), made by addition.
template <int BITS, int DIM>
struct LaneVectors {
    static constexpr int kVectors = 4 * DIM * BITS / kVectorBytes;
    uint32_t word[kVectors][4];

    // Codes come with `above` added to them, which is taken away again for every field.
    __device__ __forceinline__ explicit LaneVectors(uint32_t above) {
        uint32_t ones = 0;
#pragma unroll
        for (int field = 0; field < fields_of(BITS); ++field) {
            ones += above << field_bit(BITS, field);
            ones += above << (field_bit(BITS, field) + 16);
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v) word[v][0] = word[v][1] = word[v][2] = word[v][3] = 0u - ones;
    }

    // `number`, `at` and `half` are constants: operand, register and half word.
    __device__ __forceinline__ void add(int number, int at, int half, uint32_t code) {
        if (is_spare(BITS, number)) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) word[v][at] += (code >> v & 1) << (kSpareBit + 16 * half);
        } else {
            word[vector_of(BITS, number)][at] += code << (field_bit(BITS, field_of(BITS, number)) + 16 * half);
        }
    }

    // Of key i of a lane, channel 32 * run + 8 * column + c (pack_rows.cuh).
    __device__ __forceinline__ void add_key(int i, int c, int run, uint32_t code) {
        add((i & 1) * (DIM / 16) + 2 * run + c / 2 % 2, (i >> 1) + 2 * (c / 4), c % 2, code);
    }

    __device__ __forceinline__ void store(uint8_t* to, int lane) const {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            reinterpret_cast<uint4*>(to + v * kVectorBytes)[lane] =
                make_uint4(word[v][0], word[v][1], word[v][2], word[v][3]);
        }
    }
};

// Reduces x[0 .. N-1] over the eight lanes that differ in lane / 4, and leaves lane 4 * row + column in x[0 ..] the
// elements row * N / 8 + 0 .. N/8 - 1; where N is 4, element row / 2. COUNT is N at first.
template <int COUNT, int STEP = 16, int N, class Op>
__device__ __forceinline__ void reduce_to_shares(uint32_t (&x)[N], int lane, const Op& op) {
    constexpr int kKept = COUNT > 1 ? COUNT / 2 : 1;
    const bool upper = (lane & STEP) != 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        const uint32_t a = x[i], b = x[i + COUNT - kKept];
        x[i] = op(upper ? b : a, __shfl_xor_sync(kAllLanes, upper ? a : b, STEP));
    }
    if constexpr (STEP > 4) reduce_to_shares<kKept, STEP / 2>(x, lane, op);
}

}  // namespace kivi::cuda
