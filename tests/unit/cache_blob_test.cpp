// Blobs of sequences and moments: exact sizes, round trips, every byte damaged, other layouts.
// [EXPORT-1] [FAIL-1]
#include "cache_support.h"

#include <functional>
#include <utility>

#include "format/checksum.h"

using namespace kivi_test;

namespace {

// A blob with `bytes` at `offset` replaced and the CRC made right again.
template <class T>
std::vector<uint8_t> patched(std::vector<uint8_t> blob, size_t offset, T number) {
    std::memcpy(&blob[offset], &number, sizeof number);
    const uint32_t crc = kivi::crc32(blob.data(), blob.size() - 4);
    std::memcpy(&blob[blob.size() - 4], &crc, 4);
    return blob;
}

kivi_config tiny_config() {
    kivi_config config = small_config();
    config.layer.kv_heads = config.layer.q_heads = 1;
    config.layer.key_dim = config.layer.value_dim = 32;
    config.layer_count = 1;
    config.sink = 0;
    config.recent = 3;
    return config;
}

void append_tiny(kivi_cache* cache, int32_t count, uint64_t seed) {
    const std::vector<float> x = Numbers(seed).take(static_cast<size_t>(count) * 32);
    const kivi_tensor tensor = dense(x, {count, 1, 32});
    const OneRow row(0, count);
    REQUIRE(kivi_append(cache, 0, &row, &tensor, &tensor, nullptr) == KIVI_OK);
}

kivi_status import(kivi_cache* cache, int32_t sequence, const std::vector<uint8_t>& blob) {
    return kivi_import(cache, sequence, blob.data(), blob.size(), nullptr);
}

}  // namespace

TEST_CASE("the size is exact, a smaller buffer is refused") {
    TestCache cache(small_config());
    REQUIRE(cache.append(1, 333) == KIVI_OK);
    size_t bytes = 0, written = 77;
    REQUIRE(kivi_export_size(cache, 1, &bytes) == KIVI_OK);
    std::vector<uint8_t> buffer(bytes + 8, 0xA5);
    CHECK(kivi_export(cache, 1, buffer.data(), bytes - 1, &written, nullptr) == KIVI_ERROR_BUFFER_TOO_SMALL);
    CHECK(buffer == std::vector<uint8_t>(bytes + 8, 0xA5));
    CHECK(written == 77);
    CHECK(kivi_export(cache, 1, buffer.data(), bytes + 8, &written, nullptr) == KIVI_OK);
    CHECK(written == bytes);
    for (size_t i = bytes; i < bytes + 8; i++) CHECK(buffer[i] == 0xA5);
    CHECK(kivi_export(cache, 1, nullptr, bytes, &written, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(kivi_export_size(cache, 3, &bytes) == KIVI_ERROR_INVALID_ARGUMENT);
}

TEST_CASE("a sequence moves to another slot and cache, and goes on as if it had not moved") {
    for (const char* preset : {"k3v2", "kivi2-sink", "kivi2-paper", "f16"}) {
        for (int32_t length : {0, 1, 31, 64, 129, 300, 500}) {
            CAPTURE(preset);
            CAPTURE(length);
            TestCache from(small_config(preset)), to(small_config(preset));
            REQUIRE(from.append(0, length) == KIVI_OK);
            REQUIRE(to.append(2, 217, 9) == KIVI_OK);  // is replaced
            const std::vector<uint8_t> blob = from.blob(0);
            REQUIRE(import(to, 2, blob) == KIVI_OK);
            CHECK(to.blob(2) == blob);
            REQUIRE(from.append(0, 90, 4) == KIVI_OK);
            REQUIRE(to.append(2, 90, 4) == KIVI_OK);
            CHECK(to.blob(2) == from.blob(0));
        }
    }
}

TEST_CASE("fault 107: two saved states may be loaded in turn") {
    TestCache cache(small_config());
    REQUIRE(cache.append(0, 200, 1) == KIVI_OK);
    const std::vector<uint8_t> a = cache.blob(0);
    REQUIRE(cache.append(0, 77, 2) == KIVI_OK);
    const std::vector<uint8_t> b = cache.blob(0);
    for (const std::vector<uint8_t>* blob : {&a, &b, &a, &b}) {
        REQUIRE(import(cache, 0, *blob) == KIVI_OK);
        CHECK(cache.blob(0) == *blob);
    }
}

TEST_CASE("fault 98: every damaged byte, every cut and every extension is found, and the old content stays") {
    TestCache from(tiny_config()), to(tiny_config());
    append_tiny(from, 40, 1);
    append_tiny(to, 37, 2);
    const std::vector<uint8_t> blob = from.blob(0), old = to.blob(0);
    for (size_t i = 0; i < blob.size(); i++) {
        std::vector<uint8_t> damaged = blob;
        damaged[i] ^= static_cast<uint8_t>(1 << (i % 8));
        if (import(to, 0, damaged) != KIVI_ERROR_CORRUPT) FAIL("byte " << i << " damaged: " << error());
    }
    for (size_t size = 0; size < blob.size(); size++) {
        const std::vector<uint8_t> cut(blob.begin(), blob.begin() + static_cast<std::ptrdiff_t>(size));
        if (import(to, 0, cut) != KIVI_ERROR_CORRUPT) FAIL("cut to " << size << ": " << error());
    }
    std::vector<uint8_t> longer = blob;
    longer.push_back(0);
    CHECK(import(to, 0, longer) == KIVI_ERROR_CORRUPT);
    CHECK(kivi_import(to, 0, nullptr, 0, nullptr) == KIVI_ERROR_CORRUPT);
    CHECK(kivi_import(to, 0, nullptr, 100, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(to.blob(0) == old);
    CHECK(import(to, 0, blob) == KIVI_OK);
}

TEST_CASE("nonsense with a right CRC is corrupt or a mismatch, never believed") {
    TestCache cache(tiny_config());
    append_tiny(cache, 40, 1);
    const std::vector<uint8_t> blob = cache.blob(0);
    const size_t record = 96, payload = record + 128, keys = payload;
    const size_t scales = keys + 32 * 32 * 2 / 8,
                 mins = scales + 32 * 2;  // 32 packed tokens, one group a channel
    const std::vector<std::pair<kivi_status, std::vector<uint8_t>>> wrong = {
        {KIVI_ERROR_MISMATCH, patched(blob, 8, uint32_t{2})},          // version
        {KIVI_ERROR_MISMATCH, patched(blob, 24, uint64_t{1})},         // layout id
        {KIVI_ERROR_MISMATCH, patched(blob, 32, int32_t{KIVI_BF16})},  // window dtype
        {KIVI_ERROR_MISMATCH, patched(blob, 36, int32_t{2})},          // layers
        {KIVI_ERROR_MISMATCH, patched(blob, 40, int64_t{32})},         // S
        {KIVI_ERROR_CORRUPT, patched(blob, 76, uint32_t{1})},          // reserved
        {KIVI_ERROR_CORRUPT, patched(blob, 80, int64_t{-1})},          // length
        {KIVI_ERROR_CORRUPT, patched(blob, 80, int64_t{1} << 60)},
        {KIVI_ERROR_CORRUPT, patched(blob, 80, int64_t{41})},
        {KIVI_ERROR_CORRUPT, patched(blob, 80, int64_t{601})},
        {KIVI_ERROR_CORRUPT, patched(blob, 88, uint64_t{5})},                // reserved
        {KIVI_ERROR_MISMATCH, patched(blob, record, int32_t{2})},            // kv_heads
        {KIVI_ERROR_MISMATCH, patched(blob, record + 16, int32_t{3})},       // bits of K
        {KIVI_ERROR_MISMATCH, patched(blob, record + 48 + 8, int32_t{64})},  // group of V
        {KIVI_ERROR_MISMATCH, patched(blob, record + 16 + 16, uint32_t{0x80000000})},  // a ratio of -0
        {KIVI_ERROR_CORRUPT, patched(blob, record + 80, int64_t{0})},        // borders
        {KIVI_ERROR_CORRUPT, patched(blob, record + 80, int64_t{16})},
        {KIVI_ERROR_CORRUPT, patched(blob, record + 80, int64_t{64})},
        {KIVI_ERROR_CORRUPT, patched(blob, record + 88, int64_t{-32})},
        {KIVI_ERROR_MISMATCH, patched(blob, record + 96, uint32_t{1})},  // encoder
        {KIVI_ERROR_MISMATCH, patched(blob, record + 100, uint32_t{9})},
        {KIVI_ERROR_CORRUPT, patched(blob, record + 104, uint64_t{0})},  // offset
        {KIVI_ERROR_CORRUPT, patched(blob, record + 112, uint64_t{8})},  // size
        {KIVI_ERROR_CORRUPT, patched(blob, record + 120, uint64_t{1})},  // reserved
        {KIVI_ERROR_CORRUPT, patched(blob, scales, uint16_t{0x7C00})},   // fault 11: infinite,
        {KIVI_ERROR_CORRUPT, patched(blob, scales, uint16_t{0x7E00})},   // NaN without its min,
        {KIVI_ERROR_CORRUPT, patched(blob, scales, uint16_t{0xBC00})},   // negative scale
        {KIVI_ERROR_CORRUPT, patched(blob, mins + 10, uint16_t{0x7C00})},
        {KIVI_ERROR_CORRUPT, patched(blob, mins + 10, uint16_t{0x8000})},  // -0
    };
    for (size_t i = 0; i < wrong.size(); i++) {
        CAPTURE(i);
        const kivi_status status = import(cache, 1, wrong[i].second);
        CAPTURE(error());
        CHECK(status == wrong[i].first);
        CHECK(cache.length(0, 1) == 0);
    }
    CHECK(import(cache, 1, blob) == KIVI_OK);
}

TEST_CASE("borders that no append and no flush reaches together are corrupt, each sound by itself") {
    const size_t record = 96, value_border = record + 88;
    // Values of 16 bits take the same bytes on both sides of their border.
    for (const char* preset : {"f16", "kivi2-paper"}) {
        CAPTURE(preset);
        kivi_config config = small_config(preset);
        config.layer.v = {16, 0, 0, 0, 0, 0, 0, 0, {}};
        if (config.schedule == KIVI_SCHEDULE_ROLLING) config.recent = 32;
        TestCache cache(config);
        REQUIRE(cache.append(0, 200) == KIVI_OK);
        const std::vector<uint8_t> blob = cache.blob(0);
        int64_t border;
        std::memcpy(&border, &blob[value_border], sizeof border);
        CHECK(import(cache, 1, patched(blob, value_border, border)) == KIVI_OK);
        CHECK(import(cache, 2, patched(blob, value_border, int64_t{190})) == KIVI_ERROR_CORRUPT);
        CAPTURE(error());
        CHECK(error().find("the borders of layer 0 are not those of length 200") != std::string::npos);
        CHECK(cache.length(0, 2) == 0);
    }
}

TEST_CASE("fault 97: blobs of another layout are a mismatch") {
    TestCache from(small_config());
    REQUIRE(from.append(0, 200) == KIVI_OK);
    const std::vector<uint8_t> blob = from.blob(0);
    const std::vector<std::function<void(kivi_config&)>> changes = {
        [](auto& c) { c.layer.k.bits = 4; },
        [](auto& c) { c.layer.v.group = 64; },
        [](auto& c) { c.layer.k.transform = KIVI_TRANSFORM_HADAMARD; },
        [](auto& c) { c.layer.v.param_dtype = KIVI_F32; },
        [](auto& c) { c.layer.q_heads = 2; },
        [](auto& c) { c.layer_count = 3; },
        [](auto& c) { c.recent = 64; },
        [](auto& c) { c.sink = 64; },
        [](auto& c) { c.flush = 64; },
        [](auto& c) { c.window_dtype = KIVI_F32; },
        [](auto& c) { c.layer.k.rounding = KIVI_ROUND_QUERY_AWARE; },
    };
    for (size_t i = 0; i < changes.size(); i++) {
        CAPTURE(i);
        kivi_config config = small_config();
        changes[i](config);
        TestCache to(config);
        CHECK(import(to, 0, blob) == KIVI_ERROR_MISMATCH);
        CHECK(to.length(0, 0) == 0);
    }
    // Capacity, threads and the number of sequences are not part of a sequence.
    kivi_config config = small_config();
    config.max_sequences = 1;
    config.max_tokens = 200;
    config.threads = 2;
    TestCache to(config);
    CHECK(import(to, 0, blob) == KIVI_OK);
    config.max_tokens = 199;
    TestCache shorter(config);
    CHECK(import(shorter, 0, blob) == KIVI_ERROR_CAPACITY);
}

TEST_CASE("fault 119: an import that does not fit is refused, and the cache works on") {
    kivi_config config = small_config();
    config.pool_tokens = 128;
    TestCache from(small_config()), to(config);
    REQUIRE(from.append(0, 400) == KIVI_OK);
    REQUIRE(to.append(1, 100, 3) == KIVI_OK);
    const std::vector<uint8_t> old = to.blob(1);
    CHECK(import(to, 1, from.blob(0)) == KIVI_ERROR_CAPACITY);
    CHECK(to.blob(1) == old);
    CHECK(to.append(1, 50, 4) == KIVI_OK);
    REQUIRE(kivi_reserve(to, 400, nullptr) == KIVI_OK);
    CHECK(import(to, 1, from.blob(0)) == KIVI_OK);
    CHECK(to.blob(1) == from.blob(0));
}
