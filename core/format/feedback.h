// Query-aware rounding: tables made once per layer from the moments of the queries, and the recursion
// that uses them (FORMAT.md, "Query-aware rounding").
#pragma once
#include <cstdint>
#include <vector>

namespace kivi {

// Encoder table of one KV head.
struct Feedback {
    int dim = 0;
    std::vector<uint16_t> order;  // [dim] channel that is coded j-th: diagonal of the moment, largest first
    std::vector<float> weights;   // row j, entries c > j (in coding order): U_jc / U_jj rounded once to fp32;
                                  // packed rows of the strict upper triangle, dim * (dim - 1) / 2 entries
};

// moment [dim][dim] in the stored basis, symmetric; damped by 0.1 of its mean diagonal, ordered, inverted
// and factored in double. False if it is not positive definite or not finite after damping.
bool make_feedback(const float* moment, int dim, Feedback* feedback);

// Offset of row j in Feedback::weights.
inline int64_t feedback_row(int dim, int j) { return static_cast<int64_t>(j) * (2 * dim - j - 1) / 2; }

// Codes of one token y [dim]; scale and min [dim] are those of the groups that hold it. Afterwards y holds
// what each channel was coded from.
void encode_row(const Feedback& feedback, int bits, float* y, const float* scale, const float* min,
                uint8_t* codes);

}  // namespace kivi
