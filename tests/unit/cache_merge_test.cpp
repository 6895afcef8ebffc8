// kivi_merge: halves of an attention give the whole, empty parts do not count. [MERGE-1]
#include "cache_support.h"

#include <cmath>
#include <limits>

using namespace kivi_test;

namespace {

const float kNone = -std::numeric_limits<float>::infinity();
constexpr int kTokens = 3;

// Two parts of [tokens, heads, dim] with LSEs, and a place for the result.
struct Parts {
    std::vector<float> a = Numbers(1).take(kTokens * kHeads * kDim),
                       b = Numbers(2).take(kTokens * kHeads * kDim);
    std::vector<float> lse_a = Numbers(3).take(kTokens * kHeads), lse_b = Numbers(4).take(kTokens * kHeads);
    std::vector<float> out = std::vector<float>(a.size()), lse = std::vector<float>(lse_a.size());

    kivi_status merge(const float* sinks = nullptr) {
        const kivi_tensor outs[2] = {dense(a, {kTokens, kHeads, kDim}), dense(b, {kTokens, kHeads, kDim})};
        const kivi_tensor lses[2] = {dense(lse_a, {kTokens, kHeads}), dense(lse_b, {kTokens, kHeads})};
        const kivi_tensor to = dense(out, {kTokens, kHeads, kDim}), lse_to = dense(lse, {kTokens, kHeads});
        return kivi_merge(2, outs, lses, sinks, &to, &lse_to, nullptr);
    }
};

}  // namespace

TEST_CASE("two parts merge by their weights") {
    Parts parts;
    REQUIRE(parts.merge() == KIVI_OK);
    for (size_t row = 0; row < parts.lse.size(); row++) {
        const double wa = std::exp(double{parts.lse_a[row]}), wb = std::exp(double{parts.lse_b[row]});
        CHECK(parts.lse[row] == doctest::Approx(std::log(wa + wb)));
        for (int c = 0; c < kDim; c++) {
            const size_t i = row * kDim + c;
            CHECK(parts.out[i] == doctest::Approx((wa * parts.a[i] + wb * parts.b[i]) / (wa + wb)));
        }
    }
}

TEST_CASE("fault 19: with one part empty the other returns bit for bit") {
    Parts parts;
    parts.a[5] = -0.0f;
    parts.lse_b.assign(parts.lse_b.size(), kNone);
    parts.b.assign(parts.b.size(), 0.0f);
    REQUIRE(parts.merge() == KIVI_OK);
    CHECK(std::memcmp(parts.out.data(), parts.a.data(), parts.a.size() * sizeof(float)) == 0);
    CHECK(std::memcmp(parts.lse.data(), parts.lse_a.data(), parts.lse_a.size() * sizeof(float)) == 0);
}

TEST_CASE("all parts empty give 0 and -infinity") {
    Parts parts;
    parts.lse_a.assign(parts.lse_a.size(), kNone);
    parts.lse_b.assign(parts.lse_b.size(), kNone);
    for (const bool sinks : {false, true}) {
        const float logits[kHeads] = {1, -2};
        REQUIRE(parts.merge(sinks ? logits : nullptr) == KIVI_OK);
        for (float x : parts.out) CHECK(x == 0);
        for (float x : parts.lse) CHECK(x == kNone);
    }
}

TEST_CASE("huge and tiny LSEs neither overflow nor vanish") {
    Parts parts;
    for (float& x : parts.lse_a) x += 20000;
    for (float& x : parts.lse_b) x += 20000;
    REQUIRE(parts.merge() == KIVI_OK);
    for (size_t i = 0; i < parts.out.size(); i++) {
        CHECK(std::isfinite(parts.out[i]));
        CHECK(std::fabs(parts.out[i]) <= std::max(std::fabs(parts.a[i]), std::fabs(parts.b[i])) + 1e-6f);
    }
    for (float& x : parts.lse_a) x -= 40000;
    for (float& x : parts.lse_b) x -= 40000;
    const std::vector<float> before = parts.out;
    REQUIRE(parts.merge() == KIVI_OK);
    for (size_t i = 0; i < parts.out.size(); i++)
        CHECK(parts.out[i] == doctest::Approx(before[i]).epsilon(1e-2));
}

TEST_CASE("learned sinks weigh the output down and leave the LSE alone") {
    Parts plain, with;
    const float sinks[kHeads] = {0.5f, -1};
    REQUIRE(plain.merge() == KIVI_OK);
    REQUIRE(with.merge(sinks) == KIVI_OK);
    CHECK(with.lse == plain.lse);
    for (size_t row = 0; row < plain.lse.size(); row++) {
        const double keys = std::exp(double{plain.lse[row]}), sink = std::exp(double{sinks[row % kHeads]});
        for (int c = 0; c < kDim; c++) {
            CHECK(with.out[row * kDim + c] ==
                  doctest::Approx(plain.out[row * kDim + c] * keys / (keys + sink)));
        }
    }
}

TEST_CASE("the result may take the place of a part") {
    Parts apart, inside;
    REQUIRE(apart.merge() == KIVI_OK);
    const kivi_tensor outs[2] = {dense(inside.a, {kTokens, kHeads, kDim}),
                                 dense(inside.b, {kTokens, kHeads, kDim})};
    const kivi_tensor lses[2] = {dense(inside.lse_a, {kTokens, kHeads}),
                                 dense(inside.lse_b, {kTokens, kHeads})};
    REQUIRE(kivi_merge(2, outs, lses, nullptr, &outs[1], &lses[1], nullptr) == KIVI_OK);
    CHECK(inside.b == apart.out);
    CHECK(inside.lse_b == apart.lse);
}

TEST_CASE("what cannot be merged is refused, and nothing is written") {
    Parts parts;
    parts.out.assign(parts.out.size(), 7.0f);
    kivi_tensor outs[1] = {dense(parts.a, {kTokens, kHeads, kDim})},
                lses[1] = {dense(parts.lse_a, {kTokens, kHeads})};
    const kivi_tensor to = dense(parts.out, {kTokens, kHeads, kDim});
    CHECK(kivi_merge(0, outs, lses, nullptr, &to, nullptr, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(contains(error(), "parts is 0"));
    CHECK(kivi_merge(1, nullptr, lses, nullptr, &to, nullptr, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(kivi_merge(1, outs, nullptr, nullptr, &to, nullptr, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(kivi_merge(1, outs, lses, nullptr, nullptr, nullptr, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    lses[0].shape[0] = 2;
    CHECK(kivi_merge(1, outs, lses, nullptr, &to, nullptr, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(contains(error(), "lses[0]: shape[0] is 2; out has 3"));
    lses[0] = dense(parts.lse_a, {kTokens, kHeads});
    outs[0].shape[2] = 8;
    CHECK(kivi_merge(1, outs, lses, nullptr, &to, nullptr, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    outs[0] = dense(parts.a, {kTokens, kHeads, kDim});
    lses[0].dtype = KIVI_F16;
    CHECK(kivi_merge(1, outs, lses, nullptr, &to, nullptr, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(parts.out == std::vector<float>(parts.out.size(), 7.0f));
    CHECK(kivi_merge(1, outs, lses, nullptr, &to, nullptr, &parts) == KIVI_ERROR_INVALID_ARGUMENT);
}
