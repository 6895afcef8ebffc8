// Packing by the scalar definitions of format/: the plain path, and what the fast packers are tested against.
#include "cpu/pack.h"

#include <algorithm>

#include "format/quantize.h"

namespace kivi::cpu {
namespace {

// Rows of these many tokens stay in the first-level cache; the query-aware packer takes more of them together.
constexpr int kTokensAtOnce = 32;
constexpr int kQueryAwareTokensAtOnce = 64;

void put_params(const PageOrder& order, uint8_t* part, int token, int channel, const GroupParams& params) {
    const int32_t dtype = order.spec.param_dtype == KIVI_F32 ? KIVI_F32 : KIVI_F16;
    store_element(part + scale_offset(order, token, channel), dtype, 0, params.scale);
    store_element(part + min_offset(order, token, channel), dtype, 0, params.min);
}

// One group of tokens, each channel with its own parameters.
void pack_channel_group(const TensorStore& store, const Feedback* feedback, const float* rows, int first,
                        uint8_t* part) {
    const int dim = store.dim, group = store.spec.group;
    float scale[kMaxDim], min[kMaxDim];
    for (int c = 0; c < dim; ++c) {
        const GroupParams params = group_params(store.spec, rows + c, dim, group);
        scale[c] = params.scale;
        min[c] = params.min;
        put_params(store.order, part, first, c, params);
    }
    for (int t = 0; t < group; ++t) {
        const float* x = rows + static_cast<int64_t>(t) * dim;
        uint8_t codes[kMaxDim];
        if (feedback != nullptr) {
            float y[kMaxDim];
            std::copy(x, x + dim, y);
            encode_row(*feedback, store.spec.bits, y, scale, min, codes);
        } else {
            for (int c = 0; c < dim; ++c) {
                codes[c] = static_cast<uint8_t>(encode(x[c], {scale[c], min[c]}, store.spec.bits));
            }
        }
        for (int c = 0; c < dim; ++c) code_put(store.order, part, first + t, c, codes[c]);
    }
}

// One token, each block of channels with its own parameters.
void pack_token(const TensorStore& store, const float* x, int token, uint8_t* part) {
    const GroupShape shape = group_shape(store.spec, store.dim);
    for (int block = 0; block < shape.blocks_a_row; ++block) {
        const int begin = block * shape.channels;
        const int n = group_channels(shape, store.dim, block);
        const GroupParams params = group_params(store.spec, x + begin, 1, n);
        put_params(store.order, part, token, begin, params);
        for (int c = begin; c < begin + n; ++c) {
            code_put(store.order, part, token, c, encode(x[c], params, store.spec.bits));
        }
    }
}

}  // namespace

int pack_step(const TensorStore& store) {
    const kivi_spec& spec = store.spec;
    const int rows = spec.rounding == KIVI_ROUND_QUERY_AWARE ? kQueryAwareTokensAtOnce : kTokensAtOnce;
    return spec.bits != 16 && spec.axis == KIVI_AXIS_CHANNEL ? std::max(spec.group, rows) : rows;
}

void pack_rows_plain(const TensorStore& store, const Feedback* feedback, const float* rows, int first,
                     int count, uint8_t* part) {
    if (store.spec.bits == 16) {
        for (int64_t i = 0; i < static_cast<int64_t>(count) * store.dim; ++i) {
            store_element(part, store.window_dtype, static_cast<int64_t>(first) * store.dim + i, rows[i]);
        }
    } else if (store.spec.axis == KIVI_AXIS_CHANNEL) {
        for (int t = 0; t < count; t += store.spec.group) {
            pack_channel_group(store, feedback, rows + static_cast<int64_t>(t) * store.dim, first + t, part);
        }
    } else {
        for (int t = 0; t < count; ++t) {
            pack_token(store, rows + static_cast<int64_t>(t) * store.dim, first + t, part);
        }
    }
}

}  // namespace kivi::cpu
