// kivi_step on a GPU, where one kernel attends and appends (core/cuda/decode_new_rows.cuh), against kivi_attend with fresh
// keys and values and kivi_append: results and contents bit for bit. And calls that begin while those before them still
// run (core/cuda/launch_order.h) against the same calls with the device waited for between.
#define DOCTEST_CONFIG_IMPLEMENT
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>

#include "gpu_support.h"
#include "instances.h"

using namespace gpu_test;

namespace {

struct Serving {
    int kv_heads, q_heads, sink, recent, flush, max_tokens;
    bool rotated_keys, rotated_values;
    int32_t dtype;
};

std::vector<uint32_t> bits_of(const void* device, size_t bytes) {
    std::vector<uint32_t> words(bytes / 4);
    CUDA_OK(cudaMemcpy(words.data(), device, words.size() * 4, cudaMemcpyDeviceToHost));
    return words;
}

// Device memory of a call's tensors for so many rows of one token.
struct Call {
    Call(const kivi_config& config, int rows)
        : config(config),
          rows(rows),
          q(int64_t{rows} * config.layer.q_heads * config.layer.key_dim, config.window_dtype),
          k(int64_t{rows} * config.layer.kv_heads * config.layer.key_dim, config.window_dtype),
          v(int64_t{rows} * config.layer.kv_heads * config.layer.key_dim, config.window_dtype),
          out(int64_t{rows} * config.layer.q_heads * config.layer.key_dim, config.window_dtype),
          lse(int64_t{rows} * config.layer.q_heads) {}

    void fill(Numbers& numbers) {
        const int dim = config.layer.key_dim;
        q.set(numbers.rows(int64_t{rows} * config.layer.q_heads, dim));
        k.set(numbers.rows(int64_t{rows} * config.layer.kv_heads, dim));
        v.set(numbers.rows(int64_t{rows} * config.layer.kv_heads, dim));
    }

    kivi_tensor of_q() { return q.view(KIVI_CUDA, {rows, 1, config.layer.q_heads, config.layer.key_dim}); }
    kivi_tensor of_k() { return k.view(KIVI_CUDA, {rows, 1, config.layer.kv_heads, config.layer.key_dim}); }
    kivi_tensor of_v() { return v.view(KIVI_CUDA, {rows, 1, config.layer.kv_heads, config.layer.key_dim}); }
    kivi_tensor of_out() { return out.view(KIVI_CUDA, {rows, 1, config.layer.q_heads, config.layer.key_dim}); }
    kivi_tensor of_lse() { return lse.view(KIVI_CUDA, {rows, 1, config.layer.q_heads}); }
    void clear() {
        CUDA_OK(cudaMemset(of_out().data, 0x7B, out.host.size() * 2));
        CUDA_OK(cudaMemset(lse.device(), 0x7B, lse.host.size() * 4));
        CUDA_OK(cudaDeviceSynchronize());
    }
    std::vector<uint32_t> result() {
        std::vector<uint32_t> words = bits_of(of_out().data, out.host.size() * 2);
        const std::vector<uint32_t> more = bits_of(lse.device(), lse.host.size() * 4);
        words.insert(words.end(), more.begin(), more.end());
        return words;
    }

    const kivi_config config;
    const int rows;
    Halfs q, k, v, out;
    Floats lse;
};

kivi_attend_params defaults() {
    kivi_attend_params params;
    KIVI_OK_(kivi_attend_params_init(&params, sizeof params));
    return params;
}

// What a step is told beside its tensors.
struct Options {
    float soft_cap = 0;
    int64_t window_left = -1;
    const float* learned_sinks = nullptr;
    uint64_t flags = 0;

    kivi_attend_params params(const kivi_tensor* lse) const {
        kivi_attend_params params = defaults();
        params.soft_cap = soft_cap, params.window_left = window_left;
        params.learned_sinks = learned_sinks, params.flags = flags;
        params.lse = lse;
        return params;
    }
};

kivi_status step_apart(Cache& cache, int layer, const kivi_batch& batch, Call& call, const Workspace& workspace,
                       const Options& options, kivi_stream stream) {
    const kivi_tensor q = call.of_q(), k = call.of_k(), v = call.of_v(), out = call.of_out(), lse = call.of_lse();
    kivi_attend_params params = options.params(&lse);
    params.k = &k, params.v = &v;
    const kivi_status status =
        kivi_attend(cache, layer, &batch, &q, &out, &params, workspace.data, workspace.bytes, stream);
    return status != KIVI_OK ? status : kivi_append(cache, layer, &batch, &k, &v, stream);
}
kivi_status step_whole(Cache& cache, int layer, const kivi_batch& batch, Call& call, const Workspace& workspace,
                       const Options& options, kivi_stream stream) {
    const kivi_tensor q = call.of_q(), k = call.of_k(), v = call.of_v(), out = call.of_out(), lse = call.of_lse();
    const kivi_attend_params params = options.params(&lse);
    return kivi_step(cache, layer, &batch, &q, &k, &v, &out, &params, workspace.data, workspace.bytes, stream);
}

// Two caches on the GPU that are given the same tokens: one by two calls, one by one.
class Twins {
  public:
    Twins(const kivi_config& config, int rows, uint64_t seed)
        : apart(config, KIVI_CUDA),
          whole(config, KIVI_CUDA),
          numbers(seed),
          config_(config),
          workspace_(apart, rows, 1) {}

    void prompt(int32_t sequence, int tokens) {
        if (tokens == 0) {
            return;
        }
        const int heads = config_.layer.kv_heads, dim = config_.layer.key_dim;
        Halfs k(numbers.rows(int64_t{tokens} * heads, dim), config_.window_dtype);
        Halfs v(numbers.rows(int64_t{tokens} * heads, dim), config_.window_dtype);
        const kivi_batch batch = batch_of(1, &sequence, nullptr, tokens);
        const kivi_tensor keys = k.view(KIVI_CUDA, {1, tokens, heads, dim}),
                          values = v.view(KIVI_CUDA, {1, tokens, heads, dim});
        for (Cache* cache : {&apart, &whole}) {
            for (int layer = 0; layer < config_.layer_count; ++layer) {
                KIVI_OK_(kivi_append(*cache, layer, &batch, &keys, &values, nullptr));
            }
        }
        CUDA_OK(cudaDeviceSynchronize());
    }
    // The same step of both, with the same results.
    void step(const kivi_batch& batch, Call& call, const Options& options = {}) {
        call.clear();
        KIVI_OK_(step_apart(apart, 0, batch, call, workspace_, options, nullptr));
        const std::vector<uint32_t> expected = call.result();
        call.clear();
        KIVI_OK_(step_whole(whole, 0, batch, call, workspace_, options, nullptr));
        CHECK(call.result() == expected);
    }
    void compare() {
        for (int32_t sequence = 0; sequence < config_.max_sequences; ++sequence) {
            CAPTURE(sequence);
            CHECK(whole.length(sequence) == apart.length(sequence));
            check_same_blob(apart, whole, sequence);
        }
        check_same_saturation(apart, whole);
    }
    const Workspace& workspace() const { return workspace_; }

    Cache apart, whole;
    Numbers numbers;

  private:
    const kivi_config config_;
    Workspace workspace_;
};

void check_steps(const kivi_config& config, const std::vector<int>& prompts, int steps, uint64_t seed,
                 const Options& options = {}) {
    const int rows = static_cast<int>(prompts.size());
    Twins twins(config, rows, seed);
    std::vector<int32_t> ids;
    for (int row = 0; row < rows; ++row) {
        ids.push_back((row * 7 + 3) % rows);  // 7 does not divide the numbers of rows here
        twins.prompt(ids.back(), prompts[row]);
    }
    const kivi_batch batch = batch_of(rows, ids.data(), nullptr, 1);
    Call call(config, rows);
    for (int step = 0; step < steps; ++step) {
        CAPTURE(step);
        if (step % 3 == 0) {
            call.fill(twins.numbers);
        }
        twins.step(batch, call, options);
    }
    KIVI_OK_(kivi_synchronize(twins.whole, nullptr));
    twins.compare();
}

void check_instances(int32_t dtype) {
    uint64_t seed = 1;
    for (const Instance& instance : kInstances) {
        const int most = instance.dim == 256 ? 8 : 16, group = instance.key_group;
        int which = 0;
        for (const int ratio : {1, 4, 8, 16}) {
            if (ratio > most) {
                continue;
            }
            CAPTURE(instance.name);
            CAPTURE(ratio);
            const Serving serving{which == 1 ? 9 : 2,
                                  (which == 1 ? 9 : 2) * ratio,
                                  which == 2 ? 0 : group,
                                  which == 3 ? 0 : 16 + 40 * which,
                                  which == 2 ? 128 : group,
                                  4000,
                                  which % 2 == 1,
                                  which > 1,
                                  dtype};
            check_steps(config_for(instance, serving, 4), {0, group + 60, 3300, 500}, group / 2 + 12, seed++);
            ++which;
        }
    }
}

kivi_config config_of_preset(const char* preset, int sequences, int max_tokens, int layers = 1) {
    kivi_config config;
    KIVI_OK_(kivi_config_init(&config, sizeof config));
    KIVI_OK_(kivi_config_preset(&config, preset));
    config.layer_count = layers;
    config.layer.kv_heads = 2, config.layer.q_heads = 8;
    config.layer.key_dim = config.layer.value_dim = 128;
    config.max_sequences = sequences;
    config.max_tokens = max_tokens;
    return config;
}

const char* const kPresets[] = {"k3v2", "kivi2-sink", "k4v2", "kivi4", "kivi2-paper", "f16"};

}  // namespace

TEST_CASE("every instance, sequences of different lengths") { check_instances(KIVI_F16); }
TEST_CASE("the same of bf16") { check_instances(KIVI_BF16); }

TEST_CASE("every preset, with what a call can ask for") {
    Floats sinks(std::vector<float>{0.5f, -1.0f, 3.0f, 0.0f, 1.0f, 2.0f, -4.0f, 0.25f});
    for (const char* preset : kPresets) {
        CAPTURE(preset);
        Options options;
        check_steps(config_of_preset(preset, 3, 2500), {0, 2000, 200}, 70, 21, options);
        options.learned_sinks = sinks.device();
        options.soft_cap = 20.0f;
        check_steps(config_of_preset(preset, 3, 2500), {0, 2000, 200}, 30, 22, options);
        options.window_left = 150;
        check_steps(config_of_preset(preset, 3, 2500), {0, 2000, 200}, 30, 23, options);
        options.flags = KIVI_ATTEND_INVARIANT;
        check_steps(config_of_preset(preset, 3, 2500), {0, 2000, 200}, 10, 24, options);
    }
}

TEST_CASE("without a recent window a token may be packed at once") {
    for (const char* preset : {"k3v2", "kivi2-sink"}) {
        CAPTURE(preset);
        kivi_config config = config_of_preset(preset, 3, 900);
        config.recent = 0;
        check_steps(config, {0, 300, 63}, 140, 27);
    }
}

TEST_CASE("one sequence, empty, short and long") {
    for (const char* preset : {"k3v2", "kivi2-sink"}) {
        CAPTURE(preset);
        for (const int prompt : {0, 150, 20000}) {
            CAPTURE(prompt);
            check_steps(config_of_preset(preset, 1, 21000), {prompt}, 70, 25);
        }
    }
}

TEST_CASE("flushes between steps") {
    for (const char* preset : {"k3v2", "kivi2-sink", "kivi4"}) {
        CAPTURE(preset);
        const kivi_config config = config_of_preset(preset, 3, 900);
        Twins twins(config, 3, 26);
        twins.prompt(0, 250), twins.prompt(2, 90);
        const kivi_batch batch = batch_of(3, nullptr, nullptr, 1);
        Call call(config, 3);
        for (int step = 0; step < 150; ++step) {
            CAPTURE(step);
            call.fill(twins.numbers);
            twins.step(batch, call);
            if (step % 23 != 5) {
                continue;
            }
            const kivi_batch flushed = batch_of(1 + step % 3, nullptr, nullptr, 1);
            for (Cache* cache : {&twins.apart, &twins.whole}) {
                KIVI_OK_(kivi_flush_residual(*cache, 0, &flushed, nullptr));
            }
            twins.compare();
        }
        twins.compare();
    }
}

TEST_CASE("more rows than a launch takes, and more heads than a block has warps") {
    std::vector<int> prompts;
    for (int row = 0; row < 75; ++row) {
        prompts.push_back(row % 5 * 70);
    }
    for (const char* preset : {"k3v2", "kivi2-sink"}) {
        CAPTURE(preset);
        check_steps(config_of_preset(preset, 75, 500), prompts, 70, 31);
        kivi_config config = config_of_preset(preset, 64, 500);
        config.layer.kv_heads = config.layer.q_heads = 16;
        check_steps(config, {prompts.begin(), prompts.begin() + 64}, 40, 32);
    }
}

TEST_CASE("rows that are not finite, and rows that leave the type's range") {
    for (const char* preset : {"k3v2", "kivi2-sink"}) {
        for (const bool rotated : {false, true}) {
            kivi_config config = config_of_preset(preset, 2, 900);
            if (rotated) {
                config.layer.k.transform = config.layer.v.transform = KIVI_TRANSFORM_HADAMARD;
            }
            Twins twins(config, 2, 41);
            twins.prompt(1, 300);
            Call call(config, 2);
            const kivi_batch batch = batch_of(2, nullptr, nullptr, 1);
            for (int step = 0; step < 90; ++step) {
                call.fill(twins.numbers);
                const float odd[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                                     -std::numeric_limits<float>::infinity(), 60000.0f, -0.0f};
                if (step % 10 == 3) {
                    std::vector<float> rows = twins.numbers.rows(4, 128);
                    std::fill(rows.begin() + 128 * (step / 10 % 3), rows.begin() + 128 * (step / 10 % 3 + 1),
                              odd[step / 10 % 5]);
                    rows[step % 128] = odd[(step / 10 + 1) % 5];
                    (step % 20 == 3 ? call.k : call.v).set(rows);
                }
                twins.step(batch, call);
            }
            twins.compare();
        }
    }
}

TEST_CASE("a replayed graph of steps over two layers crosses flush boundaries") {
    for (const char* preset : kPresets) {
        CAPTURE(preset);
        const kivi_config config = config_of_preset(preset, 3, 1200, 2);
        Twins twins(config, 3, 51);
        for (int32_t id = 0; id < 3; ++id) {
            KIVI_OK_(kivi_sequence_reserve(twins.whole, id, 1200, nullptr));
            KIVI_OK_(kivi_sequence_reserve(twins.apart, id, 1200, nullptr));
        }
        twins.prompt(0, 400), twins.prompt(2, 61);
        Call calls[4] = {{config, 3}, {config, 3}, {config, 3}, {config, 3}};
        const kivi_batch batch = batch_of(3, nullptr, nullptr, 1);
        const Stream stream;
        const Captured whole(stream, [&] {
            for (int i = 0; i < 4; ++i) {
                KIVI_OK_(step_whole(twins.whole, i % 2, batch, calls[i], twins.workspace(), {}, stream));
            }
        });
        for (int replay = 0; replay < 80; ++replay) {
            CAPTURE(replay);
            for (Call& call : calls) {
                call.fill(twins.numbers);
            }
            whole.replay();
            std::vector<std::vector<uint32_t>> got;
            for (Call& call : calls) {
                got.push_back(call.result());
            }
            for (int i = 0; i < 4; ++i) {
                KIVI_OK_(step_apart(twins.apart, i % 2, batch, calls[i], twins.workspace(), {}, stream));
            }
            CUDA_OK(cudaStreamSynchronize(stream));
            for (int i = 0; i < 4; ++i) {
                CHECK(got[i] == calls[i].result());
            }
        }
        KIVI_OK_(kivi_synchronize(twins.whole, stream));
        twins.compare();
    }
}

TEST_CASE("rows that the device tells: skipped ones, a sequence twice, one that becomes full") {
    for (const char* preset : kPresets) {
        CAPTURE(preset);
        const kivi_config config = config_of_preset(preset, 6, 300);
        Twins twins(config, 6, 61);
        for (int32_t id = 0; id < 6; ++id) {
            KIVI_OK_(kivi_sequence_reserve(twins.whole, id, 300, nullptr));
            KIVI_OK_(kivi_sequence_reserve(twins.apart, id, 300, nullptr));
        }
        twins.prompt(0, 280), twins.prompt(3, 71);
        const std::vector<int32_t> ids{3, -1, 0, 77, 3, 1};
        const DeviceArray<int32_t> on_device(ids);
        kivi_batch batch = batch_of(6, on_device.data(), nullptr, 1);
        batch.device = KIVI_CUDA;
        Call call(config, 6);
        for (int step = 0; step < 60; ++step) {
            CAPTURE(step);
            call.fill(twins.numbers);
            twins.step(batch, call);
        }
        CHECK(kivi_synchronize(twins.apart, nullptr) == KIVI_ERROR_CAPACITY);
        CHECK(kivi_synchronize(twins.whole, nullptr) == KIVI_ERROR_CAPACITY);
        CHECK(twins.whole.length(0) == 300);
        CHECK(twins.whole.length(3) == 71 + 60);
        CHECK(twins.whole.length(1) == 60);
        twins.compare();
    }
}

TEST_CASE("more rows that the device tells than a launch takes, and sequences that stand in two launches") {
    constexpr int kRows = 80;
    const kivi_config config = config_of_preset("k3v2", kRows, 300);
    Twins twins(config, kRows, 62);
    std::vector<int32_t> ids;
    for (int32_t row = 0; row < kRows; ++row) {
        KIVI_OK_(kivi_sequence_reserve(twins.whole, row, 300, nullptr));
        KIVI_OK_(kivi_sequence_reserve(twins.apart, row, 300, nullptr));
        twins.prompt(row, row % 3 * 90);
        ids.push_back(row % 9 == 4 ? -1 : row < 70 ? row : row - 67);
    }
    const DeviceArray<int32_t> on_device(ids);
    kivi_batch batch = batch_of(kRows, on_device.data(), nullptr, 1);
    batch.device = KIVI_CUDA;
    Call call(config, kRows);
    for (int step = 0; step < 40; ++step) {
        CAPTURE(step);
        call.fill(twins.numbers);
        twins.step(batch, call);
    }
    KIVI_OK_(kivi_synchronize(twins.apart, nullptr));
    KIVI_OK_(kivi_synchronize(twins.whole, nullptr));
    CHECK(twins.whole.length(3) == 40);  // of rows 3 and 70
    twins.compare();
}

// Views of one tensor [tokens, heads of q, k and v, dim], as a projection leaves it; rows that are skipped, told by
// counts and offsets on either side.
TEST_CASE("queries, keys and values in one tensor of rank 3") {
    constexpr int kTokens = 3, kHeads = 12, kDim = 128;
    const std::vector<int32_t> ids{2, -1, 0, 77, 1, 3}, counts{1, 1, 0, 0, 1, 0};
    const std::vector<int32_t> odd_counts{1, 1, 0, 1, 1, 5};  // what only the device is told
    const std::vector<int64_t> offsets{2, 1, 1, 0, 0, 0};
    const std::vector<int64_t> odd_offsets{2, -1, 1, 0, kTokens, int64_t{1} << 32};  // row 4 is skipped too
    const std::vector<int32_t> sound_ids{2, -1, 0, -1, 1, 3};
    const DeviceArray<int32_t> device_ids(ids), device_counts(odd_counts);
    const DeviceArray<int64_t> device_offsets(odd_offsets);
    for (const char* preset : {"k3v2", "kivi2-sink", "f16"}) {
        CAPTURE(preset);
        const kivi_config config = config_of_preset(preset, 6, 600);  // as many as rows, which device arrays need
        Twins twins(config, 6, 63);
        for (int32_t id = 0; id < 4; ++id) {
            KIVI_OK_(kivi_sequence_reserve(twins.whole, id, 600, nullptr));
            KIVI_OK_(kivi_sequence_reserve(twins.apart, id, 600, nullptr));
        }
        twins.prompt(1, 61), twins.prompt(2, 150);
        Halfs together(int64_t{kTokens} * kHeads * kDim), out(int64_t{kTokens} * 8 * kDim);
        const auto part = [&](int first, int heads) {
            kivi_tensor tensor = together.view(KIVI_CUDA, {kTokens, kHeads, kDim});
            tensor.data = static_cast<uint16_t*>(tensor.data) + first * kDim;
            tensor.shape[1] = heads;
            return tensor;
        };
        const kivi_tensor q = part(0, 8), k = part(8, 2), v = part(10, 2), to = out.view(KIVI_CUDA, {kTokens, 8, kDim});
        kivi_batch batches[3] = {batch_of(6, sound_ids.data(), counts.data(), 1),
                                 batch_of(6, sound_ids.data(), counts.data(), 1),
                                 batch_of(6, device_ids.data(), device_counts.data(), 1)};
        batches[1].offsets = offsets.data();
        batches[2].offsets = device_offsets.data();
        batches[2].device = KIVI_CUDA;
        const size_t bytes = out.host.size() * 2;
        for (int step = 0; step < 120; ++step) {
            CAPTURE(step);
            const kivi_batch& batch = batches[step % 3];
            together.set(twins.numbers.rows(int64_t{kTokens} * kHeads, kDim));
            kivi_attend_params params = defaults();
            params.k = &k, params.v = &v;
            CUDA_OK(cudaMemset(to.data, 0x7B, bytes));
            KIVI_OK_(kivi_attend(twins.apart, 0, &batch, &q, &to, &params, twins.workspace().data,
                                 twins.workspace().bytes, nullptr));
            KIVI_OK_(kivi_append(twins.apart, 0, &batch, &k, &v, nullptr));
            const std::vector<uint32_t> expected = bits_of(to.data, bytes);
            CUDA_OK(cudaMemset(to.data, 0x7B, bytes));
            KIVI_OK_(kivi_step(twins.whole, 0, &batch, &q, &k, &v, &to, nullptr, twins.workspace().data,
                               twins.workspace().bytes, nullptr));
            CHECK(bits_of(to.data, bytes) == expected);
        }
        KIVI_OK_(kivi_synchronize(twins.apart, nullptr));
        KIVI_OK_(kivi_synchronize(twins.whole, nullptr));
        CHECK(twins.whole.length(2) == 150 + 120);
        CHECK(twins.whole.length(1) == 61 + 80);
        CHECK(twins.whole.length(0) == 0);
        twins.compare();
    }
}

TEST_CASE("a step that its tensors keep from the one kernel makes two launches") {
    // f32 tensors, and rows that are not aligned, on a cache whose kernel reads f16.
    const kivi_config config = config_of_preset("k3v2", 2, 900);
    Twins twins(config, 2, 71);
    twins.prompt(0, 200);
    Floats q(twins.numbers.rows(16, 128)), k(twins.numbers.rows(4, 128)), v(twins.numbers.rows(4, 128)),
        out(2 * 8 * 128);
    const kivi_batch batch = batch_of(2, nullptr, nullptr, 1);
    const kivi_tensor queries = q.view(KIVI_CUDA, {2, 1, 8, 128}), keys = k.view(KIVI_CUDA, {2, 1, 2, 128}),
                      values = v.view(KIVI_CUDA, {2, 1, 2, 128}), to = out.view(KIVI_CUDA, {2, 1, 8, 128});
    const Workspace workspace(twins.whole, 2, 1);
    for (int step = 0; step < 80; ++step) {
        kivi_attend_params params = defaults();
        params.k = &keys, params.v = &values;
        KIVI_OK_(kivi_attend(twins.apart, 0, &batch, &queries, &to, &params, workspace.data, workspace.bytes, nullptr));
        KIVI_OK_(kivi_append(twins.apart, 0, &batch, &keys, &values, nullptr));
        const std::vector<float> expected = out.download();
        KIVI_OK_(kivi_step(twins.whole, 0, &batch, &queries, &keys, &values, &to, nullptr, workspace.data,
                           workspace.bytes, nullptr));
        CHECK(out.download() == expected);
    }
    twins.compare();
}

// Calls in a random order on three layers, once enqueued as they come and once with the device waited for between. Now
// and then both sequences begin anew with a prompt of their own, on pages of either.
TEST_CASE("steps, appends, attends, flushes, replays and new sequences in any order see what was before them") {
    for (const char* preset : {"k3v2", "kivi2-sink", "f16"}) {
        CAPTURE(preset);
        constexpr int kLayers = 3, kCalls = 400, kPrompt = 150, kMorePrompt = 60;
        const kivi_config config = config_of_preset(preset, 2, 2000, kLayers);
        const kivi_batch batch = batch_of(2, nullptr, nullptr, 1);
        std::vector<std::vector<uint32_t>> results[2];
        for (const bool patient : {false, true}) {
            CAPTURE(patient);
            Cache cache(config, KIVI_CUDA);
            const Workspace workspace(cache, 2, 1);
            Numbers numbers(81);
            std::mt19937 random(82);
            const Stream streams[2];
            cudaEvent_t done;
            CUDA_OK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
            Halfs prompt_keys(numbers.rows((kPrompt + kMorePrompt) * 2, 128)),
                prompt_values(numbers.rows((kPrompt + kMorePrompt) * 2, 128));
            const auto begin_anew = [&](kivi_stream stream) {
                for (int32_t id = 0; id < 2; ++id) {
                    KIVI_OK_(kivi_sequence_reset(cache, id, stream));
                }
                const auto first = static_cast<int32_t>(random() % 2);
                for (const int32_t id : {first, 1 - first}) {
                    KIVI_OK_(kivi_sequence_reserve(cache, id, 2000, stream));
                    const int tokens = kPrompt + static_cast<int>(random() % kMorePrompt);
                    const kivi_batch prompt = batch_of(1, &id, nullptr, tokens);
                    const kivi_tensor k = prompt_keys.view(KIVI_CUDA, {1, tokens, 2, 128}),
                                      v = prompt_values.view(KIVI_CUDA, {1, tokens, 2, 128});
                    for (int layer = 0; layer < kLayers; ++layer) {
                        KIVI_OK_(kivi_append(cache, layer, &prompt, &k, &v, stream));
                    }
                }
            };
            begin_anew(streams[0]);
            std::vector<std::unique_ptr<Call>> calls;
            for (int i = 0; i < kCalls; ++i) {
                calls.push_back(std::make_unique<Call>(config, 2));
                calls.back()->fill(numbers);
            }
            Call captured_call(config, 2);
            captured_call.fill(numbers);
            CUDA_OK(cudaDeviceSynchronize());
            cudaGraph_t graph;
            cudaGraphExec_t appends;  // to every layer
            CUDA_OK(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeGlobal));
            for (int layer = 0; layer < kLayers; ++layer) {
                const kivi_tensor k = captured_call.of_k(), v = captured_call.of_v();
                KIVI_OK_(kivi_append(cache, layer, &batch, &k, &v, streams[0]));
            }
            CUDA_OK(cudaStreamEndCapture(streams[0], &graph));
            CUDA_OK(cudaGraphInstantiate(&appends, graph, 0));
            int at = 0;
            for (int i = 0; i < kCalls; ++i) {
                Call& call = *calls[i];
                const int layer = static_cast<int>(random() % kLayers);
                const kivi_tensor q = call.of_q(), k = call.of_k(), v = call.of_v(), out = call.of_out();
                if (random() % 10 == 0) {  // to the other stream
                    CUDA_OK(cudaEventRecord(done, streams[at]));
                    at = 1 - at;
                    CUDA_OK(cudaStreamWaitEvent(streams[at], done, 0));
                }
                switch (random() % 8) {
                    case 0:
                    case 1:
                        KIVI_OK_(step_whole(cache, layer, batch, call, workspace, {}, streams[at]));
                        break;
                    case 2:
                        KIVI_OK_(kivi_append(cache, layer, &batch, &k, &v, streams[at]));
                        break;
                    case 3:
                        CUDA_OK(cudaGraphLaunch(appends, streams[at]));
                        break;
                    case 4: {
                        const int what = static_cast<int>(random() % 12);
                        if (what < 3) {
                            KIVI_OK_(kivi_flush_residual(cache, layer, &batch, streams[at]));
                        } else if (what == 3) {
                            begin_anew(streams[at]);
                        }
                        break;
                    }
                    default:
                        KIVI_OK_(kivi_attend(cache, layer, &batch, &q, &out, nullptr, workspace.data, workspace.bytes,
                                             streams[at]));
                }
                if (patient) {
                    CUDA_OK(cudaDeviceSynchronize());
                }
            }
            CUDA_OK(cudaDeviceSynchronize());
            for (const auto& call : calls) {
                results[patient].push_back(bits_of(call->of_out().data, call->out.host.size() * 2));
            }
            KIVI_OK_(kivi_synchronize(cache, streams[at]));
            for (int layer = 0; layer < kLayers; ++layer) {
                for (int32_t id = 0; id < 2; ++id) {
                    const int64_t tokens = cache.length(id, layer);
                    REQUIRE(tokens >= kPrompt);
                    Halfs k(tokens * 2 * 128), v(tokens * 2 * 128);
                    const kivi_tensor keys = k.view(KIVI_CUDA, {tokens, 2, 128}),
                                      values = v.view(KIVI_CUDA, {tokens, 2, 128});
                    KIVI_OK_(kivi_dequantize(cache, layer, id, 0, tokens, &keys, &values, 0, streams[at]));
                    CUDA_OK(cudaDeviceSynchronize());
                    results[patient].push_back(bits_of(keys.data, k.host.size() * 2));
                    results[patient].push_back(bits_of(values.data, v.host.size() * 2));
                }
            }
            CUDA_OK(cudaGraphExecDestroy(appends));
            CUDA_OK(cudaGraphDestroy(graph));
            CUDA_OK(cudaEventDestroy(done));
        }
        REQUIRE(results[0].size() == results[1].size());
        for (size_t i = 0; i < results[0].size(); ++i) {
            CAPTURE(i);
            CHECK(results[0][i] == results[1][i]);
        }
    }
}

// Small enough for tools that watch each access: the second step packs. With and without clusters.
TEST_CASE("sanitized: steps of three presets that pack") {
    for (const char* preset : {"k3v2", "kivi2-sink", "kivi2-paper"}) {
        kivi_config config = config_of_preset(preset, 2, 700);
        const int before = config.recent + 2 * config.flush - 2;
        check_steps(config, {before, 0}, 3, 91);
        config.layer.kv_heads = config.layer.q_heads = 12;
        check_steps(config, {before, 0}, 3, 92);
    }
}

int main(int argc, char** argv) {
    if (!gpu_there()) {
        return kSkipped;
    }
    return doctest::Context(argc, argv).run();
}
