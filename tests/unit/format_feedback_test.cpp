// Query-aware rounding against a dense restatement: inverse by elimination, Cholesky factor of the inverse.
#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <vector>

#include "format/feedback.h"
#include "format/half.h"
#include "format/quantize.h"

using namespace kivi;

namespace {

using Matrix = std::vector<std::vector<long double>>;

// Second moment of correlated random queries.
std::vector<float> random_moment(int dim, unsigned seed, int queries) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    std::vector<double> sums(size_t(dim) * size_t(dim), 0.0);
    std::vector<double> direction(size_t(dim), 0.0);
    for (double& d : direction) d = normal(random);
    for (int i = 0; i < queries; ++i) {
        const double common = 2 * normal(random);
        std::vector<double> q(size_t(dim), 0.0);
        for (int c = 0; c < dim; ++c)
            q[size_t(c)] = normal(random) * (1 + c % 5) + common * direction[size_t(c)];
        for (int a = 0; a < dim; ++a) {
            for (int b = 0; b < dim; ++b) sums[size_t(a * dim + b)] += q[size_t(a)] * q[size_t(b)];
        }
    }
    std::vector<float> moment;
    for (double s : sums) moment.push_back(float(s / queries));
    return moment;
}

Matrix inverse(Matrix a) {
    const size_t n = a.size();
    Matrix result(n, std::vector<long double>(n, 0));
    for (size_t i = 0; i < n; ++i) result[i][i] = 1;
    for (size_t column = 0; column < n; ++column) {
        const long double pivot = a[column][column];
        for (size_t k = 0; k < n; ++k) a[column][k] /= pivot, result[column][k] /= pivot;
        for (size_t row = 0; row < n; ++row) {
            if (row == column) continue;
            const long double factor = a[row][column];
            for (size_t k = 0; k < n; ++k) {
                a[row][k] -= factor * a[column][k];
                result[row][k] -= factor * result[column][k];
            }
        }
    }
    return result;
}

// U of a = U' U, upper triangular.
Matrix upper_factor(const Matrix& a) {
    const size_t n = a.size();
    Matrix u(n, std::vector<long double>(n, 0));
    for (size_t i = 0; i < n; ++i) {
        for (size_t j = i; j < n; ++j) {
            long double rest = a[i][j];
            for (size_t k = 0; k < i; ++k) rest -= u[k][i] * u[k][j];
            u[i][j] = i == j ? std::sqrt(rest) : rest / u[i][i];
        }
    }
    return u;
}

struct Restated {
    std::vector<int> order;
    std::vector<std::vector<float>> weights;  // [dim][dim], strict upper part
};

Restated restate(const std::vector<float>& moment, int dim) {
    Restated table;
    std::vector<bool> taken(size_t(dim), false);
    for (int j = 0; j < dim; ++j) {  // selection: the first of the largest that are left
        int best = -1;
        for (int c = 0; c < dim; ++c) {
            if (!taken[size_t(c)] &&
                (best < 0 || moment[size_t(c * dim + c)] > moment[size_t(best * dim + best)]))
                best = c;
        }
        taken[size_t(best)] = true;
        table.order.push_back(best);
    }
    long double mean = 0;
    for (int c = 0; c < dim; ++c) mean += moment[size_t(c * dim + c)];
    mean /= dim;
    Matrix damped(size_t(dim), std::vector<long double>(size_t(dim), 0));
    for (int i = 0; i < dim; ++i) {
        for (int j = 0; j < dim; ++j) {
            damped[size_t(i)][size_t(j)] =
                moment[size_t(table.order[size_t(i)] * dim + table.order[size_t(j)])];
        }
        damped[size_t(i)][size_t(i)] += 0.1L * mean;
    }
    const Matrix u = upper_factor(inverse(damped));
    for (int j = 0; j < dim; ++j) {
        std::vector<float> row(size_t(dim), 0.0f);
        for (int c = j + 1; c < dim; ++c)
            row[size_t(c)] = float(u[size_t(j)][size_t(c)] / u[size_t(j)][size_t(j)]);
        table.weights.push_back(row);
    }
    return table;
}

struct Row {
    std::vector<int> codes;
    std::vector<float> coded_from;
};

bool operator==(const Row& a, const Row& b) { return a.codes == b.codes && a.coded_from == b.coded_from; }

// Column by column: what each channel has received from all channels before it.
Row restated_row(const Restated& table, int bits, const std::vector<float>& row,
                 const std::vector<float>& scale, const std::vector<float>& min) {
    const size_t dim = row.size();
    std::vector<float> errors;
    Row result{std::vector<int>(dim), std::vector<float>(dim)};
    for (size_t c = 0; c < dim; ++c) {
        const size_t channel = size_t(table.order[c]);
        float y = row[channel];
        for (size_t j = 0; j < c; ++j) y = std::fma(-errors[j], table.weights[j][c], y);
        int code = 0;
        if (scale[channel] > 0) {
            const float steps = std::nearbyintf((y - min[channel]) / scale[channel]);
            code = int(std::fmin(std::fmax(steps, 0.0f), float((1 << bits) - 1)));
        }
        result.codes[channel] = code;
        result.coded_from[channel] = y;
        errors.push_back(y - std::fma(float(code), scale[channel], min[channel]));
    }
    return result;
}

struct Tokens {
    std::vector<std::vector<float>> rows;
    std::vector<float> scale, min;
};

Tokens random_tokens(int dim, int count, int bits, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    Tokens tokens;
    for (int t = 0; t < count; ++t) {
        std::vector<float> row;
        for (int c = 0; c < dim; ++c)
            row.push_back(f16_to_f32(f32_to_f16(normal(random) * float(1 + c % 3) + float(c % 7))));
        tokens.rows.push_back(row);
    }
    kivi_spec spec{};
    spec.bits = bits;
    spec.param_dtype = KIVI_F16;
    for (int c = 0; c < dim; ++c) {
        std::vector<float> channel;
        for (const auto& row : tokens.rows) channel.push_back(row[size_t(c)]);
        const GroupParams params = group_params(spec, channel.data(), 1, count);
        tokens.scale.push_back(params.scale);
        tokens.min.push_back(params.min);
    }
    return tokens;
}

double objective(const std::vector<float>& moment, const std::vector<float>& row,
                 const std::vector<int>& codes, const Tokens& tokens) {
    const size_t dim = row.size();
    std::vector<double> error;
    for (size_t c = 0; c < dim; ++c)
        error.push_back(row[c] - (codes[c] * double(tokens.scale[c]) + tokens.min[c]));
    double sum = 0;
    for (size_t a = 0; a < dim; ++a) {
        for (size_t b = 0; b < dim; ++b) sum += error[a] * moment[a * dim + b] * error[b];
    }
    return sum;
}

Row library_row(const Feedback& table, int bits, std::vector<float> row, const std::vector<float>& scale,
                const std::vector<float>& min) {
    std::vector<uint8_t> codes(row.size());
    encode_row(table, bits, row.data(), scale.data(), min.data(), codes.data());
    return {{codes.begin(), codes.end()}, row};
}

std::vector<int> library_codes(const Feedback& table, int bits, const std::vector<float>& row,
                               const std::vector<float>& scale, const std::vector<float>& min) {
    return library_row(table, bits, row, scale, min).codes;
}

}  // namespace

TEST_CASE("table and codes equal a dense restatement, code for code; the score error falls") {
    for (int dim : {8, 24, 64, 80, 128}) {
        for (int bits : {2, 3, 4}) {
            CAPTURE(dim);
            CAPTURE(bits);
            const std::vector<float> moment = random_moment(dim, unsigned(dim + bits), 3 * dim);
            Feedback table;
            REQUIRE(make_feedback(moment.data(), dim, &table));
            const Restated restated = restate(moment, dim);
            REQUIRE(table.dim == dim);
            CHECK(std::vector<int>(table.order.begin(), table.order.end()) == restated.order);
            REQUIRE(int64_t(table.weights.size()) == int64_t(dim) * (dim - 1) / 2);
            int different = 0;
            for (int j = 0; j < dim; ++j) {
                for (int c = j + 1; c < dim; ++c) {
                    const float weight = table.weights[size_t(feedback_row(dim, j) + c - j - 1)];
                    different += weight != restated.weights[size_t(j)][size_t(c)];
                }
            }
            CHECK(different == 0);

            const Tokens tokens = random_tokens(dim, 32, bits, 7);
            double aware = 0, nearest = 0;
            for (const auto& row : tokens.rows) {
                const Row coded = library_row(table, bits, row, tokens.scale, tokens.min);
                CHECK(coded == restated_row(restated, bits, row, tokens.scale, tokens.min));
                std::vector<int> plain;
                for (int c = 0; c < dim; ++c) {
                    plain.push_back(
                        encode(row[size_t(c)], {tokens.scale[size_t(c)], tokens.min[size_t(c)]}, bits));
                }
                aware += objective(moment, row, coded.codes, tokens);
                nearest += objective(moment, row, plain, tokens);
            }
            CHECK(aware < nearest);
        }
    }
}

TEST_CASE("the table does not depend on the scale of the moments") {
    const int dim = 64;
    const std::vector<float> moment = random_moment(dim, 1, 200);
    Feedback table;
    REQUIRE(make_feedback(moment.data(), dim, &table));
    for (int exponent : {-100, -30, 40, 110}) {
        std::vector<float> scaled;
        for (float m : moment) scaled.push_back(std::ldexp(m, exponent));
        Feedback other;
        REQUIRE(make_feedback(scaled.data(), dim, &other));
        CHECK(other.order == table.order);
        CHECK(other.weights == table.weights);
    }
    for (float factor : {1e-30f, 1e30f}) {
        std::vector<float> scaled;
        for (float m : moment) scaled.push_back(m * factor);
        Feedback other;
        REQUIRE(make_feedback(scaled.data(), dim, &other));
        for (size_t i = 0; i < table.weights.size(); ++i)
            CHECK(std::fabs(other.weights[i] - table.weights[i]) < 1e-5);
    }
}

TEST_CASE("a diagonal moment feeds nothing on and orders by its diagonal, ties by channel") {
    const int dim = 8;
    const float diagonal[dim] = {1, 5, 2, 5, 0, 2, 9, 1};
    std::vector<float> moment(dim * dim, 0.0f);
    for (int c = 0; c < dim; ++c) moment[size_t(c * dim + c)] = diagonal[c];
    Feedback table;
    REQUIRE(make_feedback(moment.data(), dim, &table));
    CHECK(table.order == std::vector<uint16_t>{6, 1, 3, 2, 5, 0, 7, 4});
    for (float w : table.weights) CHECK(w == 0);
    const Tokens tokens = random_tokens(dim, 32, 2, 3);
    for (const auto& row : tokens.rows) {
        const std::vector<int> codes = library_codes(table, 2, row, tokens.scale, tokens.min);
        for (size_t c = 0; c < row.size(); ++c)
            CHECK(codes[c] == encode(row[c], {tokens.scale[c], tokens.min[c]}, 2));
    }
}

TEST_CASE("ties of a long diagonal stay in the order of the channels") {
    const int dim = 512;
    std::vector<float> moment(size_t(dim) * dim, 0.0f);
    for (int c = 0; c < dim; ++c) moment[size_t(c) * dim + size_t(c)] = float(1 + c % 3);
    Feedback table;
    REQUIRE(make_feedback(moment.data(), dim, &table));
    std::vector<uint16_t> due;
    for (int value : {2, 1, 0}) {
        for (int c = value; c < dim; c += 3) due.push_back(uint16_t(c));
    }
    CHECK(table.order == due);
}

TEST_CASE("rank-one and nearly singular moments are factored, indefinite and empty ones refused") {
    const int dim = 16;
    Feedback table;
    std::vector<float> moment(dim * dim, 1.0f);
    CHECK(make_feedback(moment.data(), dim, &table));
    for (float& m : moment) m = 0;
    CHECK_FALSE(make_feedback(moment.data(), dim, &table));
    for (int c = 0; c < dim; ++c) moment[size_t(c * dim + c)] = 1;
    moment[1] = moment[dim] = 3;
    CHECK_FALSE(make_feedback(moment.data(), dim, &table));
    for (float bad : {NAN, INFINITY}) {
        moment[1] = moment[dim] = bad;
        CHECK_FALSE(make_feedback(moment.data(), dim, &table));
        moment[1] = moment[dim] = 0;
        moment[0] = bad;
        CHECK_FALSE(make_feedback(moment.data(), dim, &table));
        moment[0] = 1;
    }
}

TEST_CASE("a damaged group passes nothing on; a constant one does") {
    const int dim = 64;
    const std::vector<float> moment = random_moment(dim, 5, 200);
    Feedback table;
    REQUIRE(make_feedback(moment.data(), dim, &table));
    Tokens tokens = random_tokens(dim, 32, 3, 5);
    const size_t first = table.order[0];

    Tokens damaged = tokens;
    damaged.scale[first] = damaged.min[first] = NAN;
    std::vector<float> row = tokens.rows[0], nan_row = row;
    const std::vector<int> codes = library_codes(table, 3, row, damaged.scale, damaged.min);
    nan_row[first] = NAN;
    CHECK(library_codes(table, 3, nan_row, damaged.scale, damaged.min) == codes);
    CHECK(codes[first] == 0);

    // As if the first channel had been coded without error.
    Tokens exact = tokens;
    exact.scale[first] = 0;
    exact.min[first] = row[first];
    CHECK(library_codes(table, 3, row, exact.scale, exact.min) == codes);

    // A constant group with an error moves later codes.
    exact.min[first] = row[first] + 8;
    CHECK(library_codes(table, 3, row, exact.scale, exact.min) != codes);
}
