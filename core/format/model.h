// The validated description of a cache: what create was asked for, with every default filled in.
// Made by cache/config.cpp, read by everything else, never changed after create.
#pragma once
#include <cstdint>
#include <vector>

#include "kivi/kivi.h"

namespace kivi {

constexpr int kPageTokens = 128;  // tokens of a page; one block id stands for 128 tokens of all layers
constexpr int kMaxDim = 512;      // channels of the widest head; a multiple of 8

struct Windows {
    int64_t sink = 0;    // S
    int64_t recent = 0;  // R
    int64_t flush = 1;   // F
    int64_t unit = 1;    // U: least common multiple of all channel-axis groups
    int32_t schedule = KIVI_SCHEDULE_ROLLING;
};

struct Model {
    int32_t device = KIVI_CPU;
    int32_t device_id = 0;
    int32_t window_dtype = KIVI_F16;
    int32_t max_sequences = 0;
    int64_t max_tokens = 0;
    int64_t pool_tokens = 0;  // as asked for; blocks of the pool: layout.h
    Windows windows;
    std::vector<kivi_layer> layers;  // kv_heads 0: absent
    int32_t threads = 1;
    bool reference = false;

    bool has(int layer) const { return layers[layer].kv_heads > 0; }
};

// The two tensors of a layer. K and V are stored independently by the same code.
enum class Part { key, value };

inline const kivi_spec& spec_of(const kivi_layer& layer, Part part) {
    return part == Part::key ? layer.k : layer.v;
}
inline int dim_of(const kivi_layer& layer, Part part) {
    return part == Part::key ? layer.key_dim : layer.value_dim;
}

}  // namespace kivi
