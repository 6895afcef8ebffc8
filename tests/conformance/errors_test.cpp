// Section G of the public faults: full caches, dead handles, accounting, and what is refused when.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>

#include "support/cache.h"
#include "support/oracle.h"
#include "support/restate.h"

using namespace kivi_test;

TEST_CASE("TEST 32: empty caches, empty appends, double destroy and NULL handles are statuses, not crashes") {
    const kivi_config with = config(channel(2, 32), token(2, 32), {1, 2, 64, 64}, {0, 32, 32});
    const Cache cache(with);
    for (float x : cache.attend({{0, 3}}, Floats(3 * 2 * 64, 1.0f)).out) CHECK(x == 0);
    cache.append({{0, 0}}, {});
    cache.flush();
    CHECK(cache.length().length == 0);
    CHECK(cache.blob().size() == 96 + 128 + 4);
    const Tensor t(KIVI_F32, {1, 1, 64}, Floats(64, 1.0f));
    kivi_memory memory{};
    kivi_length length{};
    kivi_statistics statistics{};
    size_t bytes = 0;
    const auto dead = [&](kivi_cache* handle, kivi_status expected) {
        const Batch batch({{0, 1}});
        CHECK(kivi_append(handle, 0, batch, t, t, nullptr) == expected);
        CHECK(kivi_attend(handle, 0, batch, t, t, nullptr, nullptr, 0, nullptr) == expected);
        CHECK(kivi_step(handle, 0, batch, t, t, t, t, nullptr, nullptr, 0, nullptr) == expected);
        CHECK(kivi_flush_residual(handle, 0, batch, nullptr) == expected);
        CHECK(kivi_cache_reset(handle, nullptr) == expected);
        CHECK(kivi_sequence_reset(handle, 0, nullptr) == expected);
        CHECK(kivi_reserve(handle, 1, nullptr) == expected);
        CHECK(kivi_cache_memory(handle, &memory, sizeof memory) == expected);
        CHECK(kivi_sequence_length(handle, 0, 0, &length, sizeof length) == expected);
        CHECK(kivi_query_statistics(handle, 0, &statistics, sizeof statistics) == expected);
        CHECK(kivi_attend_workspace(handle, 0, 1, 1, &bytes) == expected);
        CHECK(kivi_dequantize(handle, 0, 0, 0, 0, nullptr, nullptr, 0, nullptr) == expected);
        CHECK(kivi_export_size(handle, 0, &bytes) == expected);
        CHECK(kivi_moments_commit(handle, 0, nullptr) == expected);
    };
    dead(nullptr, KIVI_ERROR_INVALID_ARGUMENT);
    kivi_cache* handle = nullptr;
    REQUIRE(kivi_cache_create(&with, &handle) == KIVI_OK);
    kivi_cache_destroy(handle);
    dead(handle, KIVI_ERROR_STATE);
    kivi_cache_destroy(handle);
    kivi_cache_destroy(nullptr);
    int64_t foreign[64] = {};
    const kivi_status status = kivi_cache_reset(reinterpret_cast<kivi_cache*>(foreign), nullptr);
    CHECK(status < 0);
    kivi_cache_destroy(reinterpret_cast<kivi_cache*>(foreign));
    CHECK(std::string(kivi_status_name(status)) != "KIVI_ERROR_UNKNOWN");
}

TEST_CASE("fault 112: capacity 100, lengths 99 and 50, two more to each: neither changes") {
    kivi_config with = config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, {0, 32, 32});
    with.max_sequences = 2;
    with.max_tokens = 100;
    const Cache cache(with);
    Random random(112);
    const Tokens tokens = random_tokens(random, cache.layer(), 100);
    cache.append(0, tokens, 0, 99);
    cache.append(1, tokens, 0, 50);
    const Bytes a = cache.blob(0), b = cache.blob(1);
    for (const Rows& rows : {Rows{{0, 2}, {1, 2}}, Rows{{1, 2}, {0, 2}}}) {
        CHECK(cache.try_append(rows, slice(tokens, cache.layer(), 0, 4)) == KIVI_ERROR_CAPACITY);
        CHECK(says("sequence 0 has 99 tokens"));
    }
    CHECK(cache.length(0).length == 99);
    CHECK(cache.length(1).length == 50);
    CHECK(cache.blob(0) == a);
    CHECK(cache.blob(1) == b);
    cache.append({{0, 1}, {1, 2}}, tokens);
    CHECK(cache.length(0).length == 100);
}

TEST_CASE("fault 112: an exhausted pool refuses the whole batch, and reserve makes room") {
    kivi_config with = config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, {0, 32, 32});
    with.layer_count = 2;
    with.max_sequences = 3;
    with.pool_tokens = 256;
    const Cache cache(with), roomy(config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, {0, 32, 32}));
    Random random(113);
    const Tokens tokens = random_tokens(random, cache.layer(), 300);
    for (int layer : {0, 1}) cache.append(0, tokens, 0, 160, 0, layer);  // one block
    for (int layer : {0, 1}) cache.append(1, tokens, 0, 100, 0, layer);  // the other
    const Bytes a = cache.blob(0), b = cache.blob(1), c = cache.blob(2);
    const kivi_statistics before = cache.statistics();
    CHECK(before.blocks_free == 0);
    CHECK(cache.try_append({{1, 20}, {2, 80}}, tokens) == KIVI_ERROR_CAPACITY);
    CHECK(says("pool_tokens"));
    CHECK(cache.blob(0) == a);
    CHECK(cache.blob(1) == b);
    CHECK(cache.blob(2) == c);
    CHECK(cache.statistics().live_bytes == before.live_bytes);
    const Floats q = random.normals(64);
    const Answer answer = cache.attend({{0, 1}}, q);
    REQUIRE(kivi_reserve(cache, 1024, nullptr) == KIVI_OK);
    CHECK(bit_equal(cache.attend({{0, 1}}, q), answer));
    CHECK(cache.blob(0) == a);
    CHECK(cache.memory().blocks == 8);
    for (int layer : {0, 1}) cache.append(2, tokens, 0, 300, 0, layer);
    roomy.append(0, tokens, 0, 300);
    CHECK(payload_in(cache.blob(2), 0) == payload_in(roomy.blob(), 0));
    check_attend(cache, {{2, 1}}, q);
    // By one block: fewer than are there already.
    const Bytes full = cache.blob(2);
    REQUIRE(kivi_reserve(cache, 1025, nullptr) == KIVI_OK);
    CHECK(cache.memory().blocks == 9);
    CHECK(cache.blob(0) == a);
    CHECK(cache.blob(1) == b);
    CHECK(cache.blob(2) == full);
    for (int layer : {0, 1}) cache.append(1, tokens, 0, 200, 0, layer);
    CHECK(cache.blob(2) == full);
    check_attend(cache, {{1, 1}}, q);
}

TEST_CASE("fault 113: a device that is not there is refused at create, and support says why") {
    kivi_config with = config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, {0, 32, 32});
    with.flags = 0;
    with.device = KIVI_CUDA;
    int32_t count = -1;
    REQUIRE(kivi_device_count(KIVI_CUDA, &count) == KIVI_OK);
    if (count == 0) {
        kivi_cache* cache = reinterpret_cast<kivi_cache*>(&with);
        const kivi_status status = kivi_cache_create(&with, &cache);
        CHECK((status == KIVI_ERROR_UNSUPPORTED || status == KIVI_ERROR_NO_DEVICE));
        CHECK(cache == nullptr);
        CHECK(error().size() > 10);
        kivi_support support{};
        REQUIRE(kivi_query_support(&with, 0, &support, sizeof support) == KIVI_OK);
        CHECK(support.supported == 0);
        CHECK(std::string(support.reason).size() > 10);
        kivi_device_info info{};
        CHECK(kivi_device_query(KIVI_CUDA, 0, &info, sizeof info) <= 0);
    }
    with.device = 7;
    CHECK(create_status(with) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(says("device is 7"));
}

TEST_CASE("fault 116: estimate, report and the formula agree for 88000 tokens") {
    kivi_config with = preset("k3v2", {8, 32, 128, 128});
    with.layer_count = 4;
    with.max_tokens = 88000;
    with.max_sequences = 2;
    kivi_memory estimate{};
    REQUIRE(kivi_cache_estimate(&with, &estimate, sizeof estimate) == KIVI_OK);
    const Cache cache(with);
    const kivi_memory report = cache.memory();
    CHECK(report.total_bytes == estimate.total_bytes);
    CHECK(report.total_bytes == report.page_bytes + report.window_bytes + report.table_bytes +
                                    report.moment_bytes + report.scratch_bytes);
    const uint64_t block =
        4 * 8 * uint64_t(part_bytes(with.layer.k, 128, KIVI_F16) + part_bytes(with.layer.v, 128, KIVI_F16));
    CHECK(report.block_bytes == block);
    CHECK(report.page_bytes == uint64_t(report.blocks) * block);
    CHECK(report.window_bytes == uint64_t(2 * 4 * 8) * (64 + 64 + 64) * 2 * 128 * 2);
    // 3 bits an element and windows: far from 16 bits.
    CHECK(double(report.total_bytes) < 2 * 88000.0 * 4 * 8 * 256 * 2 * 0.2);
    kivi_config half = with;
    half.max_sequences = 1;
    kivi_memory smaller{};
    REQUIRE(kivi_cache_estimate(&half, &smaller, sizeof smaller) == KIVI_OK);
    CHECK(smaller.page_bytes * 2 == estimate.page_bytes);
}

TEST_CASE("fault 119: an import that does not fit is refused, and the next calls work") {
    kivi_config with = config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, {0, 32, 32});
    with.max_sequences = 2;
    with.pool_tokens = 384;
    const Cache cache(with), source(with);
    Random random(119);
    const Tokens tokens = random_tokens(random, cache.layer(), 400);
    source.append(0, tokens, 0, 330);  // three blocks
    cache.append(0, tokens, 0, 100);   // one of the three
    const Bytes before = cache.blob(0);
    CHECK(cache.import(1, source.blob()) == KIVI_ERROR_CAPACITY);
    CHECK(cache.length(1).length == 0);
    CHECK(cache.blob(0) == before);
    cache.append(1, tokens, 0, 100);
    check_attend(cache, {{0, 1}, {1, 1}}, random.normals(2 * 64));
    // In place of the sequence that holds the block it fits, and too long a one does not.
    REQUIRE(kivi_sequence_reset(cache, 1, nullptr) == KIVI_OK);
    CHECK(cache.import(0, source.blob()) == KIVI_OK);
    CHECK(cache.blob(0) == source.blob());
    with.max_tokens = 300;
    const Cache shorter(with);
    CHECK(shorter.import(0, source.blob()) == KIVI_ERROR_CAPACITY);
    CHECK(shorter.length().length == 0);
}

TEST_CASE("TEST 36: a hundred prompt lengths, the same results as any other chunking") {
    const kivi_config with = preset("kivi2-paper", {1, 1, 64, 64});
    const Cache cache(with), other(with);
    Random random(36);
    const Tokens tokens = random_tokens(random, cache.layer(), 500);
    for (int64_t length = 1; length < 500; length += 5) {
        for (const Cache* one : {&cache, &other}) one->reset();
        cache.append(0, tokens, 0, length);
        other.append(0, tokens, 0, length, 37);
        CHECK(cache.blob() == other.blob());
    }
}

TEST_CASE(
    "[THREAD-1] two threads that append to one cache: each call works or is refused, and all are counted") {
    kivi_config with = config(channel(2, 32), token(2, 32), {2, 2, 64, 64}, {0, 32, 32});
    with.max_sequences = 2;
    with.max_tokens = 20000;
    const Cache cache(with);
    std::atomic<int64_t> appended{0};
    std::atomic<int> others{0}, ready{0};
    const auto work = [&](int sequence) {
        Random random{uint64_t(sequence)};
        const Tokens tokens = random_tokens(random, with.layer, 40);
        const Tensor k(KIVI_F32, {40, 2, 64}, tokens.k), v(KIVI_F32, {40, 2, 64}, tokens.v);
        const Batch batch({{sequence, 40}});
        ++ready;
        while (ready < 2) std::this_thread::yield();
        for (int i = 0; i < 200; ++i) {
            const kivi_status status = kivi_append(cache, 0, batch, k, v, nullptr);
            if (status == KIVI_OK) appended += 40;
            if (status != KIVI_OK && status != KIVI_ERROR_STATE) ++others;
        }
    };
    std::thread first(work, 0), second(work, 1);
    first.join();
    second.join();
    CHECK(others == 0);
    CHECK(appended > 0);
    CHECK(cache.statistics().tokens == appended);
    Random random(3);
    check_attend(cache, {{0, 1}, {1, 1}}, random.normals(2 * 2 * 64));
}

TEST_CASE("memory of the library's own: copies in, across and out come after the stream and are complete [COPY-1]") {
    const int32_t device = backend().device;
    void* first = nullptr;
    void* second = nullptr;
    REQUIRE(kivi_device_allocate(device, 0, 3 << 20, &first) == KIVI_OK);
    REQUIRE(kivi_device_allocate(device, 0, 3 << 20, &second) == KIVI_OK);
    CHECK(reinterpret_cast<uintptr_t>(first) % 64 == 0);
    std::vector<uint8_t> given(3 << 20), got(given.size());
    for (size_t i = 0; i < given.size(); ++i) given[i] = static_cast<uint8_t>(i * 7 + i / 251);
    REQUIRE(kivi_device_copy(device, 0, first, given.data(), given.size(), nullptr) == KIVI_OK);
    REQUIRE(kivi_device_copy(device, 0, second, first, given.size(), nullptr) == KIVI_OK);
    REQUIRE(kivi_device_copy(device, 0, got.data(), static_cast<uint8_t*>(second) + 5, given.size() - 5, nullptr) == KIVI_OK);
    CHECK(std::equal(given.begin() + 5, given.end(), got.begin()));

    // A cache works on it, with nothing between that waits.
    const Cache cache(config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, {0, 32, 32}));
    Floats rows(200 * 64);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 37) - 18;
    const kivi_tensor k{first, KIVI_F32, device, 0, 4, {1, 200, 1, 64}, {0, 64, 64, 1}};
    REQUIRE(kivi_device_copy(device, 0, first, rows.data(), rows.size() * 4, nullptr) == KIVI_OK);
    const Batch batch({{0, 200}});
    REQUIRE(kivi_append(cache, 0, batch, &k, &k, nullptr) == KIVI_OK);
    const kivi_tensor out{second, KIVI_F32, device, 0, 3, {200, 1, 64}, {64, 64, 1}};
    REQUIRE(kivi_dequantize(cache, 0, 0, 0, 200, &out, nullptr, 0, nullptr) == KIVI_OK);
    Floats back(rows.size());
    REQUIRE(kivi_device_copy(device, 0, back.data(), second, back.size() * 4, nullptr) == KIVI_OK);
    for (size_t i = 0; i < back.size(); ++i) {
        if (std::abs(back[i] - rows[i]) > 6.5f) {
            CAPTURE(i);
            CHECK(back[i] == rows[i]);
            break;
        }
    }
    CHECK(kivi_device_free(device, 0, first) == KIVI_OK);
    CHECK(kivi_device_free(device, 0, second) == KIVI_OK);
}

TEST_CASE("memory of the library's own: what is refused") {
    const int32_t device = backend().device;
    int here = 0;
    void* memory = &here;
    CHECK(kivi_device_allocate(device, 0, 0, &memory) == KIVI_OK);
    CHECK(memory == nullptr);
    CHECK(kivi_device_free(device, 0, nullptr) == KIVI_OK);
    CHECK(kivi_device_copy(device, 0, nullptr, nullptr, 0, nullptr) == KIVI_OK);
    memory = &here;
    CHECK(kivi_device_allocate(device, 0, size_t{1} << 60, &memory) == KIVI_ERROR_OUT_OF_MEMORY);
    CHECK(memory == nullptr);
    CHECK(kivi_device_allocate(device, 0, 10, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(says("memory is NULL"));
    CHECK(kivi_device_allocate(device, -1, 10, &memory) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(says("device_id is -1"));
    CHECK(kivi_device_allocate(device, 999, 10, &memory) == KIVI_ERROR_NO_DEVICE);
    CHECK(says("device_id is 999"));
    CHECK(kivi_device_free(7, 0, &here) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(says("device is 7"));
    int32_t gpus = 0;
    if (kivi_device_count(KIVI_CUDA, &gpus) == KIVI_OK && gpus == 0) {
        const kivi_status status = kivi_device_allocate(KIVI_CUDA, 0, 10, &memory);
        CHECK((status == KIVI_ERROR_UNSUPPORTED || status == KIVI_ERROR_NO_DEVICE));
    }
    CHECK(kivi_device_copy(device, 0, nullptr, &here, 4, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(says("to is NULL"));
    CHECK(kivi_device_copy(device, 0, &here, nullptr, 4, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(says("from is NULL"));
    if (device == KIVI_CPU) {
        CHECK(kivi_device_copy(device, 0, &here, &here, 4, &here) == KIVI_ERROR_INVALID_ARGUMENT);
        CHECK(says("stream is "));
    } else {
        CHECK(kivi_device_free(device, 0, &here) == KIVI_ERROR_INVALID_ARGUMENT);
        CHECK(says("memory is host memory"));
    }
}
