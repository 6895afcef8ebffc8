// Packing: rows of window-dtype values become codes, scales and mins inside a page.
//
// A packer takes `count` rows (fp32 values that the window dtype holds exactly, stored basis) for tokens
// first .. first + count - 1 of a page. On the channel axis first and count are multiples of the group.
// All packers write the same bytes; pack_rows_plain is the definition.
#pragma once
#include <cstdint>

#include "cpu/storage.h"
#include "format/feedback.h"

namespace kivi::cpu {

// Most tokens that one call of a packer takes: whole groups, or a few tokens that stay in cache.
int pack_step(const TensorStore& store);

// `feedback` NULL: nearest rounding.
void pack_rows_plain(const TensorStore& store, const Feedback* feedback, const float* rows, int first, int count,
                     uint8_t* part);

}  // namespace kivi::cpu
