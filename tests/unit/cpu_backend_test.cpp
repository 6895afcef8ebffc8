// The CPU backend driven through the seam, without a cache above it: append, flush, attend, export.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "backend/backend.h"
#include "cpu/cpu_backend.h"
#include "format/hadamard.h"
#include "format/half.h"
#include "format/layout.h"
#include "format/policy.h"
#include "spec_support.h"

using namespace kivi;
using kivi_test::make_spec;

namespace {

Model make_model(const kivi_spec& k, const kivi_spec& v, int key_dim, int value_dim, int32_t window_dtype) {
    Model model;
    model.window_dtype = window_dtype;
    model.max_sequences = 2;
    model.max_tokens = 700;
    model.windows.sink = 32 * (k.group == 128 || v.group == 128 ? 4 : 2);
    model.windows.unit = model.windows.sink;
    model.windows.flush = model.windows.unit;
    model.windows.recent = 40;
    kivi_layer layer{};
    layer.kv_heads = 2;
    layer.q_heads = 6;
    layer.key_dim = key_dim;
    layer.value_dim = value_dim;
    layer.k = k;
    layer.v = v;
    model.layers = {layer};
    model.threads = 2;
    model.reference = true;
    return model;
}

View view_of(std::vector<float>& data, int heads, int dim) {
    View view;
    view.data = data.data();
    view.ragged = true;
    view.token_stride = static_cast<int64_t>(heads) * dim;
    view.head_stride = dim;
    return view;
}

// One sequence of a backend with what the cache would keep for it.
struct Sequence {
    Model model;
    std::unique_ptr<Backend> backend;
    int32_t id;
    Span span;
    std::vector<int32_t> blocks;

    Sequence(const Model& m, int32_t sequence, std::vector<int32_t> table)
        : model(m), backend(cpu::backend_kind().create(m)), id(sequence), blocks(std::move(table)) {}

    Row row(int64_t offset, int64_t count, const Span& before, const Span& after) const {
        Row row;
        row.sequence = id;
        row.offset = offset;
        row.count = count;
        row.before = before;
        row.after = after;
        row.blocks = blocks.data();
        return row;
    }
    void append(std::vector<float>& k, std::vector<float>& v, int64_t count) {
        const kivi_layer& layer = model.layers[0];
        const Span after = after_append(model.windows, span, span.length + count);
        const Row r = row(span.length, count, span, after);
        backend->append(0, {&r, 1}, view_of(k, layer.kv_heads, layer.key_dim),
                        view_of(v, layer.kv_heads, layer.value_dim), nullptr);
        span = after;
    }
    void flush() {
        const Span after = after_flush(model.windows, span);
        const Row r = row(0, 0, span, after);
        backend->flush(0, {&r, 1}, nullptr);
        span = after;
    }
    // Canonical bytes of everything that is packed, and the window rows.
    std::vector<uint8_t> contents() const {
        std::vector<uint8_t> bytes;
        const kivi_layer& layer = model.layers[0];
        for (Part part : {Part::key, Part::value}) {
            const kivi_spec& spec = spec_of(layer, part);
            const int dim = dim_of(layer, part);
            const int64_t begin = tail_begin(model.windows, span, part);
            const int64_t packed = begin - model.windows.sink;
            const int64_t row_bytes = dim * static_cast<int64_t>(dtype_bytes(model.window_dtype));
            for (int head = 0; head < layer.kv_heads; ++head) {
                for (int64_t at = 0; at < packed; at += kPageTokens) {
                    const int64_t tokens = std::min<int64_t>(kPageTokens, packed - at);
                    std::vector<uint8_t> page(packed_bytes(spec, dim, model.window_dtype, tokens));
                    backend->export_page(0, part, head, blocks[at / kPageTokens], tokens, page.data());
                    bytes.insert(bytes.end(), page.begin(), page.end());
                }
                const int64_t sink = std::min(span.length, model.windows.sink);
                std::vector<uint8_t> rows(sink * row_bytes);
                backend->export_window(0, part, head, id, 0, sink, rows.data());
                bytes.insert(bytes.end(), rows.begin(), rows.end());
                rows.assign(std::max<int64_t>(0, span.length - begin) * row_bytes, 0);
                if (!rows.empty()) {
                    backend->export_window(0, part, head, id, begin, span.length, rows.data());
                    bytes.insert(bytes.end(), rows.begin(), rows.end());
                }
            }
        }
        return bytes;
    }
    std::vector<float> dequantized(Part part, bool stored_basis) const {
        const kivi_layer& layer = model.layers[0];
        const int dim = dim_of(layer, part);
        std::vector<float> x(span.length * layer.kv_heads * dim);
        const View view = view_of(x, layer.kv_heads, dim);
        backend->dequantize(0, row(0, 0, span, span), 0, span.length, part == Part::key ? view : View{},
                            part == Part::value ? view : View{}, stored_basis, nullptr);
        return x;
    }
    std::vector<float> attend(std::vector<float>& q, int64_t count, std::vector<float>* lse = nullptr,
                              int64_t window_left = -1, float soft_cap = 0,
                              const float* learned_sinks = nullptr) const {
        const kivi_layer& layer = model.layers[0];
        std::vector<float> out(count * layer.q_heads * layer.value_dim);
        const Row r = row(0, count, span, span);
        AttendCall call;
        call.rows = {&r, 1};
        call.q = view_of(q, layer.q_heads, layer.key_dim);
        call.out = view_of(out, layer.q_heads, layer.value_dim);
        if (lse != nullptr) {
            lse->assign(count * layer.q_heads, 0);
            call.lse = view_of(*lse, layer.q_heads, 1);
        }
        call.scale = 1 / std::sqrt(static_cast<float>(layer.key_dim));
        call.window_left = window_left;
        call.soft_cap = soft_cap;
        call.learned_sinks = learned_sinks;
        std::vector<uint8_t> workspace(backend->attend_workspace(0, 1, static_cast<int32_t>(count)) + 64);
        call.workspace = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
        call.workspace_bytes = workspace.size() - 64;
        backend->attend(call);
        return out;
    }
};

std::vector<float> noise(size_t n, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 1);
    std::vector<float> x(n);
    for (float& value : x) value = normal(random);
    return x;
}

struct Case {
    kivi_spec k, v;
    int key_dim, value_dim;
    int32_t window_dtype;
};

std::vector<Case> cases() {
    const int C = KIVI_AXIS_CHANNEL, T = KIVI_AXIS_TOKEN, H = KIVI_TRANSFORM_HADAMARD;
    return {
        {make_spec(2, C, 32, 0), make_spec(2, T, 32, 0), 128, 128, KIVI_F16},
        {make_spec(3, C, 64, 0), make_spec(2, T, 64, H), 128, 128, KIVI_F16},
        {make_spec(4, C, 32, H), make_spec(4, T, 32, 0), 64, 80, KIVI_BF16},
        {make_spec(8, T, KIVI_GROUP_HEAD, 0), make_spec(8, C, 128, 0), 96, 40, KIVI_F32},
        {make_spec(3, T, 64, 0), make_spec(3, C, 32, H), 80, 112, KIVI_F16},
        {make_spec(16, 0, 0, 0), make_spec(16, 0, 0, H), 64, 64, KIVI_F16},
        {make_spec(2, C, 128, 0), make_spec(16, 0, 0, 0), 192, 256, KIVI_BF16},
    };
}

// Attention over rows in the caller's basis, straight from the definition.
std::vector<double> plain_attention(const Sequence& s, const std::vector<float>& k, const std::vector<float>& v,
                                    const std::vector<float>& q, int64_t count) {
    const kivi_layer& layer = s.model.layers[0];
    const int ratio = layer.q_heads / layer.kv_heads;
    std::vector<double> out(count * layer.q_heads * layer.value_dim, 0.0);
    for (int64_t i = 0; i < count; ++i) {
        for (int h = 0; h < layer.q_heads; ++h) {
            const int64_t seen = s.span.length - count + i + 1;
            std::vector<double> p(seen);
            double sum = 0;
            for (int64_t t = 0; t < seen; ++t) {
                double dot = 0;
                for (int c = 0; c < layer.key_dim; ++c) {
                    dot += static_cast<double>(q[(i * layer.q_heads + h) * layer.key_dim + c]) *
                           k[(t * layer.kv_heads + h / ratio) * layer.key_dim + c];
                }
                sum += p[t] = std::exp(dot / std::sqrt(static_cast<double>(layer.key_dim)));
            }
            for (int64_t t = 0; t < seen; ++t) {
                for (int c = 0; c < layer.value_dim; ++c) {
                    out[(i * layer.q_heads + h) * layer.value_dim + c] +=
                        p[t] / sum * v[(t * layer.kv_heads + h / ratio) * layer.value_dim + c];
                }
            }
        }
    }
    return out;
}

double relative_error(const std::vector<float>& x, const std::vector<double>& exact) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < x.size(); ++i) {
        error += (x[i] - exact[i]) * (x[i] - exact[i]);
        norm += exact[i] * exact[i];
    }
    return std::sqrt(error / norm);
}

}  // namespace

TEST_CASE("contents do not depend on how tokens were split over appends, on the block or on the threads") {
    int number = 0;
    for (const Case& c : cases()) {
        CAPTURE(number);
        const Model model = make_model(c.k, c.v, c.key_dim, c.value_dim, c.window_dtype);
        const int64_t n = 600;
        std::vector<float> k = noise(n * 2 * c.key_dim, 1 + number), v = noise(n * 2 * c.value_dim, 100 + number);
        Sequence whole(model, 0, {0, 1, 2, 3, 4});
        whole.append(k, v, n);
        Model single_thread = model;
        single_thread.threads = 1;
        single_thread.reference = false;
        Sequence chunks(single_thread, 1, {4, 2, 0, 3, 1});
        for (int64_t step : {1, 31, 33, 1, 64, 200, 7, 63, 100, 50, 49, 1}) chunks.append(k, v, step);
        REQUIRE(chunks.span.length == n);
        CHECK(whole.contents() == chunks.contents());
        whole.flush();
        chunks.flush();
        CHECK(whole.contents() == chunks.contents());
        ++number;
    }
}

TEST_CASE("attend equals attention over the dequantised rows") {
    int number = 0;
    for (const Case& c : cases()) {
        CAPTURE(number);
        const Model model = make_model(c.k, c.v, c.key_dim, c.value_dim, c.window_dtype);
        const int64_t n = 300, queries = 3;
        std::vector<float> k = noise(n * 2 * c.key_dim, 7 + number), v = noise(n * 2 * c.value_dim, 70 + number);
        std::vector<float> q = noise(queries * 6 * c.key_dim, 700 + number);
        Sequence s(model, 0, {3, 1, 0, 2, 4});
        s.append(k, v, n);
        const std::vector<float> stored_k = s.dequantized(Part::key, false);
        const std::vector<float> stored_v = s.dequantized(Part::value, false);
        CHECK(relative_error(s.attend(q, queries), plain_attention(s, stored_k, stored_v, q, queries)) < 1e-5);
        ++number;
    }
}

TEST_CASE("export and import carry a page between caches") {
    int number = 0;
    for (const Case& c : cases()) {
        CAPTURE(number);
        const Model model = make_model(c.k, c.v, c.key_dim, c.value_dim, c.window_dtype);
        const int64_t n = 500;
        std::vector<float> k = noise(n * 2 * c.key_dim, 3), v = noise(n * 2 * c.value_dim, 4);
        Sequence from(model, 0, {0, 1, 2, 3, 4}), to(model, 1, {4, 3, 2, 1, 0});
        from.append(k, v, n);
        to.span = from.span;
        const kivi_layer& layer = model.layers[0];
        for (Part part : {Part::key, Part::value}) {
            const int64_t begin = tail_begin(model.windows, from.span, part);
            const int dim = dim_of(layer, part);
            std::vector<uint8_t> bytes(n * dim * 4);
            for (int head = 0; head < layer.kv_heads; ++head) {
                for (int64_t at = 0; at < begin - model.windows.sink; at += kPageTokens) {
                    const int64_t tokens = std::min<int64_t>(kPageTokens, begin - model.windows.sink - at);
                    from.backend->export_page(0, part, head, from.blocks[at / kPageTokens], tokens, bytes.data());
                    to.backend->import_page(0, part, head, to.blocks[at / kPageTokens], tokens, bytes.data());
                }
                from.backend->export_window(0, part, head, 0, 0, model.windows.sink, bytes.data());
                to.backend->import_window(0, part, head, 1, 0, model.windows.sink, bytes.data());
                from.backend->export_window(0, part, head, 0, begin, n, bytes.data());
                to.backend->import_window(0, part, head, 1, begin, n, bytes.data());
            }
        }
        CHECK(from.contents() == to.contents());
        ++number;
    }
}

TEST_CASE("a window, a soft cap and learned sinks change the softmax as they say") {
    const Model model = make_model(make_spec(16, 0, 0, 0), make_spec(16, 0, 0, 0), 8, 8, KIVI_F32);
    const int64_t n = 200;
    std::vector<float> k(n * 2 * 8, 0.0f), v(n * 2 * 8, 0.0f), q(6 * 8, 0.0f);
    for (int64_t t = 0; t < n; ++t) {
        for (int i = 0; i < 16; ++i) v[t * 16 + i] = static_cast<float>(t);
    }
    Sequence s(model, 0, {0, 1, 2, 3, 4});
    s.append(k, v, n);
    std::vector<float> lse;
    CHECK(s.attend(q, 1, &lse, 9)[0] == doctest::Approx(194.5));  // positions 190 .. 199
    CHECK(lse[0] == doctest::Approx(std::log(10.0)));
    const std::vector<float> sinks(6, std::log(10.0f));
    CHECK(s.attend(q, 1, &lse, 9, 0, sinks.data())[0] == doctest::Approx(194.5 / 2));
    CHECK(lse[0] == doctest::Approx(std::log(10.0)));

    for (int i = 0; i < 16; ++i) k[199 * 16 + i] = 1;
    Sequence capped(model, 0, {0, 1, 2, 3, 4});
    capped.append(k, v, n);
    const float raw = 30;
    std::vector<float> one(6 * 8, raw * std::sqrt(8.0f) / 8);  // q . k * scale = 30
    capped.attend(one, 1, &lse, 0, 30);
    CHECK(lse[0] == doctest::Approx(22.848).epsilon(1e-4));  // fault 22
    CHECK(capped.attend(one, 1, &lse, 0)[0] == doctest::Approx(199));
}

TEST_CASE("queries that see nothing give 0 and -infinity") {
    const Model model = make_model(make_spec(2, KIVI_AXIS_CHANNEL, 32, 0), make_spec(2, KIVI_AXIS_TOKEN, 32, 0), 64,
                                   64, KIVI_F16);
    Sequence s(model, 0, {0, 1, 2, 3, 4});
    std::vector<float> q = noise(2 * 6 * 64, 5), lse;
    const std::vector<float> out = s.attend(q, 2, &lse);
    for (float x : out) CHECK(x == 0);
    for (float x : lse) CHECK(x == -std::numeric_limits<float>::infinity());
}

TEST_CASE("rows whose transform leaves the range of the window dtype saturate and are counted") {
    const Model model = make_model(make_spec(16, 0, 0, 0), make_spec(2, KIVI_AXIS_TOKEN, 32, 1), 64, 64, KIVI_F16);
    std::vector<float> k(2 * 64, 1.0f), v(2 * 64, 60000.0f);
    Sequence s(model, 0, {0, 1, 2, 3, 4});
    s.append(k, v, 1);
    CHECK(s.backend->saturated_rows(0) == 2);
    CHECK(s.dequantized(Part::value, true)[0] == 65504.0f);
    s.backend->reset(nullptr);
    CHECK(s.backend->saturated_rows(0) == 0);
}

TEST_CASE("moments are the sum of q q' over the heads of a group, in the stored basis") {
    kivi_spec k = make_spec(2, KIVI_AXIS_CHANNEL, 32, KIVI_TRANSFORM_HADAMARD);
    k.rounding = KIVI_ROUND_QUERY_AWARE;
    const Model model = make_model(k, make_spec(2, KIVI_AXIS_TOKEN, 32, 0), 16, 16, KIVI_F16);
    Sequence s(model, 0, {0, 1, 2, 3, 4});
    std::vector<float> q = noise(5 * 6 * 16, 9);
    const Row r = s.row(0, 5, Span{}, Span{});
    s.backend->accumulate_moments(0, {&r, 1}, view_of(q, 6, 16), nullptr);
    std::vector<float> sums(2 * 16 * 16);
    s.backend->read_moments(0, sums.data());
    for (int head = 0; head < 2; ++head) {
        std::vector<double> exact(16 * 16, 0.0);
        for (int row = 0; row < 15; ++row) {
            double x[16];
            for (int c = 0; c < 16; ++c) x[c] = q[((row / 3) * 6 + head * 3 + row % 3) * 16 + c];
            hadamard(x, 16);
            for (int i = 0; i < 256; ++i) exact[i] += x[i / 16] * x[i % 16];
        }
        for (int i = 0; i < 256; ++i) CHECK(sums[head * 256 + i] == doctest::Approx(exact[i]).epsilon(1e-4));
    }
}

TEST_CASE("a larger pool keeps its pages") {
    const Case c = cases()[1];
    Model model = make_model(c.k, c.v, c.key_dim, c.value_dim, c.window_dtype);
    model.pool_tokens = 4 * kPageTokens;
    const int64_t n = 400;
    std::vector<float> k = noise(n * 2 * c.key_dim, 3), v = noise(n * 2 * c.value_dim, 4);
    Sequence s(model, 0, {3, 2, 1, 0});
    s.append(k, v, n);
    const std::vector<uint8_t> before = s.contents();
    for (int64_t more : {1, 64}) {  // fewer than there are, and more
        s.backend->grow_pool(more, nullptr);
        CHECK(before == s.contents());
    }
}
