// What attend gives: double precision over the dequantised cache, whatever the model, the windows and the
// call.
#include <cmath>

#include "property/random_case.h"
#include "support/oracle.h"

using namespace kivi_test;

namespace {

constexpr uint64_t kCases = 90;

// Sequences of different lengths in one cache, each layer with its moments.
void fill(const Case& made, const Cache& cache, Random& random) {
    commit_moments(cache, random);
    for (int32_t sequence = 0; sequence < made.config.max_sequences; ++sequence) {
        const int64_t length = made.length(random);
        append_in_pieces(cache, sequence, random_history(made, random, length), 0, length, random);
        if (!made.published() && random.chance(20)) cache.flush(sequence);
    }
}

Rows random_rows(Random& random) {
    Rows rows{{0, int32_t(random.between(0, 4))}, {1, 1}, {2, int32_t(random.between(1, 12))}};
    if (random.chance(50)) std::swap(rows[0], rows[2]);
    if (random.chance(30)) rows[1].sequence = -1;
    return rows;
}

int64_t count_of(const Rows& rows) {
    int64_t count = 0;
    for (const Row& row : rows) count += row.sequence < 0 ? 0 : row.count;
    return count;
}

Ask random_ask(Random& random, const kivi_layer& layer, int64_t tokens) {
    Ask ask;
    if (random.chance(30)) ask.scale = 0.02f + 0.2f * float(random.uniform());
    if (random.chance(30)) ask.soft_cap = 1 + 20 * float(random.uniform());
    if (random.chance(40)) ask.window_left = random.between(0, 400);
    if (random.chance(30)) ask.sinks = random.normals(size_t(layer.q_heads), 3);
    if (random.chance(40)) {
        const Tokens fresh = random_tokens(random, layer, tokens);
        ask.fresh_k = fresh.k;
        ask.fresh_v = fresh.v;
    }
    ask.q_dtype = random.one_of({KIVI_F32, KIVI_F16, KIVI_BF16});
    ask.out_dtype = random.one_of({KIVI_F32, KIVI_F16, KIVI_BF16});
    return ask;
}

}  // namespace

TEST_CASE("attend equals attention in double precision over the dequantised cache") {
    for (uint64_t seed = 0; seed < kCases; ++seed) {
        const Case made(seed + 1000);
        INFO(made.text);
        Random random(seed);
        const Cache cache(made.config);
        fill(made, cache, random);
        for (int index = 0; index < cache.layers(); ++index) {
            const kivi_layer& layer = cache.layer(index);
            const Rows rows = random_rows(random);
            const Ask ask = random_ask(random, layer, count_of(rows));
            INFO("layer ", index, ", window ", ask.window_left, ", cap ", ask.soft_cap, ", scale ", ask.scale,
                 ", sinks ", ask.sinks.size(), ", fresh ", ask.fresh_k.size(), ", dtypes ", ask.q_dtype, " ",
                 ask.out_dtype);
            check_attend(cache, rows, random.normals(size_t(count_of(rows) * layer.q_heads * layer.key_dim)),
                         ask, index);
        }
    }
}

TEST_CASE("a window that begins anywhere, query after query, equals double precision") {
    kivi_config with = config(channel(3, 32), rotated(token(2, 32)), {1, 2, 64, 64}, {32, 40, 32});
    const Cache cache(with);
    Random random(77);
    const int64_t length = 300;
    cache.append(0, random_tokens(random, cache.layer(), length), 0, length);
    const Floats q = random.normals(3 * 2 * 64);
    for (int64_t reach = 0; reach <= length; reach += reach < 80 ? 1 : 7) {
        CAPTURE(reach);
        Ask ask;
        ask.window_left = reach;
        check_attend(cache, {{0, 3}}, q, ask);
    }
}

TEST_CASE("parts over disjoint windows merge to the unsplit attention, learned sinks at the last merge") {
    for (uint64_t seed = 0; seed < 30; ++seed) {
        const Case made(seed + 2000);
        INFO(made.text);
        Random random(seed);
        const Cache cache(made.config);
        fill(made, cache, random);
        const kivi_layer& layer = cache.layer();
        const int64_t length = cache.length(0).length;
        if (length < 8) continue;
        const Tokens all = cache.dequantize(0);
        const int64_t split = random.between(1, length - 1);
        kivi_config exact = kivi_test::config(
            full(), full(), {layer.kv_heads, layer.q_heads, layer.key_dim, layer.value_dim}, {0, 0, 1});
        exact.window_dtype = KIVI_F32;
        exact.max_sequences = 3;
        exact.max_tokens = 1400;
        const Cache plain(exact);
        plain.append(0, all, 0, length);
        plain.append(1, all, 0, split);
        plain.append(2, all, split, length);
        const Floats q = random.normals(size_t(layer.q_heads * layer.key_dim));
        Ask with_sinks;
        with_sinks.sinks = random.normals(size_t(layer.q_heads), 2);
        const Answer whole = plain.attend({{0, 1}}, q, with_sinks), bare = plain.attend({{0, 1}}, q);
        const Answer a = plain.attend({{1, 1}}, q), b = plain.attend({{2, 1}}, q);
        const int64_t heads = layer.q_heads, dim = layer.value_dim;
        const Tensor oa(KIVI_F32, {1, heads, dim}, a.out), ob(KIVI_F32, {1, heads, dim}, b.out);
        const Tensor la(KIVI_F32, {1, heads}, a.lse), lb(KIVI_F32, {1, heads}, b.lse);
        const Tensor out(KIVI_F32, {1, heads, dim}), lse(KIVI_F32, {1, heads});
        const Tensor sinks(KIVI_F32, {1, heads}, with_sinks.sinks);
        const kivi_tensor outs[2] = {*static_cast<const kivi_tensor*>(oa),
                                     *static_cast<const kivi_tensor*>(ob)};
        const kivi_tensor lses[2] = {*static_cast<const kivi_tensor*>(la),
                                     *static_cast<const kivi_tensor*>(lb)};
        REQUIRE(kivi_merge(2, outs, lses, static_cast<const float*>(sinks.data()), out, lse, nullptr) ==
                KIVI_OK);
        const Floats merged = out.read(), merged_lse = lse.read();
        double error = 0, norm = 0;
        for (size_t i = 0; i < merged.size(); ++i) {
            error += (double(merged[i]) - whole.out[i]) * (double(merged[i]) - whole.out[i]);
            norm += double(whole.out[i]) * whole.out[i];
        }
        CHECK(std::sqrt(error) <= 1e-3 * std::sqrt(norm));
        for (size_t h = 0; h < merged_lse.size(); ++h) {
            CHECK(std::fabs(merged_lse[h] - whole.lse[h]) <= 1e-3);
            CHECK(whole.lse[h] == bare.lse[h]);  // learned sinks are no part of it
        }
    }
}

TEST_CASE("results are bit for bit independent of batch, threads, page placement and capacity") {
    for (uint64_t seed = 0; seed < 24; ++seed) {
        const Case made(seed + 3000);
        INFO(made.text);
        Random random(seed);
        const int64_t length = made.length(random);
        const std::vector<Tokens> tokens = random_history(made, random, length);
        const std::vector<Tokens> other = random_history(made, random, 500);
        const Rows row{{1, int32_t(random.between(1, 5))}};
        std::vector<Floats> q;
        std::vector<Ask> asks;
        for (const kivi_layer& layer : made.layers) {
            q.push_back(random.normals(size_t(row[0].count * layer.q_heads * layer.key_dim)));
            asks.push_back(random_ask(random, layer, row[0].count));
        }
        Bytes blob;
        std::vector<Answer> answers;
        for (int variant = 0; variant < 4; ++variant) {
            CAPTURE(variant);
            kivi_config with = made.config;
            with.threads = 1 + variant % 3;
            if (variant == 3) {
                with.max_tokens = 5000;
                with.max_sequences = 9;
            }
            const Cache cache(with);
            Random moments(seed);
            commit_moments(cache, moments);
            if (variant > 0) {
                append_in_pieces(cache, 2, other, 0, 150 * variant, random);
                append_in_pieces(cache, 0, other, 0, 200, random);
                REQUIRE(kivi_sequence_reset(cache, 2, nullptr) == KIVI_OK);
            }
            const int64_t first = variant * length / 4;
            append_in_pieces(cache, 1, tokens, 0, first, random);
            if (variant > 0) append_in_pieces(cache, 2, other, 0, 300, random);
            append_in_pieces(cache, 1, tokens, first, length, random);
            if (variant == 0) blob = cache.blob(1);
            CHECK(cache.blob(1) == blob);
            for (int index = 0; index < cache.layers(); ++index) {
                const kivi_layer& layer = cache.layer(index);
                const Answer alone = cache.attend(row, q[size_t(index)], asks[size_t(index)], index);
                if (variant == 0) answers.push_back(alone);
                CHECK(bit_equal(alone, answers[size_t(index)]));
                // The same row behind another one.
                Ask ask = asks[size_t(index)];
                const auto behind = [&](const Floats& own, int64_t width) {
                    Floats both = random.normals(size_t(2 * width));
                    both.insert(both.end(), own.begin(), own.end());
                    return both;
                };
                if (!ask.fresh_k.empty()) {
                    ask.fresh_k = behind(ask.fresh_k, layer.kv_heads * layer.key_dim);
                    ask.fresh_v = behind(ask.fresh_v, layer.kv_heads * layer.value_dim);
                }
                const Answer both = cache.attend(
                    {{0, 2}, row[0]}, behind(q[size_t(index)], layer.q_heads * layer.key_dim), ask, index);
                const size_t width = size_t(layer.q_heads * layer.value_dim);
                CHECK(bit_equal(rows_of(both.out, width, 2, 2 + row[0].count), alone.out));
                CHECK(bit_equal(rows_of(both.lse, size_t(layer.q_heads), 2, 2 + row[0].count), alone.lse));
            }
        }
    }
}

TEST_CASE("NaN and infinities stay in their own groups, and in the heads and queries that see them") {
    for (uint64_t seed = 0; seed < 24; ++seed) {
        const Case made(seed + 4000);
        INFO(made.text);
        Random random(seed);
        const kivi_layer& layer = made.layers[0];
        kivi_config with = made.config;
        with.layer_count = 1;
        const int64_t length = random.between(2, 300);
        const Tokens tokens = random_tokens(random, layer, length);
        Tokens damaged = tokens;
        const int64_t at = random.between(0, length - 1), head = random.between(0, layer.kv_heads - 1);
        const int64_t hurt_channel = random.between(0, layer.key_dim - 1);
        const float bad = random.one_of({kNaN, kInfinity, -kInfinity});
        CAPTURE(length);
        CAPTURE(at);
        CAPTURE(bad);
        damaged.k[size_t((at * layer.kv_heads + head) * layer.key_dim + hurt_channel)] = bad;
        const Cache clean(with), hurt(with);
        clean.append(0, tokens, 0, length);
        hurt.append(0, damaged, 0, length);
        const kivi_length borders = hurt.length();
        CHECK(payload_in(hurt.blob(), 0) ==
              payload(with, layer, damaged, length,
                      borders.key_border > borders.sink ? borders.key_border : 0,
                      borders.value_border > borders.sink ? borders.value_border : 0));
        const Floats q = random.normals(size_t(layer.q_heads * layer.key_dim));
        const Answer a = clean.attend({{0, 1}}, q), b = hurt.attend({{0, 1}}, q);
        const size_t dim = size_t(layer.value_dim);
        for (size_t i = 0; i < a.out.size(); ++i) {
            const bool sees = int64_t(i / dim) / (layer.q_heads / layer.kv_heads) == head;
            if (sees) {
                CHECK(std::isnan(b.out[i]));
            } else {
                CHECK(a.out[i] == b.out[i]);
            }
        }
    }
}
