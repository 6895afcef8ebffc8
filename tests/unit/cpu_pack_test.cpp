// The SIMD packers against the scalar definitions, byte for byte, on every instruction set of this machine.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/pack.h"
#include "cpu/rows.h"
#include "cpu/simd.h"
#include "cpu/write_kernels.h"
#include "format/half.h"

using namespace kivi;
using namespace kivi::cpu;

namespace {

using Random = std::mt19937;

// Values of every kind that a cache may be given; finite.
float nasty(Random& random, int kind) {
    std::normal_distribution<float> normal(0, 1);
    switch (kind) {
        case 0: return normal(random);
        case 1: return normal(random) * 1e-6f;                              // f16 subnormals
        case 2: return static_cast<float>(static_cast<int>(random() % 7) - 3) * 0.5f;  // exact half steps
        case 3: return 3.25f;                                               // constant groups
        case 4: return random() % 2 ? -0.0f : 0.0f;
        case 5: return normal(random) * 20000.0f;
        case 6: return 200.0f + 0.1f * normal(random);
        case 7: return normal(random) * 1e-38f;
        case 8: return random() % 2 ? 65504.0f : -65504.0f;
        default: return float_of((static_cast<uint32_t>(random()) & 0xBFFFFFFFu) | 0x20000000u);  // any exponent
    }
}
constexpr int kKinds = 10;

std::vector<uint8_t> encode_as(const std::vector<float>& x, int32_t dtype) {
    std::vector<uint8_t> bytes(x.size() * dtype_bytes(dtype));
    for (size_t i = 0; i < x.size(); ++i) store_element(bytes.data(), dtype, static_cast<int64_t>(i), x[i]);
    return bytes;
}

// Rows that the window dtype holds exactly; each channel of a kind of its own where `mixed`.
std::vector<float> stored_rows(Random& random, int count, int dim, int32_t window_dtype, int kind, bool mixed) {
    std::vector<float> x(static_cast<size_t>(count) * dim);
    for (int t = 0; t < count; ++t) {
        for (int c = 0; c < dim; ++c) x[t * dim + c] = nasty(random, mixed ? (c * 7 + kind) % kKinds : kind);
    }
    std::vector<uint8_t> row(dim * 4);
    for (int t = 0; t < count; ++t) {
        const std::vector<uint8_t> bytes =
            encode_as(std::vector<float>(x.begin() + t * dim, x.begin() + (t + 1) * dim), KIVI_F32);
        take_row_plain(bytes.data(), KIVI_F32, 0, dim, KIVI_TRANSFORM_NONE, window_dtype, row.data());
        load_row_plain(row.data(), window_dtype, dim, x.data() + t * dim);
    }
    return x;
}

TensorStore make_store(const kivi_spec& spec, int dim, int32_t window_dtype) {
    TensorStore store;
    store.spec = spec;
    store.heads = 1;
    store.dim = dim;
    store.window_dtype = window_dtype;
    store.order = page_order(spec, dim);
    store.page_bytes = page_part_bytes(spec, dim, window_dtype);
    return store;
}

Feedback random_feedback(Random& random, int dim) {
    std::normal_distribution<float> normal(0, 1);
    std::vector<float> q(2 * dim * dim), moment(dim * dim, 0.0f);
    for (float& x : q) x = normal(random);
    for (int r = 0; r < 2 * dim; ++r) {
        for (int i = 0; i < dim; ++i) {
            for (int j = 0; j < dim; ++j) moment[i * dim + j] += q[r * dim + i] * q[r * dim + j];
        }
    }
    Feedback feedback;
    REQUIRE(make_feedback(moment.data(), dim, &feedback));
    return feedback;
}

// Runs `body` on every instruction set that this machine has.
template <class Body>
void on_every_target(Body&& body) {
    using simd::Target;
    for (Target target : {Target::sse4, Target::avx2, Target::avx512, Target::avx512_vnni, Target::plain}) {
        if (!simd::runs_on(target)) continue;
        simd::force_target(target);
        CAPTURE(std::string(simd::target_name(target)));
        body();
    }
    simd::force_target(simd::best_target());
}

std::vector<kivi_spec> specs(int dim) {
    std::vector<kivi_spec> all;
    for (int bits : {2, 3, 4, 8}) {
        for (int axis : {KIVI_AXIS_CHANNEL, KIVI_AXIS_TOKEN}) {
            for (int group : {32, 64, 128, static_cast<int>(KIVI_GROUP_HEAD)}) {
                if (axis == KIVI_AXIS_CHANNEL && group < 0) continue;
                if (axis == KIVI_AXIS_TOKEN && group > dim) continue;
                kivi_spec spec{};
                spec.bits = bits;
                spec.axis = axis;
                spec.group = group;
                spec.param_dtype = KIVI_F16;
                all.push_back(spec);
                spec.param_dtype = KIVI_F32;
                all.push_back(spec);
                spec.param_dtype = KIVI_F16;
                spec.range = KIVI_RANGE_RATIO;
                spec.range_ratio = 0.83f;
                all.push_back(spec);
            }
        }
    }
    return all;
}

// Packs the same rows both ways over a page of old bytes.
void check_pack(const TensorStore& store, const Feedback* feedback, const std::vector<float>& rows, int first,
                int count) {
    std::vector<uint8_t> plain(store.page_bytes), fast;
    for (size_t i = 0; i < plain.size(); ++i) plain[i] = static_cast<uint8_t>(i * 37 + 11);
    fast = plain;
    pack_rows_plain(store, feedback, rows.data(), first, count, plain.data());
    const PackKernels* kernels = pack_kernels();
    RowsAhead nothing;
    if (feedback == nullptr) {
        kernels->nearest(store, rows.data(), first, count, fast.data(), nothing);
    } else {
        if (kernels->query_aware == nullptr) return;
        kernels->query_aware(store, *feedback, rows.data(), first, count, fast.data(), nothing);
    }
    CHECK(plain == fast);
}

}  // namespace

TEST_CASE("nearest packers write the bytes of the scalar definition") {
    on_every_target([] {
        if (pack_kernels() == nullptr) return;
        Random random(1);
        for (int dim : {16, 64, 80, 96, 112, 128, 256}) {
            for (const kivi_spec& spec : specs(dim)) {
                for (int32_t window_dtype : {KIVI_F16, KIVI_BF16, KIVI_F32}) {
                    const TensorStore store = make_store(spec, dim, window_dtype);
                    const bool channel = spec.axis == KIVI_AXIS_CHANNEL;
                    const int kind = static_cast<int>(random() % kKinds);
                    const bool mixed = random() % 2;
                    int first, count;
                    if (channel) {
                        first = spec.group * static_cast<int>(random() % (kPageTokens / spec.group));
                        count = spec.group;
                    } else {
                        first = static_cast<int>(random() % kPageTokens);
                        count = 1 + static_cast<int>(random() % (kPageTokens - first));
                        if (random() % 2) first = first / 16 * 16, count = std::max(16, count / 16 * 16);
                    }
                    CAPTURE(dim);
                    CAPTURE(spec.bits);
                    CAPTURE(spec.axis);
                    CAPTURE(spec.group);
                    CAPTURE(spec.param_dtype);
                    CAPTURE(window_dtype);
                    CAPTURE(kind);
                    CAPTURE(first);
                    CAPTURE(count);
                    check_pack(store, nullptr, stored_rows(random, count, dim, window_dtype, kind, mixed), first, count);
                }
            }
        }
    });
}

TEST_CASE("query-aware packers write the bytes of the scalar definition") {
    Random random_tables(4);
    std::vector<Feedback> tables;
    for (int dim : {16, 80, 96, 128}) tables.push_back(random_feedback(random_tables, dim));
    on_every_target([&] {
        if (pack_kernels() == nullptr) return;
        Random random(2);
        for (const Feedback& feedback : tables) {
            const int dim = feedback.dim;
            for (const kivi_spec& spec : specs(dim)) {
                if (spec.axis != KIVI_AXIS_CHANNEL || spec.range != KIVI_RANGE_MINMAX) continue;
                const int32_t window_dtype = spec.param_dtype == KIVI_F32 ? KIVI_F32 : KIVI_F16;
                const TensorStore store = make_store(spec, dim, window_dtype);
                for (int kind = 0; kind < kKinds; ++kind) {
                    CAPTURE(dim);
                    CAPTURE(spec.bits);
                    CAPTURE(spec.group);
                    CAPTURE(spec.param_dtype);
                    CAPTURE(kind);
                    const int count = spec.group * (1 + kind % (spec.group < kPageTokens ? 2 : 1));
                    check_pack(store, &feedback, stored_rows(random, count, dim, window_dtype, kind, kind % 2),
                               kPageTokens - count, count);
                }
            }
        }
    });
}

TEST_CASE("row kernels give the stored row of the scalar definition, or decline") {
    on_every_target([] {
        const RowKernels* kernels = row_kernels();
        if (kernels == nullptr) return;
        Random random(3);
        int taken = 0, declined = 0;
        for (int round = 0; round < 300; ++round) {
            for (int dim : {16, 48, 80, 96, 128, 192, 512}) {
                const int32_t dtypes[] = {KIVI_F16, KIVI_BF16, KIVI_F32};
                const int32_t dtype = dtypes[random() % 3], window_dtype = dtypes[random() % 3];
                const int transform = random() % 2 ? KIVI_TRANSFORM_HADAMARD : KIVI_TRANSFORM_NONE;
                const int kind = static_cast<int>(random() % kKinds);
                std::vector<float> x(dim);
                for (float& value : x) value = nasty(random, kind);
                if (round % 10 == 0) x[random() % dim] = std::numeric_limits<float>::infinity();
                if (round % 10 == 1) x[random() % dim] = std::numeric_limits<float>::quiet_NaN();
                const std::vector<uint8_t> input = encode_as(x, dtype);
                std::vector<uint8_t> plain(dim * dtype_bytes(window_dtype)), fast(plain.size());
                std::vector<float> stored(dim), plain_stored(dim), loaded(dim);
                const bool saturated =
                    take_row_plain(input.data(), dtype, 0, dim, transform, window_dtype, plain.data());
                load_row_plain(plain.data(), window_dtype, dim, plain_stored.data());
                bool finite = true;
                for (float value : plain_stored) finite = finite && std::isfinite(value);
                CAPTURE(dim);
                CAPTURE(dtype);
                CAPTURE(window_dtype);
                CAPTURE(transform);
                CAPTURE(kind);
                RowsAhead nothing;
                if (kernels->take({input.data(), dtype, 0, dim}, 1, dim, transform, window_dtype, stored.data(),
                                  nothing, 0)) {
                    ++taken;
                    CHECK(!saturated);
                    CHECK(finite);
                    kernels->store(stored.data(), window_dtype, dim, fast.data());
                    CHECK(plain == fast);
                } else {
                    ++declined;
                }
                CHECK(kernels->load(plain.data(), window_dtype, dim, loaded.data()) == finite);
                if (finite) CHECK(std::memcmp(loaded.data(), plain_stored.data(), dim * sizeof(float)) == 0);
            }
        }
        CHECK(taken > declined);
        CHECK(declined > 100);
    });
}

// Signs, quiet and signalling, all payload bits set: the rounding of some carries out of the exponent.
TEST_CASE("row kernels decline every NaN and infinity, whatever its bits and wherever it stands") {
    const std::vector<uint32_t> of_f32 = {0x7FC00000, 0x7F800001, 0xFF800001, 0x7FFF8000, 0x7FFFFFFF,
                                          0xFFFFFFFF, 0x7F800000, 0xFF800000};
    const std::vector<uint32_t> of_f16 = {0x7E00, 0x7C01, 0xFC01, 0x7FFF, 0xFFFF, 0x7C00, 0xFC00};
    const std::vector<uint32_t> of_bf16 = {0x7FC0, 0x7F81, 0xFF81, 0x7FFF, 0xFFFF, 0x7F80, 0xFF80};
    on_every_target([&] {
        const RowKernels* kernels = row_kernels();
        if (kernels == nullptr) return;
        for (int dim : {16, 48, 80, 96, 112, 128, 144, 192, 256}) {
            for (int32_t dtype : {KIVI_F32, KIVI_F16, KIVI_BF16}) {
                for (uint32_t pattern : dtype == KIVI_F32 ? of_f32 : dtype == KIVI_F16 ? of_f16 : of_bf16) {
                    for (int32_t window_dtype : {KIVI_F32, KIVI_F16, KIVI_BF16}) {
                        for (int transform : {KIVI_TRANSFORM_NONE, KIVI_TRANSFORM_HADAMARD}) {
                            CAPTURE(dim);
                            CAPTURE(dtype);
                            CAPTURE(pattern);
                            CAPTURE(window_dtype);
                            CAPTURE(transform);
                            std::vector<uint8_t> input =
                                encode_as(std::vector<float>(static_cast<size_t>(dim), 1.0f), dtype);
                            const size_t bytes = dtype_bytes(dtype);
                            std::vector<float> stored(dim);
                            RowsAhead nothing;
                            int taken = 0;
                            for (int c = 0; c < dim; ++c) {
                                std::vector<uint8_t> damaged = input;
                                std::memcpy(&damaged[c * bytes], &pattern, bytes);
                                taken += kernels->take({damaged.data(), dtype, 0, dim}, 1, dim, transform,
                                                       window_dtype, stored.data(), nothing, 0);
                            }
                            CHECK(taken == 0);
                            CHECK(kernels->take({input.data(), dtype, 0, dim}, 1, dim, transform, window_dtype,
                                                stored.data(), nothing, 0));
                        }
                    }
                }
            }
        }
    });
}
