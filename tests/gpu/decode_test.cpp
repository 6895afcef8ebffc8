// The fast attention of a GPU against the CPU: every instance, ragged lengths, rings that wrap, several query tokens,
// replayed graphs; soft caps, sliding windows and learned sinks against double precision.
#define DOCTEST_CONFIG_IMPLEMENT
#include <algorithm>
#include <cmath>
#include <string>

#include "gpu_support.h"
#include "instances.h"

using namespace gpu_test;

namespace {

std::vector<Instance> every_instance() {
    std::vector<Instance> all(std::begin(kInstances), std::end(kInstances));
    all.insert(all.end(), std::begin(kPlainInstances), std::end(kPlainInstances));
    all.insert(all.end(), std::begin(kPublishedInstances), std::end(kPublishedInstances));
    return all;
}

struct Serving {
    int kv_heads, q_heads, sequences, sink, recent, flush, max_tokens;
    bool rotated_keys, rotated_values;
    int32_t dtype = KIVI_F16;
    bool reference = false;  // the CPU computes in double precision
};

struct Options {
    float q_scale = 1.0f, soft_cap = 0.0f;
    int64_t window_left = -1;
    bool learned_sinks = false;
    bool fresh = false;  // keys and values come with the call
};

kivi_config config_for(const Instance& instance, const Serving& shape) {
    return config_for(instance, shape, shape.sequences);
}

kivi_config on_cpu(kivi_config config, const Serving& shape) {
    config.flags = shape.reference ? KIVI_CACHE_REFERENCE : 0;
    return config;
}

// The same tokens in both, and the same queries to both.
class Pair {
  public:
    Pair(const Instance& instance, const Serving& shape)
        : cpu(on_cpu(config_for(instance, shape), shape), KIVI_CPU),
          gpu(config_for(instance, shape), KIVI_CUDA),
          dim(instance.dim),
          shape(shape) {
        kivi_support support{};
        kivi_config config = config_for(instance, shape);
        config.device = KIVI_CUDA;
        KIVI_OK_(kivi_query_support(&config, 0, &support, sizeof support));
        INFO(support.reason);
        REQUIRE(support.attend_path == KIVI_PATH_FAST);
    }

    void append(int32_t sequence, int count) {
        if (count == 0) return;
        Floats k(numbers.rows(int64_t{1} * count * shape.kv_heads, dim)),
            v(numbers.rows(int64_t{1} * count * shape.kv_heads, dim));
        const kivi_batch batch = batch_of(1, &sequence, nullptr, count);
        for (Cache* cache : {&cpu, &gpu}) {
            const kivi_tensor keys = k.view(cache->device, {1, count, shape.kv_heads, dim});
            const kivi_tensor values = v.view(cache->device, {1, count, shape.kv_heads, dim});
            KIVI_OK_(kivi_append(*cache, 0, &batch, &keys, &values, nullptr));
        }
        CUDA_OK(cudaDeviceSynchronize());
    }

    // Attends to all given sequences, with and without KIVI_ATTEND_INVARIANT, compares out and LSE, and that a second call
    // gives the same bits.
    void compare(const std::vector<int32_t>& sequences, int count, const Options& options = {}) {
        compare(sequences, count, options, 0);
        compare(sequences, count, options, KIVI_ATTEND_INVARIANT);
    }
    void compare(const std::vector<int32_t>& sequences, int count, const Options& options, uint64_t flags) {
        CAPTURE(flags);
        CAPTURE(count);
        CAPTURE(options.q_scale);
        CAPTURE(options.soft_cap);
        CAPTURE(options.window_left);
        CAPTURE(options.learned_sinks);
        CAPTURE(options.fresh);
        const int rows = static_cast<int>(sequences.size());
        const int64_t heads = int64_t{1} * rows * count * shape.q_heads;
        std::vector<float> queries = numbers.rows(heads, dim);
        for (float& x : queries) x *= options.q_scale;
        Halfs q(queries, shape.dtype), out(heads * dim, shape.dtype);
        Floats learned_sinks(numbers.rows(shape.q_heads, 1));
        const int64_t own = int64_t{1} * rows * count * shape.kv_heads;
        Halfs own_keys(numbers.rows(own, dim), shape.dtype), own_values(numbers.rows(own, dim), shape.dtype);
        Floats lse(heads), wide(heads * dim), wide_lse(heads);
        const kivi_batch batch = batch_of(rows, sequences.data(), nullptr, count);
        kivi_attend_params params;
        kivi_attend_params_init(&params, sizeof params);
        params.soft_cap = options.soft_cap;
        params.window_left = options.window_left;
        if (options.learned_sinks) params.learned_sinks = learned_sinks.host.data();
        const Workspace on_cpu(cpu, rows, count), on_gpu(gpu, rows, count);
        {
            const kivi_tensor in = q.view(KIVI_CPU, {rows, count, shape.q_heads, dim});
            const kivi_tensor to = wide.view(KIVI_CPU, {rows, count, shape.q_heads, dim});
            const kivi_tensor sums = wide_lse.view(KIVI_CPU, {rows, count, shape.q_heads});
            const kivi_tensor keys = own_keys.view(KIVI_CPU, {rows, count, shape.kv_heads, dim});
            const kivi_tensor values = own_values.view(KIVI_CPU, {rows, count, shape.kv_heads, dim});
            if (options.fresh) params.k = &keys, params.v = &values;
            params.lse = &sums;
            KIVI_OK_(kivi_attend(cpu, 0, &batch, &in, &to, &params, on_cpu.data, on_cpu.bytes, nullptr));
        }
        if (options.learned_sinks) params.learned_sinks = learned_sinks.device();
        std::vector<float> before;
        for (int turn = 0; turn < 3; ++turn) {
            params.flags = flags;
            const kivi_tensor in = q.view(KIVI_CUDA, {rows, count, shape.q_heads, dim});
            const kivi_tensor to = out.view(KIVI_CUDA, {rows, count, shape.q_heads, dim});
            const kivi_tensor sums = lse.view(KIVI_CUDA, {rows, count, shape.q_heads});
            const kivi_tensor keys = own_keys.view(KIVI_CUDA, {rows, count, shape.kv_heads, dim});
            const kivi_tensor values = own_values.view(KIVI_CUDA, {rows, count, shape.kv_heads, dim});
            if (options.fresh) params.k = &keys, params.v = &values;
            params.lse = &sums;
            CUDA_OK(cudaMemset(to.data, 0xFF, out.host.size() * 2));
            KIVI_OK_(kivi_attend(gpu, 0, &batch, &in, &to, &params, on_gpu.data, on_gpu.bytes, nullptr));
            CUDA_OK(cudaDeviceSynchronize());
            const std::vector<float> result = out.download();
            if (turn > 0) CHECK(result == before);
            before = result;
        }
        // out of 8 bits is 1.6e-3 from what it was before it was rounded.
        const double rounding = shape.dtype == KIVI_BF16 ? 1e-3 : 0.0;
        CHECK(relative_error(before, wide.host) < 3e-3 + rounding);
        const std::vector<float> sums = lse.download();
        double worst = 0;
        for (size_t i = 0; i < sums.size(); ++i) {
            if (std::isinf(wide_lse.host[i])) {
                CHECK(sums[i] == wide_lse.host[i]);
            } else {
                worst = std::fmax(worst, std::fabs(double(sums[i]) - wide_lse.host[i]) /
                                             std::fmax(1.0, std::fabs(wide_lse.host[i])));
            }
        }
        CHECK(worst < 2e-3);
        double worst_row = 0;
        for (int64_t row = 0; row < heads; ++row) {
            const std::vector<float> a(before.begin() + row * dim, before.begin() + (row + 1) * dim);
            const std::vector<float> b(wide.host.begin() + row * dim, wide.host.begin() + (row + 1) * dim);
            worst_row = std::fmax(worst_row, relative_error(a, b));
        }
        CHECK(worst_row < 1e-2 + 2 * rounding);
    }

    Cache cpu, gpu;
    const int dim;
    const Serving shape;
    Numbers numbers{17};
};


// Sequences of one content and one set of queries each, whatever cache and call they are in. For results that must not
// depend on those.
class Contents {
  public:
    Contents(const Serving& shape, int dim, const std::vector<int>& lengths) : shape_(shape), dim_(dim) {
        for (size_t s = 0; s < lengths.size(); ++s) {
            keys_.push_back(Numbers(2 * s).rows(int64_t{1} * lengths[s] * shape.kv_heads, dim));
            values_.push_back(Numbers(2 * s + 1).rows(int64_t{1} * lengths[s] * shape.kv_heads, dim));
        }
    }

    int length(int number) const {
        return static_cast<int>(keys_[number].size() / (int64_t{1} * shape_.kv_heads * dim_));
    }

    // Tokens begin .. end - 1 of content `number` to a sequence.
    void append(const Cache& cache, int32_t sequence, int number, int begin, int end) const {
        if (begin == end) return;
        const int64_t token = int64_t{1} * shape_.kv_heads * dim_;
        const auto part = [&](const std::vector<float>& x) {
            return std::vector<float>(x.begin() + begin * token, x.begin() + end * token);
        };
        Floats k(part(keys_[number])), v(part(values_[number]));
        const kivi_batch batch = batch_of(1, &sequence, nullptr, end - begin);
        const kivi_tensor keys = k.view(cache.device, {1, end - begin, shape_.kv_heads, dim_});
        const kivi_tensor values = v.view(cache.device, {1, end - begin, shape_.kv_heads, dim_});
        KIVI_OK_(kivi_append(cache, 0, &batch, &keys, &values, nullptr));
        CUDA_OK(cudaDeviceSynchronize());
    }

    // Attends with KIVI_ATTEND_INVARIANT: row r has counts[r] queries of content numbers[r], which is sequence
    // sequences[numbers[r]]; if fresh, as many keys and values come with the call. Returns out and LSE of row `which`.
    std::vector<float> attend(const Cache& cache, const Workspace& workspace,
                              const std::vector<int>& sequences, const std::vector<int>& numbers,
                              const std::vector<int32_t>& counts, int which, bool fresh,
                              bool on_device = false) const {
        std::vector<int32_t> ids;
        int64_t tokens = 0, before = 0;
        for (size_t r = 0; r < numbers.size(); ++r) {
            ids.push_back(sequences[numbers[r]]);
            if (static_cast<int>(r) == which) before = tokens;
            tokens += counts[r];
        }
        const auto of_rows = [&](int seed, int heads) {
            std::vector<float> all;
            for (size_t r = 0; r < numbers.size(); ++r) {
                const std::vector<float> own = Numbers(seed + numbers[r]).rows(int64_t{1} * counts[r] * heads, dim_);
                all.insert(all.end(), own.begin(), own.end());
            }
            return all;
        };
        Halfs q(of_rows(100, shape_.q_heads), shape_.dtype), out(tokens * shape_.q_heads * dim_, shape_.dtype);
        Halfs k(of_rows(200, shape_.kv_heads), shape_.dtype), v(of_rows(300, shape_.kv_heads), shape_.dtype);
        Floats lse(tokens * shape_.q_heads);
        kivi_batch batch = batch_of(static_cast<int>(ids.size()), ids.data(), counts.data(),
                                    *std::max_element(counts.begin(), counts.end()));
        int32_t* arrays = nullptr;
        if (on_device) {
            const size_t bytes = ids.size() * sizeof(int32_t);
            CUDA_OK(cudaMalloc(&arrays, 2 * bytes));
            CUDA_OK(cudaMemcpy(arrays, ids.data(), bytes, cudaMemcpyHostToDevice));
            CUDA_OK(cudaMemcpy(arrays + ids.size(), counts.data(), bytes, cudaMemcpyHostToDevice));
            batch.sequences = arrays, batch.counts = arrays + ids.size(), batch.device = KIVI_CUDA;
        }
        const kivi_tensor in = q.view(KIVI_CUDA, {tokens, shape_.q_heads, dim_});
        const kivi_tensor to = out.view(KIVI_CUDA, {tokens, shape_.q_heads, dim_});
        const kivi_tensor sums = lse.view(KIVI_CUDA, {tokens, shape_.q_heads});
        const kivi_tensor keys = k.view(KIVI_CUDA, {tokens, shape_.kv_heads, dim_});
        const kivi_tensor values = v.view(KIVI_CUDA, {tokens, shape_.kv_heads, dim_});
        kivi_attend_params params;
        kivi_attend_params_init(&params, sizeof params);
        params.flags = KIVI_ATTEND_INVARIANT;
        params.lse = &sums;
        if (fresh) params.k = &keys, params.v = &values;
        KIVI_OK_(kivi_attend(cache, 0, &batch, &in, &to, &params, workspace.data, workspace.bytes, nullptr));
        CUDA_OK(cudaDeviceSynchronize());
        CUDA_OK(cudaFree(arrays));
        const std::vector<float> all = out.download(), all_lse = lse.download();
        const int64_t begin = before * shape_.q_heads, end = begin + counts[which] * shape_.q_heads;
        std::vector<float> row(all.begin() + begin * dim_, all.begin() + end * dim_);
        row.insert(row.end(), all_lse.begin() + begin, all_lse.begin() + end);
        return row;
    }

  private:
    Serving shape_;
    int dim_;
    std::vector<std::vector<float>> keys_, values_;
};

// Every other one from `first` on: a process for each half.
void check_every_instance(int32_t dtype, size_t first) {
    const std::vector<Instance> all = every_instance();
    for (size_t number = first; number < all.size(); number += 2) {
        const Instance& instance = all[number];
        CAPTURE(std::string(instance.name));
        const int unit = instance.key_group;
        int turn = 0;
        // The last has more segments than a GPU has clusters.
        for (const Serving& shape : {Serving{2, 8, 6, 0, 0, unit, 3000, false, false, dtype},
                                     Serving{2, 2, 6, unit, 96, unit, 3000, true, false, dtype},
                                     Serving{1, 8, 6, 2 * unit, 72, unit, 3000, false, true, dtype},
                                     Serving{6, 12, 6, unit, 5, unit, 3000, true, true, dtype}}) {
            CAPTURE(turn++);
            Pair pair(instance, shape);
            const int lengths[] = {0, 3, 64, 333, 1000, 2900};
            for (int s = 0; s < 6; ++s) pair.append(s, lengths[s]);
            pair.compare({0, 1, 2, 3, 4, 5}, 1);
            pair.compare({5}, 1, {0.01f});
            pair.compare({4, 2, 0}, 1, {4.0f});
            pair.compare({0, 1, 2, 3, 4, 5}, 1, {1.0f, 0.0f, -1, false, true});
            const int ratio = shape.q_heads / shape.kv_heads;
            if (ratio <= 4) pair.compare({1, 3, 5, 4}, 2);
            pair.compare({0, 4, 2, 5}, 8 / ratio, {1.0f, 0.0f, -1, false, true});
            if (ratio <= 2) pair.compare({5, 1, 3, 2}, 4);
            pair.compare({4, 2, 5}, 16 / ratio);  // as many rows as any instance has
            pair.compare({4, 2, 5}, 32 / ratio);  // and more: the kernel for many rows (prefill.h) reads the same pages
            // The ring turns on.
            for (int i = 0; i < 7; ++i) {
                for (int s = 0; s < 6; ++s) pair.append(s, 1 + (s + i) % 5);
                pair.compare({0, 1, 2, 3, 4, 5}, 1);
            }
            for (int s = 0; s < 6; ++s) CHECK(pair.gpu.blob(s) == pair.cpu.blob(s));
        }
    }
}

}  // namespace

TEST_CASE("half of the instances: ragged lengths, sinks and tails, ratios, query tokens") {
    check_every_instance(KIVI_F16, 0);
}
TEST_CASE("the other half") { check_every_instance(KIVI_F16, 1); }

TEST_CASE("half of the instances with bf16 windows, queries and results") { check_every_instance(KIVI_BF16, 0); }
TEST_CASE("the other half of them with bf16") { check_every_instance(KIVI_BF16, 1); }

TEST_CASE("with KIVI_ATTEND_INVARIANT bits do not depend on batch, counts beside, page placement and capacity") {
    int turn = 0;
    for (const Instance& instance : every_instance()) {
        CAPTURE(std::string(instance.name));
        const int unit = instance.key_group;
        Serving shape{2, 8, 5, unit, 72, unit, 9000, false, true, turn++ % 3 == 2 ? KIVI_BF16 : KIVI_F16};
        const Contents contents(shape, instance.dim, {3, 5700, 333, 0, 2900});
        const Cache plain(config_for(instance, shape), KIVI_CUDA);
        for (int s = 0; s < 5; ++s) contents.append(plain, s, s, 0, contents.length(s));
        // Elsewhere pages come in turns, between those of a sequence that goes.
        const std::vector<int> same{0, 1, 2, 3, 4}, elsewhere{7, 2, 8, 0, 5};
        shape.sequences = 9, shape.max_tokens = 40000;
        const Cache roomy(config_for(instance, shape), KIVI_CUDA);
        for (int round = 0; round < 3; ++round) {
            contents.append(roomy, 1, 1, 300 * round, 300 * (round + 1));
            for (int s = 4; s >= 0; --s) {
                const int length = contents.length(s);
                contents.append(roomy, elsewhere[s], s, length * round / 3, length * (round + 1) / 3);
            }
        }
        KIVI_OK_(kivi_sequence_reset(roomy, 1, nullptr));
        const Workspace tight(plain, 3, 40), wide(roomy, 3, 70);
        // Counts of every kernel: four heads make 4, 8, 16, 20, 64, 68 and 160 rows of them, the last more than a tile.
        for (const int count : {1, 2, 4, 5, 16, 17, 40}) {
            CAPTURE(count);
            for (const int s : {1, 4, count % 3 % 2 * 2}) {
                CAPTURE(s);
                const int t = (s + 1) % 5, u = (s + 2) % 5;
                for (const bool fresh : {false, true}) {
                    CAPTURE(fresh);
                    const std::vector<float> alone = contents.attend(plain, tight, same, {s}, {count}, 0, fresh);
                    CHECK(contents.attend(plain, tight, same, {t, s, u}, {1, count, 4}, 1, fresh) == alone);
                    CHECK(contents.attend(roomy, wide, elsewhere, {t, s, u}, {70, count, 2}, 1, fresh) == alone);
                    CHECK(contents.attend(roomy, wide, elsewhere, {t, u, s}, {1, 4, count}, 2, fresh, true) == alone);
                }
            }
        }
    }
}

TEST_CASE("soft cap, sliding window, learned sinks") {
    const std::vector<Instance> all = every_instance();
    for (const int number : {0, 2, 3, 7, 8, 11, 12, 15, 16, 18, 19, 20}) {
        const Instance& instance = all[number];
        CAPTURE(std::string(instance.name));
        const int unit = instance.key_group;
        for (const Serving& shape : {Serving{2, 8, 5, unit, 72, unit, 2000, false, false, KIVI_F16, true},
                                     Serving{1, 2, 5, 0, 0, unit, 2000, true, true, KIVI_BF16, true}}) {
            Pair pair(instance, shape);
            const int lengths[] = {1, 40, 300, 1111, 1900};
            for (int s = 0; s < 5; ++s) pair.append(s, lengths[s]);
            pair.compare({0, 1, 2, 3, 4}, 1, {1.0f, 5.0f});
            pair.compare({4, 2}, 2, {0.3f, 50.0f, -1, true});
            pair.compare({0, 1, 2, 3, 4}, 1, {1.0f, 5.0f, -1, true, true});
            for (const int64_t window : {0, 1, 31, 100, 333, 1110, 1500, 100000}) {
                pair.compare({0, 1, 2, 3, 4}, 1, {0.5f, 0.0f, window});
                pair.compare({0, 1, 2, 3, 4}, 1, {0.5f, 0.0f, window, false, true});
                pair.compare({0, 1, 2, 3, 4}, 8 * shape.kv_heads / shape.q_heads, {0.5f, 0.0f, window, false, true});
                pair.compare({1, 3, 2}, 2, {0.5f, window % 2 * 20.0f, window, window % 3 == 0});
                pair.compare({4, 3}, 8 * shape.kv_heads / shape.q_heads, {0.5f, 0.0f, window});
            }
        }
    }
}

TEST_CASE("many short sequences, one long one, more blocks than visits") {
    for (const Instance& instance :
         {kInstances[0], kInstances[3], kInstances[7], kPlainInstances[0], kPublishedInstances[0]}) {
        CAPTURE(std::string(instance.name));
        Pair pair(instance, {8, 32, 40, instance.key_group, 96, instance.key_group, 20000, false, true});
        std::vector<int32_t> all;
        for (int s = 0; s < 40; ++s) {
            pair.append(s, s == 11 ? 19000 : s * 37 % 700);
            all.push_back(s);
        }
        pair.compare(all, 1);
        pair.compare(all, 2);
        pair.compare({11}, 1);
        pair.compare({3, 11, 5}, 1);
    }
}

namespace {

// Steps of two sequences, of `prompt` and 10 tokens first, in replays of one graph.
void check_replays(const Instance& instance, uint64_t flags, int prompt, int steps) {
    const Serving shape{2, 8, 2, 64, 64, 64, prompt + 600, false, true};
    Pair pair(instance, shape);
    pair.append(0, prompt);
    pair.append(1, 10);
    const int rows = 2, dim = instance.dim;
    const int32_t ids[] = {0, 1};
    for (int32_t id : ids) KIVI_OK_(kivi_sequence_reserve(pair.gpu, id, shape.max_tokens, nullptr));
    Halfs k(int64_t{rows} * shape.kv_heads * dim), v(int64_t{rows} * shape.kv_heads * dim);
    Halfs q(int64_t{rows} * shape.q_heads * dim), out(int64_t{rows} * shape.q_heads * dim);
    Floats wide(int64_t{rows} * shape.q_heads * dim);
    const kivi_batch batch = batch_of(rows, ids, nullptr, 1);
    kivi_attend_params params;
    kivi_attend_params_init(&params, sizeof params);
    params.flags = flags;
    const Workspace on_cpu(pair.cpu, rows, 1), on_gpu(pair.gpu, rows, 1);
    const auto step = [&](const Cache& cache, const Workspace& workspace, kivi_stream stream) {
        const kivi_tensor keys = k.view(cache.device, {rows, 1, shape.kv_heads, dim});
        const kivi_tensor values = v.view(cache.device, {rows, 1, shape.kv_heads, dim});
        const kivi_tensor queries = q.view(cache.device, {rows, 1, shape.q_heads, dim});
        const kivi_tensor result = cache.device == KIVI_CPU ? wide.view(KIVI_CPU, {rows, 1, shape.q_heads, dim})
                                                            : out.view(KIVI_CUDA, {rows, 1, shape.q_heads, dim});
        KIVI_OK_(kivi_append(cache, 0, &batch, &keys, &values, stream));
        KIVI_OK_(kivi_attend(cache, 0, &batch, &queries, &result, &params, workspace.data, workspace.bytes, stream));
    };
    const Stream stream;
    const Captured captured(stream, [&] { step(pair.gpu, on_gpu, stream); });
    for (int i = 0; i < steps; ++i) {
        k.set(pair.numbers.rows(rows * shape.kv_heads, dim)), v.set(pair.numbers.rows(rows * shape.kv_heads, dim));
        q.set(pair.numbers.rows(rows * shape.q_heads, dim));
        if (i % 3 == 0) CUDA_OK(cudaMemset(on_gpu.data, i, on_gpu.bytes));
        CUDA_OK(cudaDeviceSynchronize());
        captured.replay();
        step(pair.cpu, on_cpu, nullptr);
        CAPTURE(i);
        CHECK(relative_error(out.download(), wide.host) < 3e-3);
    }
    KIVI_OK_(kivi_synchronize(pair.gpu, stream));
    for (int32_t id : ids) CHECK(pair.gpu.blob(id, stream) == pair.cpu.blob(id));
}

}  // namespace

TEST_CASE("a captured step replays while lengths advance, in a workspace that others write to") {
    // The longest one has runs of more than one group (core/cuda/decode_runs.cuh).
    const struct {
        Instance instance;
        uint64_t flags;
        int prompt, steps;
    } turns[] = {{kInstances[3], 0, 300, 200},
                 {kInstances[3], KIVI_ATTEND_INVARIANT, 300, 60},
                 {kPlainInstances[0], 0, 300, 60},
                 {kPlainInstances[0], KIVI_ATTEND_INVARIANT, 2100, 60},
                 {kPublishedInstances[0], 0, 300, 200},
                 {kPublishedInstances[1], KIVI_ATTEND_INVARIANT, 2100, 60}};
    for (const auto& turn : turns) {
        CAPTURE(std::string(turn.instance.name));
        CAPTURE(turn.flags);
        check_replays(turn.instance, turn.flags, turn.prompt, turn.steps);
    }
}

TEST_CASE("sanitized: a cluster, tickets, runs, pages of 16 bits") {
    const uint64_t invariant = KIVI_ATTEND_INVARIANT;
    check_replays(kInstances[3], 0, 300, 2);    // clusters
    check_replays(kInstances[3], 0, 12000, 2);  // too long for one: tickets
    check_replays(kInstances[3], invariant, 300, 2);
    check_replays(kPlainInstances[0], invariant, 2100, 2);
    check_replays(kPublishedInstances[0], 0, 300, 2);
}

TEST_CASE("a chain of calls, each with what the one before it wrote, enqueued at once and replayed") {
    const Instance& instance = kInstances[0];
    const Serving shape{2, 8, 3, 32, 32, 32, 12000, false, false};
    const int dim = instance.dim, links = 24;
    const int32_t lengths[] = {40, 900, 11000};  // the last is too long for a cluster
    const int64_t row = int64_t{1} * shape.q_heads * dim;
    // Row i of x is what link i asks with, and what link i - 1 wrote; the first keys of it are appended as well.
    const auto run = [&](bool wait, bool replay) {
        const Cache cache(config_for(instance, shape), KIVI_CUDA);
        Numbers numbers(5);
        for (int32_t id = 0; id < 3; ++id) {
            Floats k(numbers.rows(int64_t{1} * lengths[id] * shape.kv_heads, dim)),
                v(numbers.rows(int64_t{1} * lengths[id] * shape.kv_heads, dim));
            const kivi_batch batch = batch_of(1, &id, nullptr, lengths[id]);
            const kivi_tensor keys = k.view(KIVI_CUDA, {1, lengths[id], shape.kv_heads, dim});
            const kivi_tensor values = v.view(KIVI_CUDA, {1, lengths[id], shape.kv_heads, dim});
            KIVI_OK_(kivi_append(cache, 0, &batch, &keys, &values, nullptr));
            KIVI_OK_(kivi_sequence_reserve(cache, id, lengths[id] + links, nullptr));
            CUDA_OK(cudaDeviceSynchronize());
        }
        Halfs x(row * (links + 1));
        std::vector<float> start(x.host.size(), NAN);
        const std::vector<float> first = numbers.rows(shape.q_heads, dim);
        std::copy(first.begin(), first.end(), start.begin());
        x.set(start);
        const Workspace workspace(cache, 1, 1);
        const Stream stream;
        const auto chain = [&] {
            for (int i = 0; i < links; ++i) {
                const int32_t id = i % 3;
                const kivi_batch batch = batch_of(1, &id, nullptr, 1);
                const auto part = [&](int64_t at, int heads) {
                    kivi_tensor view = x.view(KIVI_CUDA, {1, 1, heads, dim});
                    view.data = static_cast<uint16_t*>(view.data) + at;
                    return view;
                };
                const kivi_tensor rows = part(i * row, shape.kv_heads), q = part(i * row, shape.q_heads);
                const kivi_tensor out = part((i + 1) * row, shape.q_heads);
                if (i % 4 == 1) KIVI_OK_(kivi_append(cache, 0, &batch, &rows, &rows, stream));
                KIVI_OK_(kivi_attend(cache, 0, &batch, &q, &out, nullptr, workspace.data, workspace.bytes, stream));
                if (wait) CUDA_OK(cudaStreamSynchronize(stream));
            }
        };
        if (replay) {
            Captured(stream, chain).replay();
        } else {
            chain();
            CUDA_OK(cudaStreamSynchronize(stream));
        }
        return x.download();
    };
    const std::vector<float> one_by_one = run(true, false);
    for (float value : one_by_one) REQUIRE(std::isfinite(value));
    for (int turn = 0; turn < 3; ++turn) {
        CHECK(run(false, false) == one_by_one);
        CHECK(run(false, true) == one_by_one);
    }
}

TEST_CASE("extremes: a key channel at 7000 with queries of 40, a value channel at 60000") {
    for (const Instance& instance : {kInstances[0], kInstances[3], kInstances[7], kPublishedInstances[0]}) {
        CAPTURE(std::string(instance.name));
        Pair pair(instance, {2, 8, 1, instance.key_group, 32, instance.key_group, 1200, false, false});
        const int dim = instance.dim, count = 1000;
        const int32_t sequence = 0;
        std::vector<float> keys = pair.numbers.rows(count * 2, dim), values = pair.numbers.rows(count * 2, dim);
        for (size_t i = 5; i < keys.size(); i += dim) keys[i] = 7000.0f + keys[i], values[i + 1] = 60000.0f;
        Floats k(keys), v(values);
        const kivi_batch batch = batch_of(1, &sequence, nullptr, count);
        for (Cache* cache : {&pair.cpu, &pair.gpu}) {
            const kivi_tensor of_keys = k.view(cache->device, {1, count, 2, dim});
            const kivi_tensor of_values = v.view(cache->device, {1, count, 2, dim});
            KIVI_OK_(kivi_append(*cache, 0, &batch, &of_keys, &of_values, nullptr));
        }
        CUDA_OK(cudaDeviceSynchronize());
        pair.compare({0}, 1, {0.05f});
        const int64_t heads = 8;
        std::vector<float> queries(heads * dim, 40.0f);
        Halfs q(queries), out(heads * dim);
        const kivi_batch one = batch_of(1, &sequence, nullptr, 1);
        const Workspace workspace(pair.gpu, 1, 1);
        const kivi_tensor in = q.view(KIVI_CUDA, {1, 1, heads, dim}), to = out.view(KIVI_CUDA, {1, 1, heads, dim});
        KIVI_OK_(kivi_attend(pair.gpu, 0, &one, &in, &to, nullptr, workspace.data, workspace.bytes, nullptr));
        CUDA_OK(cudaDeviceSynchronize());
        for (float x : out.download()) REQUIRE(std::isfinite(x));
    }
}

// Pages and rings that another sequence has left: what is not yet packed there must not show.
TEST_CASE("NaN that an earlier sequence has left in its pages and windows") {
    for (const Instance& instance : {kInstances[0], kInstances[3], kPlainInstances[0], kPublishedInstances[0],
                                     kPublishedInstances[1], kPublishedInstances[2]}) {
        CAPTURE(std::string(instance.name));
        Pair pair(instance, {2, 8, 1, instance.key_group, 64, instance.key_group, 1200, false, false});
        const int dim = instance.dim, count = 1100;
        const int32_t sequence = 0;
        Floats damaged(std::vector<float>(int64_t{count} * 2 * dim, NAN));
        for (const int length : {70, 150, 333, 1000}) {
            const kivi_batch batch = batch_of(1, &sequence, nullptr, count);
            for (Cache* cache : {&pair.cpu, &pair.gpu}) {
                const kivi_tensor rows = damaged.view(cache->device, {1, count, 2, dim});
                KIVI_OK_(kivi_append(*cache, 0, &batch, &rows, &rows, nullptr));
                KIVI_OK_(kivi_sequence_reset(*cache, 0, nullptr));
            }
            CUDA_OK(cudaDeviceSynchronize());
            pair.append(0, length);
            for (int i = 0; i < 40; i += 13) {
                pair.compare({0}, 1);
                pair.compare({0}, 2);
                pair.append(0, 13);
            }
            KIVI_OK_(kivi_sequence_reset(pair.cpu, 0, nullptr));
            KIVI_OK_(kivi_sequence_reset(pair.gpu, 0, nullptr));
        }
    }
}

int main(int argc, char** argv) {
    if (!gpu_there()) return kSkipped;
    doctest::Context context(argc, argv);
    return context.run();
}
