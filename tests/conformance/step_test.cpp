// kivi_step is kivi_attend with fresh keys and values and then kivi_append, bit for bit, and whole or not at all.
#include <algorithm>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "support/cache.h"

using namespace kivi_test;

namespace {

// How a case calls: types that the fast kernels of a GPU take and types that they do not, one launch and two.
struct Manner {
    int32_t dtype;  // of q, k, v and out
    uint64_t flags;
};
std::vector<Manner> manners(const kivi_config& config) {
    std::vector<Manner> all{{KIVI_F32, 0}, {config.window_dtype, 0}, {config.window_dtype, KIVI_ATTEND_INVARIANT}};
    if (config.window_dtype == KIVI_F32) all.pop_back();
    return all;
}

Ask ask_of(const Manner& manner) {
    Ask ask;
    ask.q_dtype = ask.out_dtype = ask.kv_dtype = manner.dtype;
    ask.flags = manner.flags;
    return ask;
}

// Two caches that are led alike, one by kivi_step and one by the two calls.
class Twins {
  public:
    explicit Twins(const kivi_config& config) : one_(config), two_(config) {}

    const Cache& one() const { return one_; }
    const Cache& two() const { return two_; }

    void append(int32_t sequence, const Tokens& tokens, int64_t count) const {
        for (const Cache* cache : {&one_, &two_}) cache->append(sequence, tokens, 0, count);
    }
    // The same step in both; keys and values of `tokens`.
    void step(const Rows& rows, const Floats& q, const Tokens& tokens, Ask ask, int layer = 0) const {
        ask.fresh_k = tokens.k;
        ask.fresh_v = tokens.v;
        const Answer stepped = one_.step(rows, q, ask, layer);
        const Answer attended = two_.attend(rows, q, ask, layer);
        two_.append(rows, tokens, layer, ask.kv_dtype);
        CHECK(bit_equal(stepped.out, attended.out));
        CHECK(bit_equal(stepped.lse, attended.lse));
    }
    // Random queries, keys and values for the rows.
    void step(const Rows& rows, Random& random, const Ask& ask, int layer = 0) const {
        const kivi_layer& shape = one_.layer(layer);
        int64_t tokens = 0;
        for (const Row& row : rows) tokens += row.sequence < 0 ? 0 : row.count;
        step(rows, random.normals(size_t(tokens * shape.q_heads * shape.key_dim)), random_tokens(random, shape, tokens),
             ask, layer);
    }
    // What they hold, sequence by sequence, and what they count.
    void check_alike() const {
        for (int32_t sequence = 0; sequence < one_.config().max_sequences; ++sequence) {
            CAPTURE(sequence);
            CHECK(one_.length(sequence).length == two_.length(sequence).length);
            CHECK(one_.blob(sequence) == two_.blob(sequence));
        }
        const kivi_statistics a = one_.statistics(), b = two_.statistics();
        CHECK(a.tokens == b.tokens);
        CHECK(a.packed_tokens == b.packed_tokens);
        CHECK(a.saturated_rows == b.saturated_rows);
        CHECK(a.blocks_used == b.blocks_used);
        CHECK(a.live_bytes == b.live_bytes);
    }

  private:
    Cache one_, two_;
};

kivi_layer with_heads(kivi_layer layer, int kv_heads, int ratio) {
    layer.kv_heads = kv_heads;
    layer.q_heads = kv_heads * ratio;
    return layer;
}

// Moments of random queries, the same for both.
void commit_moments(const Twins& twins, Random& random) {
    const kivi_layer& shape = twins.one().layer();
    const Tensor q(KIVI_F32, {90, shape.q_heads, shape.key_dim},
                   random.normals(size_t(90 * shape.q_heads * shape.key_dim)));
    for (const Cache* cache : {&twins.one(), &twins.two()}) {
        REQUIRE(kivi_moments_accumulate(*cache, 0, Batch({{0, 90}}), q, nullptr) == KIVI_OK);
        REQUIRE(kivi_moments_commit(*cache, 0, nullptr) == KIVI_OK);
    }
}

}  // namespace

TEST_CASE("[STEP-1] one token a row, through sinks, packs and the ring: every preset as attend and append leave it") {
    for (int32_t i = 0; i < kivi_preset_count(); ++i) {
        kivi_preset about{};
        REQUIRE(kivi_preset_at(i, &about, sizeof about) == KIVI_OK);
        CAPTURE(std::string(about.name));
        kivi_config with = preset(about.name, {2, 8, 64, 64});
        with.max_sequences = 3;
        for (const Manner& manner : manners(with)) {
            CAPTURE(manner.dtype);
            CAPTURE(manner.flags);
            Random random(uint64_t(i + 1));
            const Twins twins(with);
            twins.append(1, random_tokens(random, with.layer, 60), 60);
            twins.append(2, random_tokens(random, with.layer, 250), 250);
            for (int step = 0; step < 140; ++step) {
                CAPTURE(step);
                twins.step({{2, 1}, {0, 1}, {1, 1}}, random, ask_of(manner));
                if (step % 10 == 9) twins.check_alike();
            }
        }
    }
}

TEST_CASE("[STEP-1] head dim 128, GQA 1, 4 and 8, bf16 windows") {
    for (int ratio : {1, 4, 8}) {
        CAPTURE(ratio);
        kivi_config with = preset("k3v2", {});
        with.window_dtype = KIVI_BF16;
        with.layer.key_dim = with.layer.value_dim = 128;
        with.layer = with_heads(with.layer, 2, ratio);
        for (const Manner& manner : manners(with)) {
            Random random(uint64_t(10 + ratio));
            const Twins twins(with);
            twins.append(0, random_tokens(random, with.layer, 370), 370);
            for (int step = 0; step < 80; ++step) twins.step({{0, 1}}, random, ask_of(manner));
            twins.check_alike();
        }
    }
}

TEST_CASE("[STEP-1] sequences so long that attend cuts them, on both sides of where a part is added") {
    kivi_config with = preset("k3v2", {1, 4, 128, 128});
    with.max_sequences = 2;
    with.max_tokens = 4500;
    for (const Manner& manner : manners(with)) {
        Random random(12);
        const Twins twins(with);
        twins.append(0, random_tokens(random, with.layer, 2230), 2230);  // 2048 of them packed
        twins.append(1, random_tokens(random, with.layer, 4280), 4280);  // and 4096
        for (int step = 0; step < 16; ++step) {
            CAPTURE(step);
            for (int32_t sequence : {0, 1}) twins.append(sequence, random_tokens(random, with.layer, 4), 4);
            twins.step({{0, 1}, {1, 1}}, random, ask_of(manner));
        }
        twins.step({{1, 3}}, random, ask_of(manner));
        twins.check_alike();
    }
}

TEST_CASE("[STEP-1] any spec, window type, schedule, batch and question") {
    const kivi_spec keys[] = {channel(2, 32), rotated(channel(3, 64)), token(4, 32), ratio(channel(2, 32), 0.9f),
                              wide(channel(8, 32)), full(), rotated(full())};
    const kivi_spec values[] = {token(2, 32), rotated(token(2, 64)), channel(4, 32), token(3, KIVI_GROUP_HEAD), full()};
    Random random(5);
    for (int round = 0; round < 60; ++round) {
        CAPTURE(round);
        const kivi_spec k = keys[random.below(std::size(keys))], v = values[random.below(std::size(values))];
        const int kv_heads = int(random.between(1, 3)), dim = random.one_of({64, 80, 128});
        const Heads heads{kv_heads, kv_heads * random.one_of({1, 2, 4, 7, 8}), dim, random.chance(20) ? 64 : dim};
        const bool as_published = v.axis != KIVI_AXIS_CHANNEL && random.chance(30);
        kivi_config with = as_published ? published(k, v, heads, 64) : config(k, v, heads, {64, 40, 64});
        with.window_dtype = random.one_of({KIVI_F16, KIVI_BF16, KIVI_F32});
        with.max_sequences = 4;
        const Twins twins(with);
        for (int32_t sequence = 0; sequence < 3; ++sequence) {
            const int64_t length = random.between(0, 330);
            twins.append(sequence, random_tokens(random, with.layer, length), length);
        }
        for (int step = 0; step < 6; ++step) {
            CAPTURE(step);
            Rows rows;
            for (int32_t sequence : {2, 0, 3, 1}) {
                const int32_t count = random.one_of({0, 1, 1, 1, 1, 3, 17, 70});
                rows.push_back({random.chance(15) ? -1 : sequence, count});
            }
            Ask ask = ask_of({random.one_of<int32_t>({KIVI_F32, KIVI_F16, KIVI_BF16, with.window_dtype}),
                              random.one_of<uint64_t>({0, KIVI_ATTEND_INVARIANT})});
            ask.out_dtype = random.one_of<int32_t>({ask.q_dtype, ask.q_dtype, KIVI_F32});
            if (random.chance(30)) ask.soft_cap = 20;
            if (random.chance(30)) ask.scale = 0.2f;
            if (random.chance(30)) ask.window_left = random.between(0, 200);
            if (random.chance(30)) ask.sinks = random.normals(size_t(heads.q));
            twins.step(rows, random, ask);
        }
        twins.check_alike();
    }
}

TEST_CASE("[STEP-1] query-aware rounding packs with the moments") {
    kivi_config with = preset("k3v2", {2, 8, 128, 128});
    with.layer.k = query_aware(with.layer.k);
    for (const Manner& manner : manners(with)) {
        Random random(6);
        const Twins twins(with);
        commit_moments(twins, random);
        twins.append(0, random_tokens(random, with.layer, 180), 180);
        for (int step = 0; step < 80; ++step) twins.step({{0, 1}}, random, ask_of(manner));
        twins.step({{0, 100}}, random, ask_of(manner));
        twins.check_alike();
        CHECK(twins.one().statistics().key_rounding == KIVI_ROUND_QUERY_AWARE);
    }
}

TEST_CASE("[STEP-1] NaN, infinities and rows beyond the range of the windows") {
    kivi_config with = preset("k3v2", {1, 4, 128, 128});
    with.max_sequences = 2;
    for (const Manner& manner : manners(with)) {
        Random random(7);
        const Twins twins(with);
        for (int32_t sequence : {0, 1}) twins.append(sequence, random_tokens(random, with.layer, 120), 120);
        for (int step = 0; step < 75; ++step) {
            CAPTURE(step);
            Tokens tokens = random_tokens(random, with.layer, 2);
            if (step % 20 == 3) tokens.k[5] = kNaN;
            if (step % 20 == 7) tokens.v[130] = kInfinity;
            if (step % 20 == 11) tokens.k[200] = -kInfinity;
            if (step % 20 == 15) std::fill_n(tokens.v.begin(), 128, 3e4f);  // the Hadamard adds them up
            if (step % 20 == 17 && manner.dtype == KIVI_F32) tokens.k[130] = -3e5f;
            twins.step({{0, 1}, {1, 1}}, random.normals(2 * 4 * 128), tokens, ask_of(manner));
        }
        twins.check_alike();
        CHECK(twins.one().statistics().saturated_rows > 0);
    }
}

TEST_CASE("[STEP-1] more rows than one launch takes, and the blocks of every layer from the first of them") {
    kivi_config with = preset("k3v2", {1, 2, 64, 64});
    with.max_sequences = 150;
    with.layer_count = 2;
    with.max_tokens = 400;
    for (const Manner& manner : manners(with)) {
        Random random(8);
        const Twins twins(with);
        Rows rows;
        for (int32_t sequence = 0; sequence < 150; ++sequence) {
            rows.push_back({149 - sequence, sequence % 31 == 30 ? 0 : 1});
            const int64_t length = (int64_t{37} * sequence) % 260;
            const Tokens tokens = random_tokens(random, with.layer, length);
            for (const Cache* cache : {&twins.one(), &twins.two()}) {
                for (int layer : {0, 1}) cache->append(sequence, tokens, 0, length, 0, layer);
            }
        }
        for (int step = 0; step < 3; ++step) {
            for (int layer : {0, 1}) {
                twins.step(rows, random, ask_of(manner), layer);
                CHECK(twins.one().statistics().blocks_used == twins.two().statistics().blocks_used);
            }
        }
        twins.check_alike();
    }
}

TEST_CASE("[STEP-1] strided, broadcast and unaligned tensors") {
    kivi_config with = preset("k3v2", {2, 8, 64, 64});
    with.max_sequences = 3;
    const Rows rows{{2, 1}, {-1, 1}, {0, 2}};
    for (int32_t dtype : {KIVI_F16, KIVI_F32}) {
        Random random(9);
        const Twins twins(with);
        for (int32_t sequence : {0, 2}) twins.append(sequence, random_tokens(random, with.layer, 190), 190);
        for (int step = 0; step < 12; ++step) {
            // Rows and heads apart, unaligned, and one key row for all tokens and heads.
            const Tensor q(dtype, {3, 2, 8, 64}, {1500, 700, 70, 1}, 3, random.normals(3 * 2 * 8 * 64));
            const Tensor k(dtype, {3, 2, 2, 64}, {0, 0, 0, 1}, step % 2, random.normals(64));
            const Tensor v(dtype, {3, 2, 2, 64}, {300, 150, 66, 1}, 1, random.normals(3 * 2 * 2 * 64));
            const Tensor out_one(dtype, {3, 2, 8, 64}, {1310, 650, 72, 1}, 5);
            const Tensor out_two(dtype, {3, 2, 8, 64}, {1310, 650, 72, 1}, 5);
            const Tensor lse_one(KIVI_F32, {3, 2, 8}, {50, 20, 1}, 1), lse_two(KIVI_F32, {3, 2, 8}, {50, 20, 1}, 1);
            size_t bytes = 0;
            REQUIRE(kivi_attend_workspace(twins.one(), 0, 3, 2, &bytes) == KIVI_OK);
            const Workspace workspace(bytes + 1);
            kivi_attend_params params;
            REQUIRE(kivi_attend_params_init(&params, sizeof params) == KIVI_OK);
            params.lse = lse_one;
            REQUIRE(kivi_step(twins.one(), 0, Batch(rows), q, k, v, out_one, &params, workspace.data() + 1, bytes,
                              nullptr) == KIVI_OK);
            params.lse = lse_two;
            params.k = k;
            params.v = v;
            REQUIRE(kivi_attend(twins.two(), 0, Batch(rows), q, out_two, &params, workspace.data() + 1, bytes,
                                nullptr) == KIVI_OK);
            REQUIRE(kivi_append(twins.two(), 0, Batch(rows), k, v, nullptr) == KIVI_OK);
            CHECK(bit_equal(out_one.read(), out_two.read()));
            CHECK(bit_equal(lse_one.read(), lse_two.read()));
            CHECK(out_one.marks_intact());
            CHECK(lse_one.marks_intact());
        }
        twins.check_alike();
    }
}

TEST_CASE("[STEP-1] params NULL are the defaults, and a step without rows does nothing") {
    const kivi_config with = preset("k3v2", {1, 2, 64, 64});
    Random random(10);
    const Twins twins(with);
    twins.append(0, random_tokens(random, with.layer, 200), 200);
    const Floats numbers = random.normals(2 * 64);
    const Tensor q(KIVI_F16, {1, 2, 64}, numbers), k(KIVI_F16, {1, 1, 64}, numbers), v(KIVI_F16, {1, 1, 64}, numbers);
    const Tensor out_one(KIVI_F16, {1, 2, 64}), out_two(KIVI_F16, {1, 2, 64});
    size_t bytes = 0;
    REQUIRE(kivi_attend_workspace(twins.one(), 0, 1, 1, &bytes) == KIVI_OK);
    const Workspace workspace(bytes);
    REQUIRE(kivi_step(twins.one(), 0, Batch({{0, 1}}), q, k, v, out_one, nullptr, workspace.data(), workspace.size(),
                      nullptr) == KIVI_OK);
    kivi_attend_params params;
    REQUIRE(kivi_attend_params_init(&params, sizeof params) == KIVI_OK);
    params.k = k;
    params.v = v;
    REQUIRE(kivi_attend(twins.two(), 0, Batch({{0, 1}}), q, out_two, &params, workspace.data(), workspace.size(),
                        nullptr) == KIVI_OK);
    REQUIRE(kivi_append(twins.two(), 0, Batch({{0, 1}}), k, v, nullptr) == KIVI_OK);
    CHECK(bit_equal(out_one.read(), out_two.read()));
    twins.check_alike();
    for (const Rows& none : {Rows{}, Rows{{-1, 1}}, Rows{{0, 0}}}) {
        REQUIRE(kivi_step(twins.one(), 0, Batch(none), q, k, v, q, nullptr, nullptr, 0, nullptr) == KIVI_OK);
    }
    twins.check_alike();
}

TEST_CASE("[STEP-1] what attend or append refuses is refused whole: cache, out and LSE stay as they are") {
    kivi_config with = preset("k3v2", {2, 8, 64, 64});
    std::vector<kivi_layer> layers(3, with.layer);
    layers[2].kv_heads = 0;
    with.layers = layers.data();
    with.layer_count = 3;
    with.max_sequences = 3;
    with.max_tokens = 300;
    with.pool_tokens = 256;
    const Cache cache(with);
    Random random(11);
    const Tokens tokens = random_tokens(random, layers[0], 300);
    for (int layer : {0, 1}) {
        cache.append(0, tokens, 0, 299, 0, layer);
        cache.append(1, tokens, 0, 191, 0, layer);
    }
    const Bytes before[3] = {cache.blob(0), cache.blob(1), cache.blob(2)};
    const kivi_statistics counts = cache.statistics();

    const Tensor q(KIVI_F32, {200, 8, 64}, random.normals(200 * 8 * 64));
    const Tensor k(KIVI_F32, {200, 2, 64}, tokens.k), v(KIVI_F32, {200, 2, 64}, tokens.v);
    const Tensor out(KIVI_F32, {200, 8, 64}), lse(KIVI_F32, {200, 8});
    const Batch one({{1, 1}}), long_row({{1, 1}, {0, 2}}), no_pool({{1, 1}, {2, 199}}), two({{1, 1}, {1, 1}});
    const Batch far({{3, 1}});
    size_t bytes = 0, needed = 0;
    REQUIRE(kivi_attend_workspace(cache, 0, 2, 199, &bytes) == KIVI_OK);
    REQUIRE(kivi_attend_workspace(cache, 0, 1, 1, &needed) == KIVI_OK);
    const Workspace workspace(bytes);
    kivi_attend_params params;
    REQUIRE(kivi_attend_params_init(&params, sizeof params) == KIVI_OK);
    params.lse = lse;

    struct Call {
        int32_t layer = 0;
        const kivi_batch* batch;
        const kivi_tensor *q, *k, *v, *out;
        kivi_attend_params params;
        void* workspace;
        size_t bytes;
        kivi_stream stream = nullptr;
    };
    const auto refused = [&](kivi_status status, const char* sentence, const std::function<void(Call&)>& change) {
        Call call{0, one, q, k, v, out, params, workspace.data(), workspace.size(), nullptr};
        change(call);
        CAPTURE(std::string(sentence));
        CHECK(kivi_step(cache, call.layer, call.batch, call.q, call.k, call.v, call.out, &call.params, call.workspace,
                        call.bytes, call.stream) == status);
        CAPTURE(error());
        CHECK(says(sentence));
        for (int32_t sequence : {0, 1, 2}) CHECK(cache.blob(sequence) == before[sequence]);
        CHECK(cache.statistics().blocks_used == counts.blocks_used);
        CHECK(out.untouched());
        CHECK(lse.untouched());
    };
    const auto reshaped = [](const kivi_tensor* of, int axis, int64_t size) {
        kivi_tensor tensor = *of;
        tensor.shape[axis] = size;
        return tensor;
    };
    const kivi_tensor few_heads = reshaped(k, 1, 1), short_keys = reshaped(k, 2, 32), few_queries = reshaped(q, 1, 4);
    const kivi_tensor no_tokens = reshaped(v, 0, 0), few_lse = reshaped(lse, 1, 4);
    kivi_tensor spread = *static_cast<const kivi_tensor*>(out);
    spread.stride[1] = 0;
    constexpr kivi_status kInvalid = KIVI_ERROR_INVALID_ARGUMENT;

    refused(kInvalid, "params.k is set", [&](Call& c) { c.params.k = k, c.params.v = v; });
    refused(kInvalid, "params.k is set", [&](Call& c) { c.params.k = k; });
    refused(kInvalid, "params.v is set", [&](Call& c) { c.params.v = v; });
    refused(kInvalid, "params.scale is", [&](Call& c) { c.params.scale = kNaN; });
    refused(kInvalid, "params.soft_cap is -1", [&](Call& c) { c.params.soft_cap = -1; });
    refused(kInvalid, "params.window_left is -2", [&](Call& c) { c.params.window_left = -2; });
    refused(kInvalid, "params.lse", [&](Call& c) { c.params.lse = &few_lse; });
    refused(kInvalid, "batch is NULL", [&](Call& c) { c.batch = nullptr; });
    refused(kInvalid, "earlier row", [&](Call& c) { c.batch = two; });
    refused(kInvalid, "batch.sequences[0] is 3", [&](Call& c) { c.batch = far; });
    refused(kInvalid, "layer is 3", [&](Call& c) { c.layer = 3; });
    refused(kInvalid, "layer is -1", [&](Call& c) { c.layer = -1; });
    refused(kInvalid, "kv_heads 0", [&](Call& c) { c.layer = 2; });
    refused(kInvalid, "q is NULL", [&](Call& c) { c.q = nullptr; });
    refused(kInvalid, "q: shape[1]", [&](Call& c) { c.q = &few_queries; });
    refused(kInvalid, "k is NULL", [&](Call& c) { c.k = nullptr; });
    refused(kInvalid, "k: shape[1]", [&](Call& c) { c.k = &few_heads; });
    refused(kInvalid, "k: shape[2]", [&](Call& c) { c.k = &short_keys; });
    refused(kInvalid, "v is NULL", [&](Call& c) { c.v = nullptr; });
    refused(kInvalid, "v: shape[0]", [&](Call& c) { c.v = &no_tokens; });
    refused(kInvalid, "out is NULL", [&](Call& c) { c.out = nullptr; });
    refused(kInvalid, "broadcast", [&](Call& c) { c.out = &spread; });
    refused(kInvalid, "workspace is NULL", [&](Call& c) { c.workspace = nullptr; });
    refused(KIVI_ERROR_BUFFER_TOO_SMALL, "workspace_bytes is", [&](Call& c) { c.bytes = needed - 1; });
    refused(KIVI_ERROR_CAPACITY, "sequence 0 has 299 tokens", [&](Call& c) { c.batch = long_row; });
    refused(KIVI_ERROR_CAPACITY, "pool_tokens", [&](Call& c) { c.batch = no_pool; });
    if (backend().host_memory) {  // a handle that is no stream is beyond what a device's runtime can check
        refused(kInvalid, "stream is", [&](Call& c) { c.stream = &needed; });
    }
    // And the same call, allowed.
    CHECK(kivi_step(cache, 0, one, q, k, v, out, &params, workspace.data(), needed, nullptr) == KIVI_OK);
    CHECK(cache.length(1).length == 192);
    CHECK_FALSE(lse.untouched());
}
