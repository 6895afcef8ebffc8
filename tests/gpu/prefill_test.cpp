// Many query rows over packed pasts on a GPU against the CPU: every instance, ragged batches, causal edges, masks,
// tokens of the call, contexts that several blocks share, replayed graphs.
#define DOCTEST_CONFIG_IMPLEMENT
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>

#include "gpu_support.h"
#include "instances.h"

using namespace gpu_test;

namespace {

struct Serving {
    int kv_heads, q_heads, sink, recent, flush, max_tokens;
    bool rotated_keys, rotated_values;
    int32_t dtype = KIVI_F16;  // of windows, queries, and keys and values of the call; bf16: results are f32
};

// How a call differs from the plain one.
struct Ask {
    float q_scale = 1, scale = 0, soft_cap = 0;
    int64_t window_left = -1;
    bool fresh = false, learned_sinks = false;
};

// The same tokens in both, and the same queries to both.
class Pair {
  public:
    Pair(const Instance& instance, const Serving& serving, const std::vector<int>& lengths, uint64_t flags = 0)
        : Pair(config_for(instance, serving, static_cast<int>(lengths.size())), flags) {
        for (size_t s = 0; s < lengths.size(); ++s) append(static_cast<int32_t>(s), lengths[s]);
    }

    void append(int32_t sequence, int count) {
        if (count == 0) return;
        Floats k(rows(count)), v(rows(count));
        append(sequence, count, k, v);
    }
    void append(int32_t sequence, int count, Floats& k, Floats& v) {
        const kivi_batch batch = batch_of(1, &sequence, nullptr, count);
        for (Cache* cache : {&cpu, &gpu}) {
            const kivi_tensor keys = k.view(cache->device, {1, count, kv_heads, dim});
            const kivi_tensor values = v.view(cache->device, {1, count, kv_heads, dim});
            KIVI_OK_(kivi_append(*cache, 0, &batch, &keys, &values, nullptr));
        }
        CUDA_OK(cudaDeviceSynchronize());
    }
    std::vector<float> rows(int64_t tokens) { return numbers.rows(tokens * kv_heads, dim); }

    // counts[s] queries to sequence s; compares out and LSE (unless scores are so large that they need not be alike), and
    // that a second call gives the same bits.
    std::vector<float> compare(const std::vector<int32_t>& counts, const Ask& ask = {}, bool alike = true) {
        CAPTURE(counts.front());
        CAPTURE(ask.window_left);
        CAPTURE(ask.fresh);
        const int batch_rows = static_cast<int>(counts.size());
        const int64_t tokens = std::accumulate(counts.begin(), counts.end(), int64_t{0}), heads = tokens * q_heads;
        int most = 0;
        for (int32_t count : counts) most = std::max(most, count);
        std::vector<float> queries = numbers.rows(heads, dim);
        for (float& x : queries) x *= ask.q_scale;
        Halfs q(queries, dtype), out(heads * dim), k(rows(tokens), dtype), v(rows(tokens), dtype);
        Floats exact_out(heads * dim), lse(heads), wide(heads * dim), wide_lse(heads), sinks(numbers.rows(1, q_heads));
        const kivi_batch batch = batch_of(batch_rows, nullptr, counts.data(), most);
        const auto call = [&](const Cache& cache, const kivi_tensor& to, Floats& to_lse, const Workspace& workspace) {
            const kivi_tensor in = q.view(cache.device, {tokens, q_heads, dim});
            const kivi_tensor sums = to_lse.view(cache.device, {tokens, q_heads});
            const kivi_tensor keys = k.view(cache.device, {tokens, kv_heads, dim});
            const kivi_tensor values = v.view(cache.device, {tokens, kv_heads, dim});
            kivi_attend_params params;
            kivi_attend_params_init(&params, sizeof params);
            params.scale = ask.scale;
            params.soft_cap = ask.soft_cap;
            params.window_left = ask.window_left;
            params.lse = &sums;
            if (ask.fresh) params.k = &keys, params.v = &values;
            if (ask.learned_sinks) params.learned_sinks = cache.device == KIVI_CPU ? sinks.host.data() : sinks.device();
            KIVI_OK_(kivi_attend(cache, 0, &batch, &in, &to, &params, workspace.data, workspace.bytes, nullptr));
        };
        const Workspace on_cpu(cpu, batch_rows, most), on_gpu(gpu, batch_rows, most);
        call(cpu, wide.view(KIVI_CPU, {tokens, q_heads, dim}), wide_lse, on_cpu);
        std::vector<float> result;
        for (int turn = 0; turn < 2; ++turn) {
            const bool exact = dtype == KIVI_BF16;
            const kivi_tensor to = exact ? exact_out.view(KIVI_CUDA, {tokens, q_heads, dim})
                                         : out.view(KIVI_CUDA, {tokens, q_heads, dim});
            CUDA_OK(cudaMemset(to.data, 0xFF, heads * dim * (exact ? 4 : 2)));
            call(gpu, to, lse, on_gpu);
            CUDA_OK(cudaDeviceSynchronize());
            const std::vector<float> again = exact ? exact_out.download() : out.download();
            if (turn > 0) CHECK(again == result);
            result = again;
        }
        if (alike) check(result, wide.host, lse.download(), wide_lse.host);
        return result;
    }

    Cache cpu, gpu;
    const int kv_heads, q_heads, dim;
    const int32_t dtype;
    Numbers numbers{17};

  private:
    Pair(const kivi_config& config, uint64_t flags)
        : cpu(with_flags(config, flags), KIVI_CPU), gpu(config, KIVI_CUDA), kv_heads(config.layer.kv_heads),
          q_heads(config.layer.q_heads), dim(config.layer.key_dim),
          dtype(config.window_dtype) {
        kivi_support support{};
        kivi_config on_gpu = config;
        on_gpu.device = KIVI_CUDA;
        KIVI_OK_(kivi_query_support(&on_gpu, 0, &support, sizeof support));
        INFO(support.reason);
        REQUIRE(support.attend_path == KIVI_PATH_FAST);
    }
    static kivi_config with_flags(kivi_config config, uint64_t flags) {
        config.flags = flags;
        return config;
    }

    void check(const std::vector<float>& result, const std::vector<float>& expected, const std::vector<float>& lse,
               const std::vector<float>& expected_lse) const {
        CHECK(relative_error(result, expected) < 2e-3);
        double worst_row = 0, worst_lse = 0;
        for (size_t row = 0; row < lse.size(); ++row) {
            if (std::isinf(expected_lse[row])) {
                CHECK(lse[row] == expected_lse[row]);
            } else {
                const double unit = std::fmax(1.0, std::fabs(expected_lse[row]));
                worst_lse = std::fmax(worst_lse, std::fabs(double(lse[row]) - expected_lse[row]) / unit);
            }
            const auto row_of = [&](const std::vector<float>& x) {
                return std::vector<float>(x.begin() + row * dim, x.begin() + (row + 1) * dim);
            };
            worst_row = std::fmax(worst_row, relative_error(row_of(result), row_of(expected)));
        }
        CHECK(worst_lse < 1e-3);
        CHECK(worst_row < 1e-2);
    }
};

}  // namespace

namespace {

void check_every_instance(int32_t dtype) {
    for (const Instance& instance : coded_instances()) {
        CAPTURE(instance.name);
        const int unit = instance.key_group;
        int turn = 0;
        for (Serving serving :
             {Serving{2, 8, 0, 0, unit, 3000, false, false}, Serving{2, 2, unit, 96, unit, 3000, true, false},
              Serving{1, 16, 2 * unit, 72, unit, 3000, false, true}, Serving{3, 6, unit, 5, unit, 3000, true, true}}) {
            CAPTURE(turn++);
            serving.dtype = dtype;
            if (instance.dim > 128) serving.q_heads = std::min(serving.q_heads, 8 * serving.kv_heads);
            Pair pair(instance, serving, {0, 3, 64, 333, 1000, 2900});
            pair.compare({40, 17, 1, 0, 100, 33});
            pair.compare({3, 9, 4, 9, 2, 9});
            pair.compare({5, 0, 64, 65, 0, 127}, {0.05f, 0, 0, -1, true});
        }
    }
}

}  // namespace

TEST_CASE("every instance: ragged batches, sinks and tails, ratios, more queries than tokens") {
    check_every_instance(KIVI_F16);
}
TEST_CASE("every instance with bf16 windows and queries") { check_every_instance(KIVI_BF16); }

TEST_CASE("windows, soft caps, learned sinks, scales, and tokens of the call") {
    for (const Instance& instance : {kInstances[3], kInstances[8], kPublishedInstances[0]}) {
        CAPTURE(instance.name);
        const int unit = instance.key_group;
        Pair pair(instance, {2, 8, unit, 40, unit, 1200, true, true}, {0, 100, 1000});
        for (const bool fresh : {false, true}) {
            for (const int64_t window : {0, 1, 31, 64, 200, 2000}) pair.compare({20, 30, 70}, {1, 0, 0, window, fresh});
            pair.compare({20, 30, 70}, {1, 0, 3, -1, fresh});
            pair.compare({20, 30, 70}, {1, 0, 30, 100, fresh, true});
            pair.compare({9, 0, 5}, {1, 0.3f, 0, -1, fresh, true});
            pair.compare({1, 1, 1}, {1, 0, 20, 50, fresh, true});
            pair.compare({1, 1, 1}, {1, 0, 0, -1, fresh});
        }
    }
}

TEST_CASE("double precision") {
    const Instance& instance = kInstances[3];
    Pair pair(instance, {2, 8, 64, 40, 64, 1200, false, true}, {100, 700}, KIVI_CACHE_REFERENCE);
    pair.compare({10, 50});
    pair.compare({3, 50}, {1, 0, 0, -1, true});
}

TEST_CASE("long contexts, which several blocks share") {
    for (const Instance& instance :
         {kInstances[0], kInstances[2], kInstances[3], kInstances[7], kPublishedInstances[0]}) {
        CAPTURE(instance.name);
        Pair pair(instance, {2, 8, instance.key_group, 96, instance.key_group, 20200, false, true}, {20000});
        for (const int count : {3, 5, 16, 128}) pair.compare({count});
        pair.compare({32}, {1, 0, 0, -1, true});
        pair.compare({32}, {1, 0, 0, 5000, true});
    }
}

TEST_CASE("long prompts of a batch, which take several launches") {
    Pair pair(kInstances[3], {8, 16, 64, 40, 64, 1200, true, true}, {100, 1200, 300, 0, 600, 500});
    pair.compare({800, 30, 790, 300, 1, 700}, {1, 0, 0, -1, true});
}

TEST_CASE("a captured chunk of a prompt replays while lengths advance, in a workspace that others write to") {
    for (const bool fresh : {false, true}) {
        const Instance& instance = kInstances[3];
        const Serving serving{2, 8, 64, 64, 64, 3000, false, true};
        Pair pair(instance, serving, {300, 10});
        const int rows = 2, count = 40, dim = instance.dim, steps = 40;
        for (int32_t id : {0, 1}) KIVI_OK_(kivi_sequence_reserve(pair.gpu, id, 3000, nullptr));
        Halfs k(int64_t{rows} * count * serving.kv_heads * dim), v(int64_t{rows} * count * serving.kv_heads * dim);
        Halfs q(int64_t{rows} * count * serving.q_heads * dim), out(int64_t{rows} * count * serving.q_heads * dim);
        Floats wide(int64_t{rows} * count * serving.q_heads * dim);
        const kivi_batch batch = batch_of(rows, nullptr, nullptr, count);
        const Workspace on_cpu(pair.cpu, rows, count), on_gpu(pair.gpu, rows, count);
        const auto step = [&](const Cache& cache, const Workspace& workspace, kivi_stream stream) {
            const kivi_tensor keys = k.view(cache.device, {rows, count, serving.kv_heads, dim});
            const kivi_tensor values = v.view(cache.device, {rows, count, serving.kv_heads, dim});
            const kivi_tensor queries = q.view(cache.device, {rows, count, serving.q_heads, dim});
            const kivi_tensor result = cache.device == KIVI_CPU
                                           ? wide.view(KIVI_CPU, {rows, count, serving.q_heads, dim})
                                           : out.view(KIVI_CUDA, {rows, count, serving.q_heads, dim});
            kivi_attend_params params;
            kivi_attend_params_init(&params, sizeof params);
            if (fresh) params.k = &keys, params.v = &values;
            if (!fresh) KIVI_OK_(kivi_append(cache, 0, &batch, &keys, &values, stream));
            KIVI_OK_(kivi_attend(cache, 0, &batch, &queries, &result, &params, workspace.data,
                                 workspace.bytes, stream));
            if (fresh) KIVI_OK_(kivi_append(cache, 0, &batch, &keys, &values, stream));
        };
        const Stream stream;
        const Captured captured(stream, [&] { step(pair.gpu, on_gpu, stream); });
        for (int i = 0; i < steps; ++i) {
            k.set(pair.rows(rows * count)), v.set(pair.rows(rows * count));
            q.set(pair.numbers.rows(int64_t{rows} * count * serving.q_heads, dim));
            if (i % 3 == 0) CUDA_OK(cudaMemset(on_gpu.data, i, on_gpu.bytes));
            CUDA_OK(cudaDeviceSynchronize());
            captured.replay();
            step(pair.cpu, on_cpu, nullptr);
            CAPTURE(i);
            CHECK(relative_error(out.download(), wide.host) < 3e-3);
        }
        KIVI_OK_(kivi_synchronize(pair.gpu, stream));
        for (int32_t id : {0, 1}) CHECK(pair.gpu.blob(id, stream) == pair.cpu.blob(id));
    }
}

TEST_CASE("extremes: a key channel at 7000 with queries of 40, a value channel at 60000, both ends of fp16") {
    for (const Instance& instance : {kInstances[0], kInstances[3], kInstances[7]}) {
        CAPTURE(instance.name);
        Pair pair(instance, {2, 8, instance.key_group, 32, instance.key_group, 1200, false, false}, {0});
        std::vector<float> keys = pair.rows(1000), values = pair.rows(1000);
        for (size_t i = 5; i < keys.size(); i += instance.dim) keys[i] = 7000.0f + keys[i], values[i + 1] = 60000.0f;
        for (size_t i = 9; i < keys.size(); i += 2 * instance.dim) {
            keys[i] = keys[i] > 0 ? 65504.0f : -65504.0f;
            values[i] = values[i] > 0 ? 65504.0f : -65504.0f;
        }
        Floats k(keys), v(values);
        pair.append(0, 1000, k, v);
        pair.compare({50}, {1e-4f});
        for (float x : pair.compare({50}, {40.0f}, false)) REQUIRE(std::isfinite(x));
    }
}

namespace {

// One element of head 1 of one token is not finite; the same queries to a sequence with it and to one without.
struct Damage {
    const Instance& instance;
    int32_t dtype;
    bool of_keys;
    float bad;
    int at;            // of 1,000 tokens
    int count;         // queries
    bool fresh;        // their tokens come with the call
    uint64_t flags;    // of the call
    bool rotated;      // values are
};

constexpr int kLength = 1000, kChannel = 7, kKvHeads = 2, kQHeads = 8;

void check_damage(const Damage& d) {
    const Instance& instance = d.instance;
    const int dim = instance.dim, unit = instance.key_group, cached = d.fresh ? kLength - d.count : kLength;
    const Serving serving{kKvHeads, kQHeads, unit, 96, unit, 1200, false, d.rotated, d.dtype};
    const Cache gpu(config_for(instance, serving, 2), KIVI_CUDA);
    Numbers numbers(3);
    std::vector<float> keys = numbers.rows(kLength * kKvHeads, dim), values = numbers.rows(kLength * kKvHeads, dim);
    Halfs q(numbers.rows(int64_t{d.count} * kQHeads, dim), d.dtype);
    const Workspace workspace(gpu, 1, d.count);
    const auto tokens = [&](const std::vector<float>& x, int begin, int end) {
        return std::vector<float>(x.begin() + begin * kKvHeads * dim, x.begin() + end * kKvHeads * dim);
    };
    std::unique_ptr<Halfs> fresh_keys[2], fresh_values[2];
    for (int32_t sequence : {0, 1}) {
        if (sequence == 1) (d.of_keys ? keys : values)[(d.at * kKvHeads + 1) * dim + kChannel] = d.bad;
        Halfs k(tokens(keys, 0, cached), d.dtype), v(tokens(values, 0, cached), d.dtype);
        const kivi_batch batch = batch_of(1, &sequence, nullptr, cached);
        const kivi_tensor of_keys = k.view(KIVI_CUDA, {1, cached, kKvHeads, dim});
        const kivi_tensor of_values = v.view(KIVI_CUDA, {1, cached, kKvHeads, dim});
        KIVI_OK_(kivi_append(gpu, 0, &batch, &of_keys, &of_values, nullptr));
        CUDA_OK(cudaDeviceSynchronize());
        fresh_keys[sequence] = std::make_unique<Halfs>(tokens(keys, kLength - d.count, kLength), d.dtype);
        fresh_values[sequence] = std::make_unique<Halfs>(tokens(values, kLength - d.count, kLength), d.dtype);
    }
    // In a page a key's group of tokens is damaged, or a value's group of channels.
    int first = d.at, last = d.at, channels_begin = kChannel, channels_end = kChannel + 1;
    const int packed_begin = instance.published ? 0 : unit;
    const int packed_end = !instance.published ? (cached - 96) / unit * unit
                           : d.of_keys         ? (cached - 1) / 128 * 128
                                               : cached - 129;
    const bool packed = d.at >= packed_begin && d.at < packed_end;
    if (d.of_keys && packed) first = d.at / unit * unit, last = first + unit - 1;
    if (!d.of_keys && packed) {
        channels_begin = 0, channels_end = instance.value_group == KIVI_GROUP_HEAD ? dim : instance.value_group;
    }
    const bool transformed = d.rotated && d.at < cached;
    if (d.of_keys || transformed) channels_begin = 0, channels_end = dim;
    // Nothing hidden; almost all; a border among the queries' own, just at and behind the token.
    const int64_t beside = kLength - d.count - d.at + d.count / 2;
    for (const int64_t window : {int64_t{-1}, int64_t{8}, beside, beside - 1}) {
        if (window < -1) continue;
        CAPTURE(window);
        std::vector<float> results[2];
        for (int32_t sequence : {0, 1}) {
            Halfs out(int64_t{d.count} * kQHeads * dim, d.dtype);
            const kivi_batch batch = batch_of(1, &sequence, nullptr, d.count);
            const kivi_tensor in = q.view(KIVI_CUDA, {1, d.count, kQHeads, dim});
            const kivi_tensor to = out.view(KIVI_CUDA, {1, d.count, kQHeads, dim});
            const kivi_tensor k = fresh_keys[sequence]->view(KIVI_CUDA, {1, d.count, kKvHeads, dim});
            const kivi_tensor v = fresh_values[sequence]->view(KIVI_CUDA, {1, d.count, kKvHeads, dim});
            kivi_attend_params params;
            kivi_attend_params_init(&params, sizeof params);
            params.window_left = window;
            params.flags = d.flags;
            if (d.fresh) params.k = &k, params.v = &v;
            KIVI_OK_(kivi_attend(gpu, 0, &batch, &in, &to, &params, workspace.data, workspace.bytes, nullptr));
            CUDA_OK(cudaDeviceSynchronize());
            results[sequence] = out.download();
        }
        int leaked = 0, hidden = 0;
        for (size_t i = 0; i < results[0].size(); ++i) {
            const int token = static_cast<int>(i / (kQHeads * dim)), head = static_cast<int>(i / dim % kQHeads);
            const int channel = static_cast<int>(i % dim), newest = kLength - d.count + token;
            const bool sees = head >= kQHeads / 2 && first <= newest && (window < 0 || last >= newest - window);
            const bool its = channel >= channels_begin && channel < channels_end;
            if (sees && its) hidden += std::isfinite(results[1][i]);
            if (sees && (its || d.rotated)) continue;
            leaked += std::memcmp(&results[0][i], &results[1][i], sizeof(float)) != 0;
        }
        CHECK(leaked == 0);
        CHECK(hidden == 0);
    }
}

void check_damage(const Instance& instance, int32_t dtype, float bad, bool rotated = false) {
    for (const bool of_keys : {false, true}) {
        if (of_keys && rotated) continue;
        for (const int count : {1, 2, 4, 40, 150}) {  // one to four: rows of the decode kernel's tile
            for (const bool fresh : {false, true}) {
                for (const uint64_t flags : {uint64_t{0}, uint64_t{KIVI_ATTEND_INVARIANT}}) {
                    // In the sink window, or the middle of the published schedule; a page, the tail, among the queries'
                    // own tokens.
                    for (const int at : {instance.published ? 880 : 10, 500, 930, kLength - (count + 1) / 2}) {
                        CAPTURE(instance.name);
                        CAPTURE(dtype);
                        CAPTURE(bad);
                        CAPTURE(of_keys);
                        CAPTURE(count);
                        CAPTURE(fresh);
                        CAPTURE(flags);
                        CAPTURE(at);
                        check_damage({instance, dtype, of_keys, bad, at, count, fresh, flags, rotated});
                    }
                }
            }
        }
    }
}

}  // namespace

TEST_CASE("keys and values that are not finite reach the queries that see them, and no other") {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity}) {
        check_damage(kInstances[0], KIVI_F16, bad);
    }
    check_damage(kInstances[3], KIVI_BF16, std::numeric_limits<float>::quiet_NaN());
    check_damage(kInstances[8], KIVI_F16, std::numeric_limits<float>::quiet_NaN());
    check_damage(kInstances[11], KIVI_BF16, kInfinity);
    check_damage(kPublishedInstances[0], KIVI_F16, kInfinity);
    check_damage(kPublishedInstances[1], KIVI_BF16, std::numeric_limits<float>::quiet_NaN());
}

TEST_CASE("values that are transformed and not finite reach the queries that see them, and no other") {
    check_damage(kInstances[3], KIVI_F16, std::numeric_limits<float>::quiet_NaN(), true);
    check_damage(kInstances[8], KIVI_BF16, std::numeric_limits<float>::infinity(), true);
}

TEST_CASE("sanitized: a few rows, many rows, tokens of the call") {
    Pair pair(kInstances[3], {1, 4, 64, 40, 64, 700, false, true}, {300, 50});
    pair.compare({20, 3});
    pair.compare({40, 3}, {1, 0, 0, 100, true, true});
}

int main(int argc, char** argv) {
    if (!gpu_there()) return kSkipped;
    doctest::Context context(argc, argv);
    return context.run();
}
