// Rounding of f32 to the 16-bit types in integer arithmetic, and typed access to arrays.
#include "format/half.h"

#include <cfloat>

namespace kivi {

float f16_to_f32(uint16_t h) {
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
}

namespace {

// u shifted right by `shift` (1..31), rounded to nearest, ties to even.
uint32_t shift_round(uint32_t u, int shift) {
    const uint32_t kept = u >> shift;
    const uint32_t rest = u & ((1u << shift) - 1);
    const uint32_t half = 1u << (shift - 1);
    return kept + (rest > half || (rest == half && (kept & 1u)) ? 1u : 0u);
}

}  // namespace

uint16_t f32_to_f16(float x) {
    const uint32_t u = bits_of(x);
    const uint32_t magnitude = u & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return kNanF16;
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
}

uint16_t f32_to_bf16(float x) {
    const uint32_t u = bits_of(x);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) return kNanBf16;
    return static_cast<uint16_t>(shift_round(u, 16));
}

float dtype_max(int32_t dtype) {
    switch (dtype) {
        case KIVI_F16: return 65504.0f;
        case KIVI_BF16: return float_of(0x7F7F0000u);
        default: return FLT_MAX;
    }
}

float load_element(const void* data, int32_t dtype, int64_t i) {
    if (dtype == KIVI_F32) return static_cast<const float*>(data)[i];
    const uint16_t h = static_cast<const uint16_t*>(data)[i];
    return dtype == KIVI_F16 ? f16_to_f32(h) : bf16_to_f32(h);
}

void store_element(void* data, int32_t dtype, int64_t i, float x) {
    if (dtype == KIVI_F32) {
        static_cast<float*>(data)[i] = x == x ? x : float_of(kNanF32);
    } else {
        static_cast<uint16_t*>(data)[i] = dtype == KIVI_F16 ? f32_to_f16(x) : f32_to_bf16(x);
    }
}

}  // namespace kivi
