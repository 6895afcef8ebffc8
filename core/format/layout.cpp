// Byte counts, all in 64 bits.
#include "format/layout.h"

#include "format/half.h"
#include "format/policy.h"

namespace kivi {

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// FNV-1a, 64 bits, over the eight little-endian bytes of each word.
class Fnv1a {
  public:
    void add(uint64_t word) {
        for (int byte = 0; byte < 8; ++byte)
            hash_ = (hash_ ^ ((word >> (8 * byte)) & 0xFFu)) * 0x100000001B3u;
    }
    void add(const kivi_spec& spec) {
        for (int32_t field : {spec.bits, spec.axis, spec.group, spec.range}) add(word_of(field));
        add(bits_of(spec.range_ratio));
        for (int32_t field : {spec.param_dtype, spec.transform, spec.rounding}) add(word_of(field));
    }
    static uint64_t word_of(int32_t field) { return static_cast<uint32_t>(field); }
    uint64_t hash() const { return hash_; }

  private:
    uint64_t hash_ = 0xCBF29CE484222325u;
};

}  // namespace

int64_t packed_bytes(const kivi_spec& spec, int dim, int32_t window_dtype, int64_t tokens) {
    if (spec.bits == 16) return tokens * dim * static_cast<int64_t>(dtype_bytes(window_dtype));
    const GroupShape shape = group_shape(spec, dim);
    int64_t row_of_groups = 0;
    for (int block = 0; block < shape.blocks_a_row; ++block) {
        const int elements = shape.tokens * group_channels(shape, dim, block);
        row_of_groups +=
            group_code_bytes(spec, elements) + 2 * static_cast<int64_t>(dtype_bytes(spec.param_dtype));
    }
    return tokens / shape.tokens * row_of_groups;
}

int64_t page_part_bytes(const kivi_spec& spec, int dim, int32_t window_dtype) {
    return packed_bytes(spec, dim, window_dtype, kPageTokens);
}

int64_t page_bytes(const kivi_layer& layer, int32_t window_dtype) {
    return page_part_bytes(layer.k, layer.key_dim, window_dtype) +
           page_part_bytes(layer.v, layer.value_dim, window_dtype);
}

int64_t block_bytes(const Model& model) {
    int64_t bytes = 0;
    for (const kivi_layer& layer : model.layers) {
        if (layer.kv_heads > 0) bytes += layer.kv_heads * page_bytes(layer, model.window_dtype);
    }
    return bytes;
}

double bits_per_element(const kivi_layer& layer, int32_t window_dtype) {
    const double elements = static_cast<double>(kPageTokens) * (layer.key_dim + layer.value_dim);
    return 8.0 * static_cast<double>(page_bytes(layer, window_dtype)) / elements;
}

int64_t blocks_per_sequence(const Model& model) {
    return most_blocks(model.windows, model.max_tokens);
}

int64_t pool_blocks(const Model& model) {
    if (model.pool_tokens > 0) return ceil_div(model.pool_tokens, kPageTokens);
    return model.max_sequences * blocks_per_sequence(model);
}

int64_t window_part_bytes(const Model& model, int layer, Part part) {
    const kivi_layer& shape = model.layers[layer];
    const int64_t rows = model.windows.sink + tail_capacity(model.windows, part);
    return shape.kv_heads * rows * dim_of(shape, part) *
           static_cast<int64_t>(dtype_bytes(model.window_dtype));
}

int64_t window_bytes(const Model& model) {
    int64_t bytes = 0;
    for (int layer = 0; layer < static_cast<int>(model.layers.size()); ++layer) {
        if (!model.has(layer)) continue;
        bytes += window_part_bytes(model, layer, Part::key) + window_part_bytes(model, layer, Part::value);
    }
    return model.max_sequences * bytes;
}

int64_t moment_bytes(const Model& model) {
    int64_t bytes = 0;
    for (const kivi_layer& layer : model.layers) {
        if (layer.kv_heads <= 0 || layer.k.rounding != KIVI_ROUND_QUERY_AWARE) continue;
        const int64_t dim = layer.key_dim;
        const int64_t matrix = dim * dim * 4, order = dim * 2, weights = dim * (dim - 1) / 2 * 4;
        bytes += layer.kv_heads * (matrix + order + weights);
    }
    return bytes;
}

uint64_t layout_id(const Model& model, uint64_t order) {
    Fnv1a id;
    id.add(order);
    id.add(Fnv1a::word_of(model.window_dtype));
    id.add(static_cast<uint64_t>(model.windows.sink));
    id.add(model.layers.size());
    for (const kivi_layer& layer : model.layers) {
        for (int32_t field : {layer.kv_heads, layer.key_dim, layer.value_dim}) id.add(Fnv1a::word_of(field));
        id.add(layer.k);
        id.add(layer.v);
    }
    return id.hash();
}

}  // namespace kivi
