// Conversions between f32 and the 16-bit floating-point types, ties to even. On the processor in integer
// arithmetic: they depend on no rounding mode, no flush-to-zero setting and no instruction set. On a GPU by its
// own instructions, which have no such settings.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include "format/host_device.h"
#include "kivi/kivi.h"

namespace kivi {

KIVI_HOST_DEVICE inline uint32_t bits_of(float x) {
    uint32_t u;
    std::memcpy(&u, &x, sizeof u);
    return u;
}
KIVI_HOST_DEVICE inline float float_of(uint32_t u) {
    float x;
    std::memcpy(&x, &u, sizeof x);
    return x;
}

// The one NaN of each type. Conversions to a type write it for every NaN, so that stored bytes do not depend
// on payloads and signs that processors choose differently.
constexpr uint16_t kNanF16 = 0x7E00;
constexpr uint16_t kNanBf16 = 0x7FC0;
constexpr uint32_t kNanF32 = 0x7FC00000;

// u shifted right by `shift` (1..31), rounded to nearest, ties to even.
KIVI_HOST_DEVICE inline uint32_t shift_round(uint32_t u, int shift) {
    const uint32_t kept = u >> shift;
    const uint32_t rest = u & ((1u << shift) - 1);
    const uint32_t half = 1u << (shift - 1);
    return kept + (rest > half || (rest == half && (kept & 1u)) ? 1u : 0u);
}

KIVI_HOST_DEVICE inline float f16_to_f32(uint16_t h) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(h));
#else
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    uint32_t exponent = (h >> 10) & 0x1Fu;
    uint32_t mantissa = h & 0x3FFu;
    if (exponent == 0x1F) return float_of(sign | 0x7F800000u | (mantissa << 13));
    if (exponent == 0) {
        if (mantissa == 0) return float_of(sign);
        exponent = 1;  // subnormal: shift the leading one into its place
        while ((mantissa & 0x400u) == 0) {
            mantissa <<= 1;
            --exponent;
        }
        mantissa &= 0x3FFu;
    }
    return float_of(sign | ((exponent + (127 - 15)) << 23) | (mantissa << 13));
#endif
}

// Beyond 65504 (after rounding): infinity.
KIVI_HOST_DEVICE inline uint16_t f32_to_f16(float x) {
    const uint32_t u = bits_of(x);
    const uint32_t magnitude = u & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return kNanF16;
#if defined(__CUDA_ARCH__)
    return __half_as_ushort(__float2half_rn(x));
#else
    const uint32_t sign = (u >> 16) & 0x8000u;
    const int exponent = static_cast<int>(magnitude >> 23) - 127;
    uint32_t result;
    if (exponent > 15) {
        result = 0x7C00u;
    } else if (exponent >= -14) {  // a carry out of the mantissa lands in the exponent, where it belongs
        result = shift_round(magnitude - ((127u - 15u) << 23), 13);
    } else if (exponent >= -25) {  // subnormal, in units of 2^-24
        result = shift_round((magnitude & 0x7FFFFFu) | 0x800000u, 13 + (-14 - exponent));
    } else {
        result = 0;
    }
    return static_cast<uint16_t>(sign | result);
#endif
}

KIVI_HOST_DEVICE inline float bf16_to_f32(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

KIVI_HOST_DEVICE inline uint16_t f32_to_bf16(float x) {
    const uint32_t u = bits_of(x);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) return kNanBf16;
#if defined(__CUDA_ARCH__)
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
    return static_cast<uint16_t>(shift_round(u, 16));
#endif
}

KIVI_HOST_DEVICE inline size_t dtype_bytes(int32_t dtype) { return dtype == KIVI_F32 ? 4 : 2; }

// Largest finite value.
KIVI_HOST_DEVICE inline float dtype_max(int32_t dtype) {
    if (dtype == KIVI_F16) return 65504.0f;
    return float_of(dtype == KIVI_BF16 ? 0x7F7F0000u : 0x7F7FFFFFu);
}

// Element i of an array of `dtype`. Stores round as above and write the one NaN, in f32 too.
KIVI_HOST_DEVICE inline float load_element(const void* data, int32_t dtype, int64_t i) {
    if (dtype == KIVI_F32) return static_cast<const float*>(data)[i];
    const uint16_t h = static_cast<const uint16_t*>(data)[i];
    return dtype == KIVI_F16 ? f16_to_f32(h) : bf16_to_f32(h);
}

KIVI_HOST_DEVICE inline void store_element(void* data, int32_t dtype, int64_t i, float x) {
    if (dtype == KIVI_F32) {
        static_cast<float*>(data)[i] = x == x ? x : float_of(kNanF32);
    } else {
        static_cast<uint16_t*>(data)[i] = dtype == KIVI_F16 ? f32_to_f16(x) : f32_to_bf16(x);
    }
}

}  // namespace kivi
