// Second moments of the queries of one KV head. The lower triangle is summed and mirrored at the end.
#include "cpu/moments.h"

#include "format/hadamard.h"

namespace kivi::cpu {
namespace {

void add_outer_product(const float* q, int dim, float* sums) {
    for (int i = 0; i < dim; ++i) {
        float* row = sums + static_cast<int64_t>(i) * dim;
        for (int j = 0; j <= i; ++j) row[j] += q[i] * q[j];
    }
}

}  // namespace

void accumulate_moments(const LayerStore& layer, Rows rows, const View& q, int kv_head, float* sums) {
    const int dim = layer.key.dim;
    const int ratio = layer.shape.q_heads / layer.shape.kv_heads;
    float x[kMaxDim];
    for (const Row& row : rows) {
        for (int64_t token = 0; token < row.count; ++token) {
            for (int head = kv_head * ratio; head < (kv_head + 1) * ratio; ++head) {
                const int64_t at = origin(q, row) + token * q.token_stride + head * q.head_stride;
                for (int c = 0; c < dim; ++c) x[c] = load_element(q.data, q.dtype, at + c);
                if (layer.key.rotated()) hadamard(x, dim);
                add_outer_product(x, dim, sums);
            }
        }
    }
    for (int i = 0; i < dim; ++i) {
        for (int j = 0; j < i; ++j)
            sums[static_cast<int64_t>(j) * dim + i] = sums[static_cast<int64_t>(i) * dim + j];
    }
}

}  // namespace kivi::cpu
