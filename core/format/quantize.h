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

// Parameters of the n raw stored values x[0], x[stride], ... Formed in fp32 and each rounded once; finite
// for every finite input (the difference of extremes that overflows fp32 or the parameter type saturates as
// FORMAT.md says). A NaN or an infinity among the values makes both NaN.
GroupParams group_params(const kivi_spec& spec, const float* x, int64_t stride, int n);

// clamp(round-half-even((y - min) / scale), 0, 2^bits - 1); 0 where scale is 0 or anything is NaN.
int encode(float y, const GroupParams& params, int bits);
// fma(code, scale, min)
float decode(int code, const GroupParams& params);

float round_to_param(float x, int32_t param_dtype);

// Codes of a group as a little-endian bit stream.
void put_code(uint8_t* stream, int bits, int64_t index, int code);  // bits of the code must be 0 before
int get_code(const uint8_t* stream, int bits, int64_t index);

}  // namespace kivi
