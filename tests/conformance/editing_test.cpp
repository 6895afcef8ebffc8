// Section C of the public faults: histories of a cache, several queries at once, windows and masks.

#include "support/cache.h"
#include "support/oracle.h"
#include "support/restate.h"

using namespace kivi_test;

TEST_CASE("fault 43: one config object makes two caches of different models and is not written") {
    kivi_config one = config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, {0, 32, 32});
    one.layer_count = 2;
    const kivi_config two_layers = one;
    const Cache small(one);
    one.layer_count = 30;
    const kivi_config thirty_layers = one;
    const Cache large(one);
    CHECK(std::equal(reinterpret_cast<const uint8_t*>(&one), reinterpret_cast<const uint8_t*>(&one + 1),
                     reinterpret_cast<const uint8_t*>(&thirty_layers)));
    CHECK(two_layers.layer_count == 2);
    kivi_length length{};
    CHECK(kivi_sequence_length(small, 1, 0, &length, sizeof length) == KIVI_OK);
    CHECK(kivi_sequence_length(small, 2, 0, &length, sizeof length) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(kivi_sequence_length(large, 29, 0, &length, sizeof length) == KIVI_OK);
}

TEST_CASE("fault 49: rows that are skipped write nowhere") {
    kivi_config with = config(channel(2, 32), token(2, 32), {1, 2, 64, 64}, {32, 32, 32});
    with.max_sequences = 3;
    const Cache cache(with);
    Random random(49);
    const Tokens tokens = random_tokens(random, cache.layer(), 200);
    cache.append(0, tokens, 0, 200);
    const Bytes before = cache.blob(0);
    const Tensor k(KIVI_F32, {3, 4, 1, 64}, Floats(3 * 4 * 64, kNaN)),
        v(KIVI_F32, {3, 4, 1, 64}, Floats(3 * 4 * 64, kNaN));
    REQUIRE(kivi_append(cache, 0, Batch({{-1, 4}, {-1, 4}, {-1, 4}}), k, v, nullptr) == KIVI_OK);
    REQUIRE(kivi_append(cache, 0, Batch({{0, 0}, {1, 0}, {2, 0}}), k, v, nullptr) == KIVI_OK);
    CHECK(cache.blob(0) == before);
    CHECK(cache.length(1).length == 0);
    // A skipped row of attend leaves its part of the output alone.
    const Tensor q(KIVI_F32, {3, 1, 2, 64}, random.normals(3 * 2 * 64)), out(KIVI_F32, {3, 1, 2, 64});
    const Workspace workspace(1 << 20);
    REQUIRE(kivi_attend(cache, 0, Batch({{-1, 1}, {1, 0}, {-1, 1}}), q, out, nullptr, workspace.data(),
                        workspace.size(), nullptr) == KIVI_OK);
    CHECK(out.untouched());
}

TEST_CASE("fault 52, S6: after a reset a cache is bit for bit a fresh one, and only new tokens are seen") {
    const kivi_config with = preset("kivi2-sink", {2, 4, 64, 64});
    const Cache used(with), fresh(with);
    Random random(52);
    used.append(0, random_tokens(random, used.layer(), 300), 0, 300);
    const Floats q = random.normals(4 * 64);
    used.attend({{0, 1}}, q);
    REQUIRE(kivi_sequence_reset(used, 0, nullptr) == KIVI_OK);
    CHECK(used.length().length == 0);
    CHECK(used.statistics().blocks_used == 0);
    for (float x : used.attend({{0, 1}}, q).out) CHECK(x == 0);
    const Tokens next = random_tokens(random, used.layer(), 230);
    for (int64_t end : {5, 230}) {
        const int64_t begin = end == 5 ? 0 : 5;
        for (const Cache* cache : {&used, &fresh}) cache->append(0, next, begin, end);
        CHECK(used.blob() == fresh.blob());
        CHECK(bit_equal(used.attend({{0, 1}}, q), fresh.attend({{0, 1}}, q)));
    }
}

TEST_CASE("fault 55: rows of 1000 and of 100 new queries each see their own past") {
    kivi_config with = config(channel(2, 32), token(2, 32), {1, 2, 64, 64}, {32, 32, 32});
    with.max_sequences = 2;
    const Cache cache(with);
    Random random(55);
    cache.append(0, random_tokens(random, cache.layer(), 1000), 0, 1000);
    cache.append(1, random_tokens(random, cache.layer(), 500), 0, 500);
    check_attend(cache, {{0, 1000}, {1, 100}}, random.normals(1100 * 2 * 64));
}

TEST_CASE(
    "fault 56, TEST 30: the workspace that was queried suffices for the worst call, one byte less does not") {
    kivi_config with = config(channel(3, 64), rotated(token(2, 64)), {2, 8, 64, 64}, {64, 64, 64});
    with.max_sequences = 3;
    const Cache cache(with);
    Random random(56);
    for (int sequence : {0, 1, 2}) {
        const int64_t length = 1024 - 100 * sequence;
        cache.append(sequence, random_tokens(random, cache.layer(), length), 0, length);
    }
    size_t bytes = 0;
    REQUIRE(kivi_attend_workspace(cache, 0, 3, 40, &bytes) == KIVI_OK);
    const Tensor q(KIVI_F32, {3, 40, 8, 64}, random.normals(3 * 40 * 8 * 64)), out(KIVI_F32, {3, 40, 8, 64});
    const Tensor k(KIVI_F32, {3, 40, 2, 64}, random.normals(3 * 40 * 2 * 64));
    kivi_attend_params params;
    kivi_attend_params_init(&params, sizeof params);
    params.k = params.v = k;
    const Tensor workspace(KIVI_F32, {int64_t(bytes / 4 + 2)});
    uint8_t* const memory = const_cast<uint8_t*>(static_cast<const uint8_t*>(workspace.data()));
    const Batch batch({{0, 40}, {1, 40}, {2, 40}});
    CHECK(kivi_attend(cache, 0, batch, q, out, &params, memory, bytes - 1, nullptr) ==
          KIVI_ERROR_BUFFER_TOO_SMALL);
    CHECK(says("workspace_bytes is " + std::to_string(bytes - 1)));
    CHECK(out.untouched());
    CHECK(kivi_attend(cache, 0, batch, q, out, &params, memory + 1, bytes, nullptr) ==
          KIVI_OK);  // any alignment
    CHECK(workspace.marks_intact());
    // No score matrix: a hundred thousand tokens and prompts of thousands ask for a sliver of what they read, and on a
    // GPU for what its multiprocessors leave of rows that they share.
    const size_t results = backend().device == KIVI_CUDA ? 100000000 : 0;
    with.max_tokens = 100000;
    const Cache longer(with);
    for (int32_t queries : {1, 40, 4096}) {
        REQUIRE(kivi_attend_workspace(longer, 0, 1, queries, &bytes) == KIVI_OK);
        CHECK(bytes < longer.memory().page_bytes / 3 / 8 + results);
    }
}

TEST_CASE("[RESERVE-1] [SYNC-1] a sequence is given its blocks beforehand, and appends then take none") {
    kivi_config with = config(channel(4, 32), token(4, 32), {2, 2, 64, 64}, {0, 32, 32});
    with.max_sequences = 2;
    with.pool_tokens = 1024;
    const Cache cache(with);
    Random random(5);
    const Tokens tokens = random_tokens(random, cache.layer(), 700);
    const auto used = [&] {
        kivi_statistics statistics{};
        REQUIRE(kivi_query_statistics(cache, -1, &statistics, sizeof statistics) == KIVI_OK);
        return statistics.blocks_used;
    };
    REQUIRE(kivi_sequence_reserve(cache, 1, 700, nullptr) == KIVI_OK);
    const int64_t reserved = used();
    CHECK(reserved == 6);  // 672 packed tokens after a flush, in blocks of 128
    CHECK(cache.length(1).length == 0);
    REQUIRE(kivi_sequence_reserve(cache, 1, 100, nullptr) == KIVI_OK);
    CHECK(used() == reserved);
    cache.append(1, tokens, 0, 700);
    REQUIRE(kivi_synchronize(cache, nullptr) == KIVI_OK);
    CHECK(cache.length(1).length == 700);
    CHECK(used() == reserved);
    CHECK(kivi_sequence_reserve(cache, 0, 1025, nullptr) == KIVI_ERROR_CAPACITY);
    CHECK(says("max_tokens"));
    CHECK(kivi_sequence_reserve(cache, 0, 1000, nullptr) == KIVI_ERROR_CAPACITY);  // the pool has 2 blocks left
    CHECK(says("more blocks"));
    CHECK(kivi_sequence_reserve(cache, 2, 1, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(kivi_sequence_reserve(cache, 0, -1, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(used() == reserved);
    REQUIRE(kivi_sequence_reset(cache, 1, nullptr) == KIVI_OK);
    CHECK(used() == 0);
}

TEST_CASE("fault 59: nothing cached and 20 fresh tokens is plain causal attention") {
    const Cache cache(preset("k3v2", {2, 4, 64, 64}));
    Random random(59);
    const Tokens fresh{random.normals(20 * 2 * 64), random.normals(20 * 2 * 64)};
    Ask ask;
    ask.fresh_k = fresh.k;
    ask.fresh_v = fresh.v;
    check_attend(cache, {{0, 20}}, random.normals(20 * 4 * 64), ask);
    CHECK(cache.length().length == 0);
}

TEST_CASE("fault 61: every ratio of query heads to KV heads") {
    for (int ratio : {1, 2, 3, 5, 6, 7, 8, 12, 16}) {
        CAPTURE(ratio);
        for (int kv : {1, 3}) {
            const Cache cache(config(channel(2, 32), token(2, 32), {kv, kv * ratio, 64, 64}, {32, 32, 32}));
            Random random(uint64_t(61 + ratio));
            cache.append(0, random_tokens(random, cache.layer(), 210), 0, 210);
            check_attend(cache, {{0, 2}}, random.normals(size_t(2 * kv * ratio * 64)));
        }
    }
}

TEST_CASE("fault 62: the second turn of 6 tokens sees the 20 of the first and its own prefix") {
    const Cache cache(config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, {0, 64, 32}));
    Random random(62);
    Tokens tokens = random_tokens(random, cache.layer(), 26);
    for (size_t i = 0; i < tokens.v.size(); ++i)
        tokens.v[i] = i % 64 == i / 64 ? 1.0f : 0.0f;  // one-hot by position
    const Floats q = random.normals(6 * 64);
    const auto check_reach = [&](const Answer& answer) {
        for (size_t row = 0; row < 6; ++row) {
            for (size_t t = 0; t < 64; ++t) CHECK((answer.out[row * 64 + t] > 0) == (t <= 20 + row));
        }
    };
    cache.append(0, tokens, 0, 20);
    Ask ask;
    const Tokens fresh = slice(tokens, cache.layer(), 20, 26);
    ask.fresh_k = fresh.k;
    ask.fresh_v = fresh.v;
    check_reach(cache.attend({{0, 6}}, q, ask));
    cache.append(0, tokens, 20, 26);
    check_reach(cache.attend({{0, 6}}, q));
    check_attend(cache, {{0, 6}}, q);
}

// The hidden keys include the whole sink window of 32. [ATTEND-3]
TEST_CASE("fault 64: window_left 127 over 200 keys shows the last query exactly 72 .. 199") {
    const Cache cache(config(channel(2, 32), token(8, 128), {1, 1, 64, 256}, {32, 32, 32}));
    Random random(64);
    Tokens tokens{random.normals(200 * 64), Floats(200 * 256, 0.0f)};
    for (size_t t = 0; t < 200; ++t) tokens.v[t * 256 + t] = 1;
    cache.append(0, tokens, 0, 200);
    Ask ask;
    ask.window_left = 127;
    const Answer answer = cache.attend({{0, 1}}, random.normals(64), ask);
    for (size_t t = 0; t < 256; ++t) CHECK((answer.out[t] != 0) == (t >= 72 && t < 200));
}

// Cached and fresh, the newest query stands at the newest position. [ATTEND-1]
TEST_CASE("fault 65: window_left 7, 20 cached, 4 queries: row i sees 13 + i .. 20 + i") {
    const Cache cache(config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, {0, 64, 32}));
    Random random(65);
    Tokens tokens{random.normals(24 * 64), Floats(24 * 64, 0.0f)};
    for (size_t t = 0; t < 24; ++t) tokens.v[t * 64 + t] = 1;
    cache.append(0, tokens, 0, 20);
    const Floats q = random.normals(4 * 64);
    Ask ask;
    ask.window_left = 7;
    Ask with_fresh = ask;
    with_fresh.fresh_k = slice(tokens, cache.layer(), 20, 24).k;
    with_fresh.fresh_v = slice(tokens, cache.layer(), 20, 24).v;
    const Answer before = cache.attend({{0, 4}}, q, with_fresh);
    cache.append(0, tokens, 20, 24);
    const Answer after = cache.attend({{0, 4}}, q, ask);
    for (size_t row = 0; row < 4; ++row) {
        for (size_t t = 0; t < 64; ++t) {
            const bool seen = t >= 13 + row && t <= 20 + row;
            CHECK((before.out[row * 64 + t] > 0) == seen);
            CHECK((after.out[row * 64 + t] > 0) == seen);
        }
    }
}

TEST_CASE(
    "fault 67: every tail from 0 to a tile behind 0, 1, 4 and 9 groups, windows that begin in every part") {
    for (int64_t groups : {0, 1, 4, 9}) {
        for (int64_t tail = 0; tail <= 32; ++tail) {
            CAPTURE(groups);
            CAPTURE(tail);
            const int64_t length = 32 + 32 * groups + tail;
            const Cache cache(config(channel(2, 32), token(2, 32), {1, 2, 64, 64}, {32, 32, 32}));
            Random random(uint64_t(67 + 100 * groups + tail));
            cache.append(0, random_tokens(random, cache.layer(), length), 0, length);
            cache.flush();
            CHECK(length - cache.length().key_border == tail % 32);
            const Floats q = random.normals(2 * 64);
            for (int64_t reach :
                 {int64_t{-1}, tail / 2, tail, tail + 16 * groups, length - 17, length - 1, length}) {
                Ask ask;
                ask.window_left = std::max<int64_t>(-1, reach);
                check_attend(cache, {{0, 1}}, q, ask);
            }
        }
    }
}

TEST_CASE("fault 68: tensors of more tokens than the batch take only its own; fewer are refused") {
    kivi_config with = config(channel(2, 32), token(2, 32), {1, 2, 64, 64}, {0, 32, 32});
    with.max_sequences = 2;
    const Cache cache(with), exact(with);
    Random random(68);
    const Tokens tokens = random_tokens(random, cache.layer(), 10);
    exact.append({{0, 3}, {1, 4}}, tokens);
    const Tensor k(KIVI_F32, {10, 1, 64}, tokens.k), v(KIVI_F32, {10, 1, 64}, tokens.v);
    REQUIRE(kivi_append(cache, 0, Batch({{0, 3}, {1, 4}}), k, v, nullptr) == KIVI_OK);
    for (int sequence : {0, 1}) CHECK(cache.blob(sequence) == exact.blob(sequence));
    CHECK(kivi_append(cache, 0, Batch({{0, 3}, {1, 8}}), k, v, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    for (int sequence : {0, 1}) CHECK(cache.blob(sequence) == exact.blob(sequence));
}

TEST_CASE("S13: a ragged batch with LSE, window and soft cap has its way with each of them") {
    kivi_config with = preset("k3v2", {2, 4, 64, 64});
    with.max_sequences = 4;
    const Cache cache(with);
    Random random(13);
    int64_t length = 3;
    Rows rows;
    for (int sequence : {0, 1, 2, 3}) {
        cache.append(sequence, random_tokens(random, cache.layer(), length), 0, length);
        length = 4 * length + 1;
        rows.push_back({3 - sequence, 1 + sequence});
    }
    Ask ask;
    ask.window_left = 60;
    ask.soft_cap = 5;
    ask.scale = 0.3f;
    check_attend(cache, rows, random.normals(10 * 4 * 64), ask);
    Ask none;
    none.scale = 0.3f;
    const Floats q = random.normals(4 * 64);
    CHECK_FALSE(bit_equal(cache.attend({{3, 1}}, q, ask).out, cache.attend({{3, 1}}, q, none).out));
}
