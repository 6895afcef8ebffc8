// The numeric contract of one group (FORMAT.md, "Groups"): the scalar definition that every backend
// reproduces bit for bit.
#pragma once
#include <cstdint>

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

// clamp(round-half-even((y - min) / scale), 0, 2^bits - 1) with an IEEE division; 0 where scale is 0 or
// anything is NaN.
int encode(float y, const GroupParams& params, int bits);
// fma(code, scale, min), one rounding
float decode(int code, const GroupParams& params);

// Nearest value of the parameter type (KIVI_F16 or KIVI_F32), ties to even; beyond its range the largest
// finite value; a zero is +0; NaN is the one NaN.
float round_to_param(float x, int32_t param_dtype);

// Codes of a group as a little-endian bit stream: code i in bits [bits * i, bits * (i + 1)), lowest first.
void put_code(uint8_t* stream, int bits, int64_t index, int code);  // bits of the code must be 0 before
int get_code(const uint8_t* stream, int bits, int64_t index);

}  // namespace kivi
