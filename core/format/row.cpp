// Transform, saturate, round.
#include "format/row.h"

#include <algorithm>
#include <cmath>

#include "format/hadamard.h"
#include "format/half.h"

namespace kivi {

namespace {

// Below this a block of 512 values cannot overflow fp32 in any stage.
const float kSafePeak = 0x1p118f;

}  // namespace

bool store_row(float* x, int dim, int32_t transform, int32_t window_dtype, void* to) {
    float peak = 0;
    for (int i = 0; i < dim; ++i) {
        if (std::isfinite(x[i])) peak = std::max(peak, std::fabs(x[i]));
    }
    float unit = 1;
    if (transform == KIVI_TRANSFORM_HADAMARD) {
        if (peak > kSafePeak) {  // exact but for values that are nothing beside the peak
            unit = 0x1p10f;
            for (int i = 0; i < dim; ++i) x[i] /= unit;
        }
        hadamard(x, dim);
    }
    bool saturated = false;
    for (int i = 0; i < dim; ++i) {
        store_element(to, window_dtype, i, x[i] * unit);
        if (std::isfinite(x[i]) && !std::isfinite(load_element(to, window_dtype, i))) {
            store_element(to, window_dtype, i, std::copysign(dtype_max(window_dtype), x[i]));
            saturated = true;
        }
    }
    return saturated;
}

}  // namespace kivi
