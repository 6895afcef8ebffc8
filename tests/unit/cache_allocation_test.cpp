// What create really takes from the system, counted where memory is asked for, beside what estimate and report
// say. [MEMORY-1]
#include "cache_support.h"

#include <atomic>
#include <cstdlib>
#include <new>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

std::atomic<int64_t> held{0};  // bytes asked for and not given back

// The size stands in front of what the caller gets.
void* take(std::size_t bytes, std::size_t alignment) {
    const std::size_t room = (bytes + 2 * alignment - 1) / alignment * alignment;
    auto* const base = static_cast<uint8_t*>(std::aligned_alloc(alignment, room));
    if (base == nullptr) throw std::bad_alloc();
    std::memcpy(base, &bytes, sizeof bytes);
    held += static_cast<int64_t>(bytes);
    return base + alignment;
}

void give(void* memory, std::size_t alignment) {
    if (memory == nullptr) return;
    auto* const base = static_cast<uint8_t*>(memory) - alignment;
    std::size_t bytes;
    std::memcpy(&bytes, base, sizeof bytes);
    held -= static_cast<int64_t>(bytes);
    std::free(base);
}

constexpr std::size_t kUsual = 16;  // alignment of new without one

}  // namespace

void* operator new(std::size_t bytes) { return take(bytes, kUsual); }
void* operator new[](std::size_t bytes) { return take(bytes, kUsual); }
void* operator new(std::size_t bytes, std::align_val_t to) { return take(bytes, static_cast<std::size_t>(to)); }
void* operator new[](std::size_t bytes, std::align_val_t to) { return take(bytes, static_cast<std::size_t>(to)); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return take(bytes, kUsual); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return take(bytes, kUsual); }
void operator delete(void* memory) noexcept { give(memory, kUsual); }
void operator delete[](void* memory) noexcept { give(memory, kUsual); }
void operator delete(void* memory, std::size_t) noexcept { give(memory, kUsual); }
void operator delete[](void* memory, std::size_t) noexcept { give(memory, kUsual); }
void operator delete(void* memory, std::align_val_t to) noexcept { give(memory, static_cast<std::size_t>(to)); }
void operator delete[](void* memory, std::align_val_t to) noexcept { give(memory, static_cast<std::size_t>(to)); }
void operator delete(void* memory, std::size_t, std::align_val_t to) noexcept {
    give(memory, static_cast<std::size_t>(to));
}
void operator delete[](void* memory, std::size_t, std::align_val_t to) noexcept {
    give(memory, static_cast<std::size_t>(to));
}

// In the place of libc's, for the library's objects in this program.
extern "C" void* mmap(void* at, std::size_t bytes, int protection, int flags, int file, off_t offset) noexcept {
    const long result = syscall(SYS_mmap, at, bytes, protection, flags, file, offset);
    if (result != -1) held += static_cast<int64_t>(bytes);
    return reinterpret_cast<void*>(result);
}
extern "C" int munmap(void* memory, std::size_t bytes) noexcept {
    held -= static_cast<int64_t>(bytes);
    return static_cast<int>(syscall(SYS_munmap, memory, bytes));
}

using namespace kivi_test;

namespace {

int64_t estimated(const kivi_config& config) {
    kivi_memory memory;
    REQUIRE(kivi_cache_estimate(&config, &memory, sizeof memory) == KIVI_OK);
    return static_cast<int64_t>(memory.total_bytes);
}

int64_t reported(kivi_cache* cache) {
    kivi_memory memory;
    REQUIRE(kivi_cache_memory(cache, &memory, sizeof memory) == KIVI_OK);
    return static_cast<int64_t>(memory.total_bytes);
}

// Bytes that create takes and keeps.
int64_t taken(const kivi_config& config) {
    const int64_t before = held;
    kivi_cache* cache = nullptr;
    REQUIRE(kivi_cache_create(&config, &cache) == KIVI_OK);
    const int64_t during = held;
    kivi_cache_destroy(cache);
    const int64_t after = held;
    CHECK(after == before);
    return during - before;
}

kivi_config larger(kivi_config config) {
    config.max_sequences = 9;
    config.max_tokens = 5000;
    config.layer.kv_heads = 3;
    config.layer.q_heads = 6;
    config.layer.key_dim = 128;
    config.layer.value_dim = 80;
    return config;
}

}  // namespace

TEST_CASE("create takes what estimate says: the objects that hold it come on top, whatever the size") {
    { const TestCache first(small_config()); }  // makes the table of handles, which stays
    for (const char* preset : {"k3v2", "kivi2-sink", "kivi4", "kivi2-paper", "f16"}) {
        for (const int flags : {0, int{KIVI_CACHE_REFERENCE}}) {
            for (int32_t threads : {1, 3}) {
                CAPTURE(preset);
                CAPTURE(flags);
                CAPTURE(threads);
                kivi_config small = small_config(preset);
                small.flags = static_cast<uint64_t>(flags);
                small.threads = threads;
                const kivi_config large = larger(small);
                const int64_t objects = taken(small) - estimated(small);
                CHECK(objects > 0);
                CHECK(objects < 8192);
                CHECK(taken(large) - estimated(large) == objects);
            }
        }
    }
}

TEST_CASE("moments are taken as the estimate says: matrices by create, tables by commit") {
    for (const bool wide : {false, true}) {
        kivi_config plain = small_config("k3v2"), aware = plain;
        if (wide) plain = larger(plain), aware = plain;
        aware.layer.k.rounding = KIVI_ROUND_QUERY_AWARE;
        const int heads = aware.layer.kv_heads, dim = aware.layer.key_dim;
        const int64_t matrices = int64_t{4} * dim * dim * heads * 2;
        CHECK(taken(aware) - taken(plain) == matrices);

        TestCache cache(aware);
        std::vector<float> m(static_cast<size_t>(heads) * dim * dim);
        for (size_t i = 0; i < m.size(); ++i) m[i] = i / dim % dim == i % dim ? 1.0f + i % 7 : 0.0f;
        const kivi_tensor moments = dense(m, {heads, dim, dim});
        const int64_t before = held;
        for (int32_t layer : {0, 1}) {
            REQUIRE(kivi_moments_set(cache, layer, &moments, 0, nullptr) == KIVI_OK);
            REQUIRE(kivi_moments_commit(cache, layer, nullptr) == KIVI_OK);
        }
        const int64_t tables = estimated(aware) - estimated(plain) - matrices, objects = held - before - tables;
        CHECK(objects > 0);
        CHECK(objects <= 64 * 2 * heads);
    }
}

TEST_CASE("reserve takes what the report grows by; append and export keep nothing") {
    kivi_config config = small_config("kivi2-sink");
    config.pool_tokens = 256;
    TestCache cache(config);
    REQUIRE(cache.append(0, 200) == KIVI_OK);
    int64_t before = held;
    const int64_t small = reported(cache);
    CHECK(small == estimated(config));
    REQUIRE(kivi_reserve(cache, 1500, nullptr) == KIVI_OK);
    const int64_t grown = held - before;
    CHECK(grown == reported(cache) - small);
    CHECK(reported(cache) > small);
    before = held;
    REQUIRE(cache.append(1, 500) == KIVI_OK);
    cache.blob(1);
    const int64_t after = held;
    CHECK(after == before);
}
