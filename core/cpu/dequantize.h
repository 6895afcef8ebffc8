// Reading rows back, one at a time and from wherever they stand: the plain path of everything.
#pragma once
#include <cstdint>

#include "backend/backend.h"
#include "cpu/storage.h"

namespace kivi::cpu {

// The row of `position` (0 .. row.before.length - 1) as attend sees it: stored basis, fp32, `store.dim` values.
void stored_row(const TensorStore& store, const Row& row, int head, int64_t position, float* x);

// Tokens first .. first + count - 1 of a page, rows of `store.dim` values. The tokens must have been packed.
void unpack_rows(const TensorStore& store, const uint8_t* part, int first, int count, float* rows);

// Writes positions begin .. end - 1 of all heads to `view`; a Hadamard is undone unless stored_basis.
void dequantize(const TensorStore& store, const Row& row, int64_t begin, int64_t end, const View& view,
                bool stored_basis);

}  // namespace kivi::cpu
