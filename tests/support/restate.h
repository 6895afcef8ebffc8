// core/FORMAT.md restated from its text, apart from the library's own code: what is stored of given tokens,
// its bytes in the canonical order, and what it decodes to.
#pragma once
#include <vector>

#include "support/cache.h"

namespace kivi_test {

// The row as windows hold it and packers read it. `saturated`: finite values were clamped.
Floats stored_row(const float* x, int dim, int transform, int32_t window_dtype, bool* saturated = nullptr);

// Coding order and weights of one KV head.
struct EncoderTable {
    std::vector<int> order;
    Floats weights;  // strict upper triangle, row after row
};
// As the moments blob carries them, and as the formula makes them from the matrix that the blob carries.
std::vector<EncoderTable> tables_in(const Bytes& moments_blob);
std::vector<std::vector<double>> matrices_in(const Bytes& moments_blob);
EncoderTable table_from(const std::vector<double>& matrix, int dim);

// Packed tokens of one head of one tensor.
struct Packed {
    int tokens = 0, dim = 0;
    kivi_spec spec{};
    std::vector<int> codes;  // [token][channel]
    Floats scales, mins;     // in the canonical order of groups
    Floats stored, decoded;  // [token][channel], stored basis

    size_t group_of(int token, int channel) const;
    float scale_at(int token, int channel) const { return scales[group_of(token, channel)]; }
    float min_at(int token, int channel) const { return mins[group_of(token, channel)]; }
};
// rows: [tokens][dim], stored rows; table: NULL rounds to nearest.
Packed pack(const Floats& rows, int dim, const kivi_spec& spec, const EncoderTable* table);
// Canonical bytes of tokens begin .. end - 1.
Bytes canonical(const Packed& packed, int32_t window_dtype, int begin, int end);

// Border of both tensors of a rolling cache of this length, 0 while nothing is packed.
int64_t rolling_border(const kivi_config& config, int64_t length);

// Payload of one layer of the sequence blob, from what was appended.
Bytes payload(const kivi_config& config, const kivi_layer& layer, const Tokens& tokens, int64_t length,
              int64_t key_border, int64_t value_border, const std::vector<EncoderTable>& tables = {});
// The payload that a blob has for a layer.
Bytes payload_in(const Bytes& blob, int layer);

// Bytes of a packed token of one head of one tensor, times 128 (the formula of "Sizes").
int64_t part_bytes(const kivi_spec& spec, int dim, int32_t window_dtype);

void hadamard(float* x, int dim);

}  // namespace kivi_test
