// Query moments: accumulate, set, commit, export, import, and when they are frozen. [MOMENTS-1] [MOMENTS-2]
#include "cache_support.h"

#include <cmath>

#include "format/feedback.h"
#include "format/hadamard.h"

using namespace kivi_test;

namespace {

kivi_config query_aware(int32_t transform = KIVI_TRANSFORM_NONE) {
    kivi_config config = small_config();
    config.layer.k.rounding = KIVI_ROUND_QUERY_AWARE;
    config.layer.k.transform = transform;
    return config;
}

kivi_status accumulate(kivi_cache* cache, int32_t layer, const std::vector<float>& q, int32_t tokens) {
    const kivi_tensor queries = dense(q, {tokens, kQueryHeads, kDim});
    const OneRow row(-1, tokens);  // ids are not looked at
    return kivi_moments_accumulate(cache, layer, &row, &queries, nullptr);
}

// Means of q q' per KV head, in double.
std::vector<float> moments_of(const std::vector<float>& q, int tokens) {
    std::vector<float> m(static_cast<size_t>(kHeads) * kDim * kDim);
    for (int head = 0; head < kHeads; head++) {
        for (int i = 0; i < kDim; i++) {
            for (int j = 0; j < kDim; j++) {
                double sum = 0;
                for (int t = 0; t < tokens; t++) {
                    for (int member = 0; member < 2; member++) {
                        const float* row =
                            &q[(static_cast<size_t>(t) * kQueryHeads + head * 2 + member) * kDim];
                        sum += double{row[i]} * row[j];
                    }
                }
                m[(static_cast<size_t>(head) * kDim + i) * kDim + j] = static_cast<float>(sum / (2 * tokens));
            }
        }
    }
    return m;
}

kivi_status set(kivi_cache* cache, const std::vector<float>& m, uint64_t flags = 0) {
    const kivi_tensor tensor = dense(m, {kHeads, kDim, kDim});
    return kivi_moments_set(cache, 0, &tensor, flags, nullptr);
}

std::vector<uint8_t> moments_blob(kivi_cache* cache, int32_t layer) {
    size_t bytes = 0, written = 0;
    REQUIRE(kivi_moments_export_size(cache, layer, &bytes) == KIVI_OK);
    std::vector<uint8_t> blob(bytes);
    REQUIRE(kivi_moments_export(cache, layer, blob.data(), bytes, &written) == KIVI_OK);
    REQUIRE(written == bytes);
    return blob;
}

kivi_status import(kivi_cache* cache, int32_t layer, const std::vector<uint8_t>& blob) {
    return kivi_moments_import(cache, layer, blob.data(), blob.size(), nullptr);
}

constexpr int kTokens = 40;

}  // namespace

TEST_CASE("moments go from none to accumulated to committed, and the statistics say so") {
    TestCache cache(query_aware());
    CHECK(cache.statistics(0).moments == 0);
    CHECK(kivi_moments_commit(cache, 0, nullptr) == KIVI_ERROR_STATE);
    CHECK(contains(error(), "no moments to commit"));
    size_t bytes;
    CHECK(kivi_moments_export_size(cache, 0, &bytes) == KIVI_ERROR_STATE);

    const std::vector<float> q = Numbers(1).take(kTokens * kQueryHeads * kDim);
    REQUIRE(accumulate(cache, 0, q, kTokens) == KIVI_OK);
    CHECK(cache.statistics(0).moments == 1);
    CHECK(cache.statistics(0).moment_queries == 2 * kTokens);
    CHECK(cache.statistics(0).key_rounding == KIVI_ROUND_NEAREST);
    REQUIRE(kivi_moments_commit(cache, 0, nullptr) == KIVI_OK);
    CHECK(cache.statistics(0).moments == 2);
    CHECK(cache.statistics(0).key_rounding == KIVI_ROUND_QUERY_AWARE);
    CHECK(cache.statistics(-1).moments == 0);  // the lowest of any layer
    REQUIRE(accumulate(cache, 0, q, kTokens) == KIVI_OK);
    CHECK(cache.statistics(0).moments == 1);
    CHECK(cache.statistics(0).moment_queries == 4 * kTokens);
    REQUIRE(kivi_cache_reset(cache, nullptr) == KIVI_OK);
    CHECK(cache.statistics(0).moments == 1);
}

TEST_CASE("once something is packed the moments are frozen") {
    TestCache cache(query_aware());
    const std::vector<float> q = Numbers(1).take(kTokens * kQueryHeads * kDim);
    REQUIRE(accumulate(cache, 0, q, kTokens) == KIVI_OK);
    REQUIRE(kivi_moments_commit(cache, 0, nullptr) == KIVI_OK);
    const std::vector<uint8_t> blob = moments_blob(cache, 0);
    REQUIRE(cache.append(1, 159) == KIVI_OK);  // one short of the first pack
    REQUIRE(kivi_moments_commit(cache, 0, nullptr) == KIVI_OK);
    REQUIRE(cache.append(1, 1) == KIVI_OK);
    const std::vector<uint8_t> contents = cache.blob(1);
    CHECK(kivi_moments_commit(cache, 0, nullptr) == KIVI_ERROR_STATE);
    CHECK(contains(error(), "frozen"));
    CHECK(accumulate(cache, 0, q, kTokens) == KIVI_ERROR_STATE);
    CHECK(set(cache, moments_of(q, kTokens)) == KIVI_ERROR_STATE);
    CHECK(import(cache, 0, blob) == KIVI_ERROR_STATE);
    CHECK(cache.blob(1) == contents);
    CHECK(moments_blob(cache, 0) == blob);
    REQUIRE(kivi_sequence_reset(cache, 1, nullptr) == KIVI_OK);
    CHECK(import(cache, 0, blob) == KIVI_OK);
    // Packed by nearest rounding, a layer still accumulates for later.
    REQUIRE(cache.append(1, 300) == KIVI_OK);
    CHECK(accumulate(cache, 1, q, kTokens) == KIVI_OK);
    CHECK(kivi_moments_commit(cache, 1, nullptr) == KIVI_ERROR_STATE);
}

TEST_CASE("accumulated queries and their set moments make the same tables, in either basis") {
    for (int32_t transform : {KIVI_TRANSFORM_NONE, KIVI_TRANSFORM_HADAMARD}) {
        TestCache accumulated(query_aware(transform)), given(query_aware(transform)),
            stored(query_aware(transform));
        std::vector<float> q = Numbers(2).take(kTokens * kQueryHeads * kDim);
        for (size_t i = 0; i < q.size(); i++)
            q[i] *= 1 + static_cast<float>(i % kDim) / 8;  // no two diagonals alike
        REQUIRE(accumulate(accumulated, 0, q, kTokens) == KIVI_OK);
        REQUIRE(set(given, moments_of(q, kTokens)) == KIVI_OK);
        std::vector<float> turned = q;
        if (transform == KIVI_TRANSFORM_HADAMARD) {
            for (size_t row = 0; row < turned.size(); row += kDim) kivi::hadamard(&turned[row], kDim);
        }
        REQUIRE(set(stored, moments_of(turned, kTokens), KIVI_STORED_BASIS) == KIVI_OK);
        std::vector<std::vector<uint8_t>> blobs;
        for (kivi_cache* cache : {static_cast<kivi_cache*>(accumulated), static_cast<kivi_cache*>(given),
                                  static_cast<kivi_cache*>(stored)}) {
            REQUIRE(kivi_moments_commit(cache, 0, nullptr) == KIVI_OK);
            blobs.push_back(moments_blob(cache, 0));
        }
        // Matrices, orders and weights of the first head.
        const size_t matrix = 48, order = matrix + 4 * kDim * kDim, weights = order + 2 * kDim;
        for (const std::vector<uint8_t>& blob : {blobs[1], blobs[2]}) {
            CHECK(std::memcmp(&blob[order], &blobs[0][order], 2 * kDim) == 0);
            for (size_t at = weights; at < weights + 2 * kDim * (kDim - 1); at += 4) {
                float a, b;
                std::memcpy(&a, &blob[at], 4);
                std::memcpy(&b, &blobs[0][at], 4);
                CHECK(a == doctest::Approx(b).epsilon(1e-3).scale(1));
            }
        }
    }
}

TEST_CASE("moments that are not are refused and leave what was there") {
    TestCache cache(query_aware());
    const std::vector<float> good = moments_of(Numbers(3).take(kTokens * kQueryHeads * kDim), kTokens);
    REQUIRE(set(cache, good) == KIVI_OK);
    REQUIRE(kivi_moments_commit(cache, 0, nullptr) == KIVI_OK);
    const std::vector<uint8_t> blob = moments_blob(cache, 0);
    const auto refused = [&](size_t at, float x, const char* sentence) {
        std::vector<float> bad = good;
        bad[at] = x;
        CHECK(set(cache, bad) == KIVI_ERROR_INVALID_ARGUMENT);
        CAPTURE(error());
        CHECK(contains(error(), sentence));
        CHECK(moments_blob(cache, 0) == blob);
    };
    refused(5, NAN, "m[0][0][5] is");
    refused(kDim * kDim + 7, INFINITY, "m[1][0][7] is inf");
    refused(kDim + 1, 0, "m[0][1][1] is 0; the diagonal must be positive");
    refused(kDim + 1, -1, "m[0][1][1] is -1");
    refused(3, good[3] + 1, "must be symmetric");
    std::vector<float> indefinite = good;
    indefinite[3] = indefinite[3 * kDim] = 100;
    CHECK(set(cache, indefinite) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(contains(error(), "positive definite"));
    CHECK(moments_blob(cache, 0) == blob);

    const kivi_tensor flat = dense(good, {kHeads, kDim, kDim / 2});
    CHECK(kivi_moments_set(cache, 0, &flat, 0, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(set(cache, good, 2) == KIVI_ERROR_INVALID_ARGUMENT);
    TestCache nearest(small_config());
    CHECK(set(nearest, good) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(contains(error(), "not rounded query-aware"));
}

TEST_CASE("a moments blob commits elsewhere, serves replicated heads, and is checked") {
    TestCache from(query_aware()), to(query_aware());
    REQUIRE(accumulate(from, 0, Numbers(4).take(kTokens * kQueryHeads * kDim), kTokens) == KIVI_OK);
    REQUIRE(kivi_moments_commit(from, 0, nullptr) == KIVI_OK);
    const std::vector<uint8_t> blob = moments_blob(from, 0);
    REQUIRE(import(to, 0, blob) == KIVI_OK);
    CHECK(to.statistics(0).moments == 2);
    CHECK(to.statistics(0).moment_queries == 2 * kTokens);
    CHECK(moments_blob(to, 0) == blob);

    // Sequences packed with them can be exchanged; with others not.
    REQUIRE(import(from, 1, blob) == KIVI_OK);
    REQUIRE(import(to, 1, blob) == KIVI_OK);
    REQUIRE(from.append(0, 300) == KIVI_OK);
    const std::vector<uint8_t> sequence = from.blob(0);
    CHECK(kivi_import(to, 0, sequence.data(), sequence.size(), nullptr) == KIVI_OK);
    CHECK(to.blob(0) == sequence);
    TestCache without(query_aware());
    CHECK(kivi_import(without, 0, sequence.data(), sequence.size(), nullptr) == KIVI_ERROR_MISMATCH);

    TestCache target(query_aware());
    for (size_t i = 0; i < blob.size(); i += 97) {
        std::vector<uint8_t> damaged = blob;
        damaged[i] ^= 4;
        CHECK(import(target, 0, damaged) == KIVI_ERROR_CORRUPT);
    }
    CHECK(import(target, 0, {blob.begin(), blob.end() - 1}) == KIVI_ERROR_CORRUPT);
    CHECK(target.statistics(0).moments == 0);
    TestCache rotated(query_aware(KIVI_TRANSFORM_HADAMARD));
    CHECK(import(rotated, 0, blob) == KIVI_ERROR_MISMATCH);
    CHECK(contains(error(), "basis"));

    kivi_config config = query_aware();
    config.layer.kv_heads = 1;
    config.layer.q_heads = 2;
    TestCache one(config);
    const std::vector<float> q = Numbers(5).take(kTokens * 2 * kDim);
    const kivi_tensor queries = dense(q, {kTokens, 2, kDim});
    const OneRow row(0, kTokens);
    REQUIRE(kivi_moments_accumulate(one, 0, &row, &queries, nullptr) == KIVI_OK);
    REQUIRE(kivi_moments_commit(one, 0, nullptr) == KIVI_OK);
    REQUIRE(import(target, 0, moments_blob(one, 0)) == KIVI_OK);
    const std::vector<uint8_t> twice = moments_blob(target, 0), once = moments_blob(one, 0);
    const size_t head = once.size() - 48 - 4;
    CHECK(std::memcmp(&twice[48], &once[48], head) == 0);
    CHECK(std::memcmp(&twice[48 + head], &once[48], head) == 0);
    CHECK(import(one, 0, twice) == KIVI_ERROR_MISMATCH);
}
