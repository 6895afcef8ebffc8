// For every query the scores, weights and outputs of the exact tensors and of what a decode step would show:
//
//   position   0 .. S - 1    S .. border - 1     border .. p          the border is that of length p + 1
//   exact      k, v          k, v                k, v
//   shown      stored rows   decoded groups      stored rows          in the stored basis
//
// Everything is compared in the stored basis: an orthonormal transform changes no norm and no score.
#include "cache/probe.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cache/moments.h"
#include "format/hadamard.h"
#include "format/half.h"
#include "format/policy.h"
#include "format/quantize.h"
#include "format/row.h"

namespace kivi {
namespace {

// K or V of one head: rows of `dim` numbers, token by token.
struct HeadRows {
    std::vector<double> exact, stored, packed;
    int64_t border = 0;  // of the last position: tokens from S to here have packed rows
};

// Scale and min of each channel of `tokens` consecutive stored rows, where groups run along channels.
void token_params(const kivi_spec& spec, int dim, const float* row, std::vector<float>& scale,
                  std::vector<float>& min) {
    const int group = spec.group == KIVI_GROUP_HEAD ? dim : spec.group;
    for (int begin = 0; begin < dim; begin += group) {
        const int n = std::min(group, dim - begin);
        const GroupParams params = group_params(spec, row + begin, 1, n);
        std::fill_n(scale.begin() + begin, n, params.scale);
        std::fill_n(min.begin() + begin, n, params.min);
    }
}

void channel_params(const kivi_spec& spec, int dim, const float* rows, std::vector<float>& scale,
                    std::vector<float>& min) {
    for (int channel = 0; channel < dim; channel++) {
        const GroupParams params = group_params(spec, rows + channel, dim, spec.group);
        scale[channel] = params.scale;
        min[channel] = params.min;
    }
}

// Encodes and decodes one stored row.
void code_row(const kivi_spec& spec, int dim, const Feedback* feedback, const float* row,
              const std::vector<float>& scale, const std::vector<float>& min, double* decoded) {
    std::vector<uint8_t> codes(dim);
    if (feedback != nullptr) {
        std::vector<float> y(row, row + dim);
        encode_row(*feedback, spec.bits, y.data(), scale.data(), min.data(), codes.data());
    } else {
        for (int c = 0; c < dim; c++)
            codes[c] = static_cast<uint8_t>(encode(row[c], {scale[c], min[c]}, spec.bits));
    }
    for (int c = 0; c < dim; c++) decoded[c] = decode(codes[c], {scale[c], min[c]});
}

HeadRows make_rows(const ProbeCall& call, Part part, int head, const Feedback* feedback) {
    const kivi_spec& spec = spec_of(call.layer, part);
    const View& view = part == Part::key ? call.k : call.v;
    const int dim = dim_of(call.layer, part);
    const size_t size = static_cast<size_t>(call.tokens) * dim;

    HeadRows rows;
    rows.exact.resize(size);
    rows.stored.resize(size);
    std::vector<float> stored(size);
    std::vector<float> x(dim);
    std::vector<uint8_t> bytes(dim * sizeof(float));
    for (int64_t token = 0; token < call.tokens; token++) {
        double* const exact = &rows.exact[token * dim];
        for (int c = 0; c < dim; c++) {
            x[c] =
                load_element(view.data, view.dtype, token * view.token_stride + head * view.head_stride + c);
            exact[c] = x[c];
        }
        if (spec.transform == KIVI_TRANSFORM_HADAMARD) hadamard(exact, dim);
        store_row(x.data(), dim, spec.transform, call.window_dtype, bytes.data());
        for (int c = 0; c < dim; c++) {
            stored[token * dim + c] = load_element(bytes.data(), call.window_dtype, c);
            rows.stored[token * dim + c] = stored[token * dim + c];
        }
    }

    rows.packed = rows.stored;
    rows.border = tail_begin(call.windows, after_append(call.windows, Span{}, call.tokens), part);
    if (spec.bits == 16) return rows;
    std::vector<float> scale(dim), min(dim);
    const bool channel_axis = spec.axis == KIVI_AXIS_CHANNEL;
    const int64_t step = channel_axis ? spec.group : 1;
    for (int64_t begin = call.windows.sink; begin < rows.border; begin += step) {
        if (channel_axis) channel_params(spec, dim, &stored[begin * dim], scale, min);
        for (int64_t token = begin; token < begin + step; token++) {
            if (!channel_axis) token_params(spec, dim, &stored[token * dim], scale, min);
            code_row(spec, dim, feedback, &stored[token * dim], scale, min, &rows.packed[token * dim]);
        }
    }
    return rows;
}

// scores[t - begin] = q . row t, summed channel by channel over all tokens at once; `columns` holds the rows
// channel by channel.
void add_scores(const double* q, int dim, const std::vector<double>& columns, int64_t tokens, int64_t begin,
                int64_t end, double* scores) {
    std::fill(scores + begin, scores + std::max(begin, end), 0.0);
    for (int c = 0; c < dim; c++) {
        const double* const column = &columns[c * tokens];
        for (int64_t t = begin; t < end; t++) scores[t] += q[c] * column[t];
    }
}

std::vector<double> columns_of(const std::vector<double>& rows, int dim, int64_t tokens) {
    std::vector<double> columns(rows.size());
    for (int64_t t = 0; t < tokens; t++) {
        for (int c = 0; c < dim; c++) columns[c * tokens + t] = rows[t * dim + c];
    }
    return columns;
}

void add_output(const double* weights, const std::vector<double>& rows, int dim, int64_t begin, int64_t end,
                double* out) {
    for (int64_t t = begin; t < end; t++) {
        const double* const row = &rows[t * dim];
        for (int c = 0; c < dim; c++) out[c] += weights[t] * row[c];
    }
}

// Softmax of scores[begin .. end) after scale and cap, which are applied to the scores in place; weights may
// not be the scores. Returns the log of the sum of exp(score).
double softmax(const ProbeCall& call, double* scores, int64_t begin, int64_t end, double* weights) {
    double largest = -HUGE_VAL;
    for (int64_t t = begin; t < end; t++) {
        scores[t] *= call.scale;
        if (call.soft_cap > 0) scores[t] = call.soft_cap * std::tanh(scores[t] / call.soft_cap);
        largest = std::max(largest, scores[t]);
    }
    double sum = 0;
    for (int64_t t = begin; t < end; t++) sum += weights[t] = std::exp(scores[t] - largest);
    for (int64_t t = begin; t < end; t++) weights[t] /= sum;
    return largest + std::log(sum);
}

// Sums of squares and of means, from which the results follow.
struct Sums {
    double key_error = 0, key = 0, value_error = 0, value = 0;
    double score_error = 0, score = 0;
    double output = 0, output_error = 0, output_error_key = 0, output_error_value = 0;
    double kl = 0, sparsity = 0;
    int64_t rows = 0;

    void add(const Sums& other) {
        key_error += other.key_error, key += other.key;
        value_error += other.value_error, value += other.value;
        score_error += other.score_error, score += other.score;
        output += other.output, output_error += other.output_error;
        output_error_key += other.output_error_key, output_error_value += other.output_error_value;
        kl += other.kl, sparsity += other.sparsity, rows += other.rows;
    }
    kivi_probe_result result() const {
        const auto relative = [](double error, double of) {
            return error == 0 ? 0.0 : std::sqrt(error / of);
        };
        const double count = rows > 0 ? static_cast<double>(rows) : 1;
        kivi_probe_result result{};
        result.key_error = relative(key_error, key);
        result.value_error = relative(value_error, value);
        result.score_error = relative(score_error, score);
        result.attention_kl = kl / count;
        result.output_error = relative(output_error, output);
        result.output_error_key = relative(output_error_key, output);
        result.output_error_value = relative(output_error_value, output);
        result.sparsity = sparsity / count;
        return result;
    }
};

void add_stored_error(const HeadRows& rows, int dim, int64_t sink, double* error, double* of) {
    for (int64_t i = sink * dim; i < rows.border * dim; i++) {
        const double difference = rows.packed[i] - rows.exact[i];
        *error += difference * difference;
        *of += rows.exact[i] * rows.exact[i];
    }
}

// All queries of one KV head.
Sums probe_head(const ProbeCall& call, int head, const Feedback* feedback) {
    const int key_dim = call.layer.key_dim, value_dim = call.layer.value_dim;
    const int64_t tokens = call.tokens, sink = call.windows.sink;
    const HeadRows keys = make_rows(call, Part::key, head, feedback);
    const HeadRows values = make_rows(call, Part::value, head, nullptr);
    const std::vector<double> exact_columns = columns_of(keys.exact, key_dim, tokens);
    const std::vector<double> stored_columns = columns_of(keys.stored, key_dim, tokens);
    const std::vector<double> packed_columns = columns_of(keys.packed, key_dim, tokens);

    Sums sums;
    add_stored_error(keys, key_dim, sink, &sums.key_error, &sums.key);
    add_stored_error(values, value_dim, sink, &sums.value_error, &sums.value);

    std::vector<double> q(key_dim), exact_scores(tokens), shown_scores(tokens), exact_weights(tokens),
        shown_weights(tokens);
    std::vector<double> exact(value_dim), by_key(value_dim), by_value(value_dim), shown(value_dim);
    const int ratio = call.layer.q_heads / call.layer.kv_heads;
    for (int64_t query = 0; query < call.queries; query++) {
        const int64_t position = tokens - call.queries + query, end = position + 1;
        const int64_t begin = call.window_left < 0 ? 0 : std::max<int64_t>(0, position - call.window_left);
        const Span span = after_append(call.windows, Span{}, end);
        // Calls visit(rows or columns, from, to) for the parts of begin .. end - 1.
        const auto shown_parts = [&](Part part, const std::vector<double>& stored,
                                     const std::vector<double>& packed, const auto& visit) {
            const int64_t border = std::min(end, tail_begin(call.windows, span, part));
            const int64_t first = std::clamp(sink, begin, end), second = std::clamp(border, first, end);
            visit(stored, begin, first);
            visit(packed, first, second);
            visit(stored, second, end);
        };
        for (int member = 0; member < ratio; member++) {
            const int64_t at = query * call.q.token_stride + (head * ratio + member) * call.q.head_stride;
            for (int c = 0; c < key_dim; c++) q[c] = load_element(call.q.data, call.q.dtype, at + c);
            if (call.layer.k.transform == KIVI_TRANSFORM_HADAMARD) hadamard(q.data(), key_dim);

            add_scores(q.data(), key_dim, exact_columns, tokens, begin, end, exact_scores.data());
            shown_parts(Part::key, stored_columns, packed_columns,
                        [&](const std::vector<double>& columns, int64_t from, int64_t to) {
                            add_scores(q.data(), key_dim, columns, tokens, from, to, shown_scores.data());
                        });
            const double exact_lse = softmax(call, exact_scores.data(), begin, end, exact_weights.data());
            const double shown_lse = softmax(call, shown_scores.data(), begin, end, shown_weights.data());

            const double count = static_cast<double>(end - begin);
            double mean = 0, mean_error = 0, kl = 0, largest = 0;
            for (int64_t t = begin; t < end; t++) {
                mean += exact_scores[t] / count;
                mean_error += (shown_scores[t] - exact_scores[t]) / count;
                largest = std::max(largest, exact_weights[t]);
            }
            int64_t small = 0;
            for (int64_t t = begin; t < end; t++) {
                const double centred = exact_scores[t] - mean;
                const double error = shown_scores[t] - exact_scores[t];
                sums.score += centred * centred;
                sums.score_error += (error - mean_error) * (error - mean_error);
                kl += exact_weights[t] * ((exact_scores[t] - exact_lse) - (shown_scores[t] - shown_lse));
                small += exact_weights[t] < 0.01 * largest;
            }
            sums.kl += kl < 0 ? 0 : kl;
            sums.sparsity += static_cast<double>(small) / count;
            sums.rows++;

            for (std::vector<double>* out : {&exact, &by_key, &by_value, &shown})
                std::fill(out->begin(), out->end(), 0);
            add_output(exact_weights.data(), values.exact, value_dim, begin, end, exact.data());
            add_output(shown_weights.data(), values.exact, value_dim, begin, end, by_key.data());
            shown_parts(Part::value, values.stored, values.packed,
                        [&](const std::vector<double>& rows, int64_t from, int64_t to) {
                            add_output(exact_weights.data(), rows, value_dim, from, to, by_value.data());
                            add_output(shown_weights.data(), rows, value_dim, from, to, shown.data());
                        });
            const auto squared = [](double x) { return x * x; };
            for (int c = 0; c < value_dim; c++) {
                sums.output += squared(exact[c]);
                sums.output_error += squared(shown[c] - exact[c]);
                sums.output_error_key += squared(by_key[c] - exact[c]);
                sums.output_error_value += squared(by_value[c] - exact[c]);
            }
        }
    }
    return sums;
}

// Means of q q' of the call's own queries, in the stored basis.
std::vector<float> own_moments(const ProbeCall& call) {
    const int dim = call.layer.key_dim, ratio = call.layer.q_heads / call.layer.kv_heads;
    const size_t size = static_cast<size_t>(dim) * dim;
    std::vector<float> means(call.layer.kv_heads * size);
    std::vector<double> sum(size);
    std::vector<double> q(dim);
    for (int head = 0; head < call.layer.kv_heads; head++) {
        std::fill(sum.begin(), sum.end(), 0);
        for (int64_t query = 0; query < call.queries; query++) {
            for (int member = 0; member < ratio; member++) {
                const int64_t at = query * call.q.token_stride + (head * ratio + member) * call.q.head_stride;
                for (int c = 0; c < dim; c++) q[c] = load_element(call.q.data, call.q.dtype, at + c);
                if (call.layer.k.transform == KIVI_TRANSFORM_HADAMARD) hadamard(q.data(), dim);
                for (int i = 0; i < dim; i++) {
                    for (int j = 0; j < dim; j++) sum[static_cast<size_t>(i) * dim + j] += q[i] * q[j];
                }
            }
        }
        const double count = static_cast<double>(call.queries * ratio);
        for (size_t i = 0; i < size; i++) means[head * size + i] = static_cast<float>(sum[i] / count);
    }
    return means;
}

}  // namespace

ProbeAnswer probe(const ProbeCall& call) {
    std::vector<Feedback> tables;
    if (call.layer.k.rounding == KIVI_ROUND_QUERY_AWARE) {
        tables = make_tables(
            call.moments ? moments_in_stored_basis(call.moments, call.layer, false) : own_moments(call),
            call.layer);
    }
    ProbeAnswer answer;
    Sums all;
    for (int head = 0; head < call.layer.kv_heads; head++) {
        const Sums sums = probe_head(call, head, tables.empty() ? nullptr : &tables[head]);
        answer.heads.push_back(sums.result());
        all.add(sums);
    }
    answer.total = all.result();
    return answer;
}

}  // namespace kivi
