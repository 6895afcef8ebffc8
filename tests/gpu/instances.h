// What the fast kernels are compiled for (core/cuda/decode_instances.h), as tests ask for it.
#pragma once
#include <iterator>
#include <vector>

#include "kivi/kivi.h"

namespace gpu_test {

struct Instance {
    const char* name;
    int dim, key_bits, value_bits, key_group, value_group;
    bool published = false;  // schedule
};

const Instance kInstances[] = {
    {"2/2 g32", 128, 2, 2, 32, 32},
    {"2/2 g64", 128, 2, 2, 64, 64},
    {"2/2 g128", 128, 2, 2, 128, KIVI_GROUP_HEAD},
    {"3/2 g64", 128, 3, 2, 64, 64},
    {"3/2 g32", 128, 3, 2, 32, 32},
    {"4/2 g64", 128, 4, 2, 64, 64},
    {"4/2 g32", 128, 4, 2, 32, 32},
    {"4/4 g32", 128, 4, 4, 32, 32},
    {"2/2 g32 dim 64", 64, 2, 2, 32, 32},
    {"4/2 g64 dim 64", 64, 4, 2, 64, 64},
    {"4/4 g32 dim 64", 64, 4, 4, 32, 32},
    {"2/2 g32 dim 256", 256, 2, 2, 32, 32},
    {"3/2 g64 dim 256", 256, 3, 2, 64, 64},
    {"4/4 g32 dim 256", 256, 4, 4, 32, 32},
    {"4/2 g64 dim 256", 256, 4, 2, 64, 64},
    {"3/2 g64 dim 64", 64, 3, 2, 64, 64},
};

// Those of 16 bits, which have no groups; key_group is the unit of the windows that tests take.
const Instance kPlainInstances[] = {
    {"16/16", 128, 16, 16, 32, 0},
    {"16/16 dim 64", 64, 16, 16, 32, 0},
    {"16/16 dim 256", 256, 16, 16, 32, 0},
};

const Instance kPublishedInstances[] = {
    {"2/2 g32 published", 128, 2, 2, 32, 32, true},
    {"2/2 g32 published dim 64", 64, 2, 2, 32, 32, true},
    {"2/2 g32 published dim 256", 256, 2, 2, 32, 32, true},
};

// All that have codes.
inline std::vector<Instance> coded_instances() {
    std::vector<Instance> all(std::begin(kInstances), std::end(kInstances));
    all.insert(all.end(), std::begin(kPublishedInstances), std::end(kPublishedInstances));
    return all;
}

// Windows of a test as the published schedule can have them.
inline void set_windows(kivi_config& config, const Instance& instance, int sink, int recent, int flush) {
    config.sink = sink, config.recent = recent, config.flush = flush;
    if (!instance.published) return;
    config.schedule = KIVI_SCHEDULE_PUBLISHED;
    config.sink = 0;
    config.recent = config.flush = recent / instance.key_group * instance.key_group + instance.key_group;
}

inline kivi_spec spec_of(int bits, int axis, int group, bool rotated) {
    kivi_spec spec{};
    spec.bits = bits;
    if (bits < 16) spec.axis = axis, spec.group = group;
    spec.transform = rotated ? KIVI_TRANSFORM_HADAMARD : KIVI_TRANSFORM_NONE;
    return spec;
}

// One layer of an instance. Serving: kv_heads, q_heads, sink, recent, flush, max_tokens, rotated_keys, rotated_values and
// dtype, of a test's own.
template <class Serving>
kivi_config config_for(const Instance& instance, const Serving& serving, int sequences) {
    kivi_config config;
    kivi_config_init(&config, sizeof config);
    config.layer_count = 1;
    config.layer.kv_heads = serving.kv_heads;
    config.layer.q_heads = serving.q_heads;
    config.layer.key_dim = config.layer.value_dim = instance.dim;
    config.layer.k = spec_of(instance.key_bits, KIVI_AXIS_CHANNEL, instance.key_group, serving.rotated_keys);
    config.layer.v = spec_of(instance.value_bits, KIVI_AXIS_TOKEN, instance.value_group, serving.rotated_values);
    config.max_sequences = sequences;
    config.max_tokens = serving.max_tokens;
    set_windows(config, instance, serving.sink, serving.recent, serving.flush);
    config.window_dtype = serving.dtype;
    config.threads = 8;
    return config;
}

}  // namespace gpu_test
