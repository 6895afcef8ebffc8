// Section A of the public faults and the numeric inputs of KIVI: what must come out of special numbers and of
// empty work.
#include <cmath>

#include "support/cache.h"
#include "support/oracle.h"
#include "support/restate.h"

using namespace kivi_test;

namespace {

const Span kNoWindows{0, 0, 32};

// One key channel `at` and one value row made of `pattern` over and over, the rest zero.
Tokens patterned(const kivi_layer& layer, int64_t tokens, const Floats& pattern, int channel = 3) {
    const size_t dk = size_t(layer.key_dim), dv = size_t(layer.value_dim);
    Tokens made{Floats(size_t(tokens) * dk, 0.0f), Floats(size_t(tokens) * dv, 0.0f)};
    for (size_t t = 0; t < size_t(tokens); ++t)
        made.k[t * dk + size_t(channel)] = pattern[t % pattern.size()];
    for (size_t i = 0; i < made.v.size(); ++i) made.v[i] = pattern[i % dv % pattern.size()];
    return made;
}

float key_at(const Tokens& tokens, const kivi_layer& layer, int64_t token, int channel) {
    return tokens.k[size_t(token * layer.kv_heads) * size_t(layer.key_dim) + size_t(channel)];
}

bool all_finite(const Floats& x) {
    for (float value : x) {
        if (!std::isfinite(value)) return false;
    }
    return true;
}

}  // namespace

TEST_CASE("TEST 01: codes 0 1 2 3 are the bytes E4, codes 0 .. 15 the bytes 10 32 .. FE, lowest bits first") {
    for (int bits : {2, 4}) {
        Floats pattern;
        for (int i = 0; i < 1 << bits; ++i) pattern.push_back(float(i));
        const Cache cache(config(channel(bits, 32), token(bits, 32), {1, 1, 64, 64}, kNoWindows));
        cache.append(0, patterned(cache.layer(), 32, pattern), 0, 32);
        const Bytes bytes = payload_in(cache.blob(), 0);
        const size_t group = size_t(4 * bits), keys = 64 * group;
        const Bytes word =
            bits == 2 ? Bytes{0xE4, 0xE4, 0xE4, 0xE4} : Bytes{0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE};
        CHECK(Bytes(bytes.begin() + int64_t(3 * group), bytes.begin() + int64_t(3 * group + word.size())) ==
              word);
        // Scale 1 and min 0 of channel 3, as f16, behind the codes.
        CHECK(bytes[keys + 2 * 3] == 0x00);
        CHECK(bytes[keys + 2 * 3 + 1] == 0x3C);
        CHECK(bytes[keys + 2 * 64 + 2 * 3] == 0x00);
        CHECK(bytes[keys + 2 * 64 + 2 * 3 + 1] == 0x00);
        // The first value group begins where the keys end.
        const size_t values = keys + 4 * 64;
        CHECK(Bytes(bytes.begin() + int64_t(values), bytes.begin() + int64_t(values + word.size())) == word);
    }
}

TEST_CASE("TEST 02: 0, 0.5, 1.5, 2.5, 3 get the codes 0, 0, 2, 2, 3") {
    const Cache cache(config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, kNoWindows));
    cache.append(0, patterned(cache.layer(), 32, {0, 0.5f, 1.5f, 2.5f, 3}), 0, 32);
    const Tokens read = cache.dequantize();
    const float expected[5] = {0, 0, 2, 2, 3};
    for (int t = 0; t < 32; ++t) CHECK(key_at(read, cache.layer(), t, 3) == expected[t % 5]);
    for (int c = 0; c < 64; ++c) CHECK(read.v[size_t(c)] == expected[c % 5]);
}

TEST_CASE(
    "TEST 03, fault 7, fault 8, S1: constant and zero groups come back exactly, with code 0 and scale 0") {
    for (int bits : {2, 3, 4, 8}) {
        for (float value : {7.25f, 0.0f, 100.0f, -3.5f}) {
            CAPTURE(bits);
            CAPTURE(value);
            const Cache cache(config(channel(bits, 32), token(bits, 64), {1, 2, 64, 64}, kNoWindows));
            Random random(3);
            Tokens tokens = random_tokens(random, cache.layer(), 64);
            for (int t = 0; t < 32; ++t)
                tokens.k[size_t(t * 64 + 5)] = value;  // the first group of channel 5
            for (int c = 0; c < 64; ++c) tokens.v[size_t(9 * 64 + c)] = value;  // the row of token 9
            cache.append(0, tokens, 0, 64);
            const Tokens read = cache.dequantize();
            for (int t = 0; t < 32; ++t) CHECK(key_at(read, cache.layer(), t, 5) == value);
            for (int c = 0; c < 64; ++c) CHECK(read.v[size_t(9 * 64 + c)] == value);
            CHECK(payload_in(cache.blob(), 0) == payload(cache.config(), cache.layer(), tokens, 64, 64, 64));
            check_attend(cache, {{0, 1}}, random.normals(2 * 64));
        }
    }
}

TEST_CASE("TEST 04: a group of +40000 and -40000 is finite: the scale is formed in fp32") {
    const Cache cache(config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, kNoWindows));
    cache.append(0, patterned(cache.layer(), 32, {40000, -40000}), 0, 32);
    const Tokens read = cache.dequantize();
    CHECK(all_finite(read.k));
    CHECK(all_finite(read.v));
    CHECK(key_at(read, cache.layer(), 1, 3) == -40000);
    CHECK(std::fabs(key_at(read, cache.layer(), 0, 3) - 40000) <= 16);  // the scale 26666.7 rounded to f16
}

TEST_CASE("TEST 05: 500 + {0, .25, .5, .75} stays within half a step") {
    const Cache cache(config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, kNoWindows));
    const Floats pattern{500, 500.25f, 500.5f, 500.75f};
    cache.append(0, patterned(cache.layer(), 32, pattern), 0, 32, 0, 0, KIVI_F16);
    const Tokens read = cache.dequantize();
    for (int t = 0; t < 32; ++t) {
        CHECK(std::fabs(key_at(read, cache.layer(), t, 3) - pattern[size_t(t) % 4]) <= 0.125);
        CHECK(std::fabs(read.v[size_t(t)] - pattern[size_t(t) % 4]) <= 0.125);
    }
}

TEST_CASE("TEST 06: a raw score of 80000 is formed in fp32") {
    for (int32_t dtype : {KIVI_F32, KIVI_F16, KIVI_BF16}) {
        const Cache cache(config(channel(2, 32), token(2, 32), {1, 1, 128, 128}, {0, 16, 32}));
        Random random(6);
        Tokens tokens = random_tokens(random, cache.layer(), 70);
        std::fill(tokens.k.begin(), tokens.k.end(), 25.0f);
        cache.append(0, tokens, 0, 70, 0, 0, dtype);
        Ask ask;
        ask.q_dtype = dtype;
        check_attend(cache, {{0, 1}}, Floats(128, 25.0f), ask);
        ask.scale = 1;
        check_attend(cache, {{0, 1}}, Floats(128, 25.0f), ask);
    }
}

TEST_CASE("fault 1: channels offset by 60 and queries scaled by 8 stay finite and near double precision") {
    const Cache cache(config(channel(2, 32), token(2, 32), {8, 32, 128, 128}, {32, 96, 32}));
    Random random(1);
    Tokens tokens{random.normals(512 * 8 * 128), random.normals(512 * 8 * 128)};
    for (size_t i = 0; i < tokens.k.size(); ++i) {
        if (i % 32 == 7) tokens.k[i] += 60;  // 4 channels
    }
    cache.append(0, tokens, 0, 512, 0, 0, KIVI_F16);
    const Floats q = random.normals(32 * 128, 8);
    Ask ask;
    ask.q_dtype = ask.out_dtype = KIVI_F16;
    Floats given = q;
    for (float& x : given) x = round_to(KIVI_F16, x);
    const Exact exact = exact_attention(cache, {{0, 1}}, given, ask);
    const Answer answer = cache.attend({{0, 1}}, q, ask);
    double largest_value = 0;
    for (float v : cache.dequantize().v) largest_value = std::max(largest_value, std::fabs(double(v)));
    for (size_t i = 0; i < exact.out.size(); ++i) {
        CHECK(std::fabs(answer.out[i] - exact.out[i]) <= std::max(2e-3, backend().tolerance) * largest_value);
    }
}

TEST_CASE("fault 2: a product of 280000 in one channel decides the softmax, in f16 and bf16") {
    for (int32_t dtype : {KIVI_F16, KIVI_BF16}) {
        kivi_config with = config(channel(2, 32), token(2, 32), {1, 1, 128, 128}, {0, 8, 32});
        with.window_dtype = dtype;
        const Cache cache(with);
        Random random(2);
        Tokens tokens{random.normals(104 * 128), random.normals(104 * 128)};
        for (size_t t = 0; t < 104; ++t) tokens.k[t * 128 + 11] = t == 40 ? 7000.0f : -7000.0f;
        cache.append(0, tokens, 0, 104, 0, 0, dtype);
        Floats q = random.normals(128);
        q[11] = 40;
        Ask ask;
        ask.q_dtype = dtype;
        const Answer answer = cache.attend({{0, 1}}, q, ask);
        const Tokens read = cache.dequantize();
        for (size_t c = 0; c < 128; ++c)
            CHECK(answer.out[c] == doctest::Approx(read.v[40 * 128 + c]).epsilon(2e-3));
    }
}

TEST_CASE("fault 4: 65536 tokens of the value 50 give 50") {
    kivi_config with = config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, {32, 96, 32});
    with.max_tokens = 65536;
    const Cache cache(with);
    Random random(4);
    Tokens tokens{random.normals(4096 * 64), Floats(4096 * 64, 50.0f)};
    for (int i = 0; i < 16; ++i) cache.append(0, tokens, 0, 4096);
    for (int32_t dtype : {KIVI_F16, KIVI_BF16, KIVI_F32}) {
        Ask ask;
        ask.out_dtype = dtype;
        const double ulp = dtype == KIVI_F16 ? 0x1p-5 : dtype == KIVI_BF16 ? 0x1p-2 : 50 * 1e-4;
        for (float x : cache.attend({{0, 1}}, random.normals(64), ask).out) CHECK(std::fabs(x - 50) <= ulp);
    }
}

TEST_CASE("TEST 34: uniform attention over 131072 ones is 1") {
    kivi_config with = config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, {0, 32, 32});
    with.max_tokens = 131072;
    const Cache cache(with);
    Random random(34);
    const Tokens tokens{random.normals(8192 * 64), Floats(8192 * 64, 1.0f)};
    for (int i = 0; i < 16; ++i) cache.append(0, tokens, 0, 8192);
    const Answer answer = cache.attend({{0, 1}}, Floats(64, 0.0f));
    for (float x : answer.out) CHECK(std::fabs(x - 1) <= 1e-3);
    CHECK(answer.lse[0] == doctest::Approx(std::log(131072.0)).epsilon(1e-5));
}

TEST_CASE(
    "fault 5: eight merged parts and one part of 32768 tokens of size 1000 are both right to a bf16 step") {
    kivi_config with = config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, {0, 32, 32});
    with.max_tokens = 32768;
    with.max_sequences = 9;
    with.pool_tokens = 2 * 32768 + 9 * 128;
    const Cache cache(with);
    Random random(5);
    const Tokens tokens{random.normals(32768 * 64), random.normals(32768 * 64, 30)};
    Tokens large = tokens;
    for (float& x : large.v) x += 1000;
    cache.append(8, large, 0, 32768);
    const Floats q = random.normals(64);
    std::vector<Tensor*> outs, lses;
    std::vector<kivi_tensor> out_views, lse_views;
    for (int part = 0; part < 8; ++part) {
        cache.append(part, large, part * 4096, (part + 1) * 4096);
        const Answer answer = cache.attend({{part, 1}}, q);
        outs.push_back(new Tensor(KIVI_F32, {1, 1, 64}, answer.out));
        lses.push_back(new Tensor(KIVI_F32, {1, 1}, answer.lse));
        out_views.push_back(outs.back()->view());
        lse_views.push_back(lses.back()->view());
    }
    const Tensor merged(KIVI_BF16, {1, 1, 64});
    REQUIRE(kivi_merge(8, out_views.data(), lse_views.data(), nullptr, merged, nullptr, nullptr) == KIVI_OK);
    // What the parts hold: their tails lie elsewhere than those of the whole, so each is compared with its own.
    Tokens held;
    for (int part = 0; part < 8; ++part) {
        const Tokens one = cache.dequantize(part);
        held.k.insert(held.k.end(), one.k.begin(), one.k.end());
        held.v.insert(held.v.end(), one.v.begin(), one.v.end());
    }
    const Exact of_parts = exact_attention(cache.layer(), held, q, {});
    const Exact of_whole = exact_attention(cache, {{8, 1}}, q);
    Ask ask;
    ask.out_dtype = KIVI_BF16;
    const Floats whole = cache.attend({{8, 1}}, q, ask).out, parts = merged.read();
    for (size_t c = 0; c < 64; ++c) {
        CHECK(std::fabs(whole[c] - of_whole.out[c]) <= 4);  // bf16 steps of 4 between 512 and 1024, 8 above
        CHECK(std::fabs(parts[c] - of_parts.out[c]) <= 4);
    }
    for (Tensor* tensor : outs) delete tensor;
    for (Tensor* tensor : lses) delete tensor;
}

TEST_CASE("fault 10: ranges of 1e-38 and of 1e-7 give valid codes and finite results") {
    for (int32_t window : {KIVI_F32, KIVI_F16}) {
        for (const kivi_spec& spec : {channel(2, 32), wide(channel(2, 32)), wide(channel(8, 32))}) {
            kivi_config with = config(spec, token(2, 32), {1, 1, 64, 64}, kNoWindows);
            with.window_dtype = window;
            const Cache cache(with);
            const float step = window == KIVI_F32 ? 1e-38f : 1e-7f;
            cache.append(0, patterned(cache.layer(), 32, {0, step, step / 2}), 0, 32);
            const Tokens read = cache.dequantize();
            for (int t = 0; t < 32; ++t) {
                const float value = key_at(read, cache.layer(), t, 3);
                CHECK(value >= 0);
                CHECK(value <= 1.1f * round_to(window, step));
            }
            CHECK(all_finite(cache.attend({{0, 1}}, Floats(64, 1.0f)).out));
        }
    }
}

TEST_CASE(
    "fault 11: imported scales that are infinite, NaN or negative are refused by their checksum and their "
    "rule") {
    const Cache cache(config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, {0, 16, 32}));
    Random random(11);
    cache.append(0, random_tokens(random, cache.layer(), 80), 0, 80);
    const Bytes good = cache.blob();
    // Scales of the first key page begin behind the codes of its 64 tokens.
    const size_t scale = 96 + 128 + 2 * 64 * 8;
    for (uint16_t bits : {0x7C00, 0x7E00, 0xBC00}) {
        Bytes bad = good;
        bad[scale] = uint8_t(bits);
        bad[scale + 1] = uint8_t(bits >> 8);
        CHECK(cache.import(0, bad) == KIVI_ERROR_CORRUPT);
        uint32_t crc = 0xFFFFFFFF;
        for (size_t i = 0; i + 4 < bad.size(); ++i) {
            crc ^= bad[i];
            for (int b = 0; b < 8; ++b) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
        }
        crc = ~crc;
        for (size_t i = 0; i < 4; ++i) bad[bad.size() - 4 + i] = uint8_t(crc >> (8 * i));
        CHECK(cache.import(0, bad) == KIVI_ERROR_CORRUPT);
        CHECK(says("scale"));
        CHECK(cache.blob() == good);
    }
    CHECK(cache.import(0, good) == KIVI_OK);
}

// [APPEND-2] [ATTEND-4]
TEST_CASE("TEST 17, fault 13: a NaN or an infinity damages its own groups and the queries that see it") {
    for (float bad : {kNaN, kInfinity, -kInfinity}) {
        for (int64_t at : {5, 70, 150}) {  // sink, page, tail
            CAPTURE(bad);
            CAPTURE(at);
            kivi_config with = config(channel(2, 32), token(2, 32), {2, 4, 64, 64}, {32, 32, 32});
            with.max_sequences = 2;
            const Cache clean(with), hurt(with);
            Random random(17);
            const Tokens tokens = random_tokens(random, clean.layer(), 160);
            Tokens damaged = tokens;
            damaged.k[size_t(at * 2 + 1) * 64 + 9] = bad;  // head 1, channel 9
            for (int sequence : {0, 1}) clean.append(sequence, tokens, 0, 160);
            hurt.append(0, damaged, 0, 160);
            hurt.append(1, tokens, 0, 160);
            CHECK(hurt.blob(1) == clean.blob(1));

            // What is stored: only channel 9 of head 1, in its own token or its own group of 32.
            const Tokens a = clean.dequantize(0), b = hurt.dequantize(0);
            CHECK(bit_equal(a.v, b.v));
            for (int64_t t = 0; t < 160; ++t) {
                for (int64_t i = 0; i < 2 * 64; ++i) {
                    const bool own = i == 64 + 9 && (at == 70 ? t / 32 == at / 32 : t == at);
                    const float x = a.k[size_t(t * 128 + i)], y = b.k[size_t(t * 128 + i)];
                    if (own) {
                        CHECK_FALSE(std::isfinite(y));
                    } else {
                        CHECK(x == y);
                    }
                }
            }
            // Attend: heads 2 and 3 read the damaged head; a query that does not see the key is unharmed.
            const Floats q = random.normals(4 * 64);
            const Rows both{{0, 1}, {1, 1}};
            Floats q2 = q;
            q2.insert(q2.end(), q.begin(), q.end());
            const Answer good = clean.attend(both, q2), result = hurt.attend(both, q2);
            for (size_t i = 0; i < good.out.size(); ++i) {
                const bool sees = i >= 2 * 64 && i < 4 * 64;
                if (sees) {
                    CHECK(std::isnan(result.out[i]));
                } else {
                    CHECK(result.out[i] == good.out[i]);
                }
            }
            Ask near;
            near.window_left = at == 150 ? 5 : 40;
            CHECK(bit_equal(hurt.attend({{0, 1}}, q, near).out, clean.attend({{0, 1}}, q, near).out));
        }
    }
}

// [ATTEND-4]
TEST_CASE("TEST 17: a value of the call that is not finite damages its channel of the queries that see it") {
    for (const bool transformed : {false, true}) {
        for (const float bad : {kNaN, kInfinity, -kInfinity}) {
            CAPTURE(transformed);
            CAPTURE(bad);
            const kivi_spec values = transformed ? rotated(token(2, 32)) : token(2, 32);
            const Cache cache(config(channel(2, 32), values, {2, 4, 64, 64}, {32, 32, 32}));
            Random random(17);
            cache.append(0, random_tokens(random, cache.layer(), 160), 0, 160);
            const Floats q = random.normals(3 * 4 * 64);
            Ask ask;
            ask.fresh_k = random.normals(3 * 2 * 64);
            ask.fresh_v = random.normals(3 * 2 * 64);
            const Answer good = cache.attend({{0, 3}}, q, ask);
            ask.fresh_v[(1 * 2 + 1) * 64 + 9] = bad;  // token 1, head 1, channel 9
            const Answer result = cache.attend({{0, 3}}, q, ask);
            for (size_t i = 0; i < good.out.size(); ++i) {
                const size_t query = i / (4 * 64), head = i / 64 % 4, dim = i % 64;
                const bool sees = query >= 1 && head >= 2;
                if (sees && dim == 9) {
                    CHECK_FALSE(std::isfinite(result.out[i]));
                } else if (!sees || !transformed) {
                    CHECK(result.out[i] == good.out[i]);
                }
            }
            CHECK(bit_equal(result.lse, good.lse));
        }
    }
}

TEST_CASE("TEST 17: a key of bits that are all ones is NaN, whatever its type, the window's and the transform") {
    for (int32_t window_dtype : {KIVI_F16, KIVI_BF16, KIVI_F32}) {
        for (int32_t dtype : {KIVI_F16, KIVI_BF16, KIVI_F32}) {
            for (const kivi_spec& keys : {token(4, 32), rotated(token(4, 32))}) {
                CAPTURE(window_dtype);
                CAPTURE(dtype);
                CAPTURE(keys.transform);
                kivi_config with = config(keys, token(4, 32), {1, 1, 64, 64}, {4, 0, 1});
                with.window_dtype = window_dtype;
                const Cache cache(with);
                Random random(18);
                const Tokens tokens = random_tokens(random, cache.layer(), 40);
                const Tensor k(dtype, {40, 1, 64}, tokens.k), v(dtype, {40, 1, 64}, tokens.v);
                const Bytes ones(element_bytes(dtype) * 64, 0xFF);
                uint8_t* memory = static_cast<uint8_t*>(const_cast<void*>(k.data()));
                for (size_t t : {2, 20}) {  // sink, page
                    backend().upload(memory + t * ones.size(), ones.data(), ones.size());
                }
                REQUIRE(kivi_append(cache, 0, Batch({{0, 40}}), k, v, nullptr) == KIVI_OK);
                const Tokens stored = cache.dequantize(0);
                for (size_t i = 0; i < stored.k.size(); ++i) {
                    const bool damaged = i / 64 == 2 || i / 64 == 20;
                    CHECK(std::isnan(stored.k[i]) == damaged);
                }
            }
        }
    }
}

TEST_CASE(
    "fault 14, fault 20, TEST 28: what lies in the memory before does not matter, whatever the length") {
    // Lengths around every part and tile; both sequences of the dirty cache were full of NaN, then reset.
    for (int64_t length : {1, 9, 31, 33, 35, 73, 129, 160, 161, 290}) {
        CAPTURE(length);
        kivi_config with = config(channel(3, 32), rotated(token(2, 32)), {2, 4, 80, 64}, {32, 17, 32});
        with.max_sequences = 2;
        with.max_tokens = 400;
        const Cache fresh(with), dirty(with);
        for (int sequence : {0, 1}) {
            dirty.append(sequence, {Floats(400 * 2 * 80, kNaN), Floats(400 * 2 * 64, kNaN)}, 0, 400);
        }
        if (length % 2) {
            dirty.reset();
        } else {
            for (int sequence : {0, 1}) REQUIRE(kivi_sequence_reset(dirty, sequence, nullptr) == KIVI_OK);
        }
        Random random(uint64_t(1400 + length));
        const Tokens tokens = random_tokens(random, fresh.layer(), length);
        for (int sequence : {1, 0}) {
            fresh.append(sequence, tokens, 0, length, 50);
            dirty.append(sequence, tokens, 0, length, 50);
        }
        const Floats q = random.normals(2 * 3 * 4 * 80);
        const Rows rows{{1, 3}, {0, 3}};
        const Answer a = fresh.attend(rows, q), b = dirty.attend(rows, q);
        CHECK(bit_equal(a, b));
        CHECK(fresh.blob(1) == dirty.blob(1));
        check_attend(dirty, rows, q);
    }
}

// [ATTEND-2]
TEST_CASE(
    "fault 16, fault 17: rows without tokens or without queries are skipped, empty sequences give zeros") {
    kivi_config with = config(channel(2, 32), token(2, 32), {1, 2, 64, 64}, {32, 32, 32});
    with.max_sequences = 4;
    const Cache cache(with);
    Random random(16);
    const Tokens tokens = random_tokens(random, cache.layer(), 134);
    cache.append({{0, 0}, {1, 130}, {2, 0}, {3, 4}}, tokens);
    CHECK(cache.length(0).length == 0);
    CHECK(cache.length(1).length == 130);
    // KV lengths 0, 130, 0: Cache::attend checks the marks around out, LSE and workspace.
    const Floats q = random.normals(3 * 2 * 64);
    const Answer answer = cache.attend({{0, 1}, {1, 1}, {2, 1}}, q);
    for (size_t i = 0; i < 2 * 64; ++i) {
        CHECK(answer.out[i] == 0);
        CHECK(answer.out[2 * 2 * 64 + i] == 0);
    }
    for (size_t i : {0, 1, 4, 5}) CHECK(answer.lse[i] == -kInfinity);
    CHECK(std::isfinite(answer.lse[2]));
    // Query counts 0, 3, 0 over KV lengths 4, 0, 0.
    for (float x : cache.attend({{3, 0}, {0, 3}, {2, 0}}, random.normals(3 * 2 * 64)).out) CHECK(x == 0);
    // No tokens at all, no rows at all.
    const Bytes before = cache.blob(1);
    cache.append({{0, 0}, {1, 0}}, {});
    cache.append(Rows{}, {});
    CHECK(cache.attend({{1, 0}}, {}).out.empty());
    CHECK(cache.attend({}, {}).out.empty());
    CHECK(cache.blob(1) == before);
}

TEST_CASE("fault 19: a part that sees nothing has LSE -infinity and merging it changes no bit of the other") {
    kivi_config with = config(channel(2, 32), token(2, 32), {1, 2, 64, 64}, {0, 32, 32});
    with.max_sequences = 2;
    const Cache cache(with);
    Random random(19);
    cache.append(0, random_tokens(random, cache.layer(), 100), 0, 100);
    const Floats q = random.normals(2 * 64);
    const Answer full_half = cache.attend({{0, 1}}, q), empty_half = cache.attend({{1, 1}}, q);
    CHECK(empty_half.lse == Floats(2, -kInfinity));
    for (const bool first : {true, false}) {
        const Tensor a(KIVI_F32, {1, 2, 64}, first ? full_half.out : empty_half.out);
        const Tensor b(KIVI_F32, {1, 2, 64}, first ? empty_half.out : full_half.out);
        const Tensor la(KIVI_F32, {1, 2}, first ? full_half.lse : empty_half.lse);
        const Tensor lb(KIVI_F32, {1, 2}, first ? empty_half.lse : full_half.lse);
        const Tensor out(KIVI_F32, {1, 2, 64}), lse(KIVI_F32, {1, 2});
        const kivi_tensor outs[2] = {*static_cast<const kivi_tensor*>(a),
                                     *static_cast<const kivi_tensor*>(b)};
        const kivi_tensor lses[2] = {*static_cast<const kivi_tensor*>(la),
                                     *static_cast<const kivi_tensor*>(lb)};
        REQUIRE(kivi_merge(2, outs, lses, nullptr, out, lse, nullptr) == KIVI_OK);
        CHECK(bit_equal(out.read(), full_half.out));
        CHECK(bit_equal(lse.read(), full_half.lse));
    }
}

TEST_CASE(
    "fault 22: a cap of 30 turns the score 30 into 30 tanh(1); 0 is off; negative and NaN are refused") {
    const Cache cache(config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, {0, 64, 32}));
    Tokens tokens{Floats(2 * 64, 0.0f), Floats(2 * 64, 0.0f)};
    tokens.k[0] = 30;  // token 0 scores 30, token 1 scores 0
    tokens.v[0] = 1;
    cache.append(0, tokens, 0, 2);
    Floats q(64, 0.0f);
    q[0] = 1;
    Ask ask;
    ask.scale = 1;
    ask.soft_cap = 30;
    const double capped = 30 * std::tanh(1.0);
    CHECK(capped == doctest::Approx(22.848).epsilon(1e-4));
    CHECK(cache.attend({{0, 1}}, q, ask).lse[0] == doctest::Approx(capped).epsilon(1e-5));
    ask.soft_cap = 0;
    CHECK(cache.attend({{0, 1}}, q, ask).lse[0] == doctest::Approx(30).epsilon(1e-5));
    const Tensor query(KIVI_F32, {1, 1, 64}, q), out(KIVI_F32, {1, 1, 64});
    kivi_attend_params params;
    kivi_attend_params_init(&params, sizeof params);
    const Workspace workspace(1 << 20);
    for (float cap : {-30.0f, kNaN, -kInfinity}) {
        params.soft_cap = cap;
        CHECK(kivi_attend(cache, 0, Batch({{0, 1}}), query, out, &params, workspace.data(), workspace.size(),
                          nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
        CHECK(says("soft_cap"));
    }
    CHECK(out.untouched());
}

TEST_CASE("fault 23: the LSE is a natural logarithm: 300 tokens split at 128 merge with exp(LSE)") {
    kivi_config with = config(channel(4, 32), token(4, 32), {2, 4, 64, 64}, {0, 512, 32});
    with.max_sequences = 3;
    const Cache cache(with);
    Random random(23);
    const Tokens tokens = random_tokens(random, cache.layer(), 300);
    cache.append(0, tokens, 0, 300);
    cache.append(1, tokens, 0, 128);
    cache.append(2, tokens, 128, 300);
    const Floats q = random.normals(4 * 64);
    const Answer whole = cache.attend({{0, 1}}, q), a = cache.attend({{1, 1}}, q),
                 b = cache.attend({{2, 1}}, q);
    for (size_t h = 0; h < 4; ++h) {
        const double wa = std::exp(double(a.lse[h])), wb = std::exp(double(b.lse[h]));
        CHECK(std::log(wa + wb) == doctest::Approx(whole.lse[h]).epsilon(1e-3));
        for (size_t c = 0; c < 64; ++c) {
            const double merged = (wa * a.out[h * 64 + c] + wb * b.out[h * 64 + c]) / (wa + wb);
            CHECK(std::fabs(merged - whole.out[h * 64 + c]) <= 1e-3);
        }
    }
}

TEST_CASE("S11, fault 35, fault 41: small signals on large offsets keep their shape") {
    struct Input {
        float offset, range;
        int32_t dtype;
    };
    for (const Input& input :
         {Input{0, 5e-5f, KIVI_F32}, {200, 0.5f, KIVI_BF16}, {200, 0.1f, KIVI_F16}, {200, 0.1f, KIVI_BF16}}) {
        kivi_config with = config(wide(channel(2, 32)), token(2, 32), {1, 1, 64, 64}, {0, 8, 32});
        with.window_dtype = input.dtype;
        const Cache cache(with), narrow([&] {
            kivi_config f16 = with;
            f16.layer.k.param_dtype = KIVI_F16;
            return f16;
        }());
        Random random(41);
        Tokens tokens = random_tokens(random, cache.layer(), 40);
        for (size_t t = 0; t < 40; ++t)
            tokens.k[t * 64 + 3] = input.offset + float(random.uniform()) * input.range;
        cache.append(0, tokens, 0, 40, 0, 0, input.dtype);
        narrow.append(0, tokens, 0, 40, 0, 0, input.dtype);
        const Tokens exact = cache.dequantize(), half = narrow.dequantize();
        const float ulp = input.offset == 0 ? 0 : input.dtype == KIVI_BF16 ? 1.0f : 0.125f;
        const float min_rounding = input.offset == 0 ? 3e-8f : 0.0625f;
        for (size_t t = 0; t < 32; ++t) {
            const float stored = round_to(input.dtype, tokens.k[t * 64 + 3]);
            const float step = std::max((input.range + ulp) / 3, input.range / 3);
            CHECK(std::fabs(exact.k[t * 64 + 3] - stored) <= 0.51f * step);
            CHECK(std::fabs(half.k[t * 64 + 3] - stored) <= 0.51f * step + min_rounding + 0.001f * step);
        }
        const Floats q = random.normals(64);
        check_attend(cache, {{0, 1}}, q);
        check_attend(narrow, {{0, 1}}, q);
    }
}

TEST_CASE("rows beyond the window dtype, before or after their Hadamard, are clamped and counted, K and V apart") {
    constexpr int kTokens = 128, kHeads = 2, kDim = 128;
    struct Huge {
        int token, head;
        float size;
    };
    const std::vector<Huge> huge_keys{{3, 1, -60000}, {70, 0, 60000}, {120, 1, 60000}};  // sink, packed, tail
    const std::vector<Huge> huge_values{{5, 0, 60000}, {80, 1, -60000}};
    const auto fill = [&](Floats& x, const Huge& huge, float factor) {
        const auto row = x.begin() + (huge.token * kHeads + huge.head) * kDim;
        std::fill(row, row + kDim, factor * huge.size);
    };
    for (const bool rotate : {true, false}) {
        // Rotated, a row of +-60000 has one channel of +-60000 sqrt(128). As it is, only a larger one is beyond f16.
        const float factor = rotate ? 1.0f : 20.0f;
        for (int32_t window_dtype : {KIVI_F16, KIVI_BF16}) {
            CAPTURE(rotate);
            CAPTURE(window_dtype);
            const kivi_spec k = channel(2, 32), v = token(2, 32);
            kivi_config with = config(rotate ? rotated(k) : k, rotate ? rotated(v) : v, {kHeads, 4, kDim, kDim},
                                      {32, 32, 32});
            with.window_dtype = window_dtype;
            Random random(60);
            Tokens tokens{random.normals(kTokens * kHeads * kDim), random.normals(kTokens * kHeads * kDim)};
            for (const Huge& huge : huge_keys) fill(tokens.k, huge, factor);
            for (const Huge& huge : huge_values) fill(tokens.v, huge, factor);
            const Cache cache(with);
            cache.append(0, tokens, 0, kTokens, 50);

            const bool beyond = window_dtype == KIVI_F16;
            CHECK(cache.statistics().saturated_rows == (beyond ? 5 : 0));
            const int64_t border = rolling_border(with, kTokens);
            CHECK(border == 96);
            CHECK(payload_in(cache.blob(), 0) == payload(with, cache.layer(), tokens, kTokens, border, border));
            const Tokens stored = cache.dequantize(0, 0, KIVI_STORED_BASIS);
            const float clamped = round_to(window_dtype, rotate ? 60000 * std::sqrt(128.0f) : factor * 60000);
            CHECK(stored.k[(3 * kHeads + 1) * kDim] == (beyond ? -65504.0f : -clamped));
            CHECK(stored.k[(120 * kHeads + 1) * kDim] == (beyond ? 65504.0f : clamped));
            CHECK(stored.v[5 * kHeads * kDim] == (beyond ? 65504.0f : clamped));
            CHECK(all_finite(stored.k));
            CHECK(all_finite(stored.v));
            check_attend(cache, {{0, 1}}, random.normals(4 * kDim, 1e-4f));
        }
    }
}

TEST_CASE("a key channel at 7000 with queries of 40 and a value channel at 60000 are right, rotated or not") {
    for (const bool rotate : {false, true}) {
        CAPTURE(rotate);
        const kivi_spec k = channel(3, 64), v = token(2, 64);
        const Cache cache(
            config(rotate ? rotated(k) : k, rotate ? rotated(v) : v, {1, 4, 128, 128}, {64, 64, 64}));
        Random random(61);
        Tokens tokens{random.normals(300 * 128), random.normals(300 * 128)};
        for (size_t t = 0; t < 300; ++t) {
            tokens.k[t * 128 + 11] = t == 140 ? 7000.0f : -7000.0f;
            tokens.v[t * 128 + 90] = 60000.0f;
        }
        cache.append(0, tokens, 0, 300, 0, 0, KIVI_F16);
        CHECK(cache.statistics().saturated_rows == 0);
        Floats q = random.normals(4 * 128);
        for (size_t head = 0; head < 4; ++head) q[head * 128 + 11] = 40;
        check_attend(cache, {{0, 1}}, q);  // one key outweighs the rest by exp(49000)
        const Answer answer = cache.attend({{0, 1}}, q);
        for (size_t head = 0; head < 4; ++head) {
            CHECK(answer.out[head * 128 + 90] == doctest::Approx(60000).epsilon(0.02));
        }
    }
}
