// Pages of this backend to and from the canonical order (format/layout.h), for export and import.
#pragma once
#include <cstdint>

#include "cpu/storage.h"

namespace kivi::cpu {

// The first `tokens` tokens of one tensor's part of a page (a multiple of the group on the channel axis):
// codes | scales | mins of those tokens only; 16-bit specs: their rows.
void export_part(const TensorStore& store, const uint8_t* part, int64_t tokens, uint8_t* to);
void import_part(const TensorStore& store, uint8_t* part, int64_t tokens, const uint8_t* from);

}  // namespace kivi::cpu
