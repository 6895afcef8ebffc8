// Sizes and the canonical order of packed data: pure functions of spec, dims and windows.
//
// The canonical order is what export writes, golden files hold and backends are compared in. A backend
// may order the bytes inside its own pages differently but never uses more of them: a page is exactly
// the canonical bytes of its 128 tokens, K part then V part.
//
//   one tensor of a page, canonical:  codes, group by group | scales | mins
//   channel axis  groups in the order [token block][channel], codes of a group over its tokens
//   token axis    groups in the order [token][channel block], codes of a group over its channels
//   a group's codes are a little-endian bit stream, lowest bits first, padded to a whole byte
#pragma once
#include <cstdint>

#include "format/host_device.h"
#include "format/model.h"

namespace kivi {

// How the groups of one tensor tile a page. 16-bit specs have no groups (groups is 0): 128 rows of
// window_dtype.
struct GroupShape {
    int tokens;        // of one group: `group` on the channel axis, 1 on the token axis
    int channels;      // of one (full) group: 1 on the channel axis
    int blocks_a_row;  // groups side by side for the same tokens: dim, or ceil(dim / channels)
    int64_t groups;    // in a page
};
KIVI_HOST_DEVICE inline GroupShape group_shape(const kivi_spec& spec, int dim) {
    if (spec.bits == 16) return {1, dim, 1, 0};
    if (spec.axis == KIVI_AXIS_CHANNEL) {
        return {spec.group, 1, dim, static_cast<int64_t>(kPageTokens / spec.group) * dim};
    }
    const int channels = spec.group == KIVI_GROUP_HEAD ? dim : spec.group;
    const int blocks = (dim + channels - 1) / channels;
    return {1, channels, blocks, static_cast<int64_t>(kPageTokens) * blocks};
}

// Channels of group `block` of a row (on the token axis the last may be short).
KIVI_HOST_DEVICE inline int group_channels(const GroupShape& shape, int dim, int block) {
    const int left = dim - block * shape.channels;
    return left < shape.channels ? left : shape.channels;
}

// ceil(bits * elements / 8)
KIVI_HOST_DEVICE inline int64_t group_code_bytes(const kivi_spec& spec, int elements) {
    return (static_cast<int64_t>(spec.bits) * elements + 7) / 8;
}

// Where an element stands in one tensor's part of a canonical page (128 tokens): the bit stream of its group,
// its place in that stream, and the number of the group among all groups of the part.
struct CanonicalPlace {
    int64_t stream;  // byte offset of the group's codes
    int64_t group;   // its scale is the group-th one
    int index;       // of the element in its group
};
KIVI_HOST_DEVICE inline int64_t canonical_row_bytes(const kivi_spec& spec, const GroupShape& shape, int dim) {
    const int last = shape.blocks_a_row - 1;  // token axis: codes of all groups of one token
    return last * group_code_bytes(spec, shape.channels) +
           group_code_bytes(spec, group_channels(shape, dim, last));
}
KIVI_HOST_DEVICE inline CanonicalPlace canonical_place(const kivi_spec& spec, int dim, int token,
                                                       int channel) {
    const GroupShape shape = group_shape(spec, dim);
    if (spec.axis == KIVI_AXIS_CHANNEL) {
        const int64_t group = static_cast<int64_t>(token / shape.tokens) * dim + channel;
        return {group * group_code_bytes(spec, shape.tokens), group, token % shape.tokens};
    }
    const int block = channel / shape.channels;
    return {token * canonical_row_bytes(spec, shape, dim) + block * group_code_bytes(spec, shape.channels),
            static_cast<int64_t>(token) * shape.blocks_a_row + block, channel % shape.channels};
}
// Codes of all groups of a part; scales and then mins follow.
KIVI_HOST_DEVICE inline int64_t canonical_code_bytes(const kivi_spec& spec, int dim) {
    const GroupShape shape = group_shape(spec, dim);
    if (spec.axis == KIVI_AXIS_CHANNEL) return shape.groups * group_code_bytes(spec, shape.tokens);
    return kPageTokens * canonical_row_bytes(spec, shape, dim);
}
// Canonical bytes of `tokens` consecutive packed tokens, one head, one tensor; on the channel axis `tokens`
// is a multiple of the group.
int64_t packed_bytes(const kivi_spec& spec, int dim, int32_t window_dtype, int64_t tokens);
int64_t page_part_bytes(const kivi_spec& spec, int dim, int32_t window_dtype);  // packed_bytes of 128 tokens
int64_t page_bytes(const kivi_layer& layer, int32_t window_dtype);              // K part + V part
int64_t block_bytes(const Model& model);                                        // all layers, all heads

// bits of a packed element, scale and min included, mean over K and V weighted by their dims.
double bits_per_element(const kivi_layer& layer, int32_t window_dtype);

int64_t pool_blocks(const Model& model);          // of the pool as created
int64_t blocks_per_sequence(const Model& model);  // at max_tokens
// Sink rows and ring of one sequence, all heads of one layer.
int64_t window_part_bytes(const Model& model, int layer, Part part);
int64_t window_bytes(const Model& model);  // all layers, all sequences
// fp32 matrices, coding orders and weights of all layers with query-aware rounding.
int64_t moment_bytes(const Model& model);

// Names an order of bytes: 0 is the canonical one (of blobs), others are the backends' own. Equal ids mean
// pages that can be exchanged: same order, specs, dims, heads, window dtype and sink (FORMAT.md, "Layout
// id").
uint64_t layout_id(const Model& model, uint64_t order);

}  // namespace kivi
