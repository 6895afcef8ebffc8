// Conversions between f32 and the 16-bit floating-point types, ties to even, in integer arithmetic: they
// depend on no rounding mode, no flush-to-zero setting and no instruction set.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kivi/kivi.h"

namespace kivi {

inline uint32_t bits_of(float x) {
    uint32_t u;
    std::memcpy(&u, &x, sizeof u);
    return u;
}
inline float float_of(uint32_t u) {
    float x;
    std::memcpy(&x, &u, sizeof x);
    return x;
}

// The one NaN of each type. Conversions to a type write it for every NaN, so that stored bytes do not depend
// on payloads and signs that processors choose differently.
constexpr uint16_t kNanF16 = 0x7E00;
constexpr uint16_t kNanBf16 = 0x7FC0;
constexpr uint32_t kNanF32 = 0x7FC00000;

float f16_to_f32(uint16_t h);
uint16_t f32_to_f16(float x);  // beyond 65504 (after rounding): infinity

inline float bf16_to_f32(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }
uint16_t f32_to_bf16(float x);

inline size_t dtype_bytes(int32_t dtype) { return dtype == KIVI_F32 ? 4 : 2; }
float dtype_max(int32_t dtype);  // largest finite value

// Element i of an array of `dtype`. Stores round as above and write the one NaN, in f32 too.
float load_element(const void* data, int32_t dtype, int64_t i);
void store_element(void* data, int32_t dtype, int64_t i, float x);

}  // namespace kivi
