// Every refusal of kivi_config is one rule here.
#include "cache/config.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <string>

#include "backend/processors.h"
#include "cache/refuse.h"

namespace kivi {
namespace {

constexpr int kMostThreads = 1024;
constexpr int kMostLayers = 65536;  // far beyond any model; a count that was never set must not take all memory

bool is_one_of(int32_t value, std::initializer_list<int32_t> allowed) {
    for (int32_t candidate : allowed) {
        if (value == candidate) return true;
    }
    return false;
}

void check_dim(const std::string& name, int32_t dim) {
    if (dim < 8 || dim > kMaxDim || dim % 8 != 0) {
        refuse_argument(name, " is ", dim, "; it must be a multiple of 8 from 8 to ", kMaxDim);
    }
}

// Sizes are 64-bit integers everywhere, and block ids 32-bit. Estimated in floating point first, so that the
// exact functions of layout.h cannot overflow.
void check_sizes(const Model& model) {
    const double limit = std::ldexp(1.0, 62);
    double token_bytes = 0;  // of all layers and heads at the widest: no page or window row takes more
    for (const kivi_layer& layer : model.layers) {
        const double elements = static_cast<double>(layer.kv_heads) * (layer.key_dim + layer.value_dim);
        token_bytes += 16 * elements;
    }
    const Windows& windows = model.windows;
    const double window_tokens = static_cast<double>(windows.sink + windows.recent + windows.flush + 2);
    const double longest = static_cast<double>(model.max_tokens) + kPageTokens;
    const double packed = model.pool_tokens > 0 ? static_cast<double>(model.pool_tokens)
                                                : static_cast<double>(model.max_sequences) * longest;
    const double bytes = token_bytes * (packed + model.max_sequences * window_tokens);
    if (!(bytes < limit)) {
        refuse_argument("max_sequences ", model.max_sequences, ", max_tokens ", model.max_tokens,
                        " and pool_tokens ", model.pool_tokens,
                        " may need 2^62 bytes or more, which 64-bit sizes do not hold");
    }
    const double most_blocks = std::numeric_limits<int32_t>::max();
    const double table_entries = model.max_sequences * (longest / kPageTokens + 1);
    if (packed / kPageTokens > most_blocks || table_entries > 1024 * most_blocks) {
        refuse_argument("max_sequences ", model.max_sequences, ", max_tokens ", model.max_tokens,
                        " and pool_tokens ", model.pool_tokens,
                        " need more than the limit of 2147483647 blocks of ", kPageTokens, " tokens");
    }
}

}  // namespace

kivi_layer checked_layer(const std::string& name, const kivi_layer& layer) {
    check_reserved(name, layer.reserved);
    if (layer.kv_heads < 0)
        refuse_argument(name, ".kv_heads is ", layer.kv_heads, "; it must not be negative");
    if (layer.kv_heads == 0) return kivi_layer{};
    if (layer.q_heads <= 0 || layer.q_heads % layer.kv_heads != 0) {
        refuse_argument(name, ".q_heads is ", layer.q_heads, "; it must be a positive multiple of kv_heads, ",
                        layer.kv_heads);
    }
    check_dim(name + ".key_dim", layer.key_dim);
    check_dim(name + ".value_dim", layer.value_dim);
    kivi_layer checked = layer;
    checked.k = checked_spec(name + ".k", layer.k, Part::key, layer.key_dim);
    checked.v = checked_spec(name + ".v", layer.v, Part::value, layer.value_dim);
    return checked;
}

kivi_spec checked_spec(const std::string& name, const kivi_spec& spec, Part part, int dim) {
    const std::string field = name + ".";
    check_reserved(name, spec.reserved);
    if (!is_one_of(spec.bits, {2, 3, 4, 8, 16})) {
        refuse_argument(field, "bits is ", spec.bits, "; supported are 2, 3, 4, 8 and 16");
    }
    if (!is_one_of(spec.transform, {KIVI_TRANSFORM_NONE, KIVI_TRANSFORM_HADAMARD})) {
        refuse_argument(field, "transform is ", spec.transform, "; supported are 0 (none) and 1 (Hadamard)");
    }
    kivi_spec checked = spec;
    if (spec.bits == 16) {
        if (spec.axis != 0 || spec.group != 0 || spec.range != 0 || spec.range_ratio != 0 ||
            spec.param_dtype != 0 || spec.rounding != 0) {
            refuse_argument(
                field, "bits is 16: axis, group, range, range_ratio, param_dtype and rounding must be 0");
        }
        checked.range_ratio = 0;
        return checked;
    }

    if (!is_one_of(spec.axis, {KIVI_AXIS_CHANNEL, KIVI_AXIS_TOKEN})) {
        refuse_argument(field, "axis is ", spec.axis, "; supported are 1 (channel) and 2 (token)");
    }
    const bool whole_head = spec.axis == KIVI_AXIS_TOKEN && spec.group == KIVI_GROUP_HEAD;
    if (!whole_head && !is_one_of(spec.group, {32, 64, 128})) {
        refuse_argument(field, "group is ", spec.group,
                        "; supported are 32, 64, 128 and, on the token axis, ", KIVI_GROUP_HEAD,
                        " (the whole head)");
    }
    if (spec.axis == KIVI_AXIS_TOKEN && spec.group > dim) {
        refuse_argument(field, "group is ", spec.group, ", larger than the head dim ", dim, "; use ",
                        KIVI_GROUP_HEAD, " for the whole head");
    }
    if (spec.range == KIVI_RANGE_MINMAX) {
        if (spec.range_ratio != 0) {
            refuse_argument(field, "range_ratio is ", spec.range_ratio, "; it must be 0 with min-max ranges");
        }
        checked.range_ratio = 0;  // of either sign: layout ids and blobs hold its bits
    } else if (spec.range == KIVI_RANGE_RATIO) {
        if (!(spec.range_ratio > 0 && spec.range_ratio <= 1)) {
            refuse_argument(field, "range_ratio is ", spec.range_ratio, "; it must be above 0 and at most 1");
        }
    } else {
        refuse_argument(field, "range is ", spec.range, "; supported are 0 (min-max) and 1 (ratio)");
    }
    if (!is_one_of(spec.param_dtype, {0, KIVI_F16, KIVI_F32})) {
        refuse_argument(
            field, "param_dtype is ", spec.param_dtype,
            "; supported are 0 and 2 (f16) and 1 (f32); bf16 would lose the min of offset channels");
    }
    if (spec.param_dtype == 0) checked.param_dtype = KIVI_F16;
    if (spec.rounding == KIVI_ROUND_QUERY_AWARE) {
        if (part != Part::key) refuse_argument(field, "rounding is query-aware, which only keys can be");
        if (spec.axis != KIVI_AXIS_CHANNEL) {
            refuse_argument(field, "rounding is query-aware, which needs the channel axis (1); axis is ",
                            spec.axis);
        }
        if (spec.range != KIVI_RANGE_MINMAX) {
            refuse_argument(field, "rounding is query-aware, which needs min-max ranges (0); range is ",
                            spec.range);
        }
    } else if (spec.rounding != KIVI_ROUND_NEAREST) {
        refuse_argument(field, "rounding is ", spec.rounding,
                        "; supported are 0 (nearest) and 1 (query-aware)");
    }
    return checked;
}

Windows checked_windows(int64_t sink, int64_t recent, int64_t flush, int32_t schedule,
                        const std::vector<kivi_layer>& layers) {
    if (sink < 0) refuse_argument("sink is ", sink, "; it must not be negative");
    if (recent < 0) refuse_argument("recent is ", recent, "; it must not be negative");

    int64_t unit = 1;
    for (const kivi_layer& layer : layers) {
        if (layer.kv_heads == 0) continue;
        for (Part part : {Part::key, Part::value}) {
            const kivi_spec& spec = spec_of(layer, part);
            if (spec.bits < 16 && spec.axis == KIVI_AXIS_CHANNEL) unit = std::lcm(unit, int64_t{spec.group});
        }
    }

    if (schedule == KIVI_SCHEDULE_PUBLISHED) {
        if (sink != 0)
            refuse_argument("sink is ", sink, "; the published schedule keeps none, so it must be 0");
        if (recent < 1) refuse_argument("recent is ", recent, "; the published schedule needs at least 1");
        for (const kivi_layer& layer : layers) {
            if (layer.kv_heads > 0 && layer.v.bits < 16 && layer.v.axis != KIVI_AXIS_TOKEN) {
                refuse_argument(
                    "v.axis is ", layer.v.axis,
                    "; the published schedule packs values one token at a time and needs the token axis (2)");
            }
        }
        if (recent % unit != 0) {
            refuse_argument("recent is ", recent,
                            "; in the published schedule it must be a multiple of the key group, ", unit);
        }
        return Windows{0, recent, recent, unit, schedule};
    }

    if (schedule != KIVI_SCHEDULE_ROLLING) {
        refuse_argument("schedule is ", schedule, "; supported are 0 (rolling) and 1 (published)");
    }
    if (flush < 1) refuse_argument("flush is ", flush, "; it must be at least 1");
    if (sink % unit != 0) {
        refuse_argument("sink is ", sink, "; it must be a multiple of ", unit,
                        ", the least common multiple of all channel-axis groups");
    }
    if (flush % unit != 0) {
        refuse_argument("flush is ", flush, "; it must be a multiple of ", unit,
                        ", the least common multiple of all channel-axis groups");
    }
    return Windows{sink, recent, flush, unit, schedule};
}

int32_t checked_window_dtype(int32_t dtype) {
    if (!is_one_of(dtype, {KIVI_F32, KIVI_F16, KIVI_BF16})) {
        refuse_argument("window_dtype is ", dtype, "; supported are 1 (f32), 2 (f16) and 3 (bf16)");
    }
    return dtype;
}

Model make_model(const kivi_config& config) {
    check_reserved("config", config.reserved);
    if (!is_one_of(config.device, {KIVI_CPU, KIVI_CUDA})) {
        refuse_argument("device is ", config.device, "; supported are 1 (CPU) and 2 (CUDA)");
    }
    if (config.device_id < 0 || (config.device == KIVI_CPU && config.device_id != 0)) {
        refuse_argument("device_id is ", config.device_id, "; it must be ",
                        config.device == KIVI_CPU ? "0 on the CPU" : "0 or more");
    }
    if (config.max_sequences < 1)
        refuse_argument("max_sequences is ", config.max_sequences, "; it must be at least 1");
    if (config.max_tokens < 1)
        refuse_argument("max_tokens is ", config.max_tokens, "; it must be at least 1");
    if (config.pool_tokens < 0)
        refuse_argument("pool_tokens is ", config.pool_tokens, "; it must not be negative");
    if (config.layer_count < 1 || config.layer_count > kMostLayers)
        refuse_argument("layer_count is ", config.layer_count, "; it must be from 1 to ", kMostLayers);
    if (config.threads < 0 || config.threads > kMostThreads) {
        refuse_argument("threads is ", config.threads, "; it must be from 0 (one a core) to ", kMostThreads);
    }
    checked_flags(config.flags, KIVI_CACHE_REFERENCE);
    if ((config.flags & KIVI_CACHE_REFERENCE) != 0 && config.device != KIVI_CPU) {
        refuse_argument("flags asks for the reference backend, which device ", config.device,
                        " does not have");
    }
    if (reinterpret_cast<uintptr_t>(config.layers) % alignof(kivi_layer) != 0) {
        refuse_argument("layers is not aligned to ", alignof(kivi_layer), " bytes");
    }

    Model model;
    model.device = config.device;
    model.device_id = config.device_id;
    model.window_dtype = checked_window_dtype(config.window_dtype);
    model.max_sequences = config.max_sequences;
    model.max_tokens = config.max_tokens;
    model.pool_tokens = config.pool_tokens;
    model.threads = config.threads > 0 ? config.threads : std::min(processors(), kMostThreads);
    model.reference = (config.flags & KIVI_CACHE_REFERENCE) != 0;

    if (config.layers == nullptr) {
        model.layers.assign(config.layer_count, checked_layer("layer", config.layer));
    } else {
        model.layers.reserve(config.layer_count);
        for (int32_t i = 0; i < config.layer_count; i++) {
            model.layers.push_back(checked_layer("layers[" + std::to_string(i) + "]", config.layers[i]));
        }
    }
    bool any = false;
    for (const kivi_layer& layer : model.layers) any = any || layer.kv_heads > 0;
    if (!any) refuse_argument("kv_heads is 0 in every layer; at least one layer must keep something");

    model.windows = checked_windows(config.sink, config.recent, config.flush, config.schedule, model.layers);
    check_sizes(model);
    return model;
}

}  // namespace kivi
