// Pages of this backend to and from the canonical order: one walk over the groups serves both directions.
#include "cpu/canonical.h"

#include <cstring>

#include "format/quantize.h"

namespace kivi::cpu {
namespace {

struct Group {
    int token, channel;    // of its first element
    int tokens, channels;  // one of them is 1
    int64_t code_begin;    // canonical offsets among the groups of the tokens at hand
    int64_t number;

    int size() const { return tokens * channels; }
    int token_of(int i) const { return tokens > 1 ? token + i : token; }
    int channel_of(int i) const { return channels > 1 ? channel + i : channel; }
};

// Calls visit(group) in canonical order. Returns the bytes of codes.
template <class Visit>
int64_t for_each_group(const TensorStore& store, int64_t tokens, Visit&& visit) {
    const GroupShape shape = group_shape(store.spec, store.dim);
    int64_t bytes = 0, number = 0;
    for (int token = 0; token < tokens; token += shape.tokens) {
        for (int block = 0; block < shape.blocks_a_row; ++block) {
            const bool by_channel = store.spec.axis == KIVI_AXIS_CHANNEL;
            const int channels = by_channel ? 1 : group_channels(shape, store.dim, block);
            const Group group{token, block * shape.channels, shape.tokens, channels, bytes, number++};
            visit(group);
            bytes += group_code_bytes(store.spec, group.size());
        }
    }
    return bytes;
}

struct Regions {
    int64_t scales, mins, param_bytes;
};

Regions regions(const TensorStore& store, int64_t tokens) {
    int64_t groups = 0;
    const int64_t codes = for_each_group(store, tokens, [&](const Group&) { ++groups; });
    const int64_t param_bytes = store.spec.param_dtype == KIVI_F32 ? 4 : 2;
    return {codes, codes + groups * param_bytes, param_bytes};
}

}  // namespace

void export_part(const TensorStore& store, const uint8_t* part, int64_t tokens, uint8_t* to) {
    if (store.spec.bits == 16) {
        std::memcpy(to, part, static_cast<size_t>(tokens * store.row_bytes()));
        return;
    }
    const Regions at = regions(store, tokens);
    std::memset(to, 0, static_cast<size_t>(at.scales));
    for_each_group(store, tokens, [&](const Group& group) {
        for (int i = 0; i < group.size(); ++i) {
            put_code(to + group.code_begin, store.spec.bits, i,
                     code_get(store.order, part, group.token_of(i), group.channel_of(i)));
        }
        std::memcpy(to + at.scales + group.number * at.param_bytes,
                    part + scale_offset(store.order, group.token, group.channel), at.param_bytes);
        std::memcpy(to + at.mins + group.number * at.param_bytes,
                    part + min_offset(store.order, group.token, group.channel), at.param_bytes);
    });
}

void import_part(const TensorStore& store, uint8_t* part, int64_t tokens, const uint8_t* from) {
    if (store.spec.bits == 16) {
        std::memcpy(part, from, static_cast<size_t>(tokens * store.row_bytes()));
        return;
    }
    const Regions at = regions(store, tokens);
    for_each_group(store, tokens, [&](const Group& group) {
        for (int i = 0; i < group.size(); ++i) {
            code_put(store.order, part, group.token_of(i), group.channel_of(i),
                     get_code(from + group.code_begin, store.spec.bits, i));
        }
        std::memcpy(part + scale_offset(store.order, group.token, group.channel),
                    from + at.scales + group.number * at.param_bytes, at.param_bytes);
        std::memcpy(part + min_offset(store.order, group.token, group.channel),
                    from + at.mins + group.number * at.param_bytes, at.param_bytes);
    });
}

}  // namespace kivi::cpu
