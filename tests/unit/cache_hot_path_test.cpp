// Append, flush, attend and step allocate nothing; memory is reported before and after create by the formula.
// [MEMORY-1]
#include "cache_support.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<bool> counting{false};
std::atomic<int64_t> allocations{0};

void* count_and_allocate(std::size_t bytes, std::size_t alignment) {
    if (counting) allocations++;
    void* const memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}
}  // namespace

void* operator new(std::size_t bytes) { return count_and_allocate(bytes, 16); }
void* operator new[](std::size_t bytes) { return count_and_allocate(bytes, 16); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
    return count_and_allocate(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
    return count_and_allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

using namespace kivi_test;

TEST_CASE("a decode loop across flushes allocates nothing, whatever the preset and the threads") {
    for (const char* preset : {"k3v2", "kivi2-sink", "kivi4", "kivi2-paper", "f16"}) {
        for (int32_t threads : {1, 2}) {
            CAPTURE(preset);
            kivi_config config = small_config(preset);
            config.threads = threads;
            TestCache cache(config);
            const std::vector<float> k = Numbers(1).take(128 * kHeads * kDim),
                                     q = Numbers(2).take(3 * kQueryHeads * kDim);
            std::vector<float> out(q.size());
            size_t bytes;
            REQUIRE(kivi_attend_workspace(cache, -1, 1, 3, &bytes) == KIVI_OK);
            std::vector<uint8_t> workspace(bytes);
            const kivi_tensor prompt = dense(k, {128, kHeads, kDim}), token = dense(k, {1, kHeads, kDim});
            const kivi_tensor queries = dense(q, {3, kQueryHeads, kDim}),
                              result = dense(out, {3, kQueryHeads, kDim});
            const OneRow first(1, 128), one(1, 1), three(1, 3);
            int failures = 0;
            allocations = 0;
            counting = true;
            failures += kivi_append(cache, 0, &first, &prompt, &prompt, nullptr) != KIVI_OK;
            for (int step = 0; step < 230; step++) {
                failures += kivi_append(cache, 0, &one, &token, &token, nullptr) != KIVI_OK;
                failures += kivi_attend(cache, 0, &three, &queries, &result, nullptr, workspace.data(), bytes,
                                        nullptr) != KIVI_OK;
                failures += kivi_step(cache, 0, &one, &queries, &token, &token, &result, nullptr, workspace.data(),
                                      bytes, nullptr) != KIVI_OK;
            }
            if (config.schedule == KIVI_SCHEDULE_ROLLING) {
                failures += kivi_flush_residual(cache, 0, &one, nullptr) != KIVI_OK;
            }
            counting = false;
            CHECK(failures == 0);
            CHECK(allocations == 0);
        }
    }
}

TEST_CASE("fault 116: the estimate is the report, and both are the formula") {
    for (const char* preset : {"k3v2", "kivi2-sink", "f16"}) {
        kivi_config config = small_config(preset);
        if (std::string(preset) == "k3v2") config.layer.k.rounding = KIVI_ROUND_QUERY_AWARE;
        kivi_memory estimate, report;
        REQUIRE(kivi_cache_estimate(&config, &estimate, sizeof estimate) == KIVI_OK);
        TestCache cache(config);
        REQUIRE(kivi_cache_memory(cache, &report, sizeof report) == KIVI_OK);
        CHECK(std::memcmp(&estimate, &report, sizeof report) == 0);
        CHECK(report.total_bytes == report.page_bytes + report.window_bytes + report.table_bytes +
                                        report.moment_bytes + report.scratch_bytes);
        CHECK(report.page_bytes == report.blocks * report.block_bytes);
        // 2 layers, 2 heads, 128 tokens, 64 channels of K and of V.
        const double elements = 2.0 * 2 * 128 * 64 * 2, bits = std::string(preset) == "f16" ? 16 : 3;
        CHECK(static_cast<double>(report.block_bytes) == elements * bits / 8);
        const uint64_t rows = config.sink + config.recent + config.flush;
        CHECK(report.window_bytes ==
              3 * 2 * 2 * 2 * 64 * 2 * rows);  // sequences, layers, K and V, heads, dim, f16
        const uint64_t matrix = 64 * 64 * 4 + 64 * 2 + 64 * 63 / 2 * 4;
        CHECK(report.moment_bytes ==
              (config.layer.k.rounding == KIVI_ROUND_QUERY_AWARE ? 2 * 2 * matrix : 0));
        REQUIRE(cache.append(0, 500) == KIVI_OK);
        REQUIRE(kivi_cache_memory(cache, &report, sizeof report) == KIVI_OK);
        CHECK(std::memcmp(&estimate, &report, sizeof report) == 0);
    }
}

TEST_CASE("the statistics count packed tokens, blocks and live bytes of what was appended") {
    kivi_config config = small_config();
    config.max_tokens = 5000;
    kivi_memory memory;
    REQUIRE(kivi_cache_estimate(&config, &memory, sizeof memory) == KIVI_OK);
    CHECK(memory.total_bytes > memory.page_bytes + memory.window_bytes);
    TestCache cache(config);
    const kivi_statistics statistics = cache.statistics();
    CHECK(statistics.blocks_free == memory.blocks);
    CHECK(statistics.live_bytes == 0);
    REQUIRE(cache.append(0, 300) == KIVI_OK);
    // Border 192: 160 tokens packed at 3 bits, 32 sink rows and 108 tail rows in f16; 2 layers, 2 heads.
    CHECK(cache.statistics().live_bytes == 2 * 2 * 2 * 64 * (160 * 3 / 8 + (32 + 108) * 2));
    CHECK(cache.statistics(0).packed_tokens == 160);
    CHECK(cache.statistics(0).blocks_used == 2);
}
