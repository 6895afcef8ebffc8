// Random numbers and the three element types, written from their definitions and apart from the library's
// own.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kivi/kivi.h"

namespace kivi_test {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

using Floats = std::vector<float>;
using Bytes = std::vector<uint8_t>;

inline size_t element_bytes(int32_t dtype) { return dtype == KIVI_F32 ? 4 : 2; }

// Largest finite value.
inline double largest(int32_t dtype) {
    return dtype == KIVI_F32   ? double(std::numeric_limits<float>::max())
           : dtype == KIVI_F16 ? 65504.0
                               : std::ldexp(255.0, 120);
}

// x rounded to the type, ties to even; beyond its range an infinity.
inline float round_to(int32_t dtype, float x) {
    if (dtype == KIVI_F32 || x == 0 || !std::isfinite(x)) return x;
    const int digits = dtype == KIVI_F16 ? 10 : 7, lowest = dtype == KIVI_F16 ? -14 : -126;
    const int exponent = std::max(std::ilogb(x), lowest);
    const double quantum = std::ldexp(1.0, exponent - digits);
    const double rounded = std::nearbyint(x / quantum) * quantum;
    return std::fabs(rounded) > largest(dtype) ? std::copysign(kInfinity, x) : float(rounded);
}

// Bits of a value that the type holds; every NaN has the one pattern of core/FORMAT.md.
inline uint32_t bits_of(int32_t dtype, float x) {
    uint32_t word;
    std::memcpy(&word, &x, sizeof word);
    if (std::isnan(x)) word = 0x7FC00000;
    if (dtype == KIVI_F32) return word;
    if (dtype == KIVI_BF16) return word >> 16;
    const uint32_t sign = word >> 31 << 15;
    if (std::isnan(x)) return 0x7E00;
    if (std::isinf(x)) return sign | 0x7C00;
    if (x == 0) return sign;
    const int exponent = std::max(std::ilogb(x), -14);
    const uint32_t mantissa = uint32_t(std::ldexp(std::fabs(x), 10 - exponent));
    return sign | (uint32_t(exponent + 14) * 1024 + mantissa);  // the leading one adds 1 to the exponent
}

inline float value_of(int32_t dtype, uint32_t bits) {
    if (dtype == KIVI_F16) {
        const int exponent = int(bits >> 10 & 31), mantissa = int(bits & 1023);
        const float sign = bits >> 15 ? -1.0f : 1.0f;
        if (exponent == 31) return mantissa ? kNaN : sign * kInfinity;
        return sign *
               float(exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24));
    }
    const uint32_t word = dtype == KIVI_BF16 ? bits << 16 : bits;
    float x;
    std::memcpy(&x, &word, sizeof x);
    return x;
}

// A seeded source that gives the same numbers on every platform.
class Random {
  public:
    explicit Random(uint64_t seed) : engine_(seed) {}

    uint64_t below(uint64_t limit) { return engine_() % limit; }
    int64_t between(int64_t low, int64_t high) { return low + int64_t(below(uint64_t(high - low + 1))); }
    bool chance(int percent) { return below(100) < uint64_t(percent); }
    template <class T>
    T one_of(std::initializer_list<T> of) {
        return of.begin()[below(of.size())];
    }
    double uniform() { return double(engine_() >> 11) * 0x1p-53; }
    // Sum of uniforms: near enough to a normal number, and equal everywhere.
    float normal() { return float(uniform() + uniform() + uniform() + uniform() - 2.0) * 1.7320508f; }
    Floats normals(size_t count, float scale = 1) {
        Floats x(count);
        for (float& value : x) value = scale * normal();
        return x;
    }

  private:
    std::mt19937_64 engine_;
};

// Keys as models have them: noise of different width by channel, a few channels far from zero, and a few
// that are never positive or never negative, with zeros of both signs.
inline Floats key_like(Random& random, size_t rows, int dim) {
    Floats x(rows * size_t(dim));
    for (size_t i = 0; i < x.size(); ++i) {
        const int channel = int(i % size_t(dim));
        x[i] = std::ldexp(random.normal(), channel % 3 - 1) + (channel % 16 == 5 ? 6.0f : 0.0f);
    }
    for (size_t i = 0; i < x.size(); ++i) {
        const int channel = int(i % size_t(dim));
        if (channel % 16 == 9 && x[i] < 0) x[i] = -0.0f;
        if (channel % 16 == 12 && x[i] > 0) x[i] = 0.0f;
    }
    return x;
}

}  // namespace kivi_test
