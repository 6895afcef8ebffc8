// Rows on their way in and back, by the scalar definitions of format/.
#include "cpu/rows.h"

#include "format/half.h"
#include "format/row.h"

namespace kivi::cpu {

bool take_row_plain(const void* data, int32_t dtype, int64_t at, int dim, int32_t transform, int32_t window_dtype,
                    uint8_t* to) {
    float x[kMaxDim];
    for (int c = 0; c < dim; ++c) x[c] = load_element(data, dtype, at + c);
    return store_row(x, dim, transform, window_dtype, to);
}

void load_row_plain(const uint8_t* from, int32_t window_dtype, int dim, float* x) {
    for (int c = 0; c < dim; ++c) x[c] = load_element(from, window_dtype, c);
}

}  // namespace kivi::cpu
