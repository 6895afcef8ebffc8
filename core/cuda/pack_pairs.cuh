// Arithmetic of the packers on pairs: two f16, or two bf16, in a word, the lower half first.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "format/quantize.h"

namespace kivi::cuda {

template <bool BF16>
struct Pairs;

template <>
struct Pairs<false> {
    static constexpr int32_t kType = KIVI_F16;
    static __device__ __forceinline__ float low(uint32_t x) { return f16_to_f32(static_cast<uint16_t>(x)); }
    static __device__ __forceinline__ float high(uint32_t x) { return f16_to_f32(static_cast<uint16_t>(x >> 16)); }
    // NaN where either is.
    static __device__ __forceinline__ uint32_t least(uint32_t a, uint32_t b) {
        uint32_t r;
        asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
    }
    static __device__ __forceinline__ uint32_t most(uint32_t a, uint32_t b) {
        uint32_t r;
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
    }
    static __device__ __forceinline__ uint32_t magnitudes(uint32_t x) {
        uint32_t r;
        asm("abs.f16x2 %0, %1;" : "=r"(r) : "r"(x));
        return r;
    }
    static __device__ __forceinline__ uint32_t without_minus_zero(uint32_t x) {
        uint32_t r;
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(0));
        return r;
    }
    static __device__ __forceinline__ uint32_t of(float low, float high) {
        uint32_t r;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
        return r;
    }
    // Rounded upwards, in the lower half.
    static __device__ __forceinline__ uint32_t ceil(float x) {
        uint16_t r;
        asm("cvt.rp.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
        return r;
    }
};

template <>
struct Pairs<true> {
    static constexpr int32_t kType = KIVI_BF16;
    static __device__ __forceinline__ float low(uint32_t x) { return __uint_as_float(x << 16); }
    static __device__ __forceinline__ float high(uint32_t x) { return __uint_as_float(x & 0xFFFF0000u); }
    static __device__ __forceinline__ uint32_t least(uint32_t a, uint32_t b) {
        uint32_t r;
        asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
    }
    static __device__ __forceinline__ uint32_t most(uint32_t a, uint32_t b) {
        uint32_t r;
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
    }
    static __device__ __forceinline__ uint32_t magnitudes(uint32_t x) {
        uint32_t r;
        asm("abs.bf16x2 %0, %1;" : "=r"(r) : "r"(x));
        return r;
    }
    static __device__ __forceinline__ uint32_t of(float low, float high) {
        uint32_t r;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
        return r;
    }
    static __device__ __forceinline__ uint32_t ceil(float x) {
        const uint32_t bits = __float_as_uint(x);
        return (bits + (x > 0.0f ? 0xFFFFu : 0u)) >> 16;
    }
};

// Whether a pair of magnitudes are finite, and of bf16 below 2^112.
template <class P>
__device__ __forceinline__ bool both_plain(uint32_t magnitudes) {
    constexpr uint32_t kToSign = (0x8000u - (P::kType == KIVI_F16 ? 0x7C00u : 0x7780u)) * 0x10001u;
    return ((magnitudes + kToSign) & 0x80008000u) == 0;
}

// a * b + c, rounded once, and clamped to 0 .. 1; NaN becomes 0.
__device__ __forceinline__ float fma_clamped(float a, float b, float c) {
    float r;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}

}  // namespace kivi::cuda
