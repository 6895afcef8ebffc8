// The factor of the inverse moment, in double, and the recursion over channels.
#include "format/feedback.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "format/quantize.h"

namespace kivi {

namespace {

constexpr double kDamping = 0.1;  // of the mean diagonal

// Overwrites the symmetric matrix a [n][n] by V and D of a = V D V', V unit upper triangular (strict upper
// part), D on the diagonal. False if a is not positive definite.
bool factor_upper(std::vector<double>& a, int n) {
    for (int j = n - 1; j >= 0; --j) {
        const double pivot = a[j * n + j];
        if (!(pivot > 0) || !std::isfinite(pivot)) return false;
        for (int i = 0; i < j; ++i) {
            const double v = a[i * n + j] / pivot;
            for (int c = 0; c <= i; ++c) a[c * n + i] -= v * a[c * n + j];
        }
        for (int i = 0; i < j; ++i) a[i * n + j] /= pivot;
    }
    return true;
}

// Overwrites the strict upper part of the unit upper triangular v [n][n] by that of its inverse.
void invert_unit_upper(std::vector<double>& v, int n) {
    std::vector<double> row(n);
    for (int i = n - 2; i >= 0; --i) {
        std::fill(row.begin(), row.end(), 0.0);
        for (int k = i + 1; k < n; ++k) {
            const double factor = v[i * n + k];
            row[k] -= factor;
            for (int c = k + 1; c < n; ++c) row[c] -= factor * v[k * n + c];
        }
        std::copy(row.begin() + i + 1, row.end(), v.begin() + i * n + i + 1);
    }
}

}  // namespace

// With M = V D V' of the permuted, damped moment, M^-1 = U' U for U = D^(-1/2) V^-1, which is upper
// triangular; so U_jc / U_jj are the entries of V^-1 and no square root is taken.
bool make_feedback(const float* moment, int dim, Feedback* feedback) {
    double mean = 0;
    for (int c = 0; c < dim; ++c) mean += moment[c * dim + c];
    mean /= dim;
    if (!(mean > 0) || !std::isfinite(mean)) return false;

    std::vector<uint16_t> order(dim);
    std::iota(order.begin(), order.end(), uint16_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](uint16_t a, uint16_t b) { return moment[a * dim + a] > moment[b * dim + b]; });

    std::vector<double> a(static_cast<size_t>(dim) * dim);
    for (int i = 0; i < dim; ++i) {
        for (int j = 0; j < dim; ++j) a[i * dim + j] = moment[order[i] * dim + order[j]] / mean;
        a[i * dim + i] += kDamping;
    }
    if (!factor_upper(a, dim)) return false;
    invert_unit_upper(a, dim);

    std::vector<float> weights;
    weights.reserve(static_cast<size_t>(dim) * (dim - 1) / 2);
    for (int j = 0; j < dim; ++j) {
        for (int c = j + 1; c < dim; ++c) weights.push_back(static_cast<float>(a[j * dim + c]));
    }
    if (!std::all_of(weights.begin(), weights.end(), [](float w) { return std::isfinite(w); })) return false;
    feedback->dim = dim;
    feedback->order = std::move(order);
    feedback->weights = std::move(weights);
    return true;
}

void encode_row(const Feedback& feedback, int bits, float* y, const float* scale, const float* min,
                uint8_t* codes) {
    for (int j = 0; j < feedback.dim; ++j) {
        const int channel = feedback.order[j];
        const GroupParams params{scale[channel], min[channel]};
        const int code = encode(y[channel], params, bits);
        codes[channel] = static_cast<uint8_t>(code);
        if (std::isnan(params.scale)) continue;  // a damaged group passes nothing on
        const float error = y[channel] - decode(code, params);
        const float* weight = feedback.weights.data() + feedback_row(feedback.dim, j);
        for (int c = j + 1; c < feedback.dim; ++c) {
            float& later = y[feedback.order[c]];
            later = std::fma(-error, weight[c - j - 1], later);
        }
    }
}

}  // namespace kivi
