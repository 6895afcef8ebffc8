// Where the code and the parameters of an element stand inside one tensor's part of a page.
//
// canonical (format/layout.h), here for a channel-axis tensor with groups of 32 tokens:
//
//   codes   [token block 0: channel 0 | channel 1 | ... | channel dim-1] [token block 1: ...] ...
//           each cell: bits * 32 / 8 bytes, the bit stream of one group
//   scales  [token block][channel]      mins  [token block][channel]
#include "cpu/page_order.h"

#include "format/half.h"
#include "format/quantize.h"

namespace kivi::cpu {
namespace {

struct CanonicalPlace {
    int64_t stream;  // first byte of the group's codes
    int64_t group;   // number of the group in the page
    int index;       // of the element in its group
};

int64_t param_bytes(const kivi_spec& spec) { return spec.param_dtype == KIVI_F32 ? 4 : 2; }

// Code bytes of all groups that hold one token of a token-axis tensor.
int64_t token_row_bytes(const kivi_spec& spec, const GroupShape& shape, int dim) {
    const int last = shape.blocks_a_row - 1;
    return last * group_code_bytes(spec, shape.channels) + group_code_bytes(spec, group_channels(shape, dim, last));
}

CanonicalPlace canonical_place(const kivi_spec& spec, int dim, int token, int channel) {
    const GroupShape shape = group_shape(spec, dim);
    if (spec.axis == KIVI_AXIS_CHANNEL) {
        const int64_t group = static_cast<int64_t>(token / shape.tokens) * dim + channel;
        return {group * group_code_bytes(spec, shape.tokens), group, token % shape.tokens};
    }
    const int block = channel / shape.channels;
    return {token * token_row_bytes(spec, shape, dim) + block * group_code_bytes(spec, shape.channels),
            static_cast<int64_t>(token) * shape.blocks_a_row + block, channel % shape.channels};
}

int64_t canonical_code_bytes(const kivi_spec& spec, int dim) {
    const GroupShape shape = group_shape(spec, dim);
    if (spec.axis == KIVI_AXIS_CHANNEL) return shape.groups * group_code_bytes(spec, shape.tokens);
    return kPageTokens * token_row_bytes(spec, shape, dim);
}

}  // namespace

PageOrder page_order(const kivi_spec& spec, int dim, int32_t window_dtype) {
    PageOrder order;
    order.order = Order::canonical;
    order.spec = spec;
    order.dim = dim;
    order.window_dtype = window_dtype;
    return order;
}

int code_get(const PageOrder& order, const uint8_t* part, int token, int channel) {
    const CanonicalPlace place = canonical_place(order.spec, order.dim, token, channel);
    return get_code(part + place.stream, order.spec.bits, place.index);
}

void code_put(const PageOrder& order, uint8_t* part, int token, int channel, int code) {
    const CanonicalPlace place = canonical_place(order.spec, order.dim, token, channel);
    const int bits = order.spec.bits;
    const int64_t first = static_cast<int64_t>(place.index) * bits;
    for (int64_t bit = first; bit < first + bits; ++bit) {
        uint8_t& byte = part[place.stream + bit / 8];
        byte = static_cast<uint8_t>(byte & ~(1u << (bit % 8)));
    }
    put_code(part + place.stream, bits, place.index, code);
}

int64_t scale_offset(const PageOrder& order, int token, int channel) {
    const CanonicalPlace place = canonical_place(order.spec, order.dim, token, channel);
    return canonical_code_bytes(order.spec, order.dim) + place.group * param_bytes(order.spec);
}

int64_t min_offset(const PageOrder& order, int token, int channel) {
    const GroupShape shape = group_shape(order.spec, order.dim);
    return scale_offset(order, token, channel) + shape.groups * param_bytes(order.spec);
}

}  // namespace kivi::cpu
