// What is stored: the same bytes for any chunking, and those that core/FORMAT.md says, for random models.
#include <cmath>

#include "property/random_case.h"
#include "support/oracle.h"

using namespace kivi_test;

namespace {

constexpr uint64_t kCases = 70;

// Borders by their rule, for a cache that was not flushed.
int64_t border(const Case& made, int64_t length, bool key) {
    const int64_t recent = made.config.recent;
    if (!made.published()) return rolling_border(made.config, length);
    if (length < 1) return 0;
    return key ? (length - 1) / recent * recent : std::max<int64_t>(0, length - 1 - recent);
}

// At most half a step, what rounding of the parameters moves the ends, and the last bits of fp32.
double half_step(const Packed& packed, int token, int channel, float low, float high) {
    const int top = (1 << packed.spec.bits) - 1;
    const double scale = packed.scale_at(token, channel), min = packed.min_at(token, channel);
    const double exact = (double(high) - double(low)) / top;
    return scale / 2 + std::fabs(min - low) + top * std::fabs(scale - exact) +
           (std::fabs(double(low)) + std::fabs(double(high))) * 0x1p-22;
}

}  // namespace

// [WINDOW-2]
TEST_CASE("any chunking gives identical bytes, and they are those of the format") {
    for (uint64_t seed = 0; seed < kCases; ++seed) {
        const Case made(seed);
        INFO(made.text);
        Random random(seed);
        const int64_t length = made.length(random);
        INFO("length ", length);
        const std::vector<Tokens> tokens = random_history(made, random, length);
        const Cache whole(made.config), pieces(made.config);
        Random same(seed + 1), again(seed + 1);
        const auto tables = commit_moments(whole, same);
        commit_moments(pieces, again);
        for (int layer = 0; layer < whole.layers(); ++layer)
            whole.append(1, tokens[size_t(layer)], 0, length, 0, layer);
        append_in_pieces(pieces, 1, tokens, 0, length, random);
        const Bytes blob = whole.blob(1);
        CHECK(pieces.blob(1) == blob);
        for (int layer = 0; layer < whole.layers(); ++layer) {
            const int64_t key = border(made, length, true), value = border(made, length, false);
            const int64_t sink = std::min<int64_t>(made.config.sink, length);
            CHECK(whole.length(1, layer).key_border == std::max(key, sink));
            CHECK(whole.length(1, layer).value_border == std::max(value, sink));
            CHECK(payload_in(blob, layer) == payload(made.config, made.layers[size_t(layer)],
                                                     tokens[size_t(layer)], length, key, value,
                                                     tables[size_t(layer)]));
        }
    }
}

TEST_CASE("flush twice equals once, packs to the last multiple of the unit, and appends go on from there") {
    int flushed = 0;
    for (uint64_t seed = 100; seed < 100 + kCases; ++seed) {
        const Case made(seed);
        if (made.published()) continue;
        INFO(made.text);
        Random random(seed);
        const int64_t length = made.length(random), more = random.between(0, 150);
        const std::vector<Tokens> tokens = random_history(made, random, length + more);
        const Cache cache(made.config);
        const auto tables = commit_moments(cache, random);
        append_in_pieces(cache, 0, tokens, 0, length, random);
        cache.flush();
        const Bytes once = cache.blob();
        cache.flush();
        cache.flush(0, 0);
        CHECK(cache.blob() == once);
        const int64_t target = length / made.unit() * made.unit();
        int64_t packed =
            std::max(rolling_border(made.config, length), target > made.config.sink ? target : 0);
        flushed += packed > rolling_border(made.config, length);
        const auto check = [&](int64_t at) {
            const Bytes blob = cache.blob();
            for (int layer = 0; layer < cache.layers(); ++layer) {
                CHECK(payload_in(blob, layer) == payload(made.config, made.layers[size_t(layer)],
                                                         tokens[size_t(layer)], at, packed, packed,
                                                         tables[size_t(layer)]));
            }
        };
        check(length);
        append_in_pieces(cache, 0, tokens, length, length + more, random);
        packed = std::max(packed, rolling_border(made.config, length + more));
        check(length + more);
    }
    CHECK(flushed > 20);
}

TEST_CASE(
    "nearest rounding with min-max ranges stays within half a step and parameter rounding, stored basis") {
    int64_t elements = 0;
    for (uint64_t seed = 200; seed < 200 + kCases; ++seed) {
        const Case made(seed);
        INFO(made.text);
        Random random(seed);
        const int64_t length = made.length(random);
        const std::vector<Tokens> tokens = random_history(made, random, length);
        const Cache cache(made.config);  // no moments: query-aware specs round to nearest
        append_in_pieces(cache, 0, tokens, 0, length, random);
        for (int index = 0; index < cache.layers(); ++index) {
            const kivi_layer& layer = cache.layer(index);
            const kivi_length borders = cache.length(0, index);
            const Tokens read = cache.dequantize(0, index, KIVI_STORED_BASIS);
            for (const bool key : {true, false}) {
                const kivi_spec& spec = key ? layer.k : layer.v;
                const int dim = key ? layer.key_dim : layer.value_dim;
                const int64_t end = key ? borders.key_border : borders.value_border;
                if (spec.bits == 16 || spec.range == KIVI_RANGE_RATIO) continue;
                const Floats& given = key ? tokens[size_t(index)].k : tokens[size_t(index)].v;
                const Floats& got = key ? read.k : read.v;
                for (int head = 0; head < layer.kv_heads; ++head) {
                    Floats rows;
                    for (int64_t t = borders.sink; t < end; ++t) {
                        const Floats row = stored_row(&given[size_t(t * layer.kv_heads + head) * size_t(dim)],
                                                      dim, spec.transform, made.config.window_dtype);
                        rows.insert(rows.end(), row.begin(), row.end());
                    }
                    const Packed packed = pack(rows, dim, spec, nullptr);
                    std::vector<float> low(packed.scales.size(), kInfinity),
                        high(packed.scales.size(), -kInfinity);
                    const auto for_each = [&](auto&& visit) {
                        for (int t = 0; t < packed.tokens; ++t) {
                            for (int c = 0; c < dim; ++c)
                                visit(t, c, packed.group_of(t, c), rows[size_t(t * dim + c)]);
                        }
                    };
                    for_each([&](int, int, size_t group, float y) {
                        low[group] = std::min(low[group], y);
                        high[group] = std::max(high[group], y);
                    });
                    int beyond = 0;
                    for_each([&](int t, int c, size_t group, float y) {
                        const float x =
                            got[size_t((borders.sink + t) * layer.kv_heads + head) * size_t(dim) + size_t(c)];
                        beyond +=
                            !(std::fabs(double(x) - y) <= half_step(packed, t, c, low[group], high[group]));
                        ++elements;
                    });
                    CHECK(beyond == 0);
                }
            }
        }
    }
    CHECK(elements > 100000);
}

TEST_CASE(
    "query-aware rounding: the table is that of the formula, and y' M y falls on average against nearest") {
    for (uint64_t seed = 300; seed < 312; ++seed) {
        Random random(seed);
        const int dim = random.one_of({8, 64, 80, 128}), bits = random.one_of({2, 3, 4});
        kivi_spec spec = query_aware(channel(bits, random.one_of({32, 64})));
        if (random.chance(50)) spec = rotated(spec);
        CAPTURE(seed);
        CAPTURE(dim);
        CAPTURE(bits);
        const kivi_config with = config(spec, token(2, KIVI_GROUP_HEAD), {2, 6, dim, 64}, {0, 0, 64});
        const Cache aware(with), nearest(with);
        const int64_t queries = 200;
        const Floats q = random_queries(random, aware.layer(), queries);
        const Tensor tensor(KIVI_F32, {queries, 6, dim}, q);
        CHECK(aware.statistics().key_rounding == KIVI_ROUND_NEAREST);
        REQUIRE(kivi_moments_accumulate(aware, 0, Batch({{0, 120}}), tensor, nullptr) == KIVI_OK);
        REQUIRE(kivi_moments_accumulate(aware, 0, Batch({{0, 80}}, {120}), tensor, nullptr) == KIVI_OK);
        REQUIRE(kivi_moments_commit(aware, 0, nullptr) == KIVI_OK);
        CHECK(aware.statistics().key_rounding == KIVI_ROUND_QUERY_AWARE);
        CHECK(aware.statistics().moment_queries == queries * 3);

        const Bytes blob = aware.moments_blob();
        const std::vector<EncoderTable> tables = tables_in(blob);
        const auto matrices = matrices_in(blob);
        const size_t n = size_t(dim);
        for (size_t head = 0; head < 2; ++head) {
            // The matrix: mean of q q' over queries and the three query heads, in the stored basis.
            std::vector<double> mean(n * n, 0.0);
            for (int64_t i = 0; i < queries; ++i) {
                for (size_t h = 3 * head; h < 3 * head + 3; ++h) {
                    Floats row = rows_of(q, n, i * 6 + int64_t(h), i * 6 + int64_t(h) + 1);
                    if (spec.transform) hadamard(row.data(), dim);
                    for (size_t a = 0; a < n; ++a) {
                        for (size_t b = 0; b < n; ++b)
                            mean[a * n + b] += double(row[a]) * row[b] / double(queries * 3);
                    }
                }
            }
            double top = 0;
            for (double m : mean) top = std::max(top, std::fabs(m));
            int off = 0;
            for (size_t i = 0; i < n * n; ++i) off += !(std::fabs(matrices[head][i] - mean[i]) <= 1e-5 * top);
            CHECK(off == 0);
            const EncoderTable formula = table_from(matrices[head], dim);
            CHECK(tables[head].order == formula.order);
            for (size_t i = 0; i < formula.weights.size(); ++i) {
                off += !(std::fabs(tables[head].weights[i] - formula.weights[i]) <=
                         1e-5 * (1 + std::fabs(formula.weights[i])));
            }
            CHECK(off == 0);
        }
        const Tokens tokens = random_tokens(random, aware.layer(), 256);
        aware.append(0, tokens, 0, 256);
        nearest.append(0, tokens, 0, 256);
        CHECK(payload_in(aware.blob(), 0) == payload(with, aware.layer(), tokens, 256, 256, 256, tables));
        // Mean of e' M e over tokens.
        double cost[2] = {0, 0};
        const Tokens read[2] = {nearest.dequantize(0, 0, KIVI_STORED_BASIS),
                                aware.dequantize(0, 0, KIVI_STORED_BASIS)};
        for (int64_t t = 0; t < 256; ++t) {
            for (size_t head = 0; head < 2; ++head) {
                const size_t at = (size_t(t) * 2 + head) * n;
                const Floats y = stored_row(&tokens.k[at], dim, spec.transform, KIVI_F16);
                for (int which : {0, 1}) {
                    for (size_t a = 0; a < n; ++a) {
                        const double e = double(y[a]) - read[which].k[at + a];
                        for (size_t b = 0; b < n; ++b) {
                            cost[which] +=
                                e * matrices[head][a * n + b] * (double(y[b]) - read[which].k[at + b]);
                        }
                    }
                }
            }
        }
        CHECK(cost[1] <= cost[0]);
    }
}
