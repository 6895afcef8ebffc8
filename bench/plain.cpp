// Compiled for the machine that runs it, with fast-math; see plain.h.
#include "plain.h"

#include <cmath>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace bench {
namespace {

constexpr int kWidth = 8;
typedef float Floats __attribute__((vector_size(4 * kWidth)));

Floats load(const float* from) {
    Floats x;
    __builtin_memcpy(&x, from, sizeof x);
    return x;
}

Floats load(const uint16_t* from) {
#if defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    Floats x;
    for (int i = 0; i < kWidth; ++i) {
        _Float16 h;
        __builtin_memcpy(&h, from + i, sizeof h);
        x[i] = static_cast<float>(h);
    }
    return x;
#endif
}

template <class T>
void head(const T* k, const T* v, int64_t tokens, int dim, const float* q, float* scores, float* out) {
    const float scale = 1 / std::sqrt(static_cast<float>(dim));
    float max = -INFINITY, sum = 0;
    for (int64_t t = 0; t < tokens; ++t) {
        Floats acc = {};
        for (int c = 0; c < dim; c += kWidth) acc += load(q + c) * load(k + t * dim + c);
        float dot = 0;
        for (int i = 0; i < kWidth; ++i) dot += acc[i];
        scores[t] = dot * scale;
        max = scores[t] > max ? scores[t] : max;
    }
    for (int64_t t = 0; t < tokens; ++t) {
        scores[t] = std::exp(scores[t] - max);
        sum += scores[t];
    }
    for (int c = 0; c < dim; ++c) out[c] = 0;
    for (int64_t t = 0; t < tokens; ++t) {
        for (int c = 0; c < dim; c += kWidth) {
            const Floats x = load(out + c) + scores[t] * load(v + t * dim + c);
            __builtin_memcpy(out + c, &x, sizeof x);
        }
    }
    for (int c = 0; c < dim; ++c) out[c] /= sum;
}

}  // namespace

void plain_head_f32(const float* k, const float* v, int64_t tokens, int dim, const float* q, float* scores,
                    float* out) {
    head(k, v, tokens, dim, q, scores, out);
}

void plain_head_f16(const uint16_t* k, const uint16_t* v, int64_t tokens, int dim, const float* q, float* scores,
                    float* out) {
    head(k, v, tokens, dim, q, scores, out);
}

uint64_t sum(const uint64_t* data, int64_t count) {
    uint64_t total[8] = {};
    for (int64_t i = 0; i + 32 <= count; i += 32) {
        for (int j = 0; j < 32; ++j) total[j % 8] += data[i + j];
    }
    uint64_t all = 0;
    for (uint64_t x : total) all += x;
    return all;
}

}  // namespace bench
