// Section B of the public faults, and what KIVI's inputs say about groups, schedules and rows of a batch.
#include <cmath>

#include "support/cache.h"
#include "support/oracle.h"
#include "support/restate.h"

using namespace kivi_test;

namespace {

int64_t tail_of(const Cache& cache, bool key) {
    const kivi_length length = cache.length();
    return length.length - (key ? length.key_border : length.value_border);
}

// Bytes of one head of K and V at these borders, D 128, 2 bits, groups of 32: 48 a packed token, 256 a row.
uint64_t two_bit_bytes(int64_t length, int64_t keys, int64_t values) {
    return uint64_t(48 * (keys + values) + 256 * (2 * length - keys - values));
}

}  // namespace

TEST_CASE("TEST 07: published schedule, prompts around every boundary, then a first decode step") {
    for (int64_t prompt : {1, 31, 32, 127, 128, 129, 255, 256, 257}) {
        CAPTURE(prompt);
        const Cache cache(published(channel(2, 32), token(2, 32), {1, 2, 128, 128}, 128));
        Random random(uint64_t(700 + prompt));
        const Tokens tokens = random_tokens(random, cache.layer(), prompt + 1);
        cache.append(0, tokens, 0, prompt);
        cache.append(0, tokens, prompt, prompt + 1);
        // What the attend of the first decode step sees is what the published prompt leaves behind.
        CHECK(cache.length().key_border == prompt - prompt % 128);
        CHECK(cache.length().value_border == std::max<int64_t>(0, prompt - 128));
        check_attend(cache, {{0, 1}}, random.normals(2 * 128));
    }
}

TEST_CASE(
    "TEST 08: 300 tokens at once, one by one, and in 7 random pieces are the same bytes and the same "
    "output") {
    for (const kivi_config& with : {preset("k3v2", {2, 4, 64, 64}), preset("kivi2-sink", {2, 4, 64, 64}),
                                    preset("kivi2-paper", {2, 4, 64, 64}), preset("kivi4", {2, 4, 64, 64}),
                                    preset("f16", {2, 4, 64, 64})}) {
        const Cache whole(with), single(with), pieces(with);
        Random random(8);
        const Tokens tokens = random_tokens(random, whole.layer(), 300);
        whole.append(0, tokens, 0, 300);
        single.append(0, tokens, 0, 300, 1);
        int64_t at = 0;
        for (int piece = 0; piece < 7; ++piece) {
            const int64_t end = piece == 6 ? 300 : random.between(at, 300);
            pieces.append(0, tokens, at, end);
            at = end;
        }
        CHECK(whole.blob() == single.blob());
        CHECK(whole.blob() == pieces.blob());
        const Floats q = random.normals(4 * 64);
        CHECK(bit_equal(whole.attend({{0, 1}}, q), single.attend({{0, 1}}, q)));
        CHECK(bit_equal(whole.attend({{0, 1}}, q), pieces.attend({{0, 1}}, q)));
    }
}

TEST_CASE("TEST 09: G = R = 32, a prompt of 32, then 168 single tokens: 192 keys are really quantised") {
    const Cache cache(published(channel(2, 32), token(2, 32), {1, 1, 128, 128}, 32));
    Random random(9);
    const Tokens tokens{random.normals(200 * 128), random.normals(200 * 128)};
    cache.append(0, tokens, 0, 32);
    cache.append(0, tokens, 32, 200, 1);
    CHECK(cache.length().key_border == 192);
    CHECK(tail_of(cache, true) == 8);
    const Tokens read = cache.dequantize();
    for (int64_t block = 0; block < 192; block += 32) {
        for (size_t c = 0; c < 128; ++c) {
            float low = kInfinity, high = -kInfinity, worst = 0;
            for (int64_t t = block; t < block + 32; ++t) {
                const float x = round_to(KIVI_F16, tokens.k[size_t(t) * 128 + c]);
                low = std::min(low, x);
                high = std::max(high, x);
                worst = std::max(worst, std::fabs(x - read.k[size_t(t) * 128 + c]));
            }
            CHECK(worst > 0);
            CHECK(worst <= (high - low) / 3 * 0.502f + 1e-3f);
        }
    }
}

TEST_CASE("TEST 10, TEST 29: a thousand single tokens, and the bytes at 4097") {
    kivi_config with = published(channel(2, 32), token(2, 32), {1, 1, 128, 128}, 128);
    with.max_tokens = 4200;
    const Cache cache(with);
    Random random(10);
    const Tokens tokens = random_tokens(random, cache.layer(), 4097);
    for (int64_t n = 1; n <= 1000; ++n) {
        cache.append(0, tokens, n - 1, n);
        CHECK(tail_of(cache, true) >= 1);
        CHECK(tail_of(cache, true) <= 128);
        CHECK(tail_of(cache, false) == std::min<int64_t>(n, 129));
        CHECK(cache.statistics().live_bytes ==
              two_bit_bytes(n, cache.length().key_border, cache.length().value_border));
    }
    cache.append(0, tokens, 1000, 4097);
    CHECK(cache.statistics().live_bytes - 2 * 256 == 419840);  // without the newest token itself
}

TEST_CASE("TEST 11: published, 100 tokens, then 60 in one append") {
    const Cache cache(published(channel(2, 32), token(2, 32), {1, 1, 128, 128}, 128));
    Random random(11);
    const Tokens tokens = random_tokens(random, cache.layer(), 161);
    cache.append(0, tokens, 0, 100);
    cache.append(0, tokens, 100, 160);
    CHECK(cache.length().key_border == 128);
    CHECK(cache.length().value_border ==
          31);  // the published 32 counts after the step, as the next attend sees it
    cache.append(0, tokens, 160, 161);
    CHECK(cache.length().value_border == 32);
    check_attend(cache, {{0, 1}}, random.normals(128));
}

TEST_CASE("TEST 12, fault 58: several queries onto a cache equal as many single steps") {
    for (int64_t cached : {0, 37, 130}) {
        for (int32_t queries : {4, 5}) {
            kivi_config with = config(channel(2, 32), token(2, 32), {2, 4, 64, 64}, {0, 32, 32});
            const Cache together(with), steps(with);
            Random random(uint64_t(1200 + cached));
            const Tokens tokens = random_tokens(random, together.layer(), cached + queries);
            const Floats q = random.normals(size_t(queries) * 4 * 64);
            // The borders must not move within the step: keep it inside one flush unit.
            together.append(0, tokens, 0, cached + queries);
            steps.append(0, tokens, 0, cached);
            const Answer all = together.attend({{0, queries}}, q);
            check_attend(together, {{0, queries}}, q);
            for (int32_t i = 0; i < queries; ++i) {
                steps.append(0, tokens, cached + i, cached + i + 1);
                if (steps.length().key_border != together.length().key_border) continue;
                const Floats own = rows_of(q, 4 * 64, i, i + 1);
                const Answer one = steps.attend({{0, 1}}, own);
                for (size_t c = 0; c < 4 * 64; ++c) {
                    CHECK(std::fabs(one.out[c] - all.out[size_t(i) * 4 * 64 + c]) <= 2e-3);
                }
            }
        }
    }
}

TEST_CASE("TEST 13: 32 heads over 8, a prompt of 16 tokens, one decode step") {
    const Cache cache(preset("kivi2-paper", {8, 32, 128, 128}));
    Random random(13);
    const Tokens tokens = random_tokens(random, cache.layer(), 17);
    cache.append(0, tokens, 0, 16);
    cache.append(0, tokens, 16, 17);
    check_attend(cache, {{0, 1}}, random.normals(32 * 128));
}

TEST_CASE("TEST 14: query head h reads KV head h / ratio; heads that do not divide are refused") {
    const Cache cache(config(channel(2, 32), token(2, 32), {2, 8, 64, 64}, {0, 32, 32}));
    Random random(14);
    Tokens tokens = random_tokens(random, cache.layer(), 100);
    for (size_t i = 0; i < tokens.v.size(); ++i) tokens.v[i] = float(i / 64 % 2);
    cache.append(0, tokens, 0, 100);
    const Answer answer = cache.attend({{0, 1}}, random.normals(8 * 64));
    for (size_t i = 0; i < answer.out.size(); ++i) CHECK(answer.out[i] == doctest::Approx(float(i / 64 / 4)));
    CHECK(create_status(config(channel(2, 32), token(2, 32), {4, 6, 64, 64}, {})) ==
          KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(says("q_heads is 6"));
}

TEST_CASE("TEST 15, fault 26, S5, S9, S10: rows of a ragged batch share nothing") {
    kivi_config with = config(channel(2, 32), token(2, 64), {2, 4, 64, 64}, {0, 32, 32});
    with.max_sequences = 3;
    const Cache batch(with), alone(with);
    Random random(15);
    Tokens a = random_tokens(random, batch.layer(), 5), b = random_tokens(random, batch.layer(), 200);
    Tokens c = random_tokens(random, batch.layer(), 100);
    for (float& x : c.k) x += 100;
    for (float& x : c.v) x *= 100;
    Tokens all = a;
    for (Tokens* more : {&b, &c}) {
        all.k.insert(all.k.end(), more->k.begin(), more->k.end());
        all.v.insert(all.v.end(), more->v.begin(), more->v.end());
    }
    batch.append({{0, 5}, {1, 200}, {2, 100}}, all);
    const Tokens* const own[3] = {&a, &b, &c};
    const int64_t lengths[3] = {5, 200, 100};
    const Floats q = random.normals(3 * 4 * 64);
    const Answer together = batch.attend({{0, 1}, {1, 1}, {2, 1}}, q);
    for (int sequence : {2, 0, 1}) alone.append(sequence, *own[sequence], 0, lengths[sequence]);
    for (int sequence : {0, 1, 2}) {
        CHECK(batch.blob(sequence) == alone.blob(sequence));
        const Answer one = alone.attend({{sequence, 1}}, rows_of(q, 4 * 64, sequence, sequence + 1));
        CHECK(bit_equal(one.out, rows_of(together.out, 4 * 64, sequence, sequence + 1)));
    }
    CHECK(batch.statistics().live_bytes < 305 * 2 * 2 * 64 * 2 / 2);  // packed: far below the f16 rows
}

TEST_CASE("TEST 16: padding is never read: left pads of 1000 between ragged rows, right pads of NaN") {
    kivi_config with = config(channel(2, 32), token(2, 32), {1, 2, 64, 64}, {0, 32, 32});
    with.max_sequences = 2;
    const Cache padded_left(with), padded_right(with), plain(with);
    Random random(16);
    const int32_t counts[2] = {70, 90};
    Tokens left, right;
    std::vector<int64_t> offsets;
    for (int row : {0, 1}) {
        const Tokens tokens = random_tokens(random, plain.layer(), counts[row]);
        plain.append(row, tokens, 0, counts[row]);
        for (auto part : {&Tokens::k, &Tokens::v}) {
            (left.*part).insert((left.*part).end(), 20 * 64, 1000.0f);
            (left.*part).insert((left.*part).end(), (tokens.*part).begin(), (tokens.*part).end());
            (right.*part).insert((right.*part).end(), (tokens.*part).begin(), (tokens.*part).end());
            (right.*part).insert((right.*part).end(), size_t(110 - counts[row]) * 64, kNaN);
        }
        offsets.push_back(row == 0 ? 20 : 20 + 70 + 20);
    }
    const Rows rows{{0, 70}, {1, 90}};
    const Tensor lk(KIVI_F32, {200, 1, 64}, left.k), lv(KIVI_F32, {200, 1, 64}, left.v);
    REQUIRE(kivi_append(padded_left, 0, Batch(rows, offsets), lk, lv, nullptr) == KIVI_OK);
    const Tensor rk(KIVI_F32, {2, 110, 1, 64}, right.k), rv(KIVI_F32, {2, 110, 1, 64}, right.v);
    REQUIRE(kivi_append(padded_right, 0, Batch(rows), rk, rv, nullptr) == KIVI_OK);
    for (int sequence : {0, 1}) {
        CHECK(padded_left.blob(sequence) == plain.blob(sequence));
        CHECK(padded_right.blob(sequence) == plain.blob(sequence));
    }
}

TEST_CASE("TEST 18, fault 28, fault 29: head dims that groups and powers of two do not divide") {
    struct Shape {
        kivi_spec k, v;
        int key_dim, value_dim;
    };
    for (const Shape& shape : {Shape{channel(2, 32), token(2, 32), 80, 80},
                               {channel(2, 64), token(2, 64), 96, 96},
                               {channel(2, 32), token(2, 64), 112, 112},
                               {channel(2, 32), token(2, 32), 192, 128},
                               {token(2, 32), token(2, 64), 80, 96}}) {
        CAPTURE(shape.key_dim);
        const Cache cache(config(shape.k, shape.v, {2, 4, shape.key_dim, shape.value_dim}, {0, 16, 64}));
        Random random{uint64_t(shape.key_dim)};
        Tokens tokens = random_tokens(random, cache.layer(), 150);
        for (Floats* part : {&tokens.k, &tokens.v}) {
            for (float& x : *part)
                x = 5 + float(random.uniform());  // all in [5, 6]: a lane that counts as 0 shows
        }
        cache.append(0, tokens, 0, 150);
        CHECK(cache.length().key_border == 128);
        const Tokens read = cache.dequantize();
        for (auto part : {&Tokens::k, &Tokens::v}) {
            for (size_t i = 0; i < (read.*part).size(); ++i) {
                CHECK(std::fabs((read.*part)[i] - (tokens.*part)[i]) <= 0.5 / 3 + 0.01);
            }
        }
        const Bytes saved = cache.blob();
        CHECK(payload_in(saved, 0) == payload(cache.config(), cache.layer(), tokens, 150, 128, 128));
        const Cache other(cache.config());
        REQUIRE(other.import(0, saved) == KIVI_OK);
        CHECK(other.blob() == saved);
        check_attend(other, {{0, 1}}, random.normals(4 * size_t(shape.key_dim)));
    }
    for (int dim : {64, 96, 128, 256}) {
        const Cache cache(config(channel(2, 32), token(2, 32), {1, 2, dim, dim}, {0, 16, 32}));
        Random random{uint64_t(dim)};
        cache.append(0, random_tokens(random, cache.layer(), 100), 0, 100);
        check_attend(cache, {{0, 1}}, random.normals(2 * size_t(dim)));
    }
    CHECK(create_status(config(channel(2, 32), token(2, 64), {1, 1, 64, 48}, {})) ==
          KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(says("larger than the head dim 48"));
    CHECK(create_status(config(channel(2, 32), token(2, 32), {1, 1, 46, 64}, {})) ==
          KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(says("key_dim is 46"));
}

TEST_CASE("TEST 19: odd windows and 3 bits are valid now; odd groups are refused at create by name") {
    CHECK(create_status(config(channel(2, 32), token(2, 32), {}, {0, 48, 32})) == KIVI_OK);
    CHECK(create_status(config(channel(2, 32), token(2, 32), {}, {0, 0, 32})) == KIVI_OK);
    CHECK(create_status(config(channel(3, 32), token(3, 32), {}, {0, 32, 32})) == KIVI_OK);
    for (int group : {48, 8, 16, 0, 256}) {
        CHECK(create_status(config(channel(2, group), token(2, 32), {}, {})) == KIVI_ERROR_INVALID_ARGUMENT);
        CHECK(says("k.group is " + std::to_string(group)));
    }
    CHECK(create_status(published(channel(2, 32), token(2, 32), {}, 48)) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(says("recent is 48"));
    CHECK(create_status(published(channel(2, 32), token(2, 32), {}, 0)) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(says("recent is 0"));
}

TEST_CASE("TEST 20: f32, f16 and bf16 inputs mean what they say") {
    for (int32_t window : {KIVI_F32, KIVI_F16, KIVI_BF16}) {
        kivi_config with = config(channel(2, 32), token(2, 32), {2, 2, 64, 64}, {32, 32, 32});
        with.window_dtype = window;
        for (int32_t dtype : {KIVI_F32, KIVI_F16, KIVI_BF16}) {
            const Cache cache(with);
            Random random(20);
            Tokens tokens = random_tokens(random, cache.layer(), 150);
            cache.append(0, tokens, 0, 150, 0, 0, dtype);
            for (Floats* part : {&tokens.k, &tokens.v}) {
                for (float& x : *part) x = round_to(dtype, x);
            }
            CHECK(payload_in(cache.blob(), 0) == payload(with, cache.layer(), tokens, 150, 96, 96));
            Ask ask;
            ask.q_dtype = ask.out_dtype = dtype;
            check_attend(cache, {{0, 2}}, random.normals(2 * 2 * 64), ask);
        }
    }
}

TEST_CASE("TEST 25, S7: twenty flushes never change the bytes of the first group") {
    kivi_config with = config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, {0, 0, 32});
    const Cache cache(with);
    Random random(25);
    const Tokens tokens = random_tokens(random, cache.layer(), 640);
    cache.append(0, tokens, 0, 32);
    const Tokens first = cache.dequantize(0, 0, 0, 32, KIVI_STORED_BASIS);
    for (int64_t flush = 1; flush < 20; ++flush) {
        cache.append(0, tokens, 32 * flush, 32 * flush + 32);
        CHECK(cache.length().key_border == 32 * flush + 32);
        const Tokens now = cache.dequantize(0, 0, 0, 32, KIVI_STORED_BASIS);
        CHECK(bit_equal(now.k, first.k));
        CHECK(bit_equal(now.v, first.v));
    }
    CHECK(payload_in(cache.blob(), 0) == payload(with, cache.layer(), tokens, 640, 640, 640));
}

TEST_CASE(
    "TEST 26, fault 118: support tells beforehand what create and attend then do, for every pair of bits and "
    "dim") {
    Random random(26);
    for (int dim : {8, 64, 80, 128, 512, 60, 520}) {
        for (int k : {2, 3, 4, 8, 16, 5}) {
            for (int v : {2, 3, 4, 8, 16, 1}) {
                const int head = KIVI_GROUP_HEAD;
                const kivi_config with =
                    config(k == 16 ? full() : channel(k, 32), v == 16 ? full() : token(v, head),
                           {1, 1, dim, dim}, {0, 8, 32});
                kivi_support support{};
                REQUIRE(kivi_query_support(&with, 0, &support, sizeof support) == KIVI_OK);
                const bool valid = k != 5 && v != 1 && dim != 60 && dim != 520;
                CHECK(support.supported == int(valid));
                CHECK((support.attend_path != KIVI_PATH_NONE) == valid);
                CHECK((support.attend_path >= KIVI_PATH_FAST ||
                       support.reason[0] != 0));  // never silently slower
                CHECK((create_status(with) == KIVI_OK) == valid);
                if (!valid) {
                    CHECK(support.reason == error());
                    continue;
                }
                const Cache cache(with);
                cache.append(0, random_tokens(random, cache.layer(), 42), 0, 42);
                check_attend(cache, {{0, 1}}, random.normals(size_t(dim)));
                const double bits = 8.0 *
                                    double(part_bytes(with.layer.k, dim, KIVI_F16) +
                                           part_bytes(with.layer.v, dim, KIVI_F16)) /
                                    (128.0 * 2 * dim);
                CHECK(support.bits_per_element == doctest::Approx(bits));
            }
        }
    }
}

TEST_CASE("fault 118: support tells what create and the calls then do for every pair of features") {
    using Change = void (*)(kivi_config&);
    const Change features[] = {
        [](kivi_config& c) { c.layer.k = token(c.layer.k.bits, 32); },
        [](kivi_config& c) { c.layer.v = channel(c.layer.v.bits, 32); },
        [](kivi_config& c) { c.layer.k = full(); },
        [](kivi_config& c) { c.layer.v = full(); },
        [](kivi_config& c) { c.layer.k.transform = KIVI_TRANSFORM_HADAMARD; },
        [](kivi_config& c) { c.layer.v.transform = KIVI_TRANSFORM_HADAMARD; },
        [](kivi_config& c) { c.layer.k.rounding = KIVI_ROUND_QUERY_AWARE; },
        [](kivi_config& c) { c.layer.v.rounding = KIVI_ROUND_QUERY_AWARE; },
        [](kivi_config& c) { c.layer.k = ratio(c.layer.k, 0.9f); },
        [](kivi_config& c) { c.layer.v = ratio(c.layer.v, 0.9f); },
        [](kivi_config& c) { c.layer.k.param_dtype = KIVI_F32; },
        [](kivi_config& c) { c.layer.v.param_dtype = KIVI_F32; },
        [](kivi_config& c) { c.layer.k.group = 64; },
        [](kivi_config& c) { c.layer.v.group = KIVI_GROUP_HEAD; },
        [](kivi_config& c) { c.layer.k.bits = 8; },
        [](kivi_config& c) { c.layer.v.bits = 3; },
        [](kivi_config& c) { c.layer.key_dim = 80; },
        [](kivi_config& c) { c.layer.value_dim = 24; },
        [](kivi_config& c) { c.layer.q_heads = 7; },
        [](kivi_config& c) { c.layer.q_heads = 14, c.layer.kv_heads = 2; },
        [](kivi_config& c) { c.window_dtype = KIVI_BF16; },
        [](kivi_config& c) { c.window_dtype = KIVI_F32; },
        [](kivi_config& c) { c.schedule = KIVI_SCHEDULE_PUBLISHED, c.sink = 0, c.recent = c.flush = 64; },
        [](kivi_config& c) { c.sink = 0; },
        [](kivi_config& c) { c.recent = 0; },
        [](kivi_config& c) { c.flush = 128; },
    };
    Random random(118);
    int refused = 0, served = 0;
    for (const Change& first : features) {
        for (const Change& second : features) {
            kivi_config with = config(channel(2, 32), token(2, 32), {1, 2, 64, 64}, {64, 40, 64});
            first(with);
            second(with);
            CAPTURE(&first - features);
            CAPTURE(&second - features);
            kivi_support support{};
            REQUIRE(kivi_query_support(&with, 0, &support, sizeof support) == KIVI_OK);
            const bool accepted = create_status(with) == KIVI_OK;
            CHECK(support.supported == int(accepted));
            if (!accepted) {
                ++refused;
                CHECK(support.reason == error());
                continue;
            }
            ++served;
            const Cache cache(with), copy(with);
            if (with.layer.k.rounding == KIVI_ROUND_QUERY_AWARE) {
                const kivi_layer& layer = with.layer;
                const Tensor q(KIVI_F32, {90, layer.q_heads, layer.key_dim},
                               random.normals(size_t(90 * layer.q_heads * layer.key_dim)));
                REQUIRE(kivi_moments_accumulate(cache, 0, Batch({{0, 90}}), q, nullptr) == KIVI_OK);
                REQUIRE(kivi_moments_commit(cache, 0, nullptr) == KIVI_OK);
                const Bytes moments = cache.moments_blob();
                REQUIRE(kivi_moments_import(copy, 0, moments.data(), moments.size(), nullptr) == KIVI_OK);
            }
            cache.append(0, random_tokens(random, with.layer, 270), 0, 270, 150);
            if (with.schedule == KIVI_SCHEDULE_ROLLING) cache.flush();
            const size_t queries = size_t(2 * with.layer.q_heads * with.layer.key_dim);
            check_attend(cache, {{0, 2}}, random.normals(queries));
            REQUIRE(copy.import(0, cache.blob()) == KIVI_OK);
            CHECK(copy.blob() == cache.blob());
        }
    }
    CHECK(refused > 50);
    CHECK(served > 400);
}

TEST_CASE("TEST 27: offset key channels need grouping by channel") {
    Random random(27);
    Tokens tokens{random.normals(512 * 128), random.normals(512 * 128)};
    for (size_t t = 0; t < 512; ++t) {
        tokens.k[t * 128 + 20] += 300;
        tokens.k[t * 128 + 90] -= 300;
    }
    const Floats q = random.normals(128, 0.5f);
    double error_of[2];
    for (int axis : {0, 1}) {
        const Cache cache(
            config(axis == 0 ? channel(2, 32) : token(2, 32), token(8, 32), {1, 1, 128, 128}, {0, 0, 32}));
        cache.append(0, tokens, 0, 512);
        const Exact exact = exact_attention(cache.layer(), tokens, q, {});
        error_of[axis] = distance(cache.attend({{0, 1}}, q), exact, 128).whole;
    }
    CHECK(error_of[0] < 0.9);
    CHECK(error_of[1] > 1.2 * error_of[0]);
}

TEST_CASE("TEST 33: flush of 40 tokens in groups of 32 packs 32 and keeps 8; appending goes on from there") {
    kivi_config with = config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, {0, 128, 32});
    const Cache cache(with), other(with);
    Random random(33);
    const Tokens tokens = random_tokens(random, cache.layer(), 300);
    cache.append(0, tokens, 0, 40);
    cache.flush();
    CHECK(cache.length().key_border == 32);
    CHECK(cache.length().value_border == 32);
    CHECK(tail_of(cache, true) == 8);
    const Bytes once = cache.blob();
    cache.flush();
    CHECK(cache.blob() == once);
    CHECK(payload_in(once, 0) == payload(with, cache.layer(), tokens, 40, 32, 32));
    cache.append(0, tokens, 40, 300, 7);
    other.append(0, tokens, 0, 300);
    CHECK(cache.blob() == other.blob());
}

TEST_CASE("fault 25: 32 tokens and 168 single ones equal 200 at once, in bytes and in what is reported") {
    const kivi_config with = config(channel(2, 32), token(2, 32), {1, 1, 128, 128}, {0, 32, 32});
    const Cache once(with), steps(with);
    Random random(25);
    const Tokens tokens = random_tokens(random, once.layer(), 200);
    once.append(0, tokens, 0, 200);
    steps.append(0, tokens, 0, 32);
    steps.append(0, tokens, 32, 200, 1);
    CHECK(once.blob() == steps.blob());
    CHECK(once.length().key_border == 160);
    CHECK(steps.statistics().live_bytes == two_bit_bytes(200, 160, 160));
    CHECK(steps.statistics().packed_tokens == 160);
    CHECK_FALSE(bit_equal(steps.dequantize(0, 0, 0, 160, 0).k, slice(tokens, once.layer(), 0, 160).k));
}

TEST_CASE("fault 32, fault 34, fault 95: rows of a batch are bit for bit what they are alone") {
    kivi_config with = config(channel(4, 32), token(4, 32), {2, 4, 64, 64}, {32, 32, 32});
    with.max_sequences = 36;
    with.max_tokens = 400;
    const Cache cache(with);
    Random random(34);
    const Tokens same = random_tokens(random, cache.layer(), 150);
    const Floats q = random.normals(4 * 64);
    Rows four, many;
    Floats four_q, many_q;
    for (int sequence = 0; sequence < 4; ++sequence) {
        cache.append(sequence, same, 0, 150);
        four.push_back({sequence, 1});
        four_q.insert(four_q.end(), q.begin(), q.end());
    }
    const Answer identical = cache.attend(four, four_q);
    for (int row = 1; row < 4; ++row) {
        CHECK(cache.blob(row) == cache.blob(0));
        CHECK(bit_equal(rows_of(identical.out, 256, row, row + 1), rows_of(identical.out, 256, 0, 1)));
    }
    for (int sequence = 4; sequence < 36; ++sequence) {
        const int64_t length = random.between(1, 400);
        cache.append(sequence, random_tokens(random, cache.layer(), length), 0, length);
        many.push_back({sequence, 1});
        const Floats own = random.normals(4 * 64);
        many_q.insert(many_q.end(), own.begin(), own.end());
    }
    const Answer all = cache.attend(many, many_q);
    for (int row = 0; row < 32; ++row) {
        const Answer one = cache.attend({many[size_t(row)]}, rows_of(many_q, 256, row, row + 1));
        CHECK(bit_equal(one.out, rows_of(all.out, 256, row, row + 1)));
        CHECK(bit_equal(one.lse, rows_of(all.lse, 4, row, row + 1)));
    }
}

TEST_CASE("fault 37: head dim 64, learned sinks, windows of 128 and none by turns, 2 bits") {
    kivi_config with = config(channel(2, 32), token(2, 32), {2, 8, 64, 64}, {32, 32, 32});
    with.layer_count = 2;
    const Cache cache(with);
    Random random(37);
    for (int layer : {0, 1})
        cache.append(0, random_tokens(random, cache.layer(layer), 300), 0, 300, 0, layer);
    for (int layer : {0, 1}) {
        Ask ask;
        ask.window_left = layer == 0 ? 128 : -1;
        ask.sinks = random.normals(8);
        check_attend(cache, {{0, 2}}, random.normals(2 * 8 * 64), ask, layer);
    }
}

TEST_CASE("fault 40: the same prompt ten times gives the same answer ten times") {
    kivi_config with = preset("k3v2", {2, 4, 64, 64});
    with.max_sequences = 3;
    const Cache cache(with);
    Random random(40);
    const Tokens tokens = random_tokens(random, cache.layer(), 300);
    const Floats q = random.normals(4 * 64);
    Answer first;
    for (int hit = 0; hit < 10; ++hit) {
        const int sequence = hit % 3;
        REQUIRE(kivi_sequence_reset(cache, sequence, nullptr) == KIVI_OK);
        cache.append(sequence, tokens, 0, 300, hit % 2 ? 64 : 0);
        const Answer answer = cache.attend({{sequence, 1}}, q);
        if (hit == 0) first = answer;
        CHECK(bit_equal(answer, first));
    }
}

TEST_CASE("S2: four tokens at once at a tail of R - 2 flush and attend") {
    const Cache cache(preset("kivi2-paper", {1, 2, 64, 64}));
    Random random(2);
    const Tokens tokens = random_tokens(random, cache.layer(), 130);
    cache.append(0, tokens, 0, 126);
    cache.append(0, tokens, 126, 130);
    CHECK(cache.length().key_border == 128);
    check_attend(cache, {{0, 4}}, random.normals(4 * 2 * 64));
}

TEST_CASE("S8: appends of 5 never let the tail pass its stated maximum") {
    for (int64_t recent : {0, 1, 31, 32, 48}) {
        const Cache cache(config(channel(2, 32), token(2, KIVI_GROUP_HEAD), {1, 1, 8, 8}, {0, recent, 32}));
        Random random(8);
        const Tokens tokens = random_tokens(random, cache.layer(), 500);
        for (int64_t n = 5; n <= 500; n += 5) {
            cache.append(0, tokens, n - 5, n);
            CHECK(tail_of(cache, true) <= recent + 31);
            CHECK(tail_of(cache, true) >= std::min(n, recent));
            CHECK(cache.length().key_border == rolling_border(cache.config(), n));
        }
    }
}
