// The committed blobs against this library: it writes the same bytes, reads them, and refuses damaged ones.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "format/checksum.h"
#include "format/layout.h"
#include "golden/golden_cases.h"

using golden::Bytes;
using golden::Cache;
using golden::Case;

namespace {

const std::string kFolder = KIVI_GOLDEN_DIR;

// Those whose blobs are committed.
const std::vector<Case>& cases() {
    static const std::vector<Case> stored = [] {
        std::vector<Case> all = golden::read_cases(kFolder + "/cases.txt");
        all.erase(std::remove_if(all.begin(), all.end(), [](const Case& c) { return !c.stored; }), all.end());
        return all;
    }();
    return stored;
}

Bytes golden_blob(const Case& c) { return golden::read_file(kFolder + "/" + c.name + ".kivi"); }

Bytes golden_moments(const Case& c, size_t layer) {
    return golden::read_file(kFolder + "/" + c.name + "." + std::to_string(layer) + ".moments");
}

bool query_aware(const Case& c, size_t layer) { return c.layers[layer].k.rounding == KIVI_ROUND_QUERY_AWARE; }

kivi_status import(const Cache& cache, const Bytes& blob) {
    return kivi_import(cache.get(), 0, blob.data(), blob.size(), nullptr);
}

void import_golden_moments(const Case& c, const Cache& cache) {
    for (size_t layer = 0; layer < c.layers.size(); ++layer) {
        if (!query_aware(c, layer)) continue;
        const Bytes blob = golden_moments(c, layer);
        golden::check(kivi_moments_import(cache.get(), int32_t(layer), blob.data(), blob.size(), nullptr));
    }
}

void seal(Bytes& blob) {
    const uint32_t crc = kivi::crc32(blob.data(), blob.size() - 4);
    for (size_t i = 0; i < 4; ++i) blob[blob.size() - 4 + i] = uint8_t(crc >> (8 * i));
}

template <class T>
T load(const Bytes& blob, size_t offset) {
    T value;
    std::memcpy(&value, blob.data() + offset, sizeof value);
    return value;
}

template <class T>
void store(Bytes& blob, size_t offset, T value) {
    std::memcpy(blob.data() + offset, &value, sizeof value);
}

}  // namespace

TEST_CASE("golden blobs are written byte for byte") {
    for (const Case& c : cases()) {
        CAPTURE(c.name);
        const Cache cache(c);
        cache.fill();
        CHECK(cache.export_sequence() == golden_blob(c));
        for (size_t layer = 0; layer < c.layers.size(); ++layer) {
            if (query_aware(c, layer)) CHECK(cache.moments_export(int(layer)) == golden_moments(c, layer));
        }
    }
}

TEST_CASE("no rounding mode, no flushing to zero and no number of threads changes a byte") {
    for (const Case& c : cases()) {
        CAPTURE(c.name);
        for (int threads : {1, 3}) {
            Case varied = c;
            varied.config.threads = threads;
            for (int rounding : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
                const Cache cache(varied);
                cache.fill({rounding, rounding != FE_UPWARD});
                CHECK(cache.export_sequence() == golden_blob(c));
            }
        }
    }
}

TEST_CASE("golden blobs are read: exported again they are the same bytes, and they decode alike") {
    for (const Case& c : cases()) {
        CAPTURE(c.name);
        const Cache written(c), read(c);
        written.fill();
        import_golden_moments(c, read);
        REQUIRE(import(read, golden_blob(c)) == KIVI_OK);
        CHECK(read.export_sequence() == golden_blob(c));
        for (int layer = 0; layer < int(c.layers.size()); ++layer) {
            if (c.layers[size_t(layer)].kv_heads == 0) continue;
            for (char part : {'k', 'v'}) {
                const std::vector<float> a = written.dequantize(layer, part),
                                         b = read.dequantize(layer, part);
                REQUIRE(a.size() == b.size());  // of an empty sequence nothing is there to compare
                CHECK((a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0));
            }
        }
    }
}

TEST_CASE("fault 98: cut, extended and flipped blobs are corrupt and change nothing") {
    const Case& c = cases().front();
    const Cache cache(c);
    cache.fill();
    const Bytes blob = golden_blob(c);
    int taken = 0;
    for (size_t size = 0; size < blob.size(); size += 97) {
        taken +=
            import(cache, Bytes(blob.begin(), blob.begin() + std::ptrdiff_t(size))) != KIVI_ERROR_CORRUPT;
    }
    Bytes longer = blob;
    longer.push_back(0);
    taken += import(cache, longer) != KIVI_ERROR_CORRUPT;
    for (size_t bit = 0; bit < 8 * blob.size(); bit += 37) {
        Bytes flipped = blob;
        flipped[bit / 8] ^= uint8_t(1 << bit % 8);
        taken += import(cache, flipped) != KIVI_ERROR_CORRUPT;
    }
    CHECK(taken == 0);
    CHECK(cache.export_sequence() == blob);
}

TEST_CASE("fault 11: parameters that no group can have are corrupt even under a right checksum") {
    const Case& c = cases().front();  // 2-bit keys, groups of 32, D 32: 32 sink rows, then 96 packed tokens
    const Cache cache(c);
    cache.fill();
    const Bytes blob = golden_blob(c);
    const size_t payload = size_t(load<uint64_t>(blob, 96 + 104));
    const size_t scales = payload + 32 * 32 * 2 + 96 * 32 * 2 / 8, mins = scales + 3 * 32 * 2;
    const struct {
        const char* what;
        uint16_t scale, min;
        kivi_status due;
    } pairs[] = {{"infinite scale", 0x7C00, 0x3C00, KIVI_ERROR_CORRUPT},
                 {"lone NaN scale", 0x7E00, 0x3C00, KIVI_ERROR_CORRUPT},
                 {"lone NaN min", 0x3C00, 0x7E00, KIVI_ERROR_CORRUPT},
                 {"negative scale", 0xBC00, 0x3C00, KIVI_ERROR_CORRUPT},
                 {"scale of -0", 0x8000, 0x3C00, KIVI_ERROR_CORRUPT},
                 {"min of -0", 0x3C00, 0x8000, KIVI_ERROR_CORRUPT},
                 {"infinite min", 0x3C00, 0xFC00, KIVI_ERROR_CORRUPT},
                 {"another NaN", 0x7E01, 0x7E01, KIVI_ERROR_CORRUPT},
                 {"NaN with a sign", 0xFE00, 0x7E00, KIVI_ERROR_CORRUPT},
                 {"the damaged group", 0x7E00, 0x7E00, KIVI_OK},
                 {"a plain group", 0x3C00, 0xBC00, KIVI_OK}};
    for (size_t group : {size_t{0}, size_t{50}, size_t{95}}) {
        for (const auto& pair : pairs) {
            CAPTURE(pair.what);
            Bytes changed = blob;
            store(changed, scales + 2 * group, pair.scale);
            store(changed, mins + 2 * group, pair.min);
            seal(changed);
            const Bytes before = cache.export_sequence();
            CHECK(import(cache, changed) == pair.due);
            CHECK(cache.export_sequence() == (pair.due == KIVI_OK ? changed : before));
        }
    }
}

TEST_CASE("fields that contradict each other are corrupt or a mismatch even under a right checksum") {
    const Case& c = cases().front();
    const Cache cache(c);
    cache.fill();
    const Bytes blob = golden_blob(c);
    const auto status_with = [&](size_t offset, auto value) {
        Bytes changed = blob;
        store(changed, offset, value);
        seal(changed);
        return import(cache, changed);
    };
    CHECK(status_with(8, uint32_t{2}) == KIVI_ERROR_MISMATCH);           // version
    CHECK(status_with(12, uint32_t{0x04030201}) == KIVI_ERROR_CORRUPT);  // byte order mark
    CHECK(status_with(24, uint64_t{1}) == KIVI_ERROR_MISMATCH);          // layout id
    CHECK(status_with(32, int32_t{KIVI_BF16}) == KIVI_ERROR_MISMATCH);   // window dtype
    CHECK(status_with(36, int32_t{2}) != KIVI_OK);                       // layers
    CHECK(status_with(40, int64_t{64}) == KIVI_ERROR_MISMATCH);          // S
    CHECK(status_with(72, int32_t{1}) == KIVI_ERROR_MISMATCH);           // schedule
    CHECK(status_with(76, uint32_t{1}) == KIVI_ERROR_CORRUPT);           // reserved
    CHECK(status_with(80, int64_t{151}) == KIVI_ERROR_CORRUPT);          // n: payload of another size
    CHECK(status_with(80, int64_t{-1}) == KIVI_ERROR_CORRUPT);
    CHECK(status_with(80, int64_t{1} << 62) == KIVI_ERROR_CORRUPT);
    CHECK(status_with(96, int32_t{1}) == KIVI_ERROR_MISMATCH);        // heads
    CHECK(status_with(96 + 16, int32_t{3}) == KIVI_ERROR_MISMATCH);   // bits of K
    CHECK(status_with(96 + 80, int64_t{96}) == KIVI_ERROR_CORRUPT);   // a border that append would move
    CHECK(status_with(96 + 80, int64_t{129}) == KIVI_ERROR_CORRUPT);  // inside a group
    CHECK(status_with(96 + 80, int64_t{-32}) == KIVI_ERROR_CORRUPT);
    CHECK(status_with(96 + 96, uint32_t{1}) != KIVI_OK);              // encoder tables
    CHECK(status_with(96 + 104, uint64_t{0}) == KIVI_ERROR_CORRUPT);  // payload offset
    CHECK(status_with(96 + 112, uint64_t{1} << 40) == KIVI_ERROR_CORRUPT);
    CHECK(cache.export_sequence() == blob);
}

TEST_CASE("fault 97: a blob of another case is a mismatch and changes nothing") {
    for (const Case& c : cases()) {
        const Cache cache(c);
        cache.fill();
        const Bytes before = cache.export_sequence();
        for (const Case& other : cases()) {
            if (&other == &c) continue;
            CAPTURE(c.name);
            CAPTURE(other.name);
            CHECK(import(cache, golden_blob(other)) == KIVI_ERROR_MISMATCH);
        }
        CHECK(cache.export_sequence() == before);
    }
}

TEST_CASE("codes of other moments are a mismatch") {
    for (const Case& c : cases()) {
        bool aware = false;
        for (size_t layer = 0; layer < c.layers.size(); ++layer) aware = aware || query_aware(c, layer);
        if (!aware) continue;
        CAPTURE(c.name);
        const Cache without(c);
        CHECK(import(without, golden_blob(c)) == KIVI_ERROR_MISMATCH);
    }
}

namespace {

kivi_status moments_import(const Cache& cache, const Bytes& blob) {
    return kivi_moments_import(cache.get(), 0, blob.data(), blob.size(), nullptr);
}

const Case& case_named(const char* name) {
    for (const Case& c : cases()) {
        if (c.name == name) return c;
    }
    throw std::runtime_error(std::string("no case ") + name);
}

}  // namespace

TEST_CASE("damaged moments blobs are corrupt, those of another basis or shape a mismatch") {
    const Case& c = case_named("query-aware");  // 2 heads, D 32, Hadamard
    const Bytes blob = golden_moments(c, 0);
    const Cache cache(c);
    int taken = 0;
    for (size_t size = 0; size < blob.size(); size += 97) {
        taken += moments_import(cache, Bytes(blob.begin(), blob.begin() + std::ptrdiff_t(size))) !=
                 KIVI_ERROR_CORRUPT;
    }
    for (size_t bit = 0; bit < 8 * blob.size(); bit += 61) {
        Bytes flipped = blob;
        flipped[bit / 8] ^= uint8_t(1 << bit % 8);
        taken += moments_import(cache, flipped) != KIVI_ERROR_CORRUPT;
    }
    CHECK(taken == 0);

    const auto status_with = [&](size_t offset, auto value) {
        Bytes changed = blob;
        store(changed, offset, value);
        seal(changed);
        return moments_import(cache, changed);
    };
    const size_t order = 48 + 32 * 32 * 4, weights = order + 2 * 32;
    CHECK(status_with(order, load<uint16_t>(blob, order + 2)) == KIVI_ERROR_CORRUPT);  // a channel twice
    CHECK(status_with(order, uint16_t{32}) == KIVI_ERROR_CORRUPT);
    CHECK(status_with(weights, uint32_t{0x7FC00000}) == KIVI_ERROR_CORRUPT);
    CHECK(status_with(weights, uint32_t{0x7F800000}) == KIVI_ERROR_CORRUPT);
    CHECK(status_with(48, uint32_t{0x7FC00000}) == KIVI_ERROR_CORRUPT);
    CHECK(status_with(36, uint32_t{1}) == KIVI_ERROR_CORRUPT);
    CHECK(status_with(8, uint32_t{2}) == KIVI_ERROR_MISMATCH);
    CHECK(status_with(32, int32_t{0}) == KIVI_ERROR_MISMATCH);
    CHECK(moments_import(cache, golden_moments(case_named("damaged"), 0)) == KIVI_ERROR_MISMATCH);

    kivi_statistics statistics{};
    golden::check(kivi_query_statistics(cache.get(), 0, &statistics, sizeof statistics));
    CHECK(statistics.moments == 0);  // nothing was taken
    CHECK(moments_import(cache, blob) == KIVI_OK);
    CHECK(cache.moments_export(0) == blob);
}

TEST_CASE("a moments blob of one head serves all replicated heads") {
    const Case& one = case_named("query-aware-40");
    Case replicated = one;
    replicated.layers[0].kv_heads = 3;
    replicated.layers[0].q_heads = 6;
    const Bytes blob = golden_moments(one, 0);
    const Cache cache(replicated);
    REQUIRE(moments_import(cache, blob) == KIVI_OK);
    const Bytes three = cache.moments_export(0);
    const size_t table = blob.size() - 52;
    REQUIRE(three.size() == 52 + 3 * table);
    for (size_t head = 0; head < 3; ++head) {
        CHECK(
            std::equal(blob.begin() + 48, blob.end() - 4, three.begin() + std::ptrdiff_t(48 + head * table)));
    }
}
