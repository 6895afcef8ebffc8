// Small caches, tensors and batches for the tests of core/cache and core/api.
#pragma once
#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kivi/kivi.h"

namespace kivi_test {

// Numbers that are alike on every machine: uniform in [-1, 1).
class Numbers {
  public:
    explicit Numbers(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
    float next() {
        state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
        return static_cast<float>(state_ >> 40) / static_cast<float>(1 << 23) - 1;
    }
    std::vector<float> take(size_t count) {
        std::vector<float> numbers(count);
        for (float& number : numbers) number = next();
        return numbers;
    }

  private:
    uint64_t state_;
};

// A dense f32 view of host memory.
inline kivi_tensor dense(void* data, std::initializer_list<int64_t> shape) {
    kivi_tensor tensor{};
    tensor.data = data;
    tensor.dtype = KIVI_F32;
    tensor.device = KIVI_CPU;
    tensor.rank = static_cast<int32_t>(shape.size());
    int64_t stride = 1;
    for (int axis = tensor.rank - 1; axis >= 0; axis--) {
        tensor.shape[axis] = shape.begin()[axis];
        tensor.stride[axis] = stride;
        stride *= shape.begin()[axis];
    }
    return tensor;
}
inline kivi_tensor dense(const std::vector<float>& data, std::initializer_list<int64_t> shape) {
    return dense(const_cast<float*>(data.data()), shape);
}

// One row for sequence `id`; the struct refers to the array.
struct OneRow {
    int32_t id;
    kivi_batch batch;
    OneRow(int32_t sequence, int32_t count) : id(sequence) {
        kivi_batch_init(&batch, sizeof batch);
        batch.rows = 1;
        batch.sequences = &id;
        batch.max_count = count;
    }
    OneRow(const OneRow&) = delete;
    const kivi_batch* operator&() const { return &batch; }
};

constexpr int kHeads = 2, kQueryHeads = 4, kDim = 64;

// Two layers of 2 KV heads and 64 channels, 3 sequences of at most 600 tokens.
inline kivi_config small_config(const char* preset = "kivi2-sink") {
    kivi_config config;
    REQUIRE(kivi_config_init(&config, sizeof config) == KIVI_OK);
    REQUIRE(kivi_config_preset(&config, preset) == KIVI_OK);
    config.layer_count = 2;
    config.layer.kv_heads = kHeads;
    config.layer.q_heads = kQueryHeads;
    config.layer.key_dim = config.layer.value_dim = kDim;
    config.max_sequences = 3;
    config.max_tokens = 600;
    config.threads = 1;
    return config;
}

// A cache that ends with its scope.
class TestCache {
  public:
    explicit TestCache(const kivi_config& config) {
        const kivi_status status = kivi_cache_create(&config, &handle_);
        INFO(kivi_last_error());
        REQUIRE(status == KIVI_OK);
    }
    ~TestCache() { kivi_cache_destroy(handle_); }
    TestCache(const TestCache&) = delete;
    operator kivi_cache*() const { return handle_; }

    // Appends seeded tokens to every layer; the same seed and range give the same tokens.
    kivi_status append(int32_t sequence, int32_t count, uint64_t seed = 1) {
        for (int32_t layer = 0; layer < 2; layer++) {
            const kivi_status status = append_layer(layer, sequence, count, seed);
            if (status != KIVI_OK) return status;
        }
        return KIVI_OK;
    }
    kivi_status append_layer(int32_t layer, int32_t sequence, int32_t count, uint64_t seed = 1) {
        Numbers numbers(seed * 10 + layer);
        const std::vector<float> k = numbers.take(static_cast<size_t>(count) * kHeads * kDim);
        const std::vector<float> v = numbers.take(static_cast<size_t>(count) * kHeads * kDim);
        const kivi_tensor keys = dense(k, {count, kHeads, kDim}), values = dense(v, {count, kHeads, kDim});
        const OneRow row(sequence, count);
        return kivi_append(handle_, layer, &row, &keys, &values, nullptr);
    }
    int64_t length(int32_t layer, int32_t sequence) const {
        kivi_length length;
        REQUIRE(kivi_sequence_length(handle_, layer, sequence, &length, sizeof length) == KIVI_OK);
        return length.length;
    }
    kivi_statistics statistics(int32_t layer = -1) const {
        kivi_statistics statistics;
        REQUIRE(kivi_query_statistics(handle_, layer, &statistics, sizeof statistics) == KIVI_OK);
        return statistics;
    }
    std::vector<uint8_t> blob(int32_t sequence) const {
        size_t bytes = 0, written = 0;
        REQUIRE(kivi_export_size(handle_, sequence, &bytes) == KIVI_OK);
        std::vector<uint8_t> blob(bytes);
        REQUIRE(kivi_export(handle_, sequence, blob.data(), bytes, &written, nullptr) == KIVI_OK);
        REQUIRE(written == bytes);
        return blob;
    }

  private:
    kivi_cache* handle_ = nullptr;
};

inline std::string error() { return kivi_last_error(); }
inline bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

}  // namespace kivi_test
