// Groups: parameters, codes, bit streams, and what FORMAT.md promises of nearest rounding.
#include <doctest/doctest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "format/half.h"
#include "format/quantize.h"

using namespace kivi;

namespace {

kivi_spec spec_of_bits(int bits, int32_t param_dtype = KIVI_F16) {
    kivi_spec spec{};
    spec.bits = bits;
    spec.axis = KIVI_AXIS_CHANNEL;
    spec.group = 32;
    spec.param_dtype = param_dtype;
    return spec;
}

struct Coded {
    GroupParams params;
    std::vector<int> codes;
    std::vector<float> decoded;
};

Coded quantize(const kivi_spec& spec, const std::vector<float>& x) {
    Coded coded;
    coded.params = group_params(spec, x.data(), 1, static_cast<int>(x.size()));
    for (float y : x) {
        coded.codes.push_back(encode(y, coded.params, spec.bits));
        coded.decoded.push_back(decode(coded.codes.back(), coded.params));
    }
    return coded;
}

double worst_error(const std::vector<float>& x, const Coded& coded) {
    double worst = 0;
    for (size_t i = 0; i < x.size(); ++i) worst = std::max(worst, std::fabs(double(x[i]) - coded.decoded[i]));
    return worst;
}

bool is_nan(float x) { return bits_of(x) == kNanF32; }

const int kBits[] = {2, 3, 4, 8};
const int32_t kParamTypes[] = {KIVI_F16, KIVI_F32};

}  // namespace

TEST_CASE("kivi-reference TEST 02: ties go to even codes") {
    const Coded coded = quantize(spec_of_bits(2), {0, 0.5f, 1.5f, 2.5f, 3});
    CHECK(coded.params.scale == 1);
    CHECK(coded.params.min == 0);
    CHECK(coded.codes == std::vector<int>{0, 0, 2, 2, 3});
}

TEST_CASE("kivi-reference TEST 03, fault 7, fault 8, S1: constant groups come back exactly") {
    for (int bits : kBits) {
        for (int32_t type : kParamTypes) {
            for (float constant : {7.25f, 0.0f, -0.0f, 100.0f, -3.5f, 65504.0f}) {
                const Coded coded = quantize(spec_of_bits(bits, type), std::vector<float>(32, constant));
                CHECK(bits_of(coded.params.scale) == 0);
                for (int code : coded.codes) CHECK(code == 0);
                for (float y : coded.decoded) CHECK(y == constant);
            }
        }
    }
}

TEST_CASE("zero parameters are +0 in whatever order zeros of both signs stand") {
    for (std::vector<float> x : {std::vector<float>{0.0f, -0.0f, 3}, {-0.0f, 0.0f, 3}, {-1e-9f, 3, 0}}) {
        const GroupParams params = group_params(spec_of_bits(2), x.data(), 1, 3);
        CHECK(bits_of(params.min) == 0);
    }
}

TEST_CASE("kivi-reference TEST 04: a range beyond fp16 is formed in fp32") {
    const Coded coded = quantize(spec_of_bits(2), {40000, -40000, 0, 100});
    CHECK(coded.params.scale == 26672);  // 26666.67 in fp16
    CHECK(coded.params.min == -40000);
    for (float y : coded.decoded) CHECK(std::isfinite(y));
    CHECK(worst_error({40000, -40000, 0, 100}, coded) <= 26672 / 2.0 + 16);
}

TEST_CASE("kivi-reference TEST 05: a large offset does not cost resolution") {
    const std::vector<float> x{500, 500.25f, 500.5f, 500.75f};
    CHECK(worst_error(x, quantize(spec_of_bits(2), x)) <= 0.125);
}

TEST_CASE("fault 10: tiny ranges give valid codes and no overflow") {
    for (int bits : kBits) {
        for (int32_t type : kParamTypes) {
            for (float range : {1e-38f, 1e-45f, 1e-7f, 6e-8f, 1e-30f}) {
                for (float offset : {0.0f, 1e-3f}) {
                    std::vector<float> x;
                    for (int i = 0; i < 32; ++i) x.push_back(offset + range * float(i) / 31);
                    const Coded coded = quantize(spec_of_bits(bits, type), x);
                    for (int code : coded.codes) CHECK((code >= 0 && code < (1 << bits)));
                    for (float y : coded.decoded) CHECK(std::isfinite(y));
                }
            }
        }
    }
}

TEST_CASE("a scale that underflows the parameter type gives code 0 and min") {
    const Coded coded = quantize(spec_of_bits(2, KIVI_F16), {0, 2e-8f, 6e-8f});
    CHECK(coded.params.scale == 0);
    CHECK(coded.codes == std::vector<int>{0, 0, 0});
    CHECK(coded.decoded == std::vector<float>{0, 0, 0});
}

TEST_CASE("fault 28: a short group takes its range from its own elements") {
    for (int n : {16, 32, 48}) {
        std::vector<float> x;
        for (int i = 0; i < n; ++i) x.push_back(5 + float(i) / float(n - 1));
        const Coded coded = quantize(spec_of_bits(2), x);
        CHECK(coded.params.min == 5);
        CHECK(coded.params.scale == doctest::Approx(1.0 / 3).epsilon(1e-3));
        CHECK(worst_error(x, coded) <= 1.0 / 6 + 1e-3);
    }
}

TEST_CASE("fault 35, fault 41: a small signal on a large offset keeps both") {
    std::mt19937 random(2);
    for (double range : {0.1, 0.5}) {
        for (auto round : {+[](float x) { return f16_to_f32(f32_to_f16(x)); },
                           +[](float x) { return bf16_to_f32(f32_to_bf16(x)); }}) {
            std::vector<float> x;
            double mean = 0;
            for (int i = 0; i < 32; ++i) {
                x.push_back(round(float(200 + range * (double(random()) / 4294967296.0 - 0.5))));
                mean += x.back() / 32.0;
            }
            const Coded coded = quantize(spec_of_bits(2), x);
            CHECK(worst_error(x, coded) <= coded.params.scale + 0.0625);  // half an fp16 step at 200 is 1/16
            double decoded_mean = 0;
            for (float y : coded.decoded) decoded_mean += y / 32.0;
            CHECK(std::fabs(decoded_mean - mean) <= coded.params.scale / 2 + 0.0625);
        }
    }
}

TEST_CASE("S11: a group of range 5e-5 is not lost") {
    std::vector<float> x;
    for (int i = 0; i < 32; ++i) x.push_back(5e-5f * float(i) / 31);
    const Coded coded = quantize(spec_of_bits(2), x);
    CHECK(coded.params.scale > 0);
    CHECK(worst_error(x, coded) <= 5e-5 / 6 * 1.01);
}

TEST_CASE("a NaN or an infinity makes both parameters the one NaN and all codes 0") {
    for (float bad : {NAN, INFINITY, -INFINITY, -NAN}) {
        for (size_t place : {size_t{0}, size_t{5}, size_t{31}}) {
            for (int bits : kBits) {
                std::vector<float> x(32);
                for (int i = 0; i < 32; ++i) x[size_t(i)] = float(i);
                x[place] = bad;
                const Coded coded = quantize(spec_of_bits(bits), x);
                CHECK(is_nan(coded.params.scale));
                CHECK(is_nan(coded.params.min));
                for (int code : coded.codes) CHECK(code == 0);
                for (float y : coded.decoded) CHECK(std::isnan(y));
            }
        }
    }
}

TEST_CASE("finite values of any size give finite parameters and finite decoded values") {
    const float big[] = {FLT_MAX,  -FLT_MAX,  1e38f,  -1e38f, 3e5f, -3e5f,
                         65504.0f, -65536.0f, 1e-45f, 0.0f,   1.0f};
    for (float a : big) {
        for (float b : big) {
            for (int bits : kBits) {
                for (int32_t type : kParamTypes) {
                    for (float ratio : {0.0f, 0.7f}) {
                        kivi_spec spec = spec_of_bits(bits, type);
                        if (ratio > 0) {
                            spec.range = KIVI_RANGE_RATIO;
                            spec.range_ratio = ratio;
                        }
                        const Coded coded = quantize(spec, {a, b, a / 2 + b / 2});
                        CHECK((std::isfinite(coded.params.scale) && coded.params.scale >= 0));
                        CHECK(std::isfinite(coded.params.min));
                        for (int code = 0; code < (1 << bits); ++code) {
                            CHECK(std::isfinite(decode(code, coded.params)));
                        }
                        for (int code : coded.codes) CHECK((code >= 0 && code < (1 << bits)));
                    }
                }
            }
        }
    }
}

TEST_CASE("beyond the parameter type scale and min saturate apart from each other") {
    CHECK(quantize(spec_of_bits(2), {0, 90000}).decoded[1] == doctest::Approx(90000).epsilon(1e-3));
    const GroupParams both = quantize(spec_of_bits(2), {-1e30f, 1e30f}).params;
    CHECK(both.scale == 65504);
    CHECK(both.min == -65504);
    CHECK(quantize(spec_of_bits(2, KIVI_F32), {-1e30f, 1e30f}).decoded[1] == doctest::Approx(1e30));
}

TEST_CASE("two-valued groups come back exactly") {
    for (int bits : kBits) {
        const float levels = float((1 << bits) - 1);
        const std::vector<float> x{-2, -2 + levels * 0.5f, -2};
        CHECK(quantize(spec_of_bits(bits), x).decoded == x);
    }
}

TEST_CASE("nearest rounding stays within half a step plus the rounding of the parameters") {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (int trial = 0; trial < 3000; ++trial) {
        const int bits = kBits[random() % 4];
        const kivi_spec spec = spec_of_bits(bits, kParamTypes[random() % 2]);
        const float width = std::exp2(float(int(random() % 30) - 15)),
                    offset = 100 * normal(random) * float(random() % 2);
        std::vector<float> x;
        for (int i = 0; i < 64; ++i) x.push_back(offset + width * normal(random));
        const auto [low, high] = std::minmax_element(x.begin(), x.end());
        if (*low < -60000 || *high > 60000) continue;
        const Coded coded = quantize(spec, x);
        const int levels = (1 << bits) - 1;
        const double exact_scale = (double(*high) - *low) / levels;
        const double bound = coded.params.scale / 2.0 + std::fabs(double(coded.params.min) - *low) +
                             levels * std::fabs(coded.params.scale - exact_scale) +
                             std::max(std::fabs(*low), std::fabs(*high)) * 2e-7;
        CHECK(worst_error(x, coded) <= bound);
    }
}

TEST_CASE("codes are the nearest of all codes and equal a restatement with the host's rounding") {
    std::mt19937 random(4);
    std::uniform_real_distribution<float> uniform(-1.5f, 1.5f);
    for (int trial = 0; trial < 20000; ++trial) {
        const int bits = kBits[random() % 4];
        const int levels = (1 << bits) - 1;
        const GroupParams params{round_to_param(std::fabs(uniform(random)) + 1e-3f, KIVI_F16),
                                 round_to_param(uniform(random), KIVI_F16)};
        // Every fourth value sits on a tie exactly or nearly.
        float y = params.min + params.scale * uniform(random) * float(levels);
        if (trial % 4 == 0) y = params.min + params.scale * (float(random() % unsigned(levels)) + 0.5f);
        const volatile float difference = y - params.min;
        const volatile float quotient = difference / params.scale;
        const int restated = int(std::min(std::max(std::nearbyintf(quotient), 0.0f), float(levels)));
        CHECK(encode(y, params, bits) == restated);
    }
}

TEST_CASE("the fixed ratio keeps the centre and shrinks the range; ratio 1 is min-max") {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (int trial = 0; trial < 200; ++trial) {
        std::vector<float> x;
        for (int i = 0; i < 64; ++i) x.push_back(3 + normal(random));
        kivi_spec spec = spec_of_bits(3, KIVI_F32);
        const GroupParams plain = group_params(spec, x.data(), 1, 64);
        spec.range = KIVI_RANGE_RATIO;
        spec.range_ratio = 1;
        const GroupParams whole = group_params(spec, x.data(), 1, 64);
        CHECK(whole.scale == plain.scale);
        CHECK(whole.min == plain.min);
        spec.range_ratio = 0.8f;
        const GroupParams shrunk = group_params(spec, x.data(), 1, 64);
        CHECK(shrunk.scale == doctest::Approx(0.8 * plain.scale).epsilon(1e-6));
        CHECK(shrunk.min + 3.5f * shrunk.scale ==
              doctest::Approx(plain.min + 3.5f * plain.scale).epsilon(1e-6));
    }
}

TEST_CASE("decode is one fused operation") {
    const GroupParams params{1 + FLT_EPSILON, -3};
    CHECK(decode(3, params) == 3 * FLT_EPSILON);  // two roundings would give 2^-21
}

TEST_CASE("strided groups equal contiguous ones") {
    std::vector<float> x;
    for (int i = 0; i < 96; ++i) x.push_back(std::sin(float(i)));
    std::vector<float> picked;
    for (int i = 0; i < 32; ++i) picked.push_back(x[size_t(3 * i + 1)]);
    const GroupParams a = group_params(spec_of_bits(4), x.data() + 1, 3, 32);
    const GroupParams b = group_params(spec_of_bits(4), picked.data(), 1, 32);
    CHECK(a.scale == b.scale);
    CHECK(a.min == b.min);
}

TEST_CASE("kivi-reference TEST 01: bit streams, lowest bits first") {
    uint8_t stream[32] = {};
    for (int i = 0; i < 32; ++i) put_code(stream, 2, i, i % 4);
    for (int i = 0; i < 8; ++i) CHECK(stream[i] == 0xE4);
    std::memset(stream, 0, sizeof stream);
    for (int i = 0; i < 16; ++i) put_code(stream, 4, i, i);
    const uint8_t nibbles[8] = {0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE};
    CHECK(std::memcmp(stream, nibbles, 8) == 0);
    std::memset(stream, 0, sizeof stream);
    for (int i = 0; i < 8; ++i) put_code(stream, 3, i, i);
    // 000 001 010 011 100 101 110 111 from bit 0 on
    CHECK(stream[0] == 0x88);
    CHECK(stream[1] == 0xC6);
    CHECK(stream[2] == 0xFA);
}

TEST_CASE("bit streams give back what was put") {
    std::mt19937 random(6);
    for (int bits : kBits) {
        std::vector<uint8_t> stream(size_t(bits) * 128 / 8);
        std::vector<int> codes;
        for (int i = 0; i < 128; ++i) codes.push_back(int(random() % (1u << bits)));
        for (int i = 0; i < 128; ++i) put_code(stream.data(), bits, i, codes[size_t(i)]);
        for (int i = 0; i < 128; ++i) CHECK(get_code(stream.data(), bits, i) == codes[size_t(i)]);
    }
}
