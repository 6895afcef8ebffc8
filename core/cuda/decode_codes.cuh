// Codes as operands of the tensor cores: what fragment_order.h writes, read.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/fragment_order.h"

namespace kivi::cuda::fast {

constexpr float kSmallest = 1.0f / 16777216.0f;  // 2^-24: the unit of codes read as fp16

// A lane's vectors of a block's codes.
template <int BITS, int DIM>
using CodeVector = std::conditional_t<vector_words(BITS, DIM) == 2, uint2, uint4>;
template <int BITS, int DIM>
constexpr int kCodeVectors = 4 * DIM * BITS / (128 * vector_words(BITS, DIM));
template <int BITS, int DIM>
__device__ __forceinline__ CodeVector<BITS, DIM> load_codes(const uint8_t* block, int vector, int lane) {
    using Vector = CodeVector<BITS, DIM>;
    return reinterpret_cast<const Vector*>(block + vector * (32 * sizeof(Vector)))[lane];
}

constexpr int high_shift(int bits) { return bits == 3 ? 9 : 8; }
template <int BITS>
__device__ __forceinline__ uint4 shift_high(uint4 w) {
    constexpr int kBy = high_shift(BITS);
    return make_uint4(w.x >> kBy, w.y >> kBy, w.z >> kBy, w.w >> kBy);
}
template <int BITS>
__device__ __forceinline__ uint2 shift_high(uint2 w) {
    return make_uint2(w.x >> high_shift(BITS), w.y >> high_shift(BITS));
}
// The fp16 pair of codes in `field` of a word; `shifted` is word >> high_shift.
template <int BITS>
__device__ __forceinline__ uint32_t code_pair(uint32_t word, uint32_t shifted, int field) {
    constexpr int kInPlace = BITS == 3 ? 3 : 8 / BITS;
    constexpr uint32_t kMask = ((1u << BITS) - 1) * 0x00010001u;
    return (field < kInPlace ? word : shifted) & (kMask << (BITS * (field % kInPlace)));
}
// The pair in the spare bits of three 3-bit words, at bits 6 to 8.
__device__ __forceinline__ uint32_t spare_pair(uint32_t shifted0, uint32_t word1, uint32_t word2) {
    return (shifted0 & 0x00400040u) | (word1 >> 8 & 0x00800080u) | (word2 >> 7 & 0x01000100u);
}
// Operand `number` of a block whose vectors are w; x: those shifted.
template <int BITS, int VECTORS>
__device__ __forceinline__ uint4 operand(const uint4 (&w)[VECTORS], const uint4 (&x)[VECTORS], int number) {
    if constexpr (BITS == 3) {
        if (is_spare(BITS, number)) {
            const int v = first_vector(BITS, number);
            return make_uint4(spare_pair(x[v].x, w[v + 1].x, w[v + 2].x), spare_pair(x[v].y, w[v + 1].y, w[v + 2].y),
                              spare_pair(x[v].z, w[v + 1].z, w[v + 2].z), spare_pair(x[v].w, w[v + 1].w, w[v + 2].w));
        }
    }
    const int v = vector_of(BITS, number), f = field_of(BITS, number);
    return make_uint4(code_pair<BITS>(w[v].x, x[v].x, f), code_pair<BITS>(w[v].y, x[v].y, f),
                      code_pair<BITS>(w[v].z, x[v].z, f), code_pair<BITS>(w[v].w, x[v].w, f));
}
// Where vectors have two words.
template <int BITS>
__device__ __forceinline__ uint2 half_operand(const uint2 (&w)[3], const uint2 (&x)[3], int number) {
    if (is_spare(BITS, number)) {
        return make_uint2(spare_pair(x[0].x, w[1].x, w[2].x), spare_pair(x[0].y, w[1].y, w[2].y));
    }
    const int v = vector_of(BITS, number), f = field_of(BITS, number);
    return make_uint2(code_pair<BITS>(w[v].x, x[v].x, f), code_pair<BITS>(w[v].y, x[v].y, f));
}
template <int BITS>
__device__ __forceinline__ uint4 operand(const uint2 (&w)[3], const uint2 (&x)[3], int number) {
    const uint2 first = half_operand<BITS>(w, x, 2 * number), second = half_operand<BITS>(w, x, 2 * number + 1);
    return make_uint4(first.x, first.y, second.x, second.y);
}

}  // namespace kivi::cuda::fast
