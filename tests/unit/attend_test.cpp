// cpu/attend: the fast path against the double-precision one, over random shapes and every instruction set that
// this machine has. Both backends are filled by the same appends.
#include "cpu/attend.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/cpu_backend.h"
#include "cpu/simd.h"
#include "format/half.h"
#include "spec_support.h"

using namespace kivi;
using kivi_test::make_spec;
using cpu::simd::Target;

namespace {

constexpr int C = KIVI_AXIS_CHANNEL, T = KIVI_AXIS_TOKEN, H = KIVI_TRANSFORM_HADAMARD;

struct Shape {
    kivi_spec k, v;
    int key_dim = 128, value_dim = 128;
    int kv_heads = 2, ratio = 4;
    int32_t window_dtype = KIVI_F16;
    int64_t sink = 32, recent = 40, flush = 32;
    int32_t schedule = KIVI_SCHEDULE_ROLLING;
    int threads = 2;
};

Model make_model(const Shape& shape, bool reference, int sequences) {
    Model model;
    model.window_dtype = shape.window_dtype;
    model.max_sequences = sequences;
    model.max_tokens = 6000;
    model.windows.sink = shape.sink;
    model.windows.recent = shape.recent;
    model.windows.flush = shape.flush;
    model.windows.unit = shape.flush;
    model.windows.schedule = shape.schedule;
    kivi_layer layer{};
    layer.kv_heads = shape.kv_heads;
    layer.q_heads = shape.kv_heads * shape.ratio;
    layer.key_dim = shape.key_dim;
    layer.value_dim = shape.value_dim;
    layer.k = shape.k;
    layer.v = shape.v;
    model.layers = {layer};
    model.threads = shape.threads;
    model.reference = reference;
    return model;
}

// A tensor [tokens][heads][dim] of any dtype, with a gap after each head.
struct Tensor {
    static constexpr int kGap = 8;
    int heads, dim;
    int32_t dtype;
    std::vector<uint8_t> bytes;

    Tensor(int64_t tokens, int heads_, int dim_, int32_t dtype_ = KIVI_F32)
        : heads(heads_), dim(dim_), dtype(dtype_), bytes(tokens * heads_ * (dim_ + kGap) * dtype_bytes(dtype_)) {}

    View view() {
        View view;
        view.data = bytes.data();
        view.dtype = dtype;
        view.ragged = true;
        view.token_stride = static_cast<int64_t>(heads) * (dim + kGap);
        view.head_stride = dim + kGap;
        return view;
    }
    int64_t at(int64_t token, int head, int c) const {
        return (token * heads + head) * static_cast<int64_t>(dim + kGap) + c;
    }
    float get(int64_t token, int head, int c) const { return load_element(bytes.data(), dtype, at(token, head, c)); }
    void set(int64_t token, int head, int c, float x) { store_element(bytes.data(), dtype, at(token, head, c), x); }
    int64_t tokens() const {
        return static_cast<int64_t>(bytes.size() / dtype_bytes(dtype)) / heads / (dim + kGap);
    }
    template <class F>
    void fill(F value) {
        for (int64_t t = 0; t < tokens(); ++t) {
            for (int h = 0; h < heads; ++h) {
                for (int c = 0; c < dim; ++c) set(t, h, c, value(t, h, c));
            }
        }
    }
};

struct Cache {
    Model model;
    std::unique_ptr<Backend> backend;
    std::vector<Span> spans;
    std::vector<std::vector<int32_t>> blocks;

    Cache(const Shape& shape, bool reference, int sequences = 1, bool backwards = false)
        : model(make_model(shape, reference, sequences)),
          backend(cpu::backend_kind().create(model)),
          spans(sequences),
          blocks(sequences) {
        const int64_t each = blocks_per_sequence(model);
        for (int s = 0; s < sequences; ++s) {
            for (int64_t i = 0; i < each; ++i) {
                blocks[s].push_back(static_cast<int32_t>(backwards ? (sequences - s) * each - 1 - i : s * each + i));
            }
        }
    }
    Row row(int s, int64_t offset, int64_t count, const Span& before, const Span& after) const {
        Row row;
        row.sequence = s;
        row.offset = offset;
        row.count = count;
        row.before = before;
        row.after = after;
        row.blocks = blocks[s].data();
        return row;
    }
    void append(int s, Tensor& k, Tensor& v, int64_t offset, int64_t count) {
        const Span after = after_append(model.windows, spans[s], spans[s].length + count);
        const Row r = row(s, offset, count, spans[s], after);
        backend->append(0, {&r, 1}, k.view(), v.view(), nullptr);
        spans[s] = after;
    }
    // rows: pairs of sequence and count, queries one after the other.
    void attend(AttendCall call, const std::vector<std::pair<int, int64_t>>& batch) const {
        std::vector<Row> rows;
        int64_t offset = 0, most = 0;
        for (const auto& [s, count] : batch) {
            rows.push_back(row(s, offset, count, spans[s], spans[s]));
            offset += count;
            most = std::max(most, count);
        }
        const int32_t n = static_cast<int32_t>(rows.size());
        call.rows = {rows.data(), n};
        std::vector<uint8_t> memory(backend->attend_workspace(0, n, static_cast<int32_t>(most)) + 64, 0xff);
        call.workspace = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
        call.workspace_bytes = memory.size() - 64;
        backend->attend(call);
    }
};

std::mt19937& random_numbers() {
    static std::mt19937 random(1);
    return random;
}
float normal() {
    static std::normal_distribution<float> distribution;
    return distribution(random_numbers());
}
template <class X>
X one_of(std::initializer_list<X> options) {
    return options.begin()[random_numbers()() % options.size()];
}

struct Options {
    int64_t window_left = -1;
    float soft_cap = 0;
    bool sinks = false, lse = true, fresh = false;
    int32_t q_dtype = KIVI_F32, out_dtype = KIVI_F32;
};

struct Result {
    Tensor out, lse;
};

Result attend(const Cache& cache, Tensor& q, Tensor& k, Tensor& v, const std::vector<std::pair<int, int64_t>>& batch,
              const Options& options) {
    const kivi_layer& layer = cache.model.layers[0];
    Result result{Tensor(q.tokens(), layer.q_heads, layer.value_dim, options.out_dtype),
                  Tensor(q.tokens(), layer.q_heads, 1)};
    std::vector<float> sinks(layer.q_heads);
    for (int h = 0; h < layer.q_heads; ++h) sinks[h] = 0.5f * static_cast<float>(h % 5) - 1;
    AttendCall call;
    call.q = q.view();
    call.out = result.out.view();
    if (options.lse) call.lse = result.lse.view();
    if (options.fresh) {
        call.k = k.view();
        call.v = v.view();
    }
    call.scale = 1 / std::sqrt(static_cast<float>(layer.key_dim));
    call.window_left = options.window_left;
    call.soft_cap = options.soft_cap;
    if (options.sinks) call.learned_sinks = sinks.data();
    cache.attend(call, batch);
    return result;
}

double relative_error(const Tensor& x, const Tensor& y) {
    double error = 0, norm = 0;
    for (int64_t t = 0; t < y.tokens(); ++t) {
        for (int h = 0; h < y.heads; ++h) {
            for (int c = 0; c < y.dim; ++c) {
                const double a = x.get(t, h, c), b = y.get(t, h, c);
                if (std::isinf(b) || std::isnan(b)) {
                    if (std::isnan(b) ? !std::isnan(a) : a != b) return std::numeric_limits<double>::infinity();
                    continue;
                }
                error += (a - b) * (a - b);
                norm += b * b;
            }
        }
    }
    return std::sqrt(error / (norm > 0 ? norm : 1));
}

std::vector<Target> targets() {
    std::vector<Target> all;
    for (Target t : {Target::plain, Target::sse4, Target::avx2, Target::avx512, Target::avx512_vnni}) {
        if (cpu::simd::runs_on(t)) all.push_back(t);
    }
    return all;
}

struct ForcedTarget {
    explicit ForcedTarget(Target target) { cpu::simd::force_target(target); }
    ~ForcedTarget() { cpu::simd::force_target(cpu::simd::best_target()); }
};

// Keys with scales and offsets of their own for each channel, as models have them.
float key_value(int h, int c) {
    const float scale = 0.3f + 0.1f * static_cast<float>((c * 7 + h * 3) % 17);
    return normal() * scale + 1.5f * static_cast<float>((c * 5 + h) % 3 - 1);
}

Shape random_shape() {
    Shape shape;
    shape.key_dim = one_of({64, 80, 96, 112, 128, 192, 256, 72});
    shape.value_dim = one_of({0, 0, 64, 80, 128, 40});
    if (shape.value_dim == 0) shape.value_dim = shape.key_dim;
    const int key_group = one_of({32, 32, 64, 128}), value_group = one_of({32, 64, static_cast<int>(KIVI_GROUP_HEAD)});
    const int bits = one_of({2, 2, 3, 3, 4, 4, 8, 16});
    const bool usual = random_numbers()() % 4 != 0;  // axes of the fast path
    shape.k = make_spec(bits, usual ? C : T, usual ? key_group : static_cast<int>(KIVI_GROUP_HEAD), one_of({0, 0, H}));
    const int value_bits = one_of({2, 2, 3, 4, 8, 16});
    shape.v = make_spec(value_bits, T, value_group > shape.value_dim ? 32 : value_group, one_of({0, H}));
    if (random_numbers()() % 6 == 0 && bits != 16) shape.k.param_dtype = KIVI_F32;
    shape.kv_heads = one_of({1, 2, 3});
    shape.ratio = one_of({1, 2, 3, 4, 5, 7, 8, 9, 12});
    shape.window_dtype = one_of({static_cast<int>(KIVI_F16), static_cast<int>(KIVI_BF16), static_cast<int>(KIVI_F32)});
    shape.flush = shape.k.axis == C ? shape.k.group : 32;
    shape.sink = one_of({0, 1, 2}) * shape.flush;
    shape.recent = one_of({0, 5, 32, 100});
    if (random_numbers()() % 6 == 0 && shape.k.axis == C) {
        shape.schedule = KIVI_SCHEDULE_PUBLISHED;
        shape.sink = 0;
        shape.recent = shape.flush;
    }
    return shape;
}

std::string describe(const Shape& s) {
    return "K " + std::to_string(s.k.bits) + " axis " + std::to_string(s.k.axis) + " g" + std::to_string(s.k.group) +
           " V " + std::to_string(s.v.bits) + " g" + std::to_string(s.v.group) + " dims " + std::to_string(s.key_dim) +
           "/" + std::to_string(s.value_dim) + " heads " + std::to_string(s.kv_heads) + "x" + std::to_string(s.ratio) +
           " windows " + std::to_string(s.sink) + "/" + std::to_string(s.recent) + "/" + std::to_string(s.flush) +
           " schedule " + std::to_string(s.schedule) + " dtype " + std::to_string(s.window_dtype);
}

}  // namespace

TEST_CASE("fast attention agrees with double precision") {
    double worst = 0;
    for (int round = 0; round < 120; ++round) {
        const Shape shape = random_shape();
        Cache fast(shape, false), oracle(shape, true);
        const int64_t length = one_of<int64_t>({1, 7, 60, 200, 333, 700});
        const int64_t count = std::min<int64_t>(length, one_of<int64_t>({1, 1, 1, 2, 3, 9, 21}));
        Tensor k(length, shape.kv_heads, shape.key_dim), v(length, shape.kv_heads, shape.value_dim);
        k.fill([](int64_t, int h, int c) { return key_value(h, c); });
        v.fill([](int64_t, int, int) { return normal(); });
        fast.append(0, k, v, 0, length);
        oracle.append(0, k, v, 0, length);
        Options options;
        options.window_left = one_of<int64_t>({-1, -1, 0, 40, 150});
        options.soft_cap = one_of({0.0f, 0.0f, 20.0f});
        options.sinks = random_numbers()() % 3 == 0;
        options.fresh = random_numbers()() % 3 == 0;
        options.q_dtype = one_of({static_cast<int>(KIVI_F32), static_cast<int>(KIVI_F16), static_cast<int>(KIVI_BF16)});
        Tensor q(count, shape.kv_heads * shape.ratio, shape.key_dim, options.q_dtype);
        q.fill([](int64_t, int, int) { return normal(); });
        Result expected = attend(oracle, q, k, v, {{0, count}}, options);
        for (Target target : targets()) {
            ForcedTarget forced(target);
            Result result = attend(fast, q, k, v, {{0, count}}, options);
            const double error = relative_error(result.out, expected.out);
            const double lse_error = relative_error(result.lse, expected.lse);
            worst = std::max({worst, error, lse_error});
            INFO(describe(shape), " length ", length, " count ", count, " left ", options.window_left, " cap ",
                 options.soft_cap, " fresh ", options.fresh, " on ", cpu::simd::target_name(target));
            CHECK(error < 1e-3);
            CHECK(lse_error < 1e-3);
        }
    }
    MESSAGE("largest error ", worst);
}

namespace {

Shape usual_shape() {
    Shape shape;
    shape.k = make_spec(2, C, 32, 0);
    shape.v = make_spec(2, T, 32, 0);
    return shape;
}

std::vector<float> values_of(const Tensor& x, int64_t first, int64_t tokens) {
    std::vector<float> values;
    for (int64_t t = first; t < first + tokens; ++t) {
        for (int h = 0; h < x.heads; ++h) {
            for (int c = 0; c < x.dim; ++c) values.push_back(x.get(t, h, c));
        }
    }
    return values;
}

}  // namespace

TEST_CASE("bits depend neither on batch, threads, page numbers nor capacity") {
    Shape shape = usual_shape();
    const int64_t length = 5000;  // three splits
    Tensor k(length, shape.kv_heads, 128), v(length, shape.kv_heads, 128);
    k.fill([](int64_t, int h, int c) { return key_value(h, c); });
    v.fill([](int64_t, int, int) { return normal(); });
    Tensor q(3, shape.kv_heads * shape.ratio, 128);
    q.fill([](int64_t, int, int) { return normal(); });
    std::vector<float> expected;
    for (int threads : {1, 2, 5}) {
        shape.threads = threads;
        for (bool backwards : {false, true}) {
            Cache cache(shape, false, 3, backwards);
            cache.append(0, k, v, 0, 700);
            cache.append(1, k, v, 0, length);
            cache.append(2, k, v, 0, 40);
            const std::vector<float> alone = values_of(attend(cache, q, k, v, {{1, 1}}, {}).out, 0, 1);
            // The same query of the same sequence, as the second row of three.
            Tensor three(3, shape.kv_heads * shape.ratio, 128);
            three.fill([&](int64_t t, int h, int c) { return q.get(t == 1 ? 0 : 1, h, c); });
            const std::vector<float> among =
                values_of(attend(cache, three, k, v, {{0, 1}, {1, 1}, {2, 1}}, {}).out, 1, 1);
            CHECK(alone == among);
            if (expected.empty()) expected = alone;
            CHECK(alone == expected);
        }
    }
}

TEST_CASE("an outlier channel does not cost the others their precision") {
    for (int bits : {2, 3, 4}) {
        Shape shape = usual_shape();
        shape.k = make_spec(bits, C, 32, 0);
        shape.kv_heads = 1;
        Cache fast(shape, false), oracle(shape, true);
        const int64_t length = 600;
        Tensor k(length, 1, 128), v(length, 1, 128), q(1, 4, 128);
        // One channel swings by 40000, one stands at 7000 (its score alone is 250: fp32 keeps the rest).
        k.fill([](int64_t t, int, int c) { return c == 5 ? (t % 2 ? 40000.0f : -40000.0f) : c == 9 ? 7000.0f : normal(); });
        v.fill([](int64_t, int h, int c) { return c == 7 + h ? 60000 * normal() / 4 : normal(); });
        q.fill([](int64_t, int h, int c) { return c == 5 ? 0.001f * static_cast<float>(h) : c == 9 ? 0.4f : normal(); });
        fast.append(0, k, v, 0, length);
        oracle.append(0, k, v, 0, length);
        Result expected = attend(oracle, q, k, v, {{0, 1}}, {});
        for (Target target : targets()) {
            ForcedTarget forced(target);
            Result result = attend(fast, q, k, v, {{0, 1}}, {});
            INFO(bits, " bits on ", std::string(cpu::simd::target_name(target)));
            CHECK(relative_error(result.out, expected.out) < 1e-3);
            // Channel 7 drowns the others in the norm: look at those far from it by themselves.
            double error = 0, norm = 0;
            for (int h = 0; h < 4; ++h) {
                for (int c = 32; c < 128; ++c) {
                    const double a = result.out.get(0, h, c), b = expected.out.get(0, h, c);
                    error += (a - b) * (a - b);
                    norm += b * b;
                }
            }
            CHECK(std::sqrt(error / norm) < 2e-3);
        }
    }
}

TEST_CASE("constant values come back over a long context") {
    Shape shape = usual_shape();
    shape.kv_heads = 1;
    for (Target target : targets()) {
        if (target < Target::avx2 && target != cpu::simd::best_target()) continue;
        ForcedTarget forced(target);
        Cache cache(shape, false);
        const int64_t length = 5900;
        Tensor k(length, 1, 128), v(length, 1, 128), q(1, 4, 128);
        k.fill([](int64_t, int h, int c) { return key_value(h, c); });
        v.fill([](int64_t, int, int) { return 50.0f; });
        q.fill([](int64_t, int, int) { return normal(); });
        cache.append(0, k, v, 0, length);
        Result result = attend(cache, q, k, v, {{0, 1}}, {});
        for (float x : values_of(result.out, 0, 1)) CHECK(std::fabs(x - 50) < 50.0f / 2048);
    }
}

TEST_CASE("values near the end of fp32 come back while scores grow from visit to visit") {
    Shape shape = usual_shape();
    shape.k = shape.v = make_spec(16, C, 32, 0);
    shape.window_dtype = KIVI_F32;
    shape.kv_heads = shape.ratio = 1;
    const int64_t length = 640;
    for (float value : {1e34f, 1e36f}) {
        for (float growth : {0.0f, 7.9f, 8.1f, 40.0f}) {  // in powers of two, every 128 tokens
            Cache cache(shape, false);
            Tensor k(length, 1, 128), v(length, 1, 128), q(1, 1, 128);
            k.fill([&](int64_t t, int, int c) { return c == 0 ? growth * static_cast<float>(t / 128) : 0.0f; });
            v.fill([&](int64_t, int, int) { return value; });
            q.fill([](int64_t, int, int c) { return c == 0 ? 0.693147f * std::sqrt(128.0f) : 0.0f; });
            cache.append(0, k, v, 0, length);
            for (Target target : targets()) {
                ForcedTarget forced(target);
                Result result = attend(cache, q, k, v, {{0, 1}}, {});
                INFO("value ", value, ", growth ", growth, " on ", std::string(cpu::simd::target_name(target)));
                for (float x : values_of(result.out, 0, 1)) CHECK(std::fabs(x / value - 1) < 1e-5);
            }
        }
    }
}

TEST_CASE("a soft cap multiplies errors of the exponential by itself: it has few") {
    Shape shape = usual_shape();
    shape.k = shape.v = make_spec(16, C, 32, 0);
    shape.window_dtype = KIVI_F32;
    shape.kv_heads = shape.ratio = 1;
    const int64_t length = 256;
    for (float cap : {50.0f, 1000.0f, 5000.0f}) {
        Tensor k(length, 1, 128), v(length, 1, 128), q(1, 1, 128);
        k.fill([&](int64_t t, int, int c) { return c == 0 ? 0.173287f * cap + (t % 2 == 0 ? -0.02f : 0.02f) : 0.0f; });
        v.fill([](int64_t t, int, int c) { return c == t % 2 ? 1.0f : 0.0f; });
        q.fill([](int64_t, int, int c) { return c == 0 ? std::sqrt(128.0f) : 0.0f; });
        Cache fast(shape, false), oracle(shape, true);
        fast.append(0, k, v, 0, length);
        oracle.append(0, k, v, 0, length);
        Options options;
        options.soft_cap = cap;
        const Result expected = attend(oracle, q, k, v, {{0, 1}}, options);
        for (Target target : targets()) {
            ForcedTarget forced(target);
            const Result result = attend(fast, q, k, v, {{0, 1}}, options);
            INFO("cap ", cap, " on ", std::string(cpu::simd::target_name(target)));
            CHECK(relative_error(result.out, expected.out) < 1e-3);
        }
    }
}

TEST_CASE("soft caps of any size: far above the scores they change nothing, far below they flatten them") {
    const Shape shape = usual_shape();
    Cache fast(shape, false), oracle(shape, true);
    const int64_t length = 300;
    Tensor k(length, 2, 128), v(length, 2, 128), q(3, 8, 128);
    k.fill([](int64_t, int h, int c) { return key_value(h, c); });
    v.fill([](int64_t, int, int) { return normal(); });
    q.fill([](int64_t, int, int) { return normal(); });
    fast.append(0, k, v, 0, length);
    oracle.append(0, k, v, 0, length);
    for (float cap : {1e-40f, 1e-20f, 0.01f, 3.0f, 1e4f, 1e6f, 1e30f, 3.4e38f}) {
        Options options;
        options.soft_cap = cap;
        Result expected = attend(oracle, q, k, v, {{0, 3}}, options);
        for (Target target : targets()) {
            ForcedTarget forced(target);
            Result result = attend(fast, q, k, v, {{0, 3}}, options);
            INFO("cap ", cap, " on ", std::string(cpu::simd::target_name(target)));
            CHECK(relative_error(result.out, expected.out) < 1e-3);
            CHECK(relative_error(result.lse, expected.lse) < 1e-3);
        }
    }
}

TEST_CASE("a NaN or infinite key poisons its head for the queries that see it, nothing else") {
    const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    for (float bad : {nan, inf, -inf}) {
        for (int64_t where : {3, 100, 290}) {  // sink window, page, tail
            Shape shape = usual_shape();
            Cache fast(shape, false), clean(shape, false);
            const int64_t length = 300;
            Tensor k(length, 2, 128), v(length, 2, 128), q(20, 8, 128);
            k.fill([](int64_t, int h, int c) { return key_value(h, c); });
            v.fill([](int64_t, int, int) { return normal(); });
            q.fill([](int64_t, int, int) { return normal(); });
            clean.append(0, k, v, 0, length);
            k.set(where, 0, 17, bad);
            fast.append(0, k, v, 0, length);
            for (Target target : targets()) {
                ForcedTarget forced(target);
                for (float cap : {0.0f, 30.0f}) {
                    Options options;
                    options.soft_cap = cap;
                    Result result = attend(fast, q, k, v, {{0, 20}}, options);
                    Result expected = attend(clean, q, k, v, {{0, 20}}, options);
                    for (int64_t t = 0; t < 20; ++t) {
                        const bool seen = where <= length - 20 + t;
                        for (int h = 0; h < 8; ++h) {
                            for (int c = 0; c < 128; ++c) {
                                const float x = result.out.get(t, h, c);
                                const bool right = h < 4 && seen ? std::isnan(x) : x == expected.out.get(t, h, c);
                                INFO(bad, " at ", where, " cap ", cap, " token ", t, " head ", h, " channel ", c, ": ", x, " and ",
                                     expected.out.get(t, h, c), " on ", cpu::simd::target_name(target));
                                REQUIRE(right);
                            }
                        }
                    }
                }
            }
        }
    }
}
