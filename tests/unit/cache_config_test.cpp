// Every rule of kivi_config is refused by its own sentence. [CREATE-1] [SUPPORT-1] [FAIL-2]
#include "cache_support.h"

#include <functional>
#include <limits>

#include <sched.h>

using namespace kivi_test;

namespace {

struct Refusal {
    const char* what;
    std::function<void(kivi_config&)> change;
    const char* sentence;  // must occur in it
    kivi_status status = KIVI_ERROR_INVALID_ARGUMENT;
};

const float kNaN = std::numeric_limits<float>::quiet_NaN();

const std::vector<Refusal>& refusals() {
    static const std::vector<Refusal> all = {
        {"unknown device", [](auto& c) { c.device = 3; }, "device is 3"},
        {"CUDA in a build without it", [](auto& c) { c.device = KIVI_CUDA; }, "does not have",
         KIVI_ERROR_UNSUPPORTED},
        {"device number on the CPU", [](auto& c) { c.device_id = 1; }, "device_id is 1"},
        {"negative device number", [](auto& c) { c.device_id = -1; }, "device_id is -1"},
        {"window dtype", [](auto& c) { c.window_dtype = 4; }, "window_dtype is 4"},
        {"no sequences", [](auto& c) { c.max_sequences = 0; }, "max_sequences is 0"},
        {"no tokens", [](auto& c) { c.max_tokens = 0; }, "max_tokens is 0"},
        {"negative pool", [](auto& c) { c.pool_tokens = -1; }, "pool_tokens is -1"},
        {"no layers", [](auto& c) { c.layer_count = 0; }, "layer_count is 0"},
        {"negative layers", [](auto& c) { c.layer_count = -4; }, "layer_count is -4"},
        {"garbage layers", [](auto& c) { c.layer_count = INT32_MAX; },
         "layer_count is 2147483647; it must be from 1 to 65536"},
        {"negative threads", [](auto& c) { c.threads = -1; }, "threads is -1"},
        {"too many threads", [](auto& c) { c.threads = 5000; }, "threads is 5000"},
        {"unknown flag", [](auto& c) { c.flags = 6; }, "flags is 6; known bits are 1"},
        {"reserved pointer", [](auto& c) { c.reserved[3] = &c; }, "reserved must be zero"},
        {"misaligned layers",
         [](auto& c) { c.layers = reinterpret_cast<const kivi_layer*>(reinterpret_cast<char*>(&c) + 1); },
         "layers is not aligned"},
        {"negative sink", [](auto& c) { c.sink = -32; }, "sink is -32"},
        {"sink off the unit", [](auto& c) { c.sink = 16; }, "sink is 16; it must be a multiple of 32"},
        {"negative recent", [](auto& c) { c.recent = -1; }, "recent is -1"},
        {"no flush unit", [](auto& c) { c.flush = 0; }, "flush is 0"},
        {"flush off the unit", [](auto& c) { c.flush = 48; }, "flush is 48; it must be a multiple of 32"},
        {"unit is the least common multiple",
         [](auto& c) {
             c.layer.k.group = 128;
             c.sink = 128;
             c.flush = 64;
         },
         "flush is 64; it must be a multiple of 128"},
        {"unknown schedule", [](auto& c) { c.schedule = 2; }, "schedule is 2"},
        {"published with sinks", [](auto& c) { c.schedule = KIVI_SCHEDULE_PUBLISHED; },
         "sink is 32; the published schedule"},
        {"published without recent",
         [](auto& c) {
             c.schedule = KIVI_SCHEDULE_PUBLISHED;
             c.sink = 0;
             c.recent = 0;
         },
         "recent is 0"},
        {"published off the key group",
         [](auto& c) {
             c.schedule = KIVI_SCHEDULE_PUBLISHED;
             c.sink = 0;
             c.recent = 100;
         },
         "recent is 100; in the published"},
        {"published with values by channel",
         [](auto& c) {
             c.schedule = KIVI_SCHEDULE_PUBLISHED;
             c.sink = 0;
             c.layer.v.axis = KIVI_AXIS_CHANNEL;
         },
         "v.axis is 1"},
        {"negative heads", [](auto& c) { c.layer.kv_heads = -1; }, "kv_heads is -1"},
        {"nothing kept", [](auto& c) { c.layer.kv_heads = 0; }, "kv_heads is 0 in every layer"},
        {"query heads no multiple", [](auto& c) { c.layer.q_heads = 5; }, "q_heads is 5"},
        {"no query heads", [](auto& c) { c.layer.q_heads = 0; }, "q_heads is 0"},
        {"key dim", [](auto& c) { c.layer.key_dim = 60; }, "key_dim is 60; it must be a multiple of 8"},
        {"value dim", [](auto& c) { c.layer.value_dim = 0; }, "value_dim is 0"},
        {"dim too large", [](auto& c) { c.layer.key_dim = 520; }, "key_dim is 520"},
        {"layer reserved", [](auto& c) { c.layer.reserved[0] = 1; }, "layer.reserved must be zero"},
        {"spec reserved", [](auto& c) { c.layer.k.reserved[7] = 1; }, "layer.k.reserved must be zero"},
        {"key bits", [](auto& c) { c.layer.k.bits = 5; }, "layer.k.bits is 5"},
        {"value bits", [](auto& c) { c.layer.v.bits = 0; }, "layer.v.bits is 0"},
        {"key axis", [](auto& c) { c.layer.k.axis = 0; }, "layer.k.axis is 0"},
        {"key group", [](auto& c) { c.layer.k.group = 16; }, "layer.k.group is 16"},
        {"whole head on the channel axis", [](auto& c) { c.layer.k.group = KIVI_GROUP_HEAD; },
         "layer.k.group is -1"},
        {"group above the head dim", [](auto& c) { c.layer.v.group = 128; },
         "layer.v.group is 128, larger than the head dim 64"},
        {"range", [](auto& c) { c.layer.k.range = 2; }, "layer.k.range is 2"},
        {"ratio with min-max", [](auto& c) { c.layer.k.range_ratio = 0.5f; },
         "range_ratio is 0.5; it must be 0"},
        {"ratio of zero", [](auto& c) { c.layer.k.range = KIVI_RANGE_RATIO; },
         "range_ratio is 0; it must be above 0"},
        {"ratio above one",
         [](auto& c) {
             c.layer.k.range = KIVI_RANGE_RATIO;
             c.layer.k.range_ratio = 1.5f;
         },
         "range_ratio is 1.5"},
        {"ratio NaN",
         [](auto& c) {
             c.layer.k.range = KIVI_RANGE_RATIO;
             c.layer.k.range_ratio = kNaN;
         },
         "range_ratio is"},
        {"bf16 parameters", [](auto& c) { c.layer.k.param_dtype = KIVI_BF16; }, "param_dtype is 3"},
        {"transform", [](auto& c) { c.layer.v.transform = 2; }, "layer.v.transform is 2"},
        {"rounding", [](auto& c) { c.layer.k.rounding = 2; }, "layer.k.rounding is 2"},
        {"query-aware values", [](auto& c) { c.layer.v.rounding = KIVI_ROUND_QUERY_AWARE; },
         "which only keys can be"},
        {"query-aware by token",
         [](auto& c) {
             c.layer.k.rounding = KIVI_ROUND_QUERY_AWARE;
             c.layer.k.axis = KIVI_AXIS_TOKEN;
         },
         "needs the channel axis"},
        {"query-aware with a ratio",
         [](auto& c) {
             c.layer.k.rounding = KIVI_ROUND_QUERY_AWARE;
             c.layer.k.range = KIVI_RANGE_RATIO;
             c.layer.k.range_ratio = 0.9f;
         },
         "needs min-max ranges"},
        {"16 bits with an axis", [](auto& c) { c.layer.k.bits = 16; }, "layer.k.bits is 16: axis"},
        {"sizes past 64 bits",
         [](auto& c) {
             c.max_sequences = INT32_MAX;
             c.max_tokens = INT64_MAX;
         },
         "may need 2^62 bytes"},
        {"blocks past 32 bits",
         [](auto& c) {
             c.layer_count = 1;
             c.max_sequences = 1;
             c.max_tokens = int64_t{1} << 40;
             c.layer.kv_heads = c.layer.q_heads = 1;
             c.layer.key_dim = c.layer.value_dim = 64;
         },
         "more than the limit of 2147483647 blocks"},
    };
    return all;
}

}  // namespace

TEST_CASE("what is not supported is refused at create, by a sentence that names it") {
    for (const Refusal& refusal : refusals()) {
        CAPTURE(refusal.what);
        kivi_config config = small_config();
        refusal.change(config);
        kivi_cache* cache = reinterpret_cast<kivi_cache*>(8);
        CHECK(kivi_cache_create(&config, &cache) == refusal.status);
        CHECK(cache == nullptr);
        CAPTURE(error());
        CHECK(contains(error(), refusal.sentence));

        kivi_memory memory;
        CHECK(kivi_cache_estimate(&config, &memory, sizeof memory) == refusal.status);
        if (config.layer_count < 1) continue;
        kivi_support support;
        REQUIRE(kivi_query_support(&config, 0, &support, sizeof support) == KIVI_OK);
        CHECK(support.supported == 0);
        CHECK(contains(support.reason, refusal.sentence));
    }
}

TEST_CASE("what kivi-reference and the design call valid is accepted") {
    const std::vector<std::pair<const char*, std::function<void(kivi_config&)>>> valid = {
        {"three bits", [](auto& c) { c.layer.k.bits = c.layer.v.bits = 3; }},
        {"no recent window", [](auto& c) { c.recent = 0; }},
        {"recent off the group", [](auto& c) { c.recent = 37; }},
        {"no channel groups, any flush",
         [](auto& c) {
             c.layer.k.axis = KIVI_AXIS_TOKEN;
             c.sink = 5;
             c.flush = 7;
         }},
        {"whole head", [](auto& c) { c.layer.v.group = KIVI_GROUP_HEAD; }},
        {"short last group",
         [](auto& c) {
             c.layer.value_dim = 80;
             c.layer.v.group = 64;
         }},
        {"values by channel", [](auto& c) { c.layer.v.axis = KIVI_AXIS_CHANNEL; }},
        {"f32 parameters", [](auto& c) { c.layer.k.param_dtype = KIVI_F32; }},
        {"bf16 windows", [](auto& c) { c.window_dtype = KIVI_BF16; }},
        {"Hadamard at 16 bits",
         [](auto& c) {
             c.layer.k = kivi_spec{};
             c.layer.k.bits = 16;
             c.layer.k.transform = 1;
         }},
        {"ratio 7 to 1", [](auto& c) { c.layer.q_heads = 14; }},
        {"largest dim", [](auto& c) { c.layer.key_dim = 512; }},
        {"smallest dim", [](auto& c) { c.layer.key_dim = 8; }},
        {"keys and values of different dims",
         [](auto& c) {
             c.layer.key_dim = 192;
             c.layer.value_dim = 128;
         }},
        {"the reference", [](auto& c) { c.flags = KIVI_CACHE_REFERENCE; }},
    };
    for (const auto& [what, change] : valid) {
        CAPTURE(what);
        kivi_config config = small_config();
        change(config);
        kivi_support support;
        REQUIRE(kivi_query_support(&config, 0, &support, sizeof support) == KIVI_OK);
        CAPTURE(support.reason);
        CHECK(support.supported == 1);
        CHECK(support.attend_path != KIVI_PATH_NONE);
        CHECK(support.pack_path != KIVI_PATH_NONE);
        const TestCache cache(config);
    }
}

TEST_CASE("a layer table gives every layer its own shape, and may mark one absent") {
    kivi_config config = small_config();
    kivi_layer layers[2] = {config.layer, kivi_layer{}};
    config.layers = layers;
    const TestCache cache(config);
    kivi_length length;
    CHECK(kivi_sequence_length(cache, 0, 0, &length, sizeof length) == KIVI_OK);
    CHECK(kivi_sequence_length(cache, 1, 0, &length, sizeof length) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(contains(error(), "keeps nothing here"));
    kivi_support support;
    REQUIRE(kivi_query_support(&config, 1, &support, sizeof support) == KIVI_OK);
    CHECK(support.supported == 1);
    CHECK(support.attend_path == KIVI_PATH_NONE);
    CHECK(kivi_query_support(&config, 2, &support, sizeof support) == KIVI_ERROR_INVALID_ARGUMENT);
    layers[1].q_heads = 3;
    layers[1].kv_heads = 2;
    kivi_cache* other;
    CHECK(kivi_cache_create(&config, &other) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(contains(error(), "layers[1].q_heads is 3"));
}

TEST_CASE("fault 43: a config serves two caches and is not written") {
    kivi_config config = small_config();
    const kivi_config before = config;
    const TestCache first(config);
    config.layer_count = 30;
    const TestCache second(config);
    config.layer_count = before.layer_count;
    CHECK(std::memcmp(&config, &before, sizeof config) == 0);
}

TEST_CASE("presets, with their bits per element") {
    const std::pair<const char*, double> presets[] = {{"k3v2", 3.0},  {"kivi2-sink", 3.0},  {"k4v2", 3.5},
                                                      {"kivi4", 5.0}, {"kivi2-paper", 3.0}, {"f16", 16.0}};
    REQUIRE(kivi_preset_count() == 6);
    for (int i = 0; i < 6; i++) {
        kivi_preset preset;
        REQUIRE(kivi_preset_at(i, &preset, sizeof preset) == KIVI_OK);
        CHECK(std::string(preset.name) == presets[i].first);
        kivi_config config = small_config(preset.name);
        config.layer.key_dim = config.layer.value_dim = 128;
        kivi_support support;
        REQUIRE(kivi_query_support(&config, 0, &support, sizeof support) == KIVI_OK);
        CHECK(support.supported == 1);
        CHECK(support.bits_per_element == doctest::Approx(presets[i].second));
        CHECK(std::memcmp(&config.layer.k, &preset.k, sizeof preset.k) == 0);
        CHECK(config.recent == preset.recent);
    }
    kivi_preset preset;
    CHECK(kivi_preset_at(6, &preset, sizeof preset) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(kivi_preset_at(-1, &preset, sizeof preset) == KIVI_ERROR_INVALID_ARGUMENT);
    kivi_config config = small_config();
    const kivi_config before = config;
    CHECK(kivi_config_preset(&config, "kivi3") == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(contains(error(), "kivi3"));
    CHECK(kivi_config_preset(&config, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(std::memcmp(&config, &before, sizeof config) == 0);
}

TEST_CASE("fault 73: a huge cache is estimated in 64 bits") {
    kivi_config config = small_config();
    config.layer_count = 1;
    config.layer.kv_heads = config.layer.q_heads = 64;
    config.layer.key_dim = config.layer.value_dim = 256;
    config.max_sequences = 1;
    config.max_tokens = int64_t{1} << 31;
    kivi_memory memory;
    REQUIRE(kivi_cache_estimate(&config, &memory, sizeof memory) == KIVI_OK);
    // 3 bits an element, of which 64 heads of K and V with 256 channels have 32768 a token.
    CHECK(memory.page_bytes > (uint64_t{1} << 31) * 32768 * 3 / 8 - memory.block_bytes * 2);
    CHECK(memory.page_bytes == memory.blocks * memory.block_bytes);
}

TEST_CASE("a ratio of -0 names the same layout as 0") {
    for (const char* preset : {"k3v2", "f16"}) {
        kivi_config config = small_config(preset);
        kivi_memory plain, negative;
        REQUIRE(kivi_cache_estimate(&config, &plain, sizeof plain) == KIVI_OK);
        config.layer.k.range_ratio = config.layer.v.range_ratio = -0.0f;
        REQUIRE(kivi_cache_estimate(&config, &negative, sizeof negative) == KIVI_OK);
        CHECK(plain.layout_id == negative.layout_id);
    }
}

TEST_CASE("devices: the CPU is there, CUDA is not in this build and says so") {
    int32_t count = -1;
    CHECK(kivi_device_count(KIVI_CPU, &count) == KIVI_OK);
    CHECK(count == 1);
    CHECK(kivi_device_count(KIVI_CUDA, &count) == KIVI_OK);
    CHECK(count == 0);
    CHECK(kivi_device_count(7, &count) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(kivi_device_count(KIVI_CPU, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    kivi_device_info info;
    CHECK(kivi_device_query(KIVI_CPU, 0, &info, sizeof info) == KIVI_OK);
    CHECK(info.available == 1);
    CHECK(info.device == KIVI_CPU);
    CHECK(info.name[0] != 0);
    CHECK(info.reason[0] == 0);
    CHECK(kivi_device_query(KIVI_CPU, 1, &info, sizeof info) == KIVI_ERROR_NO_DEVICE);
    CHECK(kivi_device_query(KIVI_CUDA, 0, &info, sizeof info) == KIVI_OK);
    CHECK(info.available == 0);
    CHECK(contains(info.reason, "no CUDA"));
}

TEST_CASE("threads 0 are the cores that the calling thread may run on") {
    cpu_set_t all;
    REQUIRE(sched_getaffinity(0, sizeof all, &all) == 0);
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int cpu = 0; CPU_COUNT(&one) == 0; ++cpu) {
        if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &one);
    }
    REQUIRE(sched_setaffinity(0, sizeof one, &one) == 0);
    kivi_config config = small_config();
    config.threads = 0;
    kivi_device_info info;
    kivi_memory chosen, alone;
    CHECK(kivi_device_query(KIVI_CPU, 0, &info, sizeof info) == KIVI_OK);
    CHECK(kivi_cache_estimate(&config, &chosen, sizeof chosen) == KIVI_OK);
    config.threads = 1;
    CHECK(kivi_cache_estimate(&config, &alone, sizeof alone) == KIVI_OK);
    REQUIRE(sched_setaffinity(0, sizeof all, &all) == 0);
    CHECK(info.threads == 1);
    CHECK(chosen.total_bytes == alone.total_bytes);
    config.threads = 2;
    CHECK(kivi_cache_estimate(&config, &alone, sizeof alone) == KIVI_OK);
    CHECK(chosen.total_bytes < alone.total_bytes);
}
