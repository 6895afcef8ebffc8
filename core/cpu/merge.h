// Combining partial results of attention over disjoint keys (kivi_merge), host tensors.
#pragma once
#include "backend/backend.h"

namespace kivi::cpu {

// out = sum w_i out_i with w_i = exp(lse_i) / sum_j exp(lse_j). Parts whose LSE is -infinity are left
// out, and a lone part without learned sinks passes unchanged.
void merge_parts(const MergeCall& call);

}  // namespace kivi::cpu
