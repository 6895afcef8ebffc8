// The probe against decoding step by step: a real cache is filled to each query's position and read back, and
// the errors are computed from that with plain loops.
#include "cache_support.h"

#include <cmath>
#include <functional>

using namespace kivi_test;

namespace {

constexpr int kTokens = 230, kQueries = 60;

struct Case {
    std::vector<float> q = Numbers(1).take(kQueries * kQueryHeads * kDim);
    std::vector<float> k = Numbers(2).take(kTokens * kHeads * kDim);
    std::vector<float> v = Numbers(3).take(kTokens * kHeads * kDim);
    kivi_config config = small_config();
    double soft_cap = 0;
    int64_t window_left = -1;
};

// Result for all heads, from the definitions of kivi_probe_result.
kivi_probe_result step_by_step(const Case& c) {
    kivi_config config = c.config;
    config.layer_count = 1;
    TestCache cache(config);
    double key = 0, key_error = 0, value = 0, value_error = 0, score = 0, score_error = 0, kl = 0, sparse = 0;
    double out = 0, both = 0, only_k = 0, only_v = 0;
    std::vector<float> shown_k(kTokens * kHeads * kDim), shown_v(shown_k.size());
    for (int length = 1; length <= kTokens; length++) {
        const OneRow row(0, 1);
        const kivi_tensor k =
            dense(const_cast<float*>(&c.k[(length - 1) * kHeads * kDim]), {1, kHeads, kDim});
        const kivi_tensor v =
            dense(const_cast<float*>(&c.v[(length - 1) * kHeads * kDim]), {1, kHeads, kDim});
        REQUIRE(kivi_append(cache, 0, &row, &k, &v, nullptr) == KIVI_OK);
        const int query = length - 1 - (kTokens - kQueries);
        if (query < 0) continue;
        const kivi_tensor rk = dense(shown_k, {length, kHeads, kDim}),
                          rv = dense(shown_v, {length, kHeads, kDim});
        REQUIRE(kivi_dequantize(cache, 0, 0, 0, length, &rk, &rv, 0, nullptr) == KIVI_OK);
        const int begin = c.window_left < 0 ? 0 : std::max(0, length - 1 - static_cast<int>(c.window_left));
        for (int h = 0; h < kQueryHeads; h++) {
            std::vector<double> s(length), t(length), a(length), b(length);
            double sum_a = 0, sum_b = 0, mean = 0, mean_error = 0, top = 0;
            const auto at = [&](const std::vector<float>& x, int token, int channel) {
                return double{x[(token * kHeads + h / 2) * kDim + channel]};
            };
            for (int j = begin; j < length; j++) {
                for (int d = 0; d < kDim; d++) {
                    const double qd = c.q[(query * kQueryHeads + h) * kDim + d] / std::sqrt(double{kDim});
                    s[j] += qd * at(c.k, j, d);
                    t[j] += qd * at(shown_k, j, d);
                }
                if (c.soft_cap > 0)
                    s[j] = c.soft_cap * std::tanh(s[j] / c.soft_cap),
                    t[j] = c.soft_cap * std::tanh(t[j] / c.soft_cap);
                sum_a += a[j] = std::exp(s[j]);
                sum_b += b[j] = std::exp(t[j]);
                mean += s[j] / (length - begin);
                mean_error += (t[j] - s[j]) / (length - begin);
            }
            for (int j = begin; j < length; j++) {
                a[j] /= sum_a, b[j] /= sum_b, top = std::max(top, a[j]);
                score += std::pow(s[j] - mean, 2);
                score_error += std::pow(t[j] - s[j] - mean_error, 2);
                kl += a[j] * std::log(a[j] / b[j]) / (kQueries * kQueryHeads);
            }
            for (int j = begin; j < length; j++)
                sparse += (a[j] < 0.01 * top) / double(length - begin) / (kQueries * kQueryHeads);
            for (int d = 0; d < kDim; d++) {
                double o = 0, ok = 0, ov = 0, okv = 0;
                for (int j = begin; j < length; j++) {
                    o += a[j] * at(c.v, j, d), ok += b[j] * at(c.v, j, d);
                    ov += a[j] * at(shown_v, j, d), okv += b[j] * at(shown_v, j, d);
                }
                out += o * o, both += std::pow(okv - o, 2), only_k += std::pow(ok - o, 2),
                    only_v += std::pow(ov - o, 2);
            }
        }
    }
    kivi_length length;
    REQUIRE(kivi_sequence_length(cache, 0, 0, &length, sizeof length) == KIVI_OK);
    const int64_t row = kHeads * kDim;
    for (int64_t i = length.sink * row; i < length.key_border * row; i++) {
        key += std::pow(double{c.k[i]}, 2), key_error += std::pow(double{shown_k[i]} - c.k[i], 2);
    }
    for (int64_t i = length.sink * row; i < length.value_border * row; i++) {
        value += std::pow(double{c.v[i]}, 2), value_error += std::pow(double{shown_v[i]} - c.v[i], 2);
    }
    kivi_probe_result result{};
    result.key_error = std::sqrt(key_error / key);
    result.value_error = std::sqrt(value_error / value);
    result.score_error = std::sqrt(score_error / score);
    result.attention_kl = kl;
    result.output_error = std::sqrt(both / out);
    result.output_error_key = std::sqrt(only_k / out);
    result.output_error_value = std::sqrt(only_v / out);
    result.sparsity = sparse;
    return result;
}

kivi_probe_params params_of(const Case& c) {
    kivi_probe_params params;
    REQUIRE(kivi_probe_params_init(&params, sizeof params) == KIVI_OK);
    params.q = dense(c.q, {kQueries, kQueryHeads, kDim});
    params.k = dense(c.k, {kTokens, kHeads, kDim});
    params.v = dense(c.v, {kTokens, kHeads, kDim});
    params.k_spec = c.config.layer.k;
    params.v_spec = c.config.layer.v;
    params.sink = c.config.sink;
    params.recent = c.config.recent;
    params.flush = c.config.flush;
    params.schedule = c.config.schedule;
    params.window_dtype = c.config.window_dtype;
    params.soft_cap = static_cast<float>(c.soft_cap);
    params.window_left = c.window_left;
    return params;
}

void compare(const Case& c) {
    const kivi_probe_params params = params_of(c);
    kivi_probe_result total, heads[kHeads];
    REQUIRE(kivi_probe(&params, &total, heads, sizeof total) == KIVI_OK);
    const kivi_probe_result expected = step_by_step(c);
    const auto near = [](double a, double b) { return std::fabs(a - b) <= 1e-5 + 1e-4 * std::fabs(b); };
    CHECK(near(total.key_error, expected.key_error));
    CHECK(near(total.value_error, expected.value_error));
    CHECK(near(total.score_error, expected.score_error));
    CHECK(near(total.attention_kl, expected.attention_kl));
    CHECK(near(total.output_error, expected.output_error));
    CHECK(near(total.output_error_key, expected.output_error_key));
    CHECK(near(total.output_error_value, expected.output_error_value));
    CHECK(near(total.sparsity, expected.sparsity));
    CHECK(near((heads[0].attention_kl + heads[1].attention_kl) / 2, total.attention_kl));
    CHECK(std::max(heads[0].output_error, heads[1].output_error) >= total.output_error);
    CHECK(std::min(heads[0].output_error, heads[1].output_error) <= total.output_error);
}

}  // namespace

TEST_CASE("the probe sees what a decode loop sees") {
    for (const char* preset : {"kivi2-sink", "k3v2", "kivi4", "kivi2-paper"}) {
        CAPTURE(preset);
        Case c;
        c.config = small_config(preset);
        compare(c);
    }
}

TEST_CASE("the probe obeys windows, caps, dtypes and the axes") {
    Case windowed;
    windowed.window_left = 50;
    compare(windowed);
    Case capped;
    capped.soft_cap = 0.7;
    compare(capped);
    Case swapped;
    swapped.config.layer.k.axis = KIVI_AXIS_TOKEN;
    swapped.config.layer.v.axis = KIVI_AXIS_CHANNEL;
    swapped.config.layer.k.transform = KIVI_TRANSFORM_HADAMARD;
    swapped.config.window_dtype = KIVI_BF16;
    compare(swapped);
}

TEST_CASE(
    "at 16 bits in f32 nothing is lost, and query-aware rounding lowers the score error, not the key error") {
    Case c;
    c.config = small_config("f16");
    c.config.window_dtype = KIVI_F32;
    kivi_probe_params params = params_of(c);
    kivi_probe_result result;
    REQUIRE(kivi_probe(&params, &result, nullptr, sizeof result) == KIVI_OK);
    CHECK(result.output_error == 0);
    CHECK(result.attention_kl == 0);

    Case correlated;  // queries that stress few directions
    for (size_t row = 0; row < correlated.q.size(); row += kDim) {
        for (int d = 4; d < kDim; d++)
            correlated.q[row + d] = 0.05f * correlated.q[row + d] + correlated.q[row + d % 4];
    }
    params = params_of(correlated);
    kivi_probe_result nearest, aware;
    REQUIRE(kivi_probe(&params, &nearest, nullptr, sizeof nearest) == KIVI_OK);
    params.k_spec.rounding = KIVI_ROUND_QUERY_AWARE;
    REQUIRE(kivi_probe(&params, &aware, nullptr, sizeof aware) == KIVI_OK);
    CHECK(aware.score_error < 0.8 * nearest.score_error);
    CHECK(aware.key_error > nearest.key_error);
}

TEST_CASE("what the probe cannot measure is refused") {
    const Case c;
    const std::vector<std::pair<const char*, std::function<void(kivi_probe_params&)>>> wrong = {
        {"params.q.rank", [](auto& p) { p.q.rank = 4; }},
        {"queries", [](auto& p) { p.q.shape[0] = kTokens + 1; }},
        {"shape[2] (dim) is 32",
         [](auto& p) {
             p.q.shape[2] = 32;
             p.q.stride[1] = 64;
         }},
        {"params.q_heads is 3", [](auto& p) { p.q.shape[1] = 3; }},
        {"params.k.bits is 7", [](auto& p) { p.k_spec.bits = 7; }},
        {"sink is 5", [](auto& p) { p.sink = 5; }},
        {"window_dtype is 9", [](auto& p) { p.window_dtype = 9; }},
        {"params.soft_cap", [](auto& p) { p.soft_cap = -1; }},
        {"params.window_left", [](auto& p) { p.window_left = -5; }},
        {"params.reserved", [](auto& p) { p.reserved[1] = &p; }},
        {"params.k is on device", [](auto& p) { p.k.device = KIVI_CUDA; }},
        {"params.v.data is NULL", [](auto& p) { p.v.data = nullptr; }},
    };
    for (const auto& [sentence, change] : wrong) {
        kivi_probe_params params = params_of(c);
        change(params);
        kivi_probe_result result;
        result.output_error = -7;
        CHECK(kivi_probe(&params, &result, nullptr, sizeof result) == KIVI_ERROR_INVALID_ARGUMENT);
        CAPTURE(error());
        CHECK(contains(error(), sentence));
        CHECK(result.output_error == -7);
    }
}
