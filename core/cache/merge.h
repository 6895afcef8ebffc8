// Combining partial results of attention over disjoint keys (kivi_merge), host tensors.
#pragma once
#include <vector>

#include "backend/backend.h"

namespace kivi {

struct MergeCall {
    int64_t rows = 1, tokens = 0, heads = 0, dim = 0;
    std::vector<View> outs;
    std::vector<View> lses;
    const float* learned_sinks = nullptr;  // [heads] or NULL
    View out;
    View lse;  // or empty
};

// out = sum w_i out_i with w_i = exp(lse_i) / sum_j exp(lse_j). Parts whose LSE is -infinity are left
// out, and a lone part without learned sinks passes unchanged.
void merge_parts(const MergeCall& call);

}  // namespace kivi
