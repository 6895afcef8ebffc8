// Attention in double precision on the dequantised cache. Written to be read: one key after the other, an
// online softmax per query, nothing shared with the fast path but the readers of rows.
#include "cpu/reference_attend.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/dequantize.h"
#include "format/hadamard.h"

namespace kivi::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kQueriesAtOnce = 8;  // query rows that share the reading of a key

// One query of one query head, and its softmax so far: out = acc / sum, all scores relative to `max`.
struct Query {
    int64_t token = 0;             // in the row
    int head = 0;                  // query head
    int64_t first = 0, last = -1;  // positions that it sees
    double max = -kInfinity;
    double sum = 0;
    double q[kMaxDim];
    double acc[kMaxDim];
};

// [ATTEND-1]: bottom-right causal, window_left keys to the left of the query itself.
void set_range(const AttendCall& call, const Row& row, Query& query) {
    const int64_t cached = row.before.length;
    query.last = (call.k ? cached : cached - row.count) + query.token;
    query.first = call.window_left < 0 ? 0 : std::max<int64_t>(0, query.last - call.window_left);
}

void load_query(const LayerStore& layer, const AttendCall& call, const Row& row, Query& query) {
    const int64_t at =
        origin(call.q, row) + query.token * call.q.token_stride + query.head * call.q.head_stride;
    for (int c = 0; c < layer.key.dim; ++c) query.q[c] = load_element(call.q.data, call.q.dtype, at + c);
    if (layer.key.rotated()) hadamard(query.q, layer.key.dim);
    std::fill(query.acc, query.acc + layer.value.dim, 0.0);
}

void load_fresh(const TensorStore& store, const View& view, const Row& row, int head, int64_t token,
                double* x) {
    const int64_t at = origin(view, row) + token * view.token_stride + head * view.head_stride;
    for (int c = 0; c < store.dim; ++c) x[c] = load_element(view.data, view.dtype, at + c);
    if (store.rotated()) hadamard(x, store.dim);
}

void load_key_or_value(const TensorStore& store, const View& fresh, const Row& row, int head,
                       int64_t position, double* x) {
    const int64_t cached = row.before.length;
    if (position >= cached) return load_fresh(store, fresh, row, head, position - cached, x);
    float narrow[kMaxDim];
    stored_row(store, row, head, position, narrow);
    std::copy(narrow, narrow + store.dim, x);
}

double score(const AttendCall& call, const Query& query, const double* key, int dim) {
    double dot = 0;
    for (int c = 0; c < dim; ++c) dot += query.q[c] * key[c];
    // A non-finite key must not hide behind exp(-inf) or tanh(inf): [ATTEND-4].
    if (!std::isfinite(dot)) return std::numeric_limits<double>::quiet_NaN();
    const double s = dot * call.scale;
    return call.soft_cap > 0 ? call.soft_cap * std::tanh(s / call.soft_cap) : s;
}

void add(Query& query, double s, const double* value, int dim) {
    if (s > query.max || std::isnan(s)) {
        const double shrink = query.max == -kInfinity ? 0 : std::exp(query.max - s);
        query.sum *= shrink;
        for (int c = 0; c < dim; ++c) query.acc[c] *= shrink;
        query.max = s;
    }
    const double weight = std::exp(s - query.max);
    query.sum += weight;
    for (int c = 0; c < dim; ++c) query.acc[c] += weight * value[c];
}

void finish(const LayerStore& layer, const AttendCall& call, const Row& row, Query& query) {
    const int dim = layer.value.dim;
    const bool empty = query.max == -kInfinity;
    if (call.lse) {
        const int64_t at =
            origin(call.lse, row) + query.token * call.lse.token_stride + query.head * call.lse.head_stride;
        const double lse = empty ? -kInfinity : query.max + std::log(query.sum);
        store_element(call.lse.data, call.lse.dtype, at, static_cast<float>(lse));
    }
    double total = query.sum;
    if (call.learned_sinks != nullptr && !empty) {
        const double sink = call.learned_sinks[query.head];
        if (sink > query.max) {
            const double shrink = std::exp(query.max - sink);
            for (int c = 0; c < dim; ++c) query.acc[c] *= shrink;
            total = query.sum * shrink + 1;
        } else {
            total += std::exp(sink - query.max);
        }
    }
    if (!empty) {
        for (int c = 0; c < dim; ++c) query.acc[c] /= total;
    }
    if (layer.value.rotated()) hadamard(query.acc, dim);
    const int64_t at =
        origin(call.out, row) + query.token * call.out.token_stride + query.head * call.out.head_stride;
    for (int c = 0; c < dim; ++c) {
        store_element(call.out.data, call.out.dtype, at + c, static_cast<float>(query.acc[c]));
    }
}

// Queries [begin, end) of one row and KV head; query i is token i / ratio, head i % ratio of the group.
void attend_some(const LayerStore& layer, const AttendCall& call, const Row& row, int kv_head, int64_t begin,
                 int64_t end) {
    const int ratio = layer.shape.q_heads / layer.shape.kv_heads;
    const int count = static_cast<int>(end - begin);
    Query queries[kQueriesAtOnce];
    int64_t first = std::numeric_limits<int64_t>::max(), last = -1;
    for (int i = 0; i < count; ++i) {
        queries[i].token = (begin + i) / ratio;
        queries[i].head = kv_head * ratio + static_cast<int>((begin + i) % ratio);
        set_range(call, row, queries[i]);
        load_query(layer, call, row, queries[i]);
        first = std::min(first, queries[i].first);
        last = std::max(last, queries[i].last);
    }
    double key[kMaxDim], value[kMaxDim];
    for (int64_t position = first; position <= last; ++position) {
        load_key_or_value(layer.key, call.k, row, kv_head, position, key);
        load_key_or_value(layer.value, call.v, row, kv_head, position, value);
        for (int i = 0; i < count; ++i) {
            Query& query = queries[i];
            if (position < query.first || position > query.last) continue;
            add(query, score(call, query, key, layer.key.dim), value, layer.value.dim);
        }
    }
    for (int i = 0; i < count; ++i) finish(layer, call, row, queries[i]);
}

}  // namespace

void reference_attend(const LayerStore& layer, const AttendCall& call, ThreadPool& pool) {
    const int heads = layer.shape.kv_heads;
    const int ratio = layer.shape.q_heads / heads;
    for (const Row& row : call.rows) {
        const int64_t queries = row.count * ratio;
        const int64_t parts = (queries + kQueriesAtOnce - 1) / kQueriesAtOnce;
        pool.parallel(parts * heads, [&](int64_t item, int) {
            const int64_t begin = item / heads * kQueriesAtOnce;
            attend_some(layer, call, row, static_cast<int>(item % heads), begin,
                        std::min(begin + kQueriesAtOnce, queries));
        });
    }
}

}  // namespace kivi::cpu
