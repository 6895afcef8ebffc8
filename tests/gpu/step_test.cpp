// The kernel of decode steps (core/cuda/step.cu) against the CPU: pages, windows and lengths byte for byte, for every
// instance, batches of different lengths and counts, replayed graphs and full sequences.
#define DOCTEST_CONFIG_IMPLEMENT
#include <algorithm>
#include <cstdlib>

#include "gpu_support.h"
#include "instances.h"

using namespace gpu_test;

namespace {

struct Serving {
    int kv_heads, q_heads, sink, recent, flush, max_tokens;
    bool rotated_keys, rotated_values;
    int32_t dtype;
};

// One cache on the CPU and one on the GPU that are given the same tokens.
class Both {
  public:
    Both(const kivi_config& config, uint64_t seed)
        : cpu(config, KIVI_CPU), gpu(config, KIVI_CUDA), numbers(seed), config_(config) {
        if (config.layer.k.rounding != KIVI_ROUND_QUERY_AWARE) return;
        const int dim = config.layer.key_dim, heads = config.layer.kv_heads;
        std::vector<float> m(size_t(heads) * dim * dim, 0.0f);
        for (size_t i = 0; i < m.size(); ++i) {
            const int row = static_cast<int>(i / dim % dim), column = static_cast<int>(i % dim);
            m[i] = (row == column ? 2.0f + row % 7 : 0.0f) + 0.5f / static_cast<float>(1 + std::abs(row - column));
        }
        Floats matrices(m);
        for (Cache* cache : {&cpu, &gpu}) {
            const kivi_tensor tensor = matrices.view(cache->device, {heads, dim, dim});
            KIVI_OK_(kivi_moments_set(*cache, 0, &tensor, 0, nullptr));
            KIVI_OK_(kivi_moments_commit(*cache, 0, nullptr));
        }
    }

    // counts[i] tokens to sequence sequences[i]; rows of the tensors are `pad` channels wider than heads.
    void append(const std::vector<int32_t>& sequences, const std::vector<int32_t>& counts, int pad = 0) {
        const int rows = static_cast<int>(sequences.size()), heads = config_.layer.kv_heads,
                  dim = config_.layer.key_dim;
        const int32_t most = *std::max_element(counts.begin(), counts.end());
        const int width = dim + pad;
        Halfs k(numbers.rows(int64_t{1} * rows * most * heads, width), config_.window_dtype);
        Halfs v(numbers.rows(int64_t{1} * rows * most * heads, width), config_.window_dtype);
        const kivi_batch batch = batch_of(rows, sequences.data(), counts.data(), most);
        for (Cache* cache : {&cpu, &gpu}) {
            kivi_tensor keys = k.view(cache->device, {rows, most, heads, width});
            kivi_tensor values = v.view(cache->device, {rows, most, heads, width});
            keys.shape[3] = values.shape[3] = dim;
            KIVI_OK_(kivi_append(*cache, 0, &batch, &keys, &values, nullptr));
        }
        CUDA_OK(cudaDeviceSynchronize());
    }

    void compare() {
        for (int32_t sequence = 0; sequence < config_.max_sequences; ++sequence) {
            CAPTURE(sequence);
            CHECK(gpu.length(sequence) == cpu.length(sequence));
            check_same_blob(cpu, gpu, sequence);
        }
        check_same_saturation(cpu, gpu);
    }

    Cache cpu, gpu;
    Numbers numbers;

  private:
    const kivi_config config_;
};

// Four sequences: prompts of different lengths, then a few tokens at a time, also none.
void check_steps(const kivi_config& config, uint64_t seed) {
    Both both(config, seed);
    both.append({2, 0, 3}, {200, 33, 90});
    static const int32_t kCounts[] = {1, 0, 16, 1, 3, 1, 0, 2, 1, 7, 15, 1, 5};
    for (int step = 0; step < 60; ++step) {
        const auto count = [&](int row) { return kCounts[(step * 4 + row * 5) % 13]; };
        both.append({3, 1, 0, 2}, {count(0), count(1), count(2), 1}, step % 3 * 8);
        if (step % 20 == 9 && config.schedule == KIVI_SCHEDULE_ROLLING) {
            const int32_t id = 3;
            const kivi_batch batch = batch_of(1, &id, nullptr, 1);
            KIVI_OK_(kivi_flush_residual(both.cpu, 0, &batch, nullptr));
            KIVI_OK_(kivi_flush_residual(both.gpu, 0, &batch, nullptr));
        }
    }
    both.compare();
}

template <class Instances>
void check_instances(const Instances& instances, int32_t dtype) {
    uint64_t seed = 1;
    for (const Instance& instance : instances) {
        for (int which = 0; which < 4; ++which) {
            CAPTURE(instance.name);
            CAPTURE(which);
            const int group = instance.key_group;
            // Rings that groups wrap round in, and blocks that share the heads of a row.
            const Serving serving{which == 1 ? 9 : 2,      which == 1 ? 9 : 4, which == 2 ? 0 : group,
                                  which == 3 ? 0 : 16 + 40 * which, which == 2 ? 128 : group, 1500,
                                  which % 2 == 1,          which > 1,          dtype};
            check_steps(config_for(instance, serving, 4), seed++);
        }
    }
}

kivi_config config_of_preset(const char* preset, int32_t dtype = KIVI_F16) {
    kivi_config config;
    KIVI_OK_(kivi_config_init(&config, sizeof config));
    KIVI_OK_(kivi_config_preset(&config, preset));
    config.layer_count = 1;
    config.layer.kv_heads = 3, config.layer.q_heads = 6;
    config.layer.key_dim = config.layer.value_dim = 128;
    config.window_dtype = dtype;
    config.max_sequences = 4;
    config.max_tokens = 1500;
    return config;
}

// One token to each of some sequences, from memory that is filled before each replay.
class Step {
  public:
    Step(Both& both, std::vector<int32_t> sequences)
        : both_(both),
          sequences_(std::move(sequences)),
          k_(int64_t{kHeads} * kDim * static_cast<int64_t>(sequences_.size())),
          v_(int64_t{kHeads} * kDim * static_cast<int64_t>(sequences_.size())) {}
    void fill() {
        const auto rows = static_cast<int64_t>(sequences_.size()) * kHeads;
        k_.set(both_.numbers.rows(rows, kDim)), v_.set(both_.numbers.rows(rows, kDim));
    }
    kivi_status append(Cache& cache, kivi_stream stream) {
        const int rows = static_cast<int>(sequences_.size());
        const kivi_batch batch = batch_of(rows, sequences_.data(), nullptr, 1);
        const kivi_tensor keys = k_.view(cache.device, {rows, 1, kHeads, kDim}),
                          values = v_.view(cache.device, {rows, 1, kHeads, kDim});
        return kivi_append(cache, 0, &batch, &keys, &values, stream);
    }

  private:
    static constexpr int kHeads = 3, kDim = 128;
    Both& both_;
    const std::vector<int32_t> sequences_;
    Halfs k_, v_;
};

const char* const kPresets[] = {"k3v2", "kivi2-sink", "k4v2", "kivi4", "kivi2-paper", "f16"};

}  // namespace

TEST_CASE("every instance, sequences of different lengths, counts from 0 to 16") {
    check_instances(kInstances, KIVI_F16);
}
TEST_CASE("the same of bf16") { check_instances(kInstances, KIVI_BF16); }
TEST_CASE("the published schedule") {
    check_instances(kPublishedInstances, KIVI_F16);
    check_instances(kPublishedInstances, KIVI_BF16);
}
TEST_CASE("pages of 16 bits") {
    check_instances(kPlainInstances, KIVI_F16);
    check_instances(kPlainInstances, KIVI_BF16);
}
TEST_CASE("presets") {
    for (const char* preset : kPresets) {
        for (int32_t dtype : {KIVI_F16, KIVI_BF16}) {
            CAPTURE(preset);
            CAPTURE(dtype);
            check_steps(config_of_preset(preset, dtype), 77);
        }
    }
}
TEST_CASE("query-aware rounding of what steps flush") {
    kivi_config config = config_of_preset("k3v2");
    config.layer.k.rounding = KIVI_ROUND_QUERY_AWARE;
    check_steps(config, 5);
}

TEST_CASE("rows that leave the type's range are clamped and counted") {
    kivi_config config = config_of_preset("k3v2");
    Both both(config, 6);
    const std::vector<int32_t> ids{1, 2};
    const kivi_batch batch = batch_of(2, ids.data(), nullptr, 1);
    Halfs rows(std::vector<float>(size_t(2) * 3 * 128, 60000.0f));
    for (int step = 0; step < 200; ++step) {
        for (Cache* cache : {&both.cpu, &both.gpu}) {
            const kivi_tensor tensor = rows.view(cache->device, {2, 1, 3, 128});
            KIVI_OK_(kivi_append(*cache, 0, &batch, &tensor, &tensor, nullptr));
        }
    }
    both.compare();
    kivi_statistics statistics{};
    KIVI_OK_(kivi_query_statistics(both.gpu, 0, &statistics, sizeof statistics));
    CHECK(statistics.saturated_rows == 200 * 2 * 3);
}

TEST_CASE("a replayed graph of steps crosses flush boundaries") {
    for (const char* preset : kPresets) {
        CAPTURE(preset);
        Both both(config_of_preset(preset), 9);
        for (int32_t id = 0; id < 4; ++id) KIVI_OK_(kivi_sequence_reserve(both.gpu, id, 1000, nullptr));
        both.append({0, 3}, {150, 71});
        Step step(both, {3, 0, 1});
        const Stream stream;
        const Captured captured(stream, [&] {
            for (int i = 0; i < 3; ++i) KIVI_OK_(step.append(both.gpu, stream));
        });
        for (int replay = 0; replay < 90; ++replay) {
            step.fill();
            captured.replay();
            for (int i = 0; i < 3; ++i) KIVI_OK_(step.append(both.cpu, nullptr));
        }
        KIVI_OK_(kivi_synchronize(both.gpu, stream));
        both.compare();
    }
}

TEST_CASE("a full sequence keeps what it has, its neighbours go on") {
    for (const char* preset : kPresets) {
        CAPTURE(preset);
        kivi_config config = config_of_preset(preset);
        config.max_tokens = 300;
        Both both(config, 10);
        for (int32_t id = 0; id < 4; ++id) KIVI_OK_(kivi_sequence_reserve(both.gpu, id, 300, nullptr));
        both.append({0, 3}, {290, 71});
        Step all(both, {3, 0, 1});
        const Stream stream;
        const Captured captured(stream, [&] { KIVI_OK_(all.append(both.gpu, stream)); });
        both.append({0}, {9});  // one place is left, for the capture's mirror
        all.fill();
        captured.replay();
        KIVI_OK_(all.append(both.cpu, nullptr));
        const std::vector<uint8_t> full = both.cpu.blob(0);
        for (int i = 0; i < 40; ++i) captured.replay();
        CHECK(kivi_synchronize(both.gpu, stream) == KIVI_ERROR_CAPACITY);
        CHECK(both.gpu.length(0) == 300);
        CHECK(both.gpu.length(3) == 71 + 41);
        CHECK(both.gpu.length(1) == 41);
        CHECK(both.gpu.blob(0, stream) == full);
    }
}

TEST_CASE("batches whose rows are told by the device, tensors of rank 3") {
    for (const char* preset : kPresets) {
        CAPTURE(preset);
        Both both(config_of_preset(preset), 11);
        for (int32_t id = 0; id < 4; ++id) KIVI_OK_(kivi_sequence_reserve(both.gpu, id, 600, nullptr));
        const std::vector<int32_t> ids{2, -1, 0, 3}, counts{3, 1, 0, 16};
        int32_t* on_device = nullptr;
        CUDA_OK(cudaMalloc(&on_device, 8 * sizeof(int32_t)));
        CUDA_OK(cudaMemcpy(on_device, ids.data(), 4 * sizeof(int32_t), cudaMemcpyHostToDevice));
        CUDA_OK(cudaMemcpy(on_device + 4, counts.data(), 4 * sizeof(int32_t), cudaMemcpyHostToDevice));
        for (int step = 0; step < 20; ++step) {
            Halfs k(both.numbers.rows(20 * 3, 128)), v(both.numbers.rows(20 * 3, 128));
            for (Cache* cache : {&both.cpu, &both.gpu}) {
                kivi_batch batch = batch_of(4, ids.data(), counts.data(), 16);
                if (cache == &both.gpu) {
                    batch.sequences = on_device, batch.counts = on_device + 4;
                    batch.device = KIVI_CUDA;
                }
                const kivi_tensor keys = k.view(cache->device, {20, 3, 128}),
                                  values = v.view(cache->device, {20, 3, 128});
                KIVI_OK_(kivi_append(*cache, 0, &batch, &keys, &values, nullptr));
            }
        }
        KIVI_OK_(kivi_synchronize(both.gpu, nullptr));
        both.compare();
        CUDA_OK(cudaFree(on_device));
    }
}

TEST_CASE("two streams: caches side by side, and one cache from stream to stream") {
    Both first(config_of_preset("k3v2"), 12), second(config_of_preset("kivi2-sink"), 13);
    for (int32_t id = 0; id < 4; ++id) {
        KIVI_OK_(kivi_sequence_reserve(first.gpu, id, 600, nullptr));
        KIVI_OK_(kivi_sequence_reserve(second.gpu, id, 600, nullptr));
    }
    Step of_first(first, {0, 1, 2}), of_second(second, {3, 1});
    of_first.fill(), of_second.fill();
    const Stream streams[2];
    cudaEvent_t done;
    CUDA_OK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    for (int i = 0; i < 300; ++i) {
        KIVI_OK_(of_first.append(first.gpu, streams[i % 2]));
        CUDA_OK(cudaEventRecord(done, streams[i % 2]));
        KIVI_OK_(of_second.append(second.gpu, streams[1]));
        CUDA_OK(cudaStreamWaitEvent(streams[(i + 1) % 2], done, 0));
        KIVI_OK_(of_first.append(first.cpu, nullptr));
        KIVI_OK_(of_second.append(second.cpu, nullptr));
    }
    CUDA_OK(cudaDeviceSynchronize());
    CUDA_OK(cudaEventDestroy(done));
    first.compare(), second.compare();
}

// Small enough for tools that watch each access.
TEST_CASE("sanitized: steps of three presets") {
    for (const char* preset : {"k3v2", "kivi2-paper", "f16"}) {
        kivi_config config = config_of_preset(preset);
        config.max_tokens = 400;
        Both both(config, 14);
        both.append({0, 1}, {100, 140});
        for (int step = 0; step < 40; ++step) both.append({0, 1, 2}, {1, step % 3, step % 17});
        both.compare();
    }
}

int main(int argc, char** argv) {
    if (!gpu_there()) return kSkipped;
    return doctest::Context(argc, argv).run();
}
