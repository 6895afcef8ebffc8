// Decode attention and packing on a GPU. Attends: one captured graph of attends over layers that rotate out of the L2,
// medians of its replays, beside the copy bandwidth of the same run. One JSON object a line, as the CPU's benchmarks.
//   bench_gpu [--quick] [GROUP...]  all groups, or these:
//     presets   every preset at every shape, windows included; --quick: two shapes
//     specs     the specs of the fast kernel, windows empty or beside the context, and what KIVI_ATTEND_INVARIANT costs;
//               --quick: batch 8, 32K
//     sweep     k3v2 and kivi2-sink over batch, context and heads, where fp16 caches of the shape fit; --quick: some
//     prompts   packing prompts of one sequence with 8 KV heads of 128 channels, or as many channels, a layer; --quick: some
//     steps     appending one token to each sequence, flushes included, a layer: appends alone, and what each adds to the
//               attend behind it
//     chunks    calls that bring keys and values of one token or several, over packed pasts, some with
//               KIVI_ATTEND_INVARIANT too; --quick: some
//   bench_gpu --spec NAME [SHAPE]   one of the specs or presets at every shape, or at the one of that number; NAME may end
//                                   in " invariant"
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "kivi/kivi.h"

namespace {

void ok(kivi_status status, const char* what) {
    if (status == KIVI_OK) return;
    std::fprintf(stderr, "%s: %s\n", what, kivi_last_error());
    std::exit(1);
}
void ok(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
    std::exit(1);
}

struct Shape {
    int batch, q_heads, kv_heads, tokens;
};
const Shape kShapes[] = {{1, 32, 8, 1024}, {1, 32, 8, 32768}, {1, 32, 8, 131072}, {8, 32, 8, 32768}, {32, 32, 8, 8192},
                         {64, 32, 8, 4096}, {1, 32, 32, 32768}, {8, 32, 32, 4096}};
bool is_quick(const Shape& shape) { return shape.kv_heads == 8 && (shape.batch == 8 || shape.tokens == 131072); }

struct Case {
    const char* name;
    int key_bits, value_bits, group, dim;
    bool rotated_values;
    int sink, recent;  // 0: no windows
    int query_tokens;
    bool bf16 = false, rotated_keys = false;
};
const Case kCases[] = {
    {"2/2 g32", 2, 2, 32, 128, false, 0, 0, 1},     {"2/2 g64", 2, 2, 64, 128, false, 0, 0, 1},
    {"2/2 g128", 2, 2, 128, 128, false, 0, 0, 1},   {"3/2 g64 hadamard", 3, 2, 64, 128, true, 0, 0, 1},
    {"3/2 g64", 3, 2, 64, 128, false, 0, 0, 1},     {"4/2 g32", 4, 2, 32, 128, false, 0, 0, 1},
    {"4/2 g64", 4, 2, 64, 128, false, 0, 0, 1},     {"4/4 g32", 4, 4, 32, 128, false, 0, 0, 1},
    {"2/2 g32 hadamard V", 2, 2, 32, 128, true, 0, 0, 1},
    {"2/2 g32 hadamard K", 2, 2, 32, 128, false, 0, 0, 1, false, true},
    {"2/2 g32 hadamard K, V", 2, 2, 32, 128, true, 0, 0, 1, false, true},
    {"2/2 g32 32+128", 2, 2, 32, 128, false, 32, 128, 1}, {"2/2 g32 2 tokens", 2, 2, 32, 128, false, 0, 0, 2},
    {"2/2 g32 4 tokens", 2, 2, 32, 128, false, 0, 0, 4},  {"2/2 g32 bf16", 2, 2, 32, 128, false, 0, 0, 1, true},
    {"2/2 g32 dim 64", 2, 2, 32, 64, false, 0, 0, 1},     {"2/2 g32 dim 256", 2, 2, 32, 256, false, 0, 0, 1},
    {"3/2 g64 dim 64", 3, 2, 64, 64, false, 0, 0, 1},     {"4/2 g64 dim 256", 4, 2, 64, 256, false, 0, 0, 1},
};

const Case& case_named(const std::string& name) {
    const Case* const found = std::find_if(std::begin(kCases), std::end(kCases), [&](const Case& c) { return c.name == name; });
    if (found != std::end(kCases)) return *found;
    std::fprintf(stderr, "bench_gpu: there is no case '%s'\n", name.c_str());
    std::exit(1);
}

// What is measured: specs and windows under a name.
struct Storage {
    std::string name;
    kivi_spec k{}, v{};
    int sink = 0, recent = 0, flush = 32, schedule = KIVI_SCHEDULE_ROLLING;
    bool beside = false;  // windows stand beside the context, not in it
    int dim = 128, query_tokens = 1;
    bool fresh = false;   // the query tokens are not in the cache: the call brings their keys and values
    int32_t dtype = KIVI_F16;
    uint64_t flags = 0;  // of attend
};

Storage storage_of(const Case& c) {
    Storage s;
    s.name = c.name;
    s.k.bits = c.key_bits, s.k.axis = KIVI_AXIS_CHANNEL, s.k.group = c.group;
    s.v.bits = c.value_bits, s.v.axis = KIVI_AXIS_TOKEN, s.v.group = c.group;
    s.k.transform = c.rotated_keys ? KIVI_TRANSFORM_HADAMARD : KIVI_TRANSFORM_NONE;
    s.v.transform = c.rotated_values ? KIVI_TRANSFORM_HADAMARD : KIVI_TRANSFORM_NONE;
    s.sink = c.sink, s.recent = c.recent, s.flush = std::max(c.group, 32);
    s.beside = true;
    s.dim = c.dim;
    s.query_tokens = c.query_tokens;
    s.dtype = c.bf16 ? KIVI_BF16 : KIVI_F16;
    return s;
}

Storage invariant(Storage s) {
    s.name += " invariant";
    s.flags = KIVI_ATTEND_INVARIANT;
    return s;
}

Storage storage_of(const kivi_preset& p) {
    Storage s;
    s.name = p.name;
    s.k = p.k, s.v = p.v;
    s.sink = p.sink, s.recent = p.recent, s.flush = p.flush, s.schedule = p.schedule;
    return s;
}

std::vector<Storage> presets() {
    std::vector<Storage> all;
    for (int32_t i = 0; i < kivi_preset_count(); ++i) {
        kivi_preset preset{};
        ok(kivi_preset_at(i, &preset, sizeof preset), "preset");
        all.push_back(storage_of(preset));
    }
    return all;
}

constexpr int kAttends = 20;  // of a graph, and as many as there are layers
constexpr int kReplays = 15, kFewReplays = 5;
constexpr double kEnoughUs = 4e5;        // of replays, once there are a few
constexpr int64_t kRotation = 256 << 20;  // bytes: several times the L2
constexpr int kMostLayers = 400;
constexpr int kSteps = 128;     // of a graph of decode steps
constexpr int kFewTokens = 64;  // of a query: more make a call so long that two are enough

// What holds for the whole run.
struct Bench {
    cudaStream_t stream = nullptr;
    kivi_device_info device{};
    double copy_gbps = 0;
    std::string table;  // the group at hand
};

kivi_tensor tensor(void* data, std::vector<int64_t> shape, bool one_row, int32_t dtype = KIVI_F16) {
    kivi_tensor t{};
    t.data = data;
    t.dtype = dtype;
    t.device = KIVI_CUDA;
    t.rank = static_cast<int32_t>(shape.size());
    int64_t stride = 1;
    for (int axis = t.rank - 1; axis >= 0; --axis) {
        t.shape[axis] = shape[axis];
        t.stride[axis] = stride;
        stride *= shape[axis];
    }
    if (one_row) t.stride[0] = 0;  // all rows read the same tokens
    return t;
}

class DeviceArray {
  public:
    explicit DeviceArray(size_t bytes) { ok(cudaMalloc(&data_, bytes + 1), "memory"); }
    ~DeviceArray() { ok(cudaFree(data_), "free"); }
    DeviceArray(const DeviceArray&) = delete;
    void* data() const { return data_; }

  private:
    void* data_ = nullptr;
};

// Numbers with exponents from 2^-5 to 2^-2.
std::vector<uint16_t> make_numbers(size_t count, int32_t dtype) {
    std::vector<uint16_t> numbers(count);
    uint32_t state = 12345;
    for (uint16_t& x : numbers) {
        state = state * 1664525u + 1013904223u;
        const uint32_t sign = (state >> 31) << 15, exponent = state >> 24 & 3, mantissa = state >> 8 & 1023;
        x = static_cast<uint16_t>(sign | (dtype == KIVI_F16 ? (10 + exponent) << 10 | mantissa : (122 + exponent) << 7 | mantissa >> 3));
    }
    return numbers;
}
void fill(void* to, int64_t count, int32_t dtype = KIVI_F16) {
    static const std::vector<uint16_t> of_f16 = make_numbers(1 << 22, KIVI_F16), of_bf16 = make_numbers(1 << 22, KIVI_BF16);
    const std::vector<uint16_t>& numbers = dtype == KIVI_F16 ? of_f16 : of_bf16;
    for (int64_t at = 0; at < count; at += static_cast<int64_t>(numbers.size())) {
        const int64_t some = std::min<int64_t>(numbers.size(), count - at);
        ok(cudaMemcpy(static_cast<uint16_t*>(to) + at, numbers.data(), some * 2, cudaMemcpyHostToDevice), "upload");
    }
}

double median(std::vector<double> numbers) {
    std::sort(numbers.begin(), numbers.end());
    return numbers[numbers.size() / 2];
}

// How long a stream is at work.
class Timer {
  public:
    explicit Timer(cudaStream_t stream) : stream_(stream) {
        ok(cudaEventCreate(&begin_), "event");
        ok(cudaEventCreate(&end_), "event");
    }
    ~Timer() {
        ok(cudaEventDestroy(begin_), "event");
        ok(cudaEventDestroy(end_), "event");
    }
    Timer(const Timer&) = delete;
    template <class Work>
    double us(const Work& work) const {
        ok(cudaEventRecord(begin_, stream_), "record");
        work();
        ok(cudaEventRecord(end_, stream_), "record");
        ok(cudaEventSynchronize(end_), "wait");
        float ms = 0;
        ok(cudaEventElapsedTime(&ms, begin_, end_), "time");
        return 1e3 * ms;
    }

  private:
    cudaStream_t stream_;
    cudaEvent_t begin_, end_;
};

// Median time of `work` after `prepare`, which is not timed.
template <class Prepare, class Work>
double median_us(cudaStream_t stream, const Prepare& prepare, const Work& work) {
    const Timer timer(stream);
    std::vector<double> times;
    double sum = 0;
    for (int i = 0; i < kReplays + 2; ++i) {
        prepare();
        const double us = timer.us(work);
        if (i >= 2) times.push_back(us);
        sum += us;
        if (times.size() >= kFewReplays && sum > kEnoughUs) break;
    }
    return median(times);
}

// What calls() enqueues on a stream, captured.
class Graph {
  public:
    template <class Calls>
    Graph(cudaStream_t stream, const Calls& calls) : stream_(stream) {
        ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
        calls();
        ok(cudaStreamEndCapture(stream, &graph_), "capture");
        ok(cudaGraphInstantiate(&replay_, graph_, 0), "graph");
    }
    ~Graph() {
        ok(cudaGraphExecDestroy(replay_), "graph");
        ok(cudaGraphDestroy(graph_), "graph");
    }
    Graph(const Graph&) = delete;
    void operator()() const { ok(cudaGraphLaunch(replay_, stream_), "launch"); }

  private:
    cudaStream_t stream_;
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t replay_ = nullptr;
};

// attend_share: us as a share of an attend, where that is told.
void print_line(const Bench& bench, const char* suite, const Storage& s, const Shape& shape, double us, double bytes,
                const char* path, double attend_share = 0) {
    const double gbps = bytes / us / 1e3;
    std::printf("{\"suite\": \"%s\", \"table\": \"%s\", \"case\": {\"backend\": \"cuda\", \"batch\": %d, \"q_heads\": %d, "
                "\"kv_heads\": %d, \"head_dim\": %d, \"context\": %d, \"q_len\": %d, \"dtype\": \"%s\", \"preset\": \"%s\", "
                "\"k_bits\": %d, \"v_bits\": %d, \"group\": %d, \"threads\": %d, \"isa\": \"sm_%d\", \"hadamard\": %s, "
                "\"query_aware\": %s, \"path\": \"%s\"}, \"median_us\": %.3f, \"bytes\": %.0f, \"gbps\": %.1f, "
                "\"ratios\": {\"copy\": %.4f",
                suite, bench.table.c_str(), shape.batch, shape.q_heads, shape.kv_heads, s.dim, shape.tokens, s.query_tokens,
                s.dtype == KIVI_BF16 ? "bf16" : "f16",
                s.name.c_str(), s.k.bits, s.v.bits, s.k.group, bench.device.threads, bench.device.capability,
                s.k.transform == KIVI_TRANSFORM_HADAMARD || s.v.transform == KIVI_TRANSFORM_HADAMARD ? "true" : "false",
                s.k.rounding == KIVI_ROUND_QUERY_AWARE ? "true" : "false", path, us, bytes, gbps, gbps / bench.copy_gbps);
    if (attend_share != 0) std::printf(", \"attend\": %.4f", attend_share);
    std::printf("}}\n");
    std::fflush(stdout);
}

// Device-to-device copies, bytes read plus written.
void measure_copy(Bench& bench) {
    constexpr size_t kBytes = size_t{1} << 30;
    const DeviceArray from(kBytes), to(kBytes);
    const double us = median_us(bench.stream, [] {}, [&] {
        ok(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, bench.stream), "copy");
    });
    bench.copy_gbps = 2.0 * kBytes / us / 1e3;
    Storage copy;
    copy.name = "copy";
    print_line(bench, "copy", copy, {1, 0, 0, 0}, us, 2.0 * kBytes, "");
}

// A cache on the device.
class Cache {
  public:
    Cache(const Storage& s, int q_heads, int kv_heads, int sequences, int length, int layers) {
        ok(kivi_config_init(&config_, sizeof config_), "config");
        config_.device = KIVI_CUDA;
        config_.layer.kv_heads = kv_heads;
        config_.layer.q_heads = q_heads;
        config_.layer.key_dim = config_.layer.value_dim = s.dim;
        config_.window_dtype = s.dtype;
        config_.layer.k = s.k;
        config_.layer.v = s.v;
        config_.sink = s.sink, config_.recent = s.recent, config_.flush = s.flush, config_.schedule = s.schedule;
        config_.max_sequences = sequences;
        config_.max_tokens = length;
        config_.layer_count = layers;
        ok(kivi_cache_create(&config_, &cache_), "create");
    }
    ~Cache() { kivi_cache_destroy(cache_); }
    Cache(const Cache&) = delete;
    operator kivi_cache*() const { return cache_; }
    int layers() const { return config_.layer_count; }
    double live_bytes() const {  // of one layer
        kivi_statistics statistics{};
        ok(kivi_query_statistics(cache_, 0, &statistics, sizeof statistics), "statistics");
        return static_cast<double>(statistics.live_bytes);
    }
    const char* attend_path() const { return path_name(support().attend_path); }
    const char* pack_path() const { return path_name(support().pack_path); }

  private:
    kivi_support support() const {
        kivi_support support{};
        ok(kivi_query_support(&config_, 0, &support, sizeof support), "support");
        return support;
    }
    static const char* path_name(int32_t path) { return path == KIVI_PATH_FAST ? "fast" : "general"; }

    kivi_config config_{};
    kivi_cache* cache_ = nullptr;
};

kivi_batch batch_of(int rows, int count) {
    kivi_batch batch;
    ok(kivi_batch_init(&batch, sizeof batch), "batch");
    batch.rows = rows;
    batch.max_count = count;
    return batch;
}

void measure_attend(const Bench& bench, const Storage& s, Shape shape) {
    // Narrower heads: more of them, and the other way round.
    shape.kv_heads = shape.kv_heads * 128 / s.dim, shape.q_heads = shape.q_heads * 128 / s.dim;
    const bool chunk = s.query_tokens > kFewTokens || (s.fresh && s.flags != 0);  // a long call
    const int length = shape.tokens + (s.beside ? s.sink + s.recent : 0);
    const double element_bits = (s.k.bits + s.v.bits) / 2.0 + (s.k.bits == 16 ? 0 : 32.0 / std::max(32, s.k.group));
    const double bytes = 2.0 * shape.batch * shape.kv_heads * s.dim * shape.tokens * element_bits / 8;
    const Cache cache(s, shape.q_heads, shape.kv_heads, shape.batch, length,
                      chunk ? 2 : static_cast<int>(std::min<double>(kMostLayers, kRotation / bytes + 1)));

    constexpr int kChunk = 4096;
    const int64_t row = int64_t{1} * s.query_tokens * shape.q_heads * s.dim;
    const DeviceArray tokens(size_t{2} * kChunk * shape.kv_heads * s.dim), queries(2 * row * shape.batch), out(2 * row * shape.batch);
    fill(tokens.data(), int64_t{kChunk} * shape.kv_heads * s.dim, s.dtype);
    fill(queries.data(), row * shape.batch, s.dtype);
    for (int layer = 0; layer < cache.layers(); ++layer) {
        for (int at = 0; at < length; at += kChunk) {
            const kivi_batch batch = batch_of(shape.batch, std::min(kChunk, length - at));
            const kivi_tensor input = tensor(tokens.data(), {shape.batch, batch.max_count, shape.kv_heads, s.dim}, true);
            ok(kivi_append(cache, layer, &batch, &input, &input, bench.stream), "append");
        }
    }
    const kivi_batch batch = batch_of(shape.batch, s.query_tokens);
    size_t workspace_bytes = 0;
    ok(kivi_attend_workspace(cache, -1, shape.batch, s.query_tokens, &workspace_bytes), "workspace");
    const DeviceArray workspace(workspace_bytes);
    const kivi_tensor q = tensor(queries.data(), {shape.batch, s.query_tokens, shape.q_heads, s.dim}, false, s.dtype);
    const kivi_tensor to = tensor(out.data(), {shape.batch, s.query_tokens, shape.q_heads, s.dim}, false, s.dtype);
    kivi_attend_params params;
    ok(kivi_attend_params_init(&params, sizeof params), "params");
    params.flags = s.flags;
    ok(cudaDeviceSynchronize(), "append");
    const kivi_tensor fresh = tensor(tokens.data(), {shape.batch, s.query_tokens, shape.kv_heads, s.dim}, true);
    if (s.fresh) params.k = params.v = &fresh;
    const int attends = chunk ? cache.layers() : std::max(kAttends, cache.layers());
    const Graph graph(bench.stream, [&] {
        for (int i = 0; i < attends; ++i) {
            ok(kivi_attend(cache, i % cache.layers(), &batch, &q, &to, &params, workspace.data(), workspace_bytes, bench.stream),
               "attend");
        }
    });
    const double us = median_us(bench.stream, [] {}, graph) / attends;
    ok(cudaDeviceSynchronize(), "attend");
    print_line(bench, "attend", s, shape, us, cache.live_bytes(), cache.attend_path());
}

// Moments with a diagonal and what falls off beside it, for every layer.
void commit_moments(kivi_cache* cache, int layers, int heads, int dim, cudaStream_t stream) {
    std::vector<float> moments(size_t(heads) * dim * dim);
    for (size_t i = 0; i < moments.size(); ++i) {
        const int row = static_cast<int>(i / dim % dim), column = static_cast<int>(i % dim);
        moments[i] = (row == column ? 1.0f + row % 7 : 0.0f) + 0.5f / (1 + std::abs(row - column));
    }
    const DeviceArray device(moments.size() * 4);
    ok(cudaMemcpy(device.data(), moments.data(), moments.size() * 4, cudaMemcpyHostToDevice), "upload");
    kivi_tensor m = tensor(device.data(), {heads, dim, dim}, false);
    m.dtype = KIVI_F32;
    for (int layer = 0; layer < layers; ++layer) {
        ok(kivi_moments_set(cache, layer, &m, 0, stream), "moments");
        ok(kivi_moments_commit(cache, layer, stream), "moments");
    }
}

// Replays of one prompt into every layer of an empty sequence; inputs take turns, so that none of a long one is in the L2.
void measure_prompt(const Bench& bench, Storage s, bool query_aware, int tokens) {
    constexpr int kLayers = 12;
    const int heads = 8 * 128 / s.dim;
    s.k.rounding = query_aware ? KIVI_ROUND_QUERY_AWARE : KIVI_ROUND_NEAREST;
    if (s.beside) s.sink = s.recent = s.flush = std::max(s.k.group, 64);
    const Cache cache(s, 4 * heads, heads, 1, tokens, kLayers);
    if (query_aware) commit_moments(cache, kLayers, heads, s.dim, bench.stream);
    const int64_t count = int64_t{1} * tokens * heads * s.dim;
    const DeviceArray inputs[4] = {DeviceArray(count * 2), DeviceArray(count * 2), DeviceArray(count * 2), DeviceArray(count * 2)};
    for (const DeviceArray& input : inputs) fill(input.data(), count, s.dtype);
    const kivi_batch batch = batch_of(1, tokens);
    const auto prepare = [&] {
        ok(kivi_synchronize(cache, bench.stream), "wait");  // replays have moved lengths
        ok(kivi_sequence_reset(cache, 0, bench.stream), "reset");
        ok(kivi_sequence_reserve(cache, 0, tokens, bench.stream), "reserve");
        ok(cudaStreamSynchronize(bench.stream), "wait");
    };
    prepare();
    const Graph graph(bench.stream, [&] {
        for (int layer = 0; layer < kLayers; ++layer) {
            const kivi_tensor keys = tensor(inputs[layer % 2 * 2].data(), {1, tokens, heads, s.dim}, false, s.dtype);
            const kivi_tensor values = tensor(inputs[layer % 2 * 2 + 1].data(), {1, tokens, heads, s.dim}, false, s.dtype);
            ok(kivi_append(cache, layer, &batch, &keys, &values, bench.stream), "append");
        }
    });
    const double us = median_us(bench.stream, prepare, graph) / kLayers;
    ok(kivi_synchronize(cache, bench.stream), "wait");
    print_line(bench, "prompt", s, {1, 4 * heads, heads, tokens}, us, 4.0 * count + cache.live_bytes(), cache.pack_path());
}

void run_presets(const Bench& bench, bool quick) {
    for (const Storage& s : presets()) {
        for (const Shape& shape : kShapes) {
            if (!quick || is_quick(shape)) measure_attend(bench, s, shape);
        }
    }
}

void run_specs(const Bench& bench, bool quick) {
    for (const Case& c : kCases) {
        for (const Shape& shape : kShapes) {
            if (!quick || (shape.batch == 8 && shape.kv_heads == 8)) measure_attend(bench, storage_of(c), shape);
        }
    }
    for (const char* name : {"2/2 g32", "3/2 g64 hadamard"}) {
        const Storage s = invariant(storage_of(case_named(name)));
        for (const Shape& shape : kShapes) {
            if (!quick || (shape.batch == 8 && shape.kv_heads == 8)) measure_attend(bench, s, shape);
        }
    }
}

// Replays of a graph of 128 appends, in which every tail is flushed as often as it must.
void measure_step(const Bench& bench, const Storage& s, int batch_size) {
    constexpr int kHeads = 8;
    const Cache cache(s, 4 * kHeads, kHeads, batch_size, kSteps * (kReplays + 4), 1);
    for (int32_t id = 0; id < batch_size; ++id) {
        ok(kivi_sequence_reserve(cache, id, kSteps * (kReplays + 4), bench.stream), "reserve");
    }
    const int64_t count = int64_t{1} * batch_size * kHeads * s.dim;
    const DeviceArray tokens(2 * count);
    fill(tokens.data(), count);
    const kivi_batch batch = batch_of(batch_size, 1);
    const kivi_tensor input = tensor(tokens.data(), {batch_size, 1, kHeads, s.dim}, false);
    const Graph graph(bench.stream, [&] {
        for (int step = 0; step < kSteps; ++step) ok(kivi_append(cache, 0, &batch, &input, &input, bench.stream), "append");
    });
    const double us = median_us(bench.stream, [] {}, graph) / kSteps;
    print_line(bench, "step", s, {batch_size, 4 * kHeads, kHeads, 1}, us, 4.0 * count, cache.pack_path());
}

// What appending adds to an attend: replays of a graph of 128 appends and attends or some more, and of one of as many
// calls of kivi_step, against those before and after of a graph of the attends alone. Of kivi_step also what it adds to an
// attend that is given the same keys and values. Layers rotate out of the L2; their lengths are spread over the flush unit,
// so that every replay has its share of flushes.
void measure_step_beside(const Bench& bench, const Storage& s, const Shape& shape) {
    constexpr int kRounds = 9;
    const double bits = (s.k.bits + s.v.bits) / 2.0 + (s.k.bits == 16 ? 0 : 32.0 / s.k.group);
    const double bytes = 2.0 * shape.batch * shape.kv_heads * s.dim * shape.tokens * bits / 8;
    const int layers = std::max(2, static_cast<int>(kRotation / bytes) + 1), turns = (kSteps + layers - 1) / layers;
    const int most = shape.tokens + s.flush + 3 * (kRounds + 1) * turns;
    const Cache cache(s, shape.q_heads, shape.kv_heads, shape.batch, most, layers);
    for (int32_t id = 0; id < shape.batch; ++id) ok(kivi_sequence_reserve(cache, id, most, bench.stream), "reserve");

    constexpr int kChunk = 4096;
    const int64_t row = int64_t{1} * shape.batch * shape.kv_heads * s.dim, query_row = row * shape.q_heads / shape.kv_heads;
    const int64_t count = std::max<int64_t>(int64_t{kChunk} * shape.kv_heads * s.dim, row);
    const DeviceArray tokens(2 * count), queries(2 * query_row), out(2 * query_row);
    fill(tokens.data(), count);
    fill(queries.data(), query_row);
    for (int layer = 0; layer < layers; ++layer) {
        const int length = shape.tokens + layer * s.flush / layers;
        for (int at = 0; at < length; at += kChunk) {
            const kivi_batch batch = batch_of(shape.batch, std::min(kChunk, length - at));
            const kivi_tensor input = tensor(tokens.data(), {shape.batch, batch.max_count, shape.kv_heads, s.dim}, true);
            ok(kivi_append(cache, layer, &batch, &input, &input, bench.stream), "append");
        }
    }
    const kivi_batch batch = batch_of(shape.batch, 1);
    size_t workspace_bytes = 0;
    ok(kivi_attend_workspace(cache, -1, shape.batch, 1, &workspace_bytes), "workspace");
    const DeviceArray workspace(workspace_bytes);
    const kivi_tensor input = tensor(tokens.data(), {shape.batch, 1, shape.kv_heads, s.dim}, false);
    const kivi_tensor q = tensor(queries.data(), {shape.batch, 1, shape.q_heads, s.dim}, false);
    const kivi_tensor to = tensor(out.data(), {shape.batch, 1, shape.q_heads, s.dim}, false);
    kivi_attend_params fresh;
    ok(kivi_attend_params_init(&fresh, sizeof fresh), "params");
    fresh.k = fresh.v = &input;
    const auto append = [&](int layer) { ok(kivi_append(cache, layer, &batch, &input, &input, bench.stream), "append"); };
    const auto attend = [&](int layer, const kivi_attend_params* params) {
        ok(kivi_attend(cache, layer, &batch, &q, &to, params, workspace.data(), workspace_bytes, bench.stream), "attend");
    };
    const auto step = [&](int layer) {
        ok(kivi_step(cache, layer, &batch, &q, &input, &input, &to, nullptr, workspace.data(), workspace_bytes, bench.stream),
           "step");
    };
    ok(cudaDeviceSynchronize(), "append");
    const auto graph_of = [&](const auto& calls) {  // on one layer after the other
        return std::make_unique<Graph>(bench.stream, [&] {
            for (int i = 0; i < turns * layers; ++i) calls(i % layers);
        });
    };
    const auto attends = graph_of([&](int layer) { attend(layer, nullptr); });
    const auto attends_fresh = graph_of([&](int layer) { attend(layer, &fresh); });
    const auto appends_and_attends = graph_of([&](int layer) { append(layer), attend(layer, nullptr); });
    const auto steps = graph_of(step);
    const Timer timer(bench.stream);
    const auto print_added = [&](const char* suite, const Graph& graph, const Graph& without) {
        timer.us(graph), timer.us(without);
        std::vector<double> alone{timer.us(without)}, added;
        for (int i = 0; i < kRounds; ++i) {
            const double us = timer.us(graph);
            alone.push_back(timer.us(without));
            added.push_back(us - (alone[i] + alone[i + 1]) / 2);
        }
        const double us = median(added) / (turns * layers);
        print_line(bench, suite, s, shape, us, 4.0 * row, cache.pack_path(), median(added) / median(alone));
    };
    print_added("step beside attend", *appends_and_attends, *attends);
    print_added("kivi_step beside attend", *steps, *attends);
    print_added("kivi_step beside attend with its token", *steps, *attends_fresh);
}

void run_steps(const Bench& bench, bool quick) {
    for (const Storage& s : presets()) {
        for (int batch_size : {1, 8, 64}) {
            if (!quick || batch_size == 8) measure_step(bench, s, batch_size);
        }
        for (const Shape& shape : {Shape{1, 32, 8, 32768}, Shape{8, 32, 8, 32768}, Shape{64, 32, 8, 4096}}) {
            if (!quick || shape.batch == 8) measure_step_beside(bench, s, shape);
        }
    }
}

void run_sweep(const Bench& bench, bool quick) {
    for (const Storage& s : presets()) {
        if (s.name != "k3v2" && s.name != "kivi2-sink") continue;
        for (int kv_heads : {32, 8, 4}) {
            for (int batch : {1, 8, 32, 128}) {
                for (int tokens : {1024, 4096, 32768, 131072}) {
                    const double fp16 = 4.0 * batch * kv_heads * tokens * s.dim;
                    if (fp16 > 0.6 * static_cast<double>(bench.device.memory_bytes)) continue;
                    if (quick && (kv_heads != 8 || batch % 32 > 1 || tokens % 32768 > 4096)) continue;
                    measure_attend(bench, s, {batch, 32, kv_heads, tokens});
                }
            }
        }
    }
}

void run_prompts(const Bench& bench, bool quick) {
    for (const Case& c : kCases) {
        if (c.sink > 0 || c.query_tokens > 1 || (quick && c.group != 64)) continue;
        for (bool query_aware : {false, true}) measure_prompt(bench, storage_of(c), query_aware, 32768);
        measure_prompt(bench, storage_of(c), false, 2048);
    }
}

// Drafts of a few tokens and pieces of prompts, whose keys and values come with the call.
void run_chunks(const Bench& bench, bool quick) {
    for (Storage s : presets()) {
        if (s.name != "k3v2" && s.name != "kivi2-sink" && s.name != "kivi2-paper") continue;
        s.fresh = true;
        for (const int tokens : {8192, 32768}) {
            for (const int query_tokens : {1, 4, 8, 16, 512, 2048}) {
                if (quick && (tokens != 8192 || query_tokens % 512 > 0)) continue;
                s.query_tokens = query_tokens;
                measure_attend(bench, s, {1, 32, 8, tokens});
                if (query_tokens <= kFewTokens) measure_attend(bench, s, {8, 32, 8, tokens});
                if (quick || s.name != "k3v2" || (query_tokens != 16 && query_tokens != 512)) continue;
                measure_attend(bench, invariant(s), {1, 32, 8, tokens});
            }
        }
    }
    for (const int dim : {64, 256}) {
        Storage s = storage_of(case_named("2/2 g32"));
        s.name += " dim " + std::to_string(dim);
        s.fresh = true;
        s.dim = dim;
        for (const int query_tokens : {1, 8, 512, 2048}) {
            if (quick && query_tokens != 512) continue;
            s.query_tokens = query_tokens;
            measure_attend(bench, s, {1, 32, 8, 8192});
            if (query_tokens <= kFewTokens) measure_attend(bench, s, {8, 32, 8, 8192});
        }
    }
}

struct Group {
    const char* name;
    void (*run)(const Bench&, bool quick);
};
const Group kGroups[] = {{"presets", run_presets}, {"specs", run_specs}, {"sweep", run_sweep}, {"prompts", run_prompts},
                         {"steps", run_steps}, {"chunks", run_chunks}};

}  // namespace

int main(int argc, char** argv) {
    std::vector<std::string> words(argv + 1, argv + argc);
    Bench bench;
    ok(kivi_device_query(KIVI_CUDA, 0, &bench.device, sizeof bench.device), "device");
    ok(cudaStreamCreateWithFlags(&bench.stream, cudaStreamNonBlocking), "stream");
    measure_copy(bench);
    if (words.size() >= 2 && words[0] == "--spec") {
        bench.table = "specs";
        const int number = words.size() > 2 ? std::atoi(words[2].c_str()) : -1;
        std::vector<Storage> all = presets();
        for (const Case& c : kCases) all.push_back(storage_of(c));
        for (const Storage& one : all) {
            for (const Storage& s : {one, invariant(one)}) {
                if (words[1] != s.name) continue;
                for (const Shape& shape : kShapes) {
                    if (number < 0 || &shape == kShapes + number) measure_attend(bench, s, shape);
                }
            }
        }
        return 0;
    }
    const auto quick = std::find(words.begin(), words.end(), "--quick");
    const bool is_short = quick != words.end();
    if (is_short) words.erase(quick);
    for (const std::string& word : words) {
        const auto named = [&](const Group& group) { return word == group.name; };
        if (std::none_of(std::begin(kGroups), std::end(kGroups), named)) {
            std::fprintf(stderr, "bench_gpu: there is no group '%s'; there are presets, specs, sweep, prompts, steps and chunks\n", word.c_str());
            return 2;
        }
    }
    for (const Group& group : kGroups) {
        if (!words.empty() && std::find(words.begin(), words.end(), group.name) == words.end()) continue;
        bench.table = group.name;
        group.run(bench, is_short);
    }
    return 0;
}
