// Query moments outside a backend: from the caller's matrices to the stored basis, to encoder tables, and to
// the moments blob (FORMAT.md, "Moments blob").
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "format/feedback.h"
#include "format/model.h"

namespace kivi {

// What a moments blob holds.
struct MomentTables {
    int64_t queries = 0;       // query rows behind each matrix; 0: the caller set it
    std::vector<float> means;  // [heads][dim][dim], stored basis
    std::vector<Feedback> heads;
};

// The caller's matrices m [heads, dim, dim] as f32, in the stored basis: H m H where keys are transformed and
// m is not. Refuses what is not finite, not symmetric or has no positive diagonal.
std::vector<float> moments_in_stored_basis(const View& m, const kivi_layer& layer, bool stored_basis);

// One table a head. Refuses matrices that are not positive definite after damping.
std::vector<Feedback> make_tables(const std::vector<float>& means, const kivi_layer& layer);

// CRC-32 of orders and weights of all heads.
uint32_t tables_crc(const std::vector<Feedback>& heads);

size_t moments_blob_bytes(const kivi_layer& layer);
void write_moments_blob(const kivi_layer& layer, int64_t queries, const std::vector<float>& means,
                        const std::vector<Feedback>& heads, uint8_t* blob);
// Of one head or of all; a lone head is repeated for every KV head of the layer.
MomentTables read_moments_blob(const kivi_layer& layer, const uint8_t* blob, size_t bytes);

}  // namespace kivi
