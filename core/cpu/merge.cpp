// One query head at a time: weights in double from the largest LSE down, so nothing overflows.
#include "cpu/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "format/half.h"

namespace kivi::cpu {
namespace {

int64_t element(const View& view, int64_t row, int64_t token, int64_t head) {
    return row * view.row_stride + token * view.token_stride + head * view.head_stride;
}

// Merges the parts of one query head. All values of a channel are read before its result is written, so out
// may be one of the parts.
void merge_head(const MergeCall& call, int64_t row, int64_t token, int64_t head,
                std::vector<double>& weights) {
    const double none = -std::numeric_limits<double>::infinity();
    const size_t parts = call.outs.size();
    double largest = none;
    int live = 0;
    size_t last_live = 0;
    for (size_t i = 0; i < parts; i++) {
        const View& lse = call.lses[i];
        weights[i] = load_element(lse.data, lse.dtype, element(lse, row, token, head));
        if (weights[i] == none) continue;
        live++;
        last_live = i;
        // A NaN stays the largest: it marks a head that saw a non-finite key, and so does the result.
        if (std::isnan(weights[i]) || weights[i] > largest) largest = weights[i];
    }
    const bool has_sink = call.learned_sinks != nullptr;
    const double top = has_sink ? std::max<double>(call.learned_sinks[head], largest) : largest;

    double parts_sum = 0;
    for (size_t i = 0; i < parts; i++) {
        if (weights[i] == none) {
            weights[i] = 0;
            continue;
        }
        parts_sum += std::exp(weights[i] - largest);
        weights[i] = std::exp(weights[i] - top);
    }
    double total = 0;
    for (size_t i = 0; i < parts; i++) total += weights[i];
    if (has_sink) total += std::exp(call.learned_sinks[head] - top);

    const int64_t to = element(call.out, row, token, head);
    const auto channel_of = [&](size_t part, int64_t channel) {
        const View& out = call.outs[part];
        return load_element(out.data, out.dtype, element(out, row, token, head) + channel);
    };
    for (int64_t channel = 0; channel < call.dim; channel++) {
        float merged = 0;
        if (live == 1 && !has_sink) {
            merged = channel_of(last_live, channel);
        } else {
            double sum = 0;
            for (size_t i = 0; i < parts; i++) {
                if (weights[i] != 0) sum += weights[i] / total * channel_of(i, channel);
            }
            merged = static_cast<float>(sum);
        }
        store_element(call.out.data, call.out.dtype, to + channel, merged);
    }
    if (call.lse) {
        const double lse = live == 0 ? none : largest + std::log(parts_sum);
        store_element(call.lse.data, call.lse.dtype, element(call.lse, row, token, head),
                      static_cast<float>(lse));
    }
}

}  // namespace

void merge_parts(const MergeCall& call) {
    std::vector<double> weights(call.outs.size());
    for (int64_t row = 0; row < call.rows; row++) {
        for (int64_t token = 0; token < call.tokens; token++) {
            for (int64_t head = 0; head < call.heads; head++) merge_head(call, row, token, head, weights);
        }
    }
}

}  // namespace kivi::cpu
