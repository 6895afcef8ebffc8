// Rows on their way in and back: the caller's dtype -> stored row in the window dtype -> fp32 for packers.
#pragma once
#include <cstdint>

#include "format/model.h"

namespace kivi::cpu {

// Stored row of elements at .. at + dim - 1 of `data` (format/row.h). True if it was saturated.
bool take_row_plain(const void* data, int32_t dtype, int64_t at, int dim, int32_t transform, int32_t window_dtype,
                    uint8_t* to);

// Exact.
void load_row_plain(const uint8_t* from, int32_t window_dtype, int dim, float* x);

}  // namespace kivi::cpu
