// From a row of the caller to the row that is stored: transform, then one rounding to the window dtype. The
// scalar definition that every backend reproduces bit for bit (FORMAT.md, "Rows").
#pragma once
#include <cstdint>

namespace kivi {

// Writes the stored row of x [dim], which is used up. Finite values beyond the range of window_dtype become
// its largest finite value; true is returned if there were any. NaN becomes the one NaN, and infinities of
// the input stay what they are.
bool store_row(float* x, int dim, int32_t transform, int32_t window_dtype, void* to);

}  // namespace kivi
