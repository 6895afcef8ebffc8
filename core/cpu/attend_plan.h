// What attend needs to know of a layer: how each tensor is read, the sizes of working memory, how sequences are split.
#pragma once
#include <algorithm>
#include <cstdint>

#include "backend/backend.h"
#include "cpu/kernels.h"
#include "cpu/storage.h"

namespace kivi::cpu {

constexpr int64_t kSplitTokens = 16 * kPageTokens;
constexpr int64_t kLongSplitTokens = 32 * kPageTokens;  // starting a split costs the time of half a page
constexpr int64_t kLongTokens = 64 * kPageTokens;       // packed; from here on splits are long
constexpr int kSplitQueries = 4;  // rows with more queries than this have work enough without splits

inline int64_t split_tokens(int64_t packed) { return packed < kLongTokens ? kSplitTokens : kLongSplitTokens; }
inline int padded(int dim) { return (dim + kLanes - 1) / kLanes * kLanes; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How attend reads the packed part of a tensor.
enum class Reader { rows, packed, decoded };

inline Reader reader_of(const kivi_spec& spec, int dim, Part part) {
    if (dim % kLanes != 0) return Reader::decoded;
    if (spec.bits == 16) return Reader::rows;
    const int32_t axis = part == Part::key ? KIVI_AXIS_CHANNEL : KIVI_AXIS_TOKEN;
    const bool lanes = page_order(spec, dim).order == Order::lanes;
    return lanes && spec.axis == axis ? Reader::packed : Reader::decoded;
}

// Sizes and choices of a layer that every item needs.
struct Plan {
    const LayerStore& layer;
    const Kernels& kernels;
    Reader read_keys, read_values;
    int ratio;                // query heads of a KV head
    int key_dim, value_dim;   // padded
    PackedPart keys{}, values{};
    int mins = 0;             // offsets in an accumulator: sums of p * min, sums over fresh values
    int fresh = 0;
    int acc_size = 0;
    int part_floats = 0;      // a part of a query row, kept until all of its splits are there: max, sum, sums

    // `fresh_values`: calls bring values of their own, which are summed apart.
    Plan(const LayerStore& store, const Kernels& table, bool fresh_values)
        : layer(store),
          kernels(table),
          read_keys(reader(store.key)),
          read_values(reader(store.value)),
          ratio(store.shape.q_heads / store.shape.kv_heads),
          key_dim(padded(store.key.dim)),
          value_dim(padded(store.value.dim)) {
        if (read_keys == Reader::packed) keys = packed_part(store.key);
        if (read_values == Reader::packed) values = packed_part(store.value);
        mins = value_dim;
        fresh = mins + values.groups * kLanes;
        acc_size = fresh + (fresh_values ? value_dim : 0);
        part_floats = kLanes + (fresh_values ? 2 : 1) * value_dim;
    }

    static Reader reader(const TensorStore& store) {
        return reader_of(store.spec, store.dim, store.part);
    }

    static PackedPart packed_part(const TensorStore& store) {
        const GroupShape shape = group_shape(store.spec, store.dim);
        const bool keys = store.part == Part::key;
        PackedPart part;
        part.data = nullptr;
        part.dim = store.dim;
        part.group = keys ? shape.tokens : shape.channels;
        part.groups = keys ? kPageTokens / shape.tokens : shape.blocks_a_row;
        part.scales = scale_offset(store.order, 0, 0);
        part.mins = min_offset(store.order, 0, 0);
        return part;
    }

    int64_t splits(const Row& row) const {
        if (row.count > kSplitQueries) return 1;
        const int64_t tokens = packed_tokens(row);
        return std::max<int64_t>(1, ceil_div(tokens, split_tokens(tokens)));
    }
    int64_t packed_tokens(const Row& row) const {
        const int64_t border = std::max(row.before.key_border, row.before.value_border);
        return std::max<int64_t>(0, border - layer.key.windows.sink);
    }
    int64_t blocks(const Row& row) const { return ceil_div(row.count * ratio, kBlockRows); }
    int64_t most_split_blocks() const { return ceil_div(kSplitQueries * ratio, kBlockRows); }
};

}  // namespace kivi::cpu
