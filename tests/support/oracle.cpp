// Scores, softmax and mean, one query at a time.
#include "support/oracle.h"

#include <algorithm>
#include <cmath>

namespace kivi_test {

Exact exact_attention(const kivi_layer& layer, const Tokens& cached, const Floats& q, const Ask& ask) {
    const size_t kv = size_t(layer.kv_heads), heads = size_t(layer.q_heads);
    const size_t dk = size_t(layer.key_dim), dv = size_t(layer.value_dim);
    Tokens all = cached;
    all.k.insert(all.k.end(), ask.fresh_k.begin(), ask.fresh_k.end());
    all.v.insert(all.v.end(), ask.fresh_v.begin(), ask.fresh_v.end());
    const int64_t total = int64_t(all.k.size() / (kv * dk)), count = int64_t(q.size() / (heads * dk));
    const double scale = ask.scale != 0 ? ask.scale : 1 / std::sqrt(double(dk));

    Exact exact;
    exact.out.assign(size_t(count) * heads * dv, 0.0);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t position = total - count + i;  // bottom-right, fresh tokens included
        const int64_t begin = ask.window_left < 0 ? 0 : std::max<int64_t>(0, position - ask.window_left);
        for (size_t h = 0; h < heads; ++h) {
            const size_t head = h / (heads / kv);
            const float* const query = &q[(size_t(i) * heads + h) * dk];
            double top = -INFINITY;
            std::vector<double> scores;
            for (int64_t t = begin; t <= position; ++t) {
                const float* const key = &all.k[(size_t(t) * kv + head) * dk];
                double score = 0;
                for (size_t c = 0; c < dk; ++c) score += double(query[c]) * key[c];
                score *= scale;
                if (ask.soft_cap > 0) score = ask.soft_cap * std::tanh(score / ask.soft_cap);
                scores.push_back(score);
                top = std::max(top, score);
            }
            double sum = 0;
            for (double& score : scores) sum += (score = std::exp(score - top));
            exact.lse.push_back(scores.empty() ? -INFINITY : top + std::log(sum));
            if (scores.empty()) continue;
            double all_weights = sum;
            if (!ask.sinks.empty()) all_weights += std::exp(double(ask.sinks[h]) - top);
            double* const out = &exact.out[(size_t(i) * heads + h) * dv];
            for (size_t t = 0; t < scores.size(); ++t) {
                const float* const value = &all.v[((size_t(begin) + t) * kv + head) * dv];
                for (size_t c = 0; c < dv; ++c) out[c] += scores[t] / all_weights * value[c];
            }
        }
    }
    return exact;
}

Exact exact_attention(const Cache& cache, const Rows& rows, const Floats& q, const Ask& ask, int layer) {
    const kivi_layer& shape = cache.layer(layer);
    const size_t q_width = size_t(shape.q_heads * shape.key_dim);
    const size_t k_width = size_t(shape.kv_heads * shape.key_dim),
                 v_width = size_t(shape.kv_heads * shape.value_dim);
    Exact all;
    int64_t at = 0;
    for (const Row& row : rows) {
        if (row.sequence < 0 || row.count == 0) continue;
        Ask own = ask;
        if (!ask.fresh_k.empty()) {
            own.fresh_k = rows_of(ask.fresh_k, k_width, at, at + row.count);
            own.fresh_v = rows_of(ask.fresh_v, v_width, at, at + row.count);
        }
        const Exact one = exact_attention(shape, cache.dequantize(row.sequence, layer),
                                          rows_of(q, q_width, at, at + row.count), own);
        all.out.insert(all.out.end(), one.out.begin(), one.out.end());
        all.lse.insert(all.lse.end(), one.lse.begin(), one.lse.end());
        at += row.count;
    }
    return all;
}

Distance distance(const Answer& answer, const Exact& exact, int value_dim) {
    REQUIRE(answer.out.size() == exact.out.size());
    REQUIRE(answer.lse.size() == exact.lse.size());
    Distance d{0, 0, 0};
    double error = 0, norm = 0;
    const size_t width = size_t(value_dim);
    for (size_t row = 0; row < exact.lse.size(); ++row) {
        double row_error = 0, row_norm = 0;
        for (size_t i = row * width; i < (row + 1) * width; ++i) {
            row_error += (answer.out[i] - exact.out[i]) * (answer.out[i] - exact.out[i]);
            row_norm += exact.out[i] * exact.out[i];
        }
        error += row_error;
        norm += row_norm;
        if (row_error > 0 || std::isnan(row_error)) {
            const double relative = std::sqrt(row_error / row_norm);
            if (!(relative <= d.worst_row)) d.worst_row = relative;
        }
        const double lse = exact.lse[row],
                     off =
                         answer.lse[row] == lse ? 0 : std::fabs(answer.lse[row] - lse) / (1 + std::fabs(lse));
        if (!(off <= d.lse)) d.lse = off;
    }
    d.whole = error == 0 ? 0 : std::sqrt(error / norm);
    return d;
}

namespace {

Floats rounded(int32_t dtype, Floats values) {
    for (float& x : values) x = round_to(dtype, x);
    return values;
}

// Whether all are finite in the type.
bool can_hold(int32_t dtype, const Floats& values) {
    return std::none_of(values.begin(), values.end(), [&](float x) { return std::isinf(round_to(dtype, x)); });
}

// Attends as `ask` says, with each of the flags, and compares.
void check_flags(const Cache& cache, const Rows& rows, const Floats& q, Ask ask, int layer, std::vector<uint64_t> flags) {
    Ask given = ask;  // what the types hold of it
    given.fresh_k = rounded(ask.kv_dtype, ask.fresh_k);
    given.fresh_v = rounded(ask.kv_dtype, ask.fresh_v);
    const Exact exact = exact_attention(cache, rows, rounded(ask.q_dtype, q), given, layer);
    const double ulp = ask.out_dtype == KIVI_F32 ? 0 : ask.out_dtype == KIVI_F16 ? 0x1p-11 : 0x1p-8;
    for (const uint64_t flag : flags) {
        INFO("flags ", flag, ", types ", ask.q_dtype, " ", ask.out_dtype, " ", ask.kv_dtype);
        ask.flags = flag;
        const Distance d = distance(cache.attend(rows, q, ask, layer), exact, cache.layer(layer).value_dim);
        CHECK(d.whole <= backend().tolerance + ulp);
        CHECK(d.worst_row <= 10 * backend().tolerance + ulp);
        CHECK(d.lse <= backend().tolerance);
    }
}

bool has_fast_kernels(const Cache& cache, int layer) {
    kivi_support support{};
    REQUIRE(kivi_query_support(&cache.config(), layer, &support, sizeof support) == KIVI_OK);
    return support.attend_path == KIVI_PATH_FAST;
}

}  // namespace

void check_attend(const Cache& cache, const Rows& rows, const Floats& q, const Ask& ask, int layer) {
    check_flags(cache, rows, q, ask, layer, {ask.flags});
    if (backend().device == KIVI_CPU || !has_fast_kernels(cache, layer)) return;
    const int32_t dtype = cache.config().window_dtype;
    if (!can_hold(dtype, q) || !can_hold(dtype, ask.fresh_k) || !can_hold(dtype, ask.fresh_v)) return;
    Ask of_windows = ask;
    of_windows.q_dtype = of_windows.out_dtype = of_windows.kv_dtype = dtype;
    check_flags(cache, rows, q, of_windows, layer, {0, KIVI_ATTEND_INVARIANT});
}

}  // namespace kivi_test
