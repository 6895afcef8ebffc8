// Attention in double precision over what a cache says it holds, straight from the definition.
#pragma once
#include <vector>

#include "support/cache.h"

namespace kivi_test {

struct Exact {
    std::vector<double> out, lse;
};

// One sequence: its cached tokens, then the fresh ones of `ask`; q [count][q_heads][key_dim].
Exact exact_attention(const kivi_layer& layer, const Tokens& cached, const Floats& q, const Ask& ask);
// The rows of a batch, over the dequantised cache.
Exact exact_attention(const Cache& cache, const Rows& rows, const Floats& q, const Ask& ask = {},
                      int layer = 0);

struct Distance {
    double whole;      // |x - exact| / |exact| over everything
    double worst_row;  // the same for the worst head of the worst query
    double lse;        // largest difference of the LSE, of 1 + |exact|
};
Distance distance(const Answer& answer, const Exact& exact, int value_dim);

// Attends and compares under the tolerance of the backend. Where a GPU has fast kernels for the layer, which serve queries,
// fresh keys and values and results of the window dtype only, also with these, with and without KIVI_ATTEND_INVARIANT, if
// that type can hold what is given.
void check_attend(const Cache& cache, const Rows& rows, const Floats& q, const Ask& ask = {}, int layer = 0);

}  // namespace kivi_test
