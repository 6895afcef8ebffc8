// Sections E and F of the public faults: determinism, saving and loading, and what a shard is.

#include "support/cache.h"
#include "support/oracle.h"
#include "support/restate.h"

using namespace kivi_test;

TEST_CASE("fault 94: pages 0 1 2 and pages scattered among those of others give the same bits") {
    kivi_config with = config(channel(2, 32), rotated(token(3, 64)), {2, 4, 64, 64}, {32, 32, 32});
    with.max_sequences = 4;
    const Cache ordered(with), scattered(with);
    Random random(94);
    const Tokens tokens = random_tokens(random, ordered.layer(), 700),
                 other = random_tokens(random, ordered.layer(), 700);
    ordered.append(1, tokens, 0, 700);
    // Others take pages, give some back, and take more in between.
    scattered.append(0, other, 0, 600);
    scattered.append(2, other, 0, 400);
    REQUIRE(kivi_sequence_reset(scattered, 0, nullptr) == KIVI_OK);
    for (int64_t at = 0; at < 700; at += 70) {
        scattered.append(1, tokens, at, at + 70);
        scattered.append(3, other, at, at + 70);
        if (at == 350) REQUIRE(kivi_sequence_reset(scattered, 2, nullptr) == KIVI_OK);
    }
    CHECK(ordered.blob(1) == scattered.blob(1));
    const Floats q = random.normals(3 * 4 * 64);
    CHECK(bit_equal(ordered.attend({{1, 3}}, q), scattered.attend({{1, 3}}, q)));
}

TEST_CASE(
    "fault 97: blobs of another group, bits, rotation, window or model are a mismatch, and change nothing") {
    const kivi_config own = config(channel(2, 32), token(2, 32), {1, 2, 64, 64}, {0, 64, 64});
    const Cache cache(own);
    Random random(97);
    cache.append(0, random_tokens(random, cache.layer(), 200), 0, 200);
    const Bytes before = cache.blob();
    std::vector<kivi_config> others;
    const auto other = [&](auto&& change) {
        others.push_back(own);
        change(others.back());
    };
    other([](kivi_config& c) { c.layer.k.group = 64; });
    other([](kivi_config& c) { c.layer.v.group = 64; });
    other([](kivi_config& c) { c.layer.k.bits = 4; });
    other([](kivi_config& c) { c.layer.v.bits = 3; });
    other([](kivi_config& c) { c.layer.k = full(); });
    other([](kivi_config& c) { c.layer.k.transform = KIVI_TRANSFORM_HADAMARD; });
    other([](kivi_config& c) { c.layer.v.transform = KIVI_TRANSFORM_HADAMARD; });
    other([](kivi_config& c) { c.layer.k.axis = KIVI_AXIS_TOKEN; });
    other([](kivi_config& c) { c.layer.k.rounding = KIVI_ROUND_QUERY_AWARE; });
    other([](kivi_config& c) { c.layer.k.param_dtype = KIVI_F32; });
    other([](kivi_config& c) { c.layer.v = ratio(c.layer.v, 0.9f); });
    other([](kivi_config& c) { c.window_dtype = KIVI_BF16; });
    other([](kivi_config& c) { c.sink = 64; });
    other([](kivi_config& c) { c.recent = 63; });
    other([](kivi_config& c) { c.flush = 32; });
    other([](kivi_config& c) { c.layer.kv_heads = 2; });
    other([](kivi_config& c) { c.layer.q_heads = 1; });
    other([](kivi_config& c) { c.layer.key_dim = 128; });
    other([](kivi_config& c) { c.layer.value_dim = 128; });
    other([](kivi_config& c) { c.layer_count = 2; });
    for (const kivi_config& changed : others) {
        const Cache source(changed);
        for (int layer = 0; layer < source.layers(); ++layer) {
            source.append(0, random_tokens(random, source.layer(layer), 200), 0, 200, 0, layer);
        }
        CHECK(cache.import(0, source.blob()) == KIVI_ERROR_MISMATCH);
        CHECK(cache.blob() == before);
    }
    // What is no part of the format may differ.
    kivi_config same = own;
    same.threads = 1;
    same.max_tokens = 300;
    same.max_sequences = 3;
    same.layer.v.param_dtype = KIVI_F16;
    const Cache reader(same);
    CHECK(reader.import(2, before) == KIVI_OK);
    CHECK(reader.blob(2) == before);
}

TEST_CASE(
    "fault 98: a blob cut anywhere or with one bit flipped fails, and the old content goes on bit for bit") {
    const kivi_config with = preset("kivi2-sink", {1, 2, 64, 64});
    const Cache cache(with), source(with), untouched(with);
    Random random(98);
    const Tokens tokens = random_tokens(random, cache.layer(), 330);
    for (const Cache* one : {&cache, &untouched}) one->append(0, tokens, 0, 300);
    source.append(0, random_tokens(random, cache.layer(), 200), 0, 200);
    const Bytes blob = source.blob();
    for (size_t size = 0; size < blob.size(); size += 100) {
        CHECK(cache.import(0, Bytes(blob.begin(), blob.begin() + int64_t(size))) == KIVI_ERROR_CORRUPT);
    }
    for (size_t at : {size_t(0), size_t(9), size_t(80), size_t(140), blob.size() / 2, blob.size() - 1}) {
        Bytes flipped = blob;
        flipped[at] ^= 0x10;
        CHECK(cache.import(0, flipped) == KIVI_ERROR_CORRUPT);
    }
    CHECK(kivi_import(cache, 0, nullptr, 0, nullptr) < 0);
    for (const Cache* one : {&cache, &untouched}) one->append(0, tokens, 300, 330);
    CHECK(cache.blob() == untouched.blob());
    const Floats q = random.normals(2 * 64);
    CHECK(bit_equal(cache.attend({{0, 1}}, q), untouched.attend({{0, 1}}, q)));
}

TEST_CASE(
    "fault 100, TEST 31: save with a half full tail and a window of 128, load, 16 steps: the same bits") {
    for (const char* name : {"k3v2", "kivi2-sink", "kivi2-paper"}) {
        const kivi_config with = preset(name, {2, 4, 64, 64});
        const Cache run(with), loaded(with);
        Random random(100);
        const Tokens tokens = random_tokens(random, run.layer(), 216);
        run.append(0, tokens, 0, 200);
        REQUIRE(loaded.import(0, run.blob()) == KIVI_OK);
        Ask ask;
        ask.window_left = 128;
        for (int64_t step = 200; step < 216; ++step) {
            for (const Cache* cache : {&run, &loaded}) cache->append(0, tokens, step, step + 1);
            const Floats q = random.normals(4 * 64);
            CHECK(bit_equal(run.attend({{0, 1}}, q, ask), loaded.attend({{0, 1}}, q, ask)));
        }
        CHECK(run.blob() == loaded.blob());
        CHECK(run.length().key_border == loaded.length().key_border);
    }
}

TEST_CASE("fault 101: Hq 64, Hkv 8: export needs exactly the queried bytes, counted in KV heads") {
    const Cache cache(config(channel(2, 32), token(2, 32), {8, 64, 64, 64}, {0, 0, 32}));
    Random random(101);
    cache.append(0, random_tokens(random, cache.layer(), 128), 0, 128);
    size_t bytes = 0, written = 0;
    REQUIRE(kivi_export_size(cache, 0, &bytes) == KIVI_OK);
    CHECK(bytes ==
          96 + 128 +
              8 * size_t(part_bytes(channel(2, 32), 64, KIVI_F16) + part_bytes(token(2, 32), 64, KIVI_F16)) +
              4);
    Bytes buffer(bytes + 8, 0xA5);
    CHECK(kivi_export(cache, 0, buffer.data(), bytes - 1, &written, nullptr) == KIVI_ERROR_BUFFER_TOO_SMALL);
    CHECK(buffer == Bytes(bytes + 8, 0xA5));
    CHECK(kivi_export(cache, 0, buffer.data(), bytes, &written, nullptr) == KIVI_OK);
    CHECK(written == bytes);
    CHECK(Bytes(buffer.begin() + int64_t(bytes), buffer.end()) == Bytes(8, 0xA5));
}

TEST_CASE("fault 103: K = 1 and V = 2 keep their roles through a blob") {
    const kivi_config with = config(channel(2, 32), token(2, 32), {2, 2, 64, 64}, {32, 32, 32});
    const Cache cache(with), other(with);
    cache.append(0, {Floats(200 * 2 * 64, 1.0f), Floats(200 * 2 * 64, 2.0f)}, 0, 200);
    REQUIRE(other.import(0, cache.blob()) == KIVI_OK);
    const Tokens read = other.dequantize();
    CHECK(read.k == Floats(200 * 2 * 64, 1.0f));
    CHECK(read.v == Floats(200 * 2 * 64, 2.0f));
}

TEST_CASE("fault 106: a KV head replicated on two ranks is the same bytes on both") {
    kivi_config with = config(query_aware(channel(3, 64)), token(2, 64), {1, 2, 64, 64}, {0, 64, 64});
    const Cache first(with), second(with);
    Random random(106);
    const Floats q = random.normals(200 * 2 * 64);
    const Tensor queries(KIVI_F32, {200, 2, 64}, q);
    REQUIRE(kivi_moments_accumulate(first, 0, Batch({{0, 200}}), queries, nullptr) == KIVI_OK);
    REQUIRE(kivi_moments_commit(first, 0, nullptr) == KIVI_OK);
    const Bytes moments = first.moments_blob();
    REQUIRE(kivi_moments_import(second, 0, moments.data(), moments.size(), nullptr) == KIVI_OK);
    const Tokens tokens = random_tokens(random, first.layer(), 300);
    first.append(0, tokens, 0, 300);
    second.append(0, tokens, 0, 300, 11);
    CHECK(first.blob() == second.blob());
}

TEST_CASE("fault 107: load A, load B, load A: each brings its own outputs back") {
    const kivi_config with = preset("k3v2", {2, 4, 64, 64});
    const Cache cache(with);
    Random random(107);
    const Floats q = random.normals(4 * 64);
    Bytes saved[2];
    Answer answers[2];
    for (int state : {0, 1}) {
        cache.reset();
        cache.append(0, random_tokens(random, cache.layer(), 400 - 150 * state), 0, 400 - 150 * state);
        saved[state] = cache.blob();
        answers[state] = cache.attend({{0, 1}}, q);
    }
    for (int state : {0, 1, 0, 0, 1}) {
        REQUIRE(cache.import(0, saved[state]) == KIVI_OK);
        CHECK(bit_equal(cache.attend({{0, 1}}, q), answers[state]));
        CHECK(cache.blob() == saved[state]);
    }
}
