// Byte counts against the arithmetic of FORMAT.md and the figures published for the scheme; blob checksum.
#include <doctest/doctest.h>

#include <vector>

#include "format/checksum.h"
#include "format/layout.h"
#include "format/policy.h"
#include "spec_support.h"

using namespace kivi;

namespace {

kivi_spec spec(int bits, int32_t axis, int group, int32_t param_dtype = KIVI_F16) {
    return kivi_test::make_spec(bits, axis, group, KIVI_TRANSFORM_NONE, param_dtype);
}

kivi_layer layer(int heads, int key_dim, int value_dim, const kivi_spec& k, const kivi_spec& v) {
    kivi_layer l{};
    l.kv_heads = l.q_heads = heads;
    l.key_dim = key_dim;
    l.value_dim = value_dim;
    l.k = k;
    l.v = v;
    return l;
}

Model model(const Windows& windows, const std::vector<kivi_layer>& layers) {
    Model m;
    m.max_sequences = 3;
    m.max_tokens = 1000;
    m.windows = windows;
    m.layers = layers;
    return m;
}

const kivi_spec kKeys2 = spec(2, KIVI_AXIS_CHANNEL, 32), kValues2 = spec(2, KIVI_AXIS_TOKEN, 32);

// Bytes of one head's K and V between two steps of the published schedule: those of the next attend without
// its new token.
int64_t published_bytes(int bits, int64_t T, int64_t R) {
    const Windows w{0, R, 1, 32, KIVI_SCHEDULE_PUBLISHED};
    const Span span = after_append(w, Span{}, T + 1);
    const kivi_spec k = spec(bits, KIVI_AXIS_CHANNEL, 32), v = spec(bits, KIVI_AXIS_TOKEN, 32);
    const int64_t rows = (T - span.key_border) + (T - span.value_border);
    return packed_bytes(k, 128, KIVI_F16, span.key_border) +
           packed_bytes(v, 128, KIVI_F16, span.value_border) + rows * 128 * 2;
}

}  // namespace

TEST_CASE("kivi-reference section 2 and TEST 29: bytes of one head, published schedule") {
    CHECK(published_bytes(2, 4096, 128) == 419840);
    CHECK(published_bytes(2, 4096, 32) == 399872);
    CHECK(published_bytes(2, 512, 128) == 75776);
    const auto ratio = [](int bits, int64_t T) {
        return double(T * 512) / double(published_bytes(bits, T, 128));
    };
    CHECK(ratio(2, 4096) == doctest::Approx(4.995).epsilon(0.001));
    CHECK(ratio(2, 512) == doctest::Approx(3.46).epsilon(0.002));
    CHECK(ratio(2, 128) == doctest::Approx(1.68).epsilon(0.005));
    CHECK(ratio(2, 32768) == doctest::Approx(5.29).epsilon(0.002));
    CHECK(ratio(4, 4096) == doctest::Approx(3.09).epsilon(0.002));
}

TEST_CASE("bits per element of the presets") {
    const auto bits = [](const kivi_spec& k, const kivi_spec& v) {
        return bits_per_element(layer(1, 128, 128, k, v), KIVI_F16);
    };
    CHECK(bits(spec(3, KIVI_AXIS_CHANNEL, 64), spec(2, KIVI_AXIS_TOKEN, 64)) == 3.0);
    CHECK(bits(kKeys2, kValues2) == 3.0);
    CHECK(bits(spec(4, KIVI_AXIS_CHANNEL, 64), spec(2, KIVI_AXIS_TOKEN, 64)) == 3.5);
    CHECK(bits(spec(4, KIVI_AXIS_CHANNEL, 32), spec(4, KIVI_AXIS_TOKEN, 32)) == 5.0);
    CHECK(bits(spec(16, 0, 0), spec(16, 0, 0)) == 16.0);
    CHECK(bits(spec(2, KIVI_AXIS_CHANNEL, 128), spec(2, KIVI_AXIS_TOKEN, KIVI_GROUP_HEAD)) == 2.25);
    CHECK(bits(spec(2, KIVI_AXIS_CHANNEL, 32, KIVI_F32), spec(2, KIVI_AXIS_TOKEN, 32, KIVI_F32)) == 4.0);
}

TEST_CASE("page parts by the formulas of FORMAT.md") {
    for (int dim : {8, 64, 80, 96, 112, 128, 192, 256, 512}) {
        for (int bits : {2, 3, 4, 8}) {
            for (int32_t param : {KIVI_F16, KIVI_F32}) {
                const int64_t p = param == KIVI_F16 ? 2 : 4;
                for (int group : {32, 64, 128}) {
                    CHECK(page_part_bytes(spec(bits, KIVI_AXIS_CHANNEL, group, param), dim, KIVI_F16) ==
                          16 * bits * dim + 256 * p * dim / group);
                    CHECK(page_part_bytes(spec(bits, KIVI_AXIS_TOKEN, group, param), dim, KIVI_F16) ==
                          16 * bits * dim + 256 * p * ((dim + group - 1) / group));
                }
                CHECK(page_part_bytes(spec(bits, KIVI_AXIS_TOKEN, KIVI_GROUP_HEAD, param), dim, KIVI_F16) ==
                      16 * bits * dim + 256 * p);
            }
        }
        CHECK(page_part_bytes(spec(16, 0, 0), dim, KIVI_F16) == 256 * dim);
        CHECK(page_part_bytes(spec(16, 0, 0), dim, KIVI_F32) == 512 * dim);
    }
}

TEST_CASE("groups tile a page") {
    const GroupShape channel = group_shape(spec(2, KIVI_AXIS_CHANNEL, 64), 80);
    CHECK(channel.tokens == 64);
    CHECK(channel.channels == 1);
    CHECK(channel.blocks_a_row == 80);
    CHECK(channel.groups == 160);
    const GroupShape token = group_shape(spec(2, KIVI_AXIS_TOKEN, 32), 80);
    CHECK(token.tokens == 1);
    CHECK(token.blocks_a_row == 3);
    CHECK(token.groups == 384);
    CHECK(group_channels(token, 80, 0) == 32);
    CHECK(group_channels(token, 80, 2) == 16);
    CHECK(group_channels(group_shape(spec(2, KIVI_AXIS_TOKEN, KIVI_GROUP_HEAD), 80), 80, 0) == 80);
    CHECK(group_shape(spec(16, 0, 0), 80).groups == 0);
    CHECK(group_code_bytes(spec(3, KIVI_AXIS_TOKEN, 32), 32) == 12);
    CHECK(group_code_bytes(spec(3, KIVI_AXIS_TOKEN, 32), 3) == 2);
}

TEST_CASE("sums over heads, layers, sequences") {
    const kivi_layer small = layer(2, 64, 80, kKeys2, kValues2), none{};
    kivi_layer wide = layer(4, 128, 128, spec(16, 0, 0), spec(16, 0, 0));
    const Model m = model({32, 96, 32, 32, KIVI_SCHEDULE_ROLLING}, {small, none, wide});
    const int64_t small_page = 128 * 64 * 3 / 8 + (16 * 2 * 80 + 256 * 2 * 3);
    CHECK(page_bytes(small, KIVI_F16) == small_page);
    CHECK(block_bytes(m) == 2 * small_page + 4 * 2 * 128 * 128 * 2);
    CHECK(blocks_per_sequence(m) == 8);  // flush of 1000 tokens packs 32 .. 991
    CHECK(pool_blocks(m) == 24);
    CHECK(window_part_bytes(m, 0, Part::key) == 2 * (32 + 128) * 64 * 2);
    CHECK(window_part_bytes(m, 0, Part::value) == 2 * (32 + 128) * 80 * 2);
    CHECK(window_bytes(m) == 3 * 160 * 2 * (2 * (64 + 80) + 4 * 256));
    CHECK(moment_bytes(m) == 0);

    Model aware = m;
    aware.pool_tokens = 129;
    aware.layers[0].k.rounding = KIVI_ROUND_QUERY_AWARE;
    CHECK(pool_blocks(aware) == 2);
    CHECK(moment_bytes(aware) == 2 * (64 * 64 * 4 + 64 * 2 + 64 * 63 / 2 * 4));
}

TEST_CASE("64-bit sizes") {
    std::vector<kivi_layer> layers(
        100, layer(64, 512, 512, spec(8, KIVI_AXIS_CHANNEL, 32), spec(8, KIVI_AXIS_TOKEN, 32)));
    Model m = model({0, 0, 32, 32, KIVI_SCHEDULE_ROLLING}, layers);
    m.max_tokens = int64_t{1} << 32;
    m.max_sequences = 1000;
    CHECK(pool_blocks(m) == 1000 * (int64_t{1} << 25));
    CHECK(block_bytes(m) == int64_t{100} * 64 * 2 * (16 * 8 * 512 + 256 * 2 * 512 / 32));
}

TEST_CASE("fault 38: the layout id tells orders, specs, dims and sinks apart") {
    const Model m = model({32, 96, 32, 32, KIVI_SCHEDULE_ROLLING}, {layer(2, 64, 64, kKeys2, kValues2)});
    std::vector<uint64_t> ids{layout_id(m, 0), layout_id(m, 1)};
    const auto with = [&](auto change) {
        Model other = m;
        change(other);
        ids.push_back(layout_id(other, 0));
    };
    with([](Model& o) { o.windows.sink = 64; });
    with([](Model& o) { o.window_dtype = KIVI_BF16; });
    with([](Model& o) { o.layers[0].k.bits = 3; });
    with([](Model& o) { o.layers[0].v.transform = KIVI_TRANSFORM_HADAMARD; });
    with([](Model& o) { o.layers[0].k.group = 64; });
    with([](Model& o) { o.layers[0].key_dim = 80; });
    with([](Model& o) { std::swap(o.layers[0].k, o.layers[0].v); });
    with([](Model& o) { o.layers.push_back(o.layers[0]); });
    for (size_t i = 0; i < ids.size(); ++i) {
        for (size_t j = 0; j < i; ++j) CHECK(ids[i] != ids[j]);
    }
    Model other = m;
    other.max_tokens = 77;
    other.threads = 9;
    CHECK(layout_id(other, 0) == ids[0]);
}

TEST_CASE("CRC-32: check value, chaining, bit by bit, and every flipped bit") {
    CHECK(crc32("123456789", 9) == 0xCBF43926u);
    CHECK(crc32("", 0) == 0);
    std::vector<uint8_t> bytes;
    for (int i = 0; i < 300; ++i) bytes.push_back(uint8_t(i * 7 + i / 3));
    const uint32_t whole = crc32(bytes.data(), bytes.size());
    uint32_t plain = 0xFFFFFFFFu;
    for (uint8_t byte : bytes) {
        plain ^= byte;
        for (int bit = 0; bit < 8; ++bit) plain = plain & 1 ? (plain >> 1) ^ 0xEDB88320u : plain >> 1;
    }
    CHECK(whole == ~plain);
    for (size_t cut = 0; cut <= bytes.size(); ++cut) {
        CHECK(crc32(bytes.data() + cut, bytes.size() - cut, crc32(bytes.data(), cut)) == whole);
    }
    for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
        bytes[bit / 8] ^= uint8_t(1 << bit % 8);
        CHECK(crc32(bytes.data(), bytes.size()) != whole);
        bytes[bit / 8] ^= uint8_t(1 << bit % 8);
    }
}
