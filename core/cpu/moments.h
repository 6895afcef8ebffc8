// Second moments of the queries of one KV head, in the stored basis.
#pragma once
#include "backend/backend.h"
#include "cpu/storage.h"

namespace kivi::cpu {

// sums [key_dim][key_dim] += q q' over the rows' queries of all query heads of `kv_head`; both triangles.
void accumulate_moments(const LayerStore& layer, Rows rows, const View& q, int kv_head, float* sums);

}  // namespace kivi::cpu
