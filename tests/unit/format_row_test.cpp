// Hadamard and stored rows.
#include <doctest/doctest.h>

#include <cfloat>
#include <cmath>
#include <random>
#include <vector>

#include "format/hadamard.h"
#include "format/half.h"
#include "format/row.h"

using namespace kivi;

namespace {

const int kDims[] = {8, 16, 24, 64, 80, 96, 112, 128, 192, 256, 512};

std::vector<float> random_row(int dim, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> x;
    for (int i = 0; i < dim; ++i) x.push_back(normal(random));
    return x;
}

// Entry of the Sylvester matrix: the sign is the parity of the common bits of row and column.
double sylvester(int row, int column) {
    int common = row & column, parity = 0;
    for (; common; common &= common - 1) parity ^= 1;
    return parity ? -1 : 1;
}

// The butterflies of a block, halves first: the same operations by recursion.
void recursive(float* x, int n) {
    if (n == 1) return;
    recursive(x, n / 2);
    recursive(x + n / 2, n / 2);
    for (int i = 0; i < n / 2; ++i) {
        const float a = x[i], b = x[i + n / 2];
        x[i] = a + b;
        x[i + n / 2] = a - b;
    }
}

}  // namespace

TEST_CASE("blocks are the largest power of two that divides the head dim") {
    CHECK(hadamard_block(80) == 16);
    CHECK(hadamard_block(96) == 32);
    CHECK(hadamard_block(112) == 16);
    CHECK(hadamard_block(192) == 64);
    CHECK(hadamard_block(128) == 128);
    CHECK(hadamard_block(8) == 8);
}

TEST_CASE("the transform is the orthonormal Sylvester matrix on every block, and its own inverse") {
    for (int dim : kDims) {
        CAPTURE(dim);
        const std::vector<float> x = random_row(dim, 1);
        std::vector<float> single = x;
        std::vector<double> precise(x.begin(), x.end());
        hadamard(single.data(), dim);
        hadamard(precise.data(), dim);
        const int block = hadamard_block(dim);
        double norm = 0, transformed_norm = 0;
        for (int i = 0; i < dim; ++i) {
            double expected = 0;
            const int base = i / block * block;
            for (int j = 0; j < block; ++j) expected += sylvester(i - base, j) * x[size_t(base + j)];
            expected /= std::sqrt(double(block));
            CHECK(precise[size_t(i)] == doctest::Approx(expected).epsilon(1e-12));
            CHECK(std::fabs(single[size_t(i)] - expected) < 1e-5);
            norm += double(x[size_t(i)]) * x[size_t(i)];
            transformed_norm += precise[size_t(i)] * precise[size_t(i)];
        }
        CHECK(transformed_norm == doctest::Approx(norm).epsilon(1e-12));
        hadamard(single.data(), dim);
        for (int i = 0; i < dim; ++i) CHECK(std::fabs(single[size_t(i)] - x[size_t(i)]) < 1e-5);
    }
}

TEST_CASE("the stages run from neighbours outwards and the norm comes last, bit for bit") {
    for (int dim : kDims) {
        std::vector<float> x = random_row(dim, 2);
        for (int i = 0; i < dim; i += 3) x[size_t(i)] *= 1e6f;  // makes the order of the sums visible
        std::vector<float> restated = x;
        const int block = hadamard_block(dim);
        const float norm = float(1 / std::sqrt(double(block)));
        for (int i = 0; i < dim; i += block) recursive(restated.data() + i, block);
        for (float& y : restated) y *= norm;
        hadamard(x.data(), dim);
        CHECK(x == restated);
    }
}

TEST_CASE("norms of FORMAT.md") {
    const struct {
        int block;
        uint32_t bits;
    } norms[] = {{8, 0x3EB504F3},   {16, 0x3E800000},  {32, 0x3E3504F3}, {64, 0x3E000000},
                 {128, 0x3DB504F3}, {256, 0x3D800000}, {512, 0x3D3504F3}};
    for (const auto& norm : norms) {
        std::vector<float> unit(size_t(norm.block), 0.0f);
        unit[0] = 1;
        hadamard(unit.data(), norm.block);
        for (float y : unit) CHECK(bits_of(y) == norm.bits);
    }
}

TEST_CASE("rows round to the window dtype, saturate finite values and say so") {
    float out[8];
    uint16_t half[8];
    float fits[8] = {1, -2, 65504, 65519, -65519, 0, 3, 4};
    CHECK_FALSE(store_row(fits, 8, KIVI_TRANSFORM_NONE, KIVI_F16, half));
    CHECK(half[2] == 0x7BFF);
    CHECK(half[3] == 0x7BFF);
    CHECK(half[4] == 0xFBFF);

    float beyond[8] = {65520, -1e30f, 1, 2, 3, 4, 5, 6};
    CHECK(store_row(beyond, 8, KIVI_TRANSFORM_NONE, KIVI_F16, half));
    CHECK(half[0] == 0x7BFF);
    CHECK(half[1] == 0xFBFF);

    float row[8];
    for (float& x : row) x = 60000;
    CHECK(store_row(row, 8, KIVI_TRANSFORM_HADAMARD, KIVI_F16, half));  // 60000 * sqrt(8) in channel 0
    CHECK(half[0] == 0x7BFF);
    for (int i = 1; i < 8; ++i) CHECK(half[i] == 0);

    for (float& x : row) x = 60000;
    CHECK_FALSE(store_row(row, 8, KIVI_TRANSFORM_HADAMARD, KIVI_BF16, half));

    for (float& x : row) x = FLT_MAX;
    CHECK(store_row(row, 8, KIVI_TRANSFORM_HADAMARD, KIVI_F32, out));
    CHECK(out[0] == FLT_MAX);
    for (int i = 1; i < 8; ++i) CHECK(out[i] == 0);

    for (int i = 0; i < 8; ++i) row[i] = i % 2 ? -3e38f : 3e38f;
    CHECK(store_row(row, 8, KIVI_TRANSFORM_HADAMARD, KIVI_BF16, half));
    CHECK(half[1] == 0x7F7F);
    CHECK(half[0] == 0);
}

TEST_CASE("scaling of huge rows changes no bit of rows that need none") {
    for (int dim : kDims) {
        std::vector<float> x = random_row(dim, 3), big = x;
        for (float& y : big) y *= 0x1p119f;  // beyond the peak at which rows are scaled
        std::vector<float> stored(size_t(dim), 0.0f), stored_big = stored;
        CHECK_FALSE(store_row(x.data(), dim, KIVI_TRANSFORM_HADAMARD, KIVI_F32, stored.data()));
        CHECK_FALSE(store_row(big.data(), dim, KIVI_TRANSFORM_HADAMARD, KIVI_F32, stored_big.data()));
        for (int i = 0; i < dim; ++i) CHECK(stored_big[size_t(i)] == stored[size_t(i)] * 0x1p119f);
    }
}

TEST_CASE("non-finite inputs stay visible and carry the one NaN") {
    uint16_t half[16];
    float row[16] = {INFINITY, 1, 2, 3, 4, 5, 6, 7};
    CHECK_FALSE(store_row(row, 8, KIVI_TRANSFORM_NONE, KIVI_F16, half));
    CHECK(half[0] == 0x7C00);
    CHECK(half[1] == 0x3C00);
    float nan[24] = {};
    nan[3] = -NAN;
    uint16_t stored[24];
    store_row(nan, 24, KIVI_TRANSFORM_HADAMARD, KIVI_F16, stored);  // three blocks of 8
    for (int i = 0; i < 8; ++i) CHECK(stored[i] == kNanF16);
    for (int i = 8; i < 24; ++i) CHECK(stored[i] == 0);
}
