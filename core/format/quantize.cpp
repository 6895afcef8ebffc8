// Extremes of a group, and writing into a bit stream. Built without contraction of multiply and add.
#include "format/quantize.h"

#include <algorithm>
#include <cmath>

namespace kivi {

GroupParams group_params(const kivi_spec& spec, const float* x, int64_t stride, int n) {
    float low = x[0], high = x[0];
    bool finite = true;
    for (int i = 0; i < n; ++i) {
        const float value = x[i * stride];
        finite = finite && std::isfinite(value);
        low = std::min(low, value);
        high = std::max(high, value);
    }
    return finite ? params_of_extremes(spec, low, high) : damaged_params();
}

void put_code(uint8_t* stream, int bits, int64_t index, int code) {
    const int64_t bit = bits * index;
    const unsigned shifted = static_cast<unsigned>(code) << (bit & 7);
    uint8_t* byte = stream + (bit >> 3);
    byte[0] = static_cast<uint8_t>(byte[0] | shifted);
    if ((bit & 7) + bits > 8) byte[1] = static_cast<uint8_t>(byte[1] | (shifted >> 8));
}

}  // namespace kivi
