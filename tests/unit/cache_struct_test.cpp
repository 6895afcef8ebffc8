// Growable structs: [GROW-1] too small, [GROW-2] larger with zeros or not, [GROW-3] reserved fields; and the
// thread's last error.
#include "cache_support.h"

#include <thread>

using namespace kivi_test;

namespace {

template <class T>
struct Grown {
    T it;
    uint64_t more[2];
};

}  // namespace

TEST_CASE("a smaller struct than the first release had is refused") {
    kivi_config config = small_config();
    kivi_cache* cache;
    for (size_t size : {size_t{0}, size_t{1}, sizeof config - 1}) {
        config.struct_size = size;
        CHECK(kivi_cache_create(&config, &cache) == KIVI_ERROR_INVALID_ARGUMENT);
        CHECK(contains(error(), "struct_size is " + std::to_string(size)));
    }
    config.struct_size = size_t{1} << 40;
    CHECK(kivi_cache_create(&config, &cache) == KIVI_ERROR_INVALID_ARGUMENT);
    kivi_memory memory;
    CHECK(kivi_cache_estimate(&config, &memory, 8) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(kivi_config_init(&config, 16) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(kivi_config_init(nullptr, sizeof config) == KIVI_ERROR_INVALID_ARGUMENT);
}

TEST_CASE("a larger struct is taken if what is beyond is zero") {
    Grown<kivi_config> config{};
    REQUIRE(kivi_config_init(&config.it, sizeof config) == KIVI_OK);
    CHECK(config.it.struct_size == sizeof config);
    CHECK(config.more[1] == 0);
    const kivi_config filled = small_config();
    std::memcpy(&config.it, &filled, sizeof filled);
    config.it.struct_size = sizeof config;
    const TestCache cache(config.it);
    config.more[1] = 1;
    kivi_cache* other;
    CHECK(kivi_cache_create(&config.it, &other) == KIVI_ERROR_UNSUPPORTED);
    CHECK(contains(error(), "older than the caller"));
}

TEST_CASE("a larger output struct gets zeros beyond, a struct's size what the caller gave") {
    Grown<kivi_memory> memory;
    std::memset(&memory, 0xA5, sizeof memory);
    const kivi_config config = small_config();
    REQUIRE(kivi_cache_estimate(&config, &memory.it, sizeof memory) == KIVI_OK);
    CHECK(memory.it.struct_size == sizeof memory);
    CHECK(memory.more[0] == 0);
    CHECK(memory.more[1] == 0);
}

TEST_CASE("reserved fields must be zero") {
    const TestCache cache(small_config());
    Numbers numbers(1);
    const std::vector<float> k = numbers.take(kHeads * kDim), q = numbers.take(kQueryHeads * kDim);
    const kivi_tensor keys = dense(k, {1, kHeads, kDim});
    OneRow row(0, 1);
    row.batch.reserved0 = 1;
    CHECK(kivi_append(cache, 0, &row, &keys, &keys, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(contains(error(), "reserved0"));
    row.batch.reserved0 = 0;
    REQUIRE(kivi_append(cache, 0, &row, &keys, &keys, nullptr) == KIVI_OK);

    std::vector<float> out(kQueryHeads * kDim);
    const kivi_tensor queries = dense(q, {1, kQueryHeads, kDim}), result = dense(out, {1, kQueryHeads, kDim});
    size_t bytes;
    REQUIRE(kivi_attend_workspace(cache, 0, 1, 1, &bytes) == KIVI_OK);
    std::vector<uint8_t> workspace(bytes);
    kivi_attend_params params;
    REQUIRE(kivi_attend_params_init(&params, sizeof params) == KIVI_OK);
    CHECK(params.window_left == -1);
    params.reserved[2] = &params;
    CHECK(kivi_attend(cache, 0, &row, &queries, &result, &params, workspace.data(), bytes, nullptr) ==
          KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(contains(error(), "params.reserved"));
}

TEST_CASE("the last error belongs to the thread and stays until the next failure") {
    CHECK(kivi_cache_create(nullptr, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    const std::string mine = error();
    CHECK(!mine.empty());
    std::thread([] { CHECK(error().empty()); }).join();
    CHECK(kivi_version() == 10000 * KIVI_VERSION_MAJOR + 100 * KIVI_VERSION_MINOR + KIVI_VERSION_PATCH);
    int32_t count;
    CHECK(kivi_device_count(KIVI_CPU, &count) == KIVI_OK);
    CHECK(error() == mine);
}

TEST_CASE("status names are those of the header") {
    CHECK(std::string(kivi_status_name(KIVI_OK)) == "KIVI_OK");
    CHECK(std::string(kivi_status_name(KIVI_ERROR_BUFFER_TOO_SMALL)) == "KIVI_ERROR_BUFFER_TOO_SMALL");
    for (int status = 0; status >= -11; status--) {
        CHECK(std::string(kivi_status_name(status)) != "KIVI_ERROR_UNKNOWN");
    }
    CHECK(std::string(kivi_status_name(-12)) == "KIVI_ERROR_UNKNOWN");
    CHECK(std::string(kivi_status_name(1)) == "KIVI_ERROR_UNKNOWN");
    CHECK(contains(kivi_build_info(), kivi_version_string()));
}
