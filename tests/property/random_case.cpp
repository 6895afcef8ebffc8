// What a random case may be: every value of every field of a spec, both schedules, all types, windows with and
// without each part, head dims from 8 to 512.
#include "property/random_case.h"

#include <algorithm>
#include <numeric>
#include <sstream>

namespace kivi_test {
namespace {

kivi_spec random_spec(Random& random, bool key, int dim, bool token_axis_only) {
    const int bits = random.one_of({2, 3, 4, 8, 2, 3, 16});
    kivi_spec spec = full();
    if (bits < 16) {
        const bool by_channel = !token_axis_only && random.chance(key ? 75 : 25);
        int group = random.one_of({32, 64, 128});
        if (!by_channel && (group > dim || random.chance(20))) group = KIVI_GROUP_HEAD;
        spec = by_channel ? channel(bits, group) : token(bits, group);
        if (random.chance(25)) spec = wide(spec);
        if (key && by_channel && random.chance(40)) {
            spec = query_aware(spec);
        } else if (random.chance(20)) {
            spec = ratio(spec, random.one_of({1.0f, 0.9f, 0.75f}));
        }
    }
    return random.chance(40) ? rotated(spec) : spec;
}

void tell(std::ostream& out, const char* name, const kivi_spec& spec) {
    out << ", " << name << " " << spec.bits << " bits axis " << spec.axis << " group " << spec.group
        << " ratio " << spec.range_ratio << " param " << spec.param_dtype << " transform " << spec.transform
        << " rounding " << spec.rounding;
}

}  // namespace

Case::Case(uint64_t from) : seed(from) {
    Random random(seed * 7919 + 1);
    config = kivi_test::config(full(), full(), {}, {});
    const bool by_steps = random.chance(20);  // the published schedule
    const int count = int(random.between(1, 2));
    for (int i = 0; i < count; ++i) {
        kivi_layer layer{};
        layer.key_dim = random.one_of({8, 16, 64, 64, 80, 96, 112, 128, 128, 192, 256, 512});
        layer.value_dim =
            random.chance(60) ? layer.key_dim : random.one_of({8, 16, 64, 80, 96, 112, 128, 192, 256, 512});
        const bool large = std::max(layer.key_dim, layer.value_dim) > 128;
        layer.kv_heads = large ? 1 : int(random.between(1, 3));
        layer.q_heads = layer.kv_heads * random.one_of({1, 2, 3, 5, 6, 7, 8, 12, 16});
        if (large) layer.q_heads = layer.kv_heads * int(random.between(1, 4));
        layer.k = random_spec(random, true, layer.key_dim, false);
        layer.v = random_spec(random, false, layer.value_dim, by_steps);
        layers.push_back(layer);
    }
    config.layer_count = count;
    config.layers = layers.data();
    config.window_dtype = random.one_of({KIVI_F16, KIVI_F16, KIVI_BF16, KIVI_F32});
    config.threads = int32_t(random.between(1, 3));
    config.max_sequences = 3;
    config.max_tokens = 1400;
    const int64_t step = unit();
    if (by_steps) {
        config.schedule = KIVI_SCHEDULE_PUBLISHED;
        config.sink = 0;
        config.flush = 1;
        config.recent = int32_t(step > 1 ? step * random.between(1, 2) : random.between(1, 100));
    } else {
        config.sink = int32_t(step * random.between(0, step > 1 ? 2 : 70));
        config.flush = int32_t(step * random.between(1, step > 1 ? 2 : 70));
        config.recent = int32_t(random.chance(25) ? 0 : random.between(0, 150));
    }
    std::ostringstream out;
    out << "seed " << seed << ": windows " << config.sink << "/" << config.recent << "/" << config.flush
        << " schedule " << config.schedule << " dtype " << config.window_dtype << " threads "
        << config.threads;
    for (const kivi_layer& layer : layers) {
        out << "; heads " << layer.kv_heads << "/" << layer.q_heads << " dims " << layer.key_dim << "/"
            << layer.value_dim;
        tell(out, "K", layer.k);
        tell(out, "V", layer.v);
    }
    text = out.str();
}

int64_t Case::unit() const {
    int64_t unit = 1;
    for (const kivi_layer& layer : layers) {
        for (const kivi_spec* spec : {&layer.k, &layer.v}) {
            if (spec->axis == KIVI_AXIS_CHANNEL) unit = std::lcm(unit, int64_t(spec->group));
        }
    }
    return unit;
}

int64_t Case::length(Random& random) const {
    return random.chance(20) ? random.between(0, 40) : random.between(40, config.sink + config.recent + 420);
}

Floats random_queries(Random& random, const kivi_layer& layer, int64_t tokens) {
    Floats q = random.normals(size_t(tokens * layer.q_heads * layer.key_dim), 0.5f);
    for (size_t i = 0; i < q.size(); ++i) {
        const int c = int(i % size_t(layer.key_dim));
        if (c % 7 == 2) q[i] *= 3;
        if (c > 0 && c % 3 == 0) q[i] += 0.7f * q[i - 1];  // channels that go together
    }
    return q;
}

std::vector<std::vector<EncoderTable>> commit_moments(const Cache& cache, Random& random) {
    std::vector<std::vector<EncoderTable>> tables(size_t(cache.layers()));
    for (int index = 0; index < cache.layers(); ++index) {
        const kivi_layer& layer = cache.layer(index);
        if (layer.k.rounding != KIVI_ROUND_QUERY_AWARE) continue;
        const Tensor q(KIVI_F32, {96, layer.q_heads, layer.key_dim}, random_queries(random, layer, 96));
        REQUIRE(kivi_moments_accumulate(cache, index, Batch({{0, 96}}), q, nullptr) == KIVI_OK);
        REQUIRE(kivi_moments_commit(cache, index, nullptr) == KIVI_OK);
        tables[size_t(index)] = tables_in(cache.moments_blob(index));
    }
    return tables;
}

void append_in_pieces(const Cache& cache, int32_t sequence, const std::vector<Tokens>& tokens, int64_t begin,
                      int64_t end, Random& random) {
    while (begin < end) {
        const int64_t stop =
            std::min(end, begin + (random.chance(50) ? random.between(1, 9) : random.between(1, 200)));
        for (int layer = 0; layer < cache.layers(); ++layer) {
            cache.append(sequence, tokens[size_t(layer)], begin, stop, 0, layer);
        }
        begin = stop;
    }
}

std::vector<Tokens> random_history(const Case& made, Random& random, int64_t length) {
    std::vector<Tokens> tokens;
    for (const kivi_layer& layer : made.layers) tokens.push_back(random_tokens(random, layer, length));
    return tokens;
}

}  // namespace kivi_test
