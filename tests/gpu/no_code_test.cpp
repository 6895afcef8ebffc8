// fault 113: a GPU that the build has no code for. Run with CUDA_FORCE_PTX_JIT=1, under which the driver passes by the
// code in the library as if it were made for other GPUs.
#define DOCTEST_CONFIG_IMPLEMENT
#include <cmath>

#include "gpu_support.h"

using namespace gpu_test;

TEST_CASE("no cache can be made, and each call says why") {
    kivi_device_info info{};
    KIVI_OK_(kivi_device_query(KIVI_CUDA, 0, &info, sizeof info));
    CHECK(info.available == 0);
    CHECK(info.capability > 0);
    CHECK(std::string(info.reason).find("this build has code for sm_") == 0);
    kivi_config config;
    KIVI_OK_(kivi_config_init(&config, sizeof config));
    config.device = KIVI_CUDA;
    config.layer_count = 1;
    config.layer.kv_heads = config.layer.q_heads = 1;
    config.layer.key_dim = config.layer.value_dim = 64;
    config.max_sequences = 1;
    config.max_tokens = 100;
    kivi_cache* cache = nullptr;
    CHECK(kivi_cache_create(&config, &cache) == KIVI_ERROR_UNSUPPORTED);
    CHECK(cache == nullptr);
    CHECK(std::string(kivi_last_error()).find("CUDA device 0: this build has code for sm_") == 0);
    kivi_support support{};
    KIVI_OK_(kivi_query_support(&config, 0, &support, sizeof support));
    CHECK(support.supported == 0);
    CHECK(std::string(support.reason) == info.reason);
    config.device = KIVI_CPU;
    KIVI_OK_(kivi_cache_create(&config, &cache));
    kivi_cache_destroy(cache);
}

int main(int argc, char** argv) {
    int32_t count = 0;
    if (kivi_device_count(KIVI_CUDA, &count) != KIVI_OK || count == 0) {
        std::printf("SKIP: there is no GPU\n");
        return kSkipped;
    }
    kivi_device_info info{};
    if (kivi_device_query(KIVI_CUDA, 0, &info, sizeof info) == KIVI_OK && info.available) {
        std::printf("SKIP: this build also has PTX, which the driver has compiled for this GPU\n");
        return kSkipped;
    }
    return doctest::Context(argc, argv).run();
}
