// Conversions against the definition of the types: every 16-bit value, every tie, random bit patterns.
#include <doctest/doctest.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "format/half.h"

using namespace kivi;

namespace {

// Value of a 16-bit float with `mantissa_bits`, by its definition.
double value_of(uint16_t h, int mantissa_bits) {
    const int exponent_bits = 15 - mantissa_bits;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const double sign = h & 0x8000 ? -1 : 1;
    const int exponent = (h & 0x7FFF) >> mantissa_bits;
    const int mantissa = h & ((1 << mantissa_bits) - 1);
    if (exponent == (1 << exponent_bits) - 1) {
        return mantissa ? std::numeric_limits<double>::quiet_NaN()
                        : sign * std::numeric_limits<double>::infinity();
    }
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

struct Type {
    const char* name;
    int mantissa_bits;
    uint16_t nan;
    float (*widen)(uint16_t);
    uint16_t (*narrow)(float);
};

const Type kTypes[] = {{"f16", 10, kNanF16, f16_to_f32, f32_to_f16},
                       {"bf16", 7, kNanBf16, bf16_to_f32, f32_to_bf16}};

// Nearest by search among all finite magnitudes, ties to the even bit pattern; the first pattern past the
// largest finite value stands for infinity and is as far as it would be as a number.
class Nearest {
  public:
    explicit Nearest(const Type& type) : type_(type) {
        const int infinity = ((1 << (15 - type.mantissa_bits)) - 1) << type.mantissa_bits;
        for (int h = 0; h < infinity; ++h)
            magnitudes_.push_back(value_of(static_cast<uint16_t>(h), type.mantissa_bits));
        const double last = magnitudes_.back();
        magnitudes_.push_back(last + (last - magnitudes_[magnitudes_.size() - 2]));
    }

    uint16_t operator()(float x) const {
        if (std::isnan(x)) return type_.nan;
        const double magnitude = std::fabs(static_cast<double>(x));
        const auto above = std::lower_bound(magnitudes_.begin(), magnitudes_.end(), magnitude);
        size_t nearest = magnitudes_.size() - 1;
        if (above != magnitudes_.end()) {
            nearest = static_cast<size_t>(above - magnitudes_.begin());
            if (nearest > 0) {
                const double up = magnitudes_[nearest] - magnitude,
                             down = magnitude - magnitudes_[nearest - 1];
                if (down < up || (down == up && (nearest - 1) % 2 == 0)) --nearest;
            }
        }
        return static_cast<uint16_t>(nearest | (std::signbit(x) ? 0x8000 : 0));
    }

    const std::vector<double>& magnitudes() const { return magnitudes_; }

  private:
    Type type_;
    std::vector<double> magnitudes_;
};

}  // namespace

TEST_CASE("every 16-bit value widens to its definition and narrows back to itself") {
    for (const Type& type : kTypes) {
        CAPTURE(type.name);
        int wrong = 0;
        for (int i = 0; i < 65536; ++i) {
            const uint16_t h = static_cast<uint16_t>(i);
            const double expected = value_of(h, type.mantissa_bits);
            const float wide = type.widen(h);
            if (std::isnan(expected)) {
                wrong += !std::isnan(wide) || type.narrow(wide) != type.nan;
            } else {
                wrong += wide != expected || std::signbit(wide) != std::signbit(expected) ||
                         type.narrow(wide) != h;
            }
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("narrowing is to nearest, ties to even, under any rounding mode of the host") {
    const int before = std::fegetround();
    for (const Type& type : kTypes) {
        CAPTURE(type.name);
        const Nearest nearest(type);
        std::vector<float> inputs;
        for (size_t i = 1; i < nearest.magnitudes().size(); ++i) {  // every tie and its two neighbours
            const float tie = static_cast<float>((nearest.magnitudes()[i - 1] + nearest.magnitudes()[i]) / 2);
            for (float x : {tie, std::nextafterf(tie, 0), std::nextafterf(tie, INFINITY)}) {
                inputs.push_back(x);
                inputs.push_back(-x);
            }
        }
        std::mt19937 random(1);
        for (int i = 0; i < 300000; ++i) inputs.push_back(float_of(static_cast<uint32_t>(random())));
        for (float x : {0.0f, -0.0f, INFINITY, -INFINITY, 1e38f, -1e38f, 65504.0f, 65519.0f, 65520.0f})
            inputs.push_back(x);
        std::vector<uint16_t> expected;
        for (float x : inputs) expected.push_back(nearest(x));
        for (int mode : {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
            int wrong = 0;
            std::fesetround(mode);
            for (size_t i = 0; i < inputs.size(); ++i) wrong += type.narrow(inputs[i]) != expected[i];
            std::fesetround(before);
            CAPTURE(mode);
            CHECK(wrong == 0);
        }
    }
}

TEST_CASE("typed access") {
    CHECK(dtype_max(KIVI_F16) == 65504.0f);
    CHECK(dtype_max(KIVI_BF16) == bf16_to_f32(0x7F7F));
    CHECK(dtype_max(KIVI_F32) == std::numeric_limits<float>::max());
    CHECK(dtype_bytes(KIVI_F32) == 4);
    CHECK(dtype_bytes(KIVI_F16) == 2);
    CHECK(dtype_bytes(KIVI_BF16) == 2);
    for (int32_t dtype : {KIVI_F32, KIVI_F16, KIVI_BF16}) {
        uint32_t memory[4] = {};
        store_element(memory, dtype, 1, -1.5f);
        CHECK(load_element(memory, dtype, 1) == -1.5f);
        CHECK(load_element(memory, dtype, 0) == 0.0f);
        store_element(memory, dtype, 2, float_of(0xFFC12345u));
        CHECK(std::isnan(load_element(memory, dtype, 2)));
    }
    float nan;
    store_element(&nan, KIVI_F32, 0, float_of(0xFFC12345u));
    CHECK(bits_of(nan) == kNanF32);
}
