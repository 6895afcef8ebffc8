// Parameters, codes and bit streams of one group. Built without contraction of multiply and add.
#include "format/quantize.h"

#include <algorithm>
#include <cmath>

#include "format/half.h"

namespace kivi {

namespace {

// Extremes are clamped to this before the range is formed, so that no fp32 operation on finite values
// overflows: not the difference, and not code * scale + min.
const float kLargestExtreme = 0x1p126f;

float clamp(float x, float limit) { return std::min(std::max(x, -limit), limit); }

}  // namespace

float round_to_param(float x, int32_t param_dtype) {
    if (x != x) return float_of(kNanF32);
    if (param_dtype == KIVI_F16) x = f16_to_f32(f32_to_f16(clamp(x, dtype_max(KIVI_F16))));
    return x == 0.0f ? 0.0f : x;  // never -0, whose place among equal values would depend on their order
}

GroupParams group_params(const kivi_spec& spec, const float* x, int64_t stride, int n) {
    float low = x[0], high = x[0];
    bool finite = true;
    for (int i = 0; i < n; ++i) {
        const float value = x[i * stride];
        finite = finite && std::isfinite(value);
        low = std::min(low, value);
        high = std::max(high, value);
    }
    if (!finite) return {float_of(kNanF32), float_of(kNanF32)};

    low = clamp(low, kLargestExtreme);
    high = clamp(high, kLargestExtreme);
    float range = high - low;
    if (spec.range == KIVI_RANGE_RATIO) {
        const float kept = range * spec.range_ratio;
        low = low + 0.5f * (range - kept);
        range = kept;
    }
    const float levels = static_cast<float>((1 << spec.bits) - 1);
    return {round_to_param(range / levels, spec.param_dtype), round_to_param(low, spec.param_dtype)};
}

int encode(float y, const GroupParams& params, int bits) {
    const int levels = (1 << bits) - 1;
    if (!(params.scale > 0.0f)) return 0;
    const float steps = (y - params.min) / params.scale;
    if (!(steps > 0.0f)) return 0;  // below the group, or NaN
    if (steps >= static_cast<float>(levels)) return levels;
    const int code = static_cast<int>(steps);
    const float rest = steps - static_cast<float>(code);  // exact
    return code + (rest > 0.5f || (rest == 0.5f && (code & 1)) ? 1 : 0);
}

float decode(int code, const GroupParams& params) {
    return std::fma(static_cast<float>(code), params.scale, params.min);
}

void put_code(uint8_t* stream, int bits, int64_t index, int code) {
    const int64_t bit = bits * index;
    const unsigned shifted = static_cast<unsigned>(code) << (bit & 7);
    uint8_t* byte = stream + (bit >> 3);
    byte[0] = static_cast<uint8_t>(byte[0] | shifted);
    if ((bit & 7) + bits > 8) byte[1] = static_cast<uint8_t>(byte[1] | (shifted >> 8));
}

int get_code(const uint8_t* stream, int bits, int64_t index) {
    const int64_t bit = bits * index;
    const uint8_t* byte = stream + (bit >> 3);
    unsigned window = byte[0];
    if ((bit & 7) + bits > 8) window |= static_cast<unsigned>(byte[1]) << 8;
    return static_cast<int>((window >> (bit & 7)) & ((1u << bits) - 1));
}

}  // namespace kivi
