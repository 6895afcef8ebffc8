// The numeric contract of one group (FORMAT.md, "Groups"): the scalar definition that every backend
// reproduces bit for bit.
#pragma once
#include <cmath>
#include <cstdint>

#include "format/half.h"
#include "format/host_device.h"
#include "format/model.h"

namespace kivi {

struct GroupParams {
    float scale;  // already rounded to the parameter type
    float min;    // likewise
};

// Parameters of the n >= 1 raw stored values x[0], x[stride], ... All in fp32, each parameter rounded once:
//
//   low, high = extremes, each clamped to +-2^126;  range = high - low
//   fixed ratio:  kept = range * ratio;  low = low + 0.5 * (range - kept);  range = kept
//   scale = round_to_param(range / (2^bits - 1));  min = round_to_param(low)
//
// Both are finite for finite values. A NaN or an infinity among the values makes both the one NaN.
GroupParams group_params(const kivi_spec& spec, const float* x, int64_t stride, int n);

// Nearest value of the parameter type (KIVI_F16 or KIVI_F32), ties to even; beyond its range the largest
// finite value; a zero is +0; NaN is the one NaN.
KIVI_HOST_DEVICE inline float round_to_param(float x, int32_t param_dtype) {
    if (x != x) return float_of(kNanF32);
    if (param_dtype == KIVI_F16) {
        const float limit = dtype_max(KIVI_F16);
        x = x < -limit ? -limit : x;
        x = x > limit ? limit : x;
        x = f16_to_f32(f32_to_f16(x));
    }
    return x == 0.0f ? 0.0f : x;  // never -0, whose place among equal values would depend on their order
}

// Extremes are clamped to this before the range is formed, so that no fp32 operation on finite values
// overflows: not the difference, and not code * scale + min.
constexpr float kLargestExtreme = 85070591730234615865843651857942052864.0f;  // 2^126

// group_params from the extremes of a group; not for groups with a NaN or an infinity.
KIVI_HOST_DEVICE inline GroupParams params_of_extremes(const kivi_spec& spec, float low, float high) {
    low = low < -kLargestExtreme ? -kLargestExtreme : low > kLargestExtreme ? kLargestExtreme : low;
    high = high < -kLargestExtreme ? -kLargestExtreme : high > kLargestExtreme ? kLargestExtreme : high;
    float range = high - low;
    if (spec.range == KIVI_RANGE_RATIO) {
        const float kept = range * spec.range_ratio;
        low = low + 0.5f * (range - kept);
        range = kept;
    }
    const float levels = static_cast<float>((1 << spec.bits) - 1);
    return {round_to_param(range / levels, spec.param_dtype), round_to_param(low, spec.param_dtype)};
}
// Parameters of a group that a NaN or an infinity has damaged.
KIVI_HOST_DEVICE inline GroupParams damaged_params() { return {float_of(kNanF32), float_of(kNanF32)}; }

// clamp(round-half-even((y - min) / scale), 0, 2^bits - 1) with an IEEE division; 0 where scale is 0 or
// anything is NaN.
KIVI_HOST_DEVICE inline int encode(float y, const GroupParams& params, int bits) {
    const int levels = (1 << bits) - 1;
    if (!(params.scale > 0.0f)) return 0;
    const float steps = (y - params.min) / params.scale;
    if (!(steps > 0.0f)) return 0;  // below the group, or NaN
    if (steps >= static_cast<float>(levels)) return levels;
    const int code = static_cast<int>(steps);
    const float rest = steps - static_cast<float>(code);  // exact
    return code + (rest > 0.5f || (rest == 0.5f && (code & 1)) ? 1 : 0);
}

// fma(code, scale, min), one rounding
KIVI_HOST_DEVICE inline float decode(int code, const GroupParams& params) {
    return fmaf(static_cast<float>(code), params.scale, params.min);
}

// Codes of a group as a little-endian bit stream: code i in bits [bits * i, bits * (i + 1)), lowest first.
void put_code(uint8_t* stream, int bits, int64_t index, int code);  // bits of the code must be 0 before
KIVI_HOST_DEVICE inline int get_code(const uint8_t* stream, int bits, int64_t index) {
    const int64_t bit = bits * index;
    const uint8_t* byte = stream + (bit >> 3);
    unsigned window = byte[0];
    if ((bit & 7) + bits > 8) window |= static_cast<unsigned>(byte[1]) << 8;
    return static_cast<int>((window >> (bit & 7)) & ((1u << bits) - 1));
}

}  // namespace kivi
