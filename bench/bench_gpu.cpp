// Decode attention and packing on a GPU. Attends: one captured graph of attends over layers that rotate out of the L2,
// medians of its replays, beside the copy bandwidth of the same run. One JSON object a line.
//   bench_gpu                      the specs of the fast kernel and the presets
//   bench_gpu --quick              batch 8, 32K only
//   bench_gpu --spec NAME [SHAPE]  one spec at every shape, or at the one of that number
//   bench_gpu --pack               prompts of one sequence with 8 KV heads, a layer
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

struct Case {
    const char* name;
    int key_bits, value_bits, group, dim;
    bool rotated;      // values
    int sink, recent;  // 0: no windows
    int query_tokens;
};
const Case kCases[] = {
    {"2/2 g32", 2, 2, 32, 128, false, 0, 0, 1},     {"2/2 g64", 2, 2, 64, 128, false, 0, 0, 1},
    {"2/2 g128", 2, 2, 128, 128, false, 0, 0, 1},   {"3/2 g64 hadamard", 3, 2, 64, 128, true, 0, 0, 1},
    {"3/2 g64", 3, 2, 64, 128, false, 0, 0, 1},     {"4/2 g32", 4, 2, 32, 128, false, 0, 0, 1},
    {"4/2 g64", 4, 2, 64, 128, false, 0, 0, 1},     {"4/4 g32", 4, 4, 32, 128, false, 0, 0, 1},
    {"2/2 g32 32+128", 2, 2, 32, 128, false, 32, 128, 1}, {"2/2 g32 2 tokens", 2, 2, 32, 128, false, 0, 0, 2},
    {"2/2 g32 dim 64", 2, 2, 32, 64, false, 0, 0, 1},
};

constexpr int kAttends = 20;  // of a graph
constexpr int kReplays = 15;
constexpr int64_t kRotation = 256 << 20;  // bytes: several times the L2

kivi_tensor tensor(void* data, std::vector<int64_t> shape, bool one_row) {
    kivi_tensor t{};
    t.data = data;
    t.dtype = KIVI_F16;
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

template <class Work>
double median_us(cudaStream_t stream, const Work& work) {
    cudaEvent_t begin, end;
    ok(cudaEventCreate(&begin), "event");
    ok(cudaEventCreate(&end), "event");
    std::vector<double> times;
    for (int i = 0; i < kReplays + 2; ++i) {
        ok(cudaEventRecord(begin, stream), "record");
        work();
        ok(cudaEventRecord(end, stream), "record");
        ok(cudaEventSynchronize(end), "wait");
        float ms = 0;
        ok(cudaEventElapsedTime(&ms, begin, end), "time");
        if (i >= 2) times.push_back(1e3 * ms);
    }
    ok(cudaEventDestroy(begin), "event");
    ok(cudaEventDestroy(end), "event");
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

double copy_gbps(cudaStream_t stream) {
    constexpr size_t kBytes = size_t{1} << 30;
    void *from = nullptr, *to = nullptr;
    ok(cudaMalloc(&from, kBytes), "memory");
    ok(cudaMalloc(&to, kBytes), "memory");
    const double us = median_us(stream, [&] { ok(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDeviceToDevice, stream), "copy"); });
    ok(cudaFree(from), "free");
    ok(cudaFree(to), "free");
    return 2.0 * kBytes / us / 1e3;
}

void measure(const Case& c, const Shape& shape, double copy, cudaStream_t stream) {
    const int over = 128 / c.dim;  // narrower heads: more of them
    const int kv_heads = shape.kv_heads * over, q_heads = shape.q_heads * over;
    kivi_config config;
    ok(kivi_config_init(&config, sizeof config), "config");
    config.device = KIVI_CUDA;
    config.layer.kv_heads = kv_heads;
    config.layer.q_heads = q_heads;
    config.layer.key_dim = config.layer.value_dim = c.dim;
    kivi_spec k{}, v{};
    k.bits = c.key_bits, k.axis = KIVI_AXIS_CHANNEL, k.group = c.group;
    v.bits = c.value_bits, v.axis = KIVI_AXIS_TOKEN, v.group = c.group;
    v.transform = c.rotated ? KIVI_TRANSFORM_HADAMARD : KIVI_TRANSFORM_NONE;
    config.layer.k = k;
    config.layer.v = v;
    config.sink = c.sink;
    config.recent = c.recent;
    config.flush = std::max(c.group, 32);
    config.max_sequences = shape.batch;
    const int length = c.sink + shape.tokens + c.recent;
    config.max_tokens = length;
    const double token_bytes = c.dim * (c.key_bits + c.value_bits) / 8.0 + 2 * 4.0 * c.dim / c.group;
    const double window_bytes = 4.0 * c.dim * (c.sink + c.recent);
    const double bytes = double(shape.batch) * kv_heads * (token_bytes * shape.tokens + window_bytes);
    config.layer_count = static_cast<int32_t>(std::min<double>(kAttends, std::max(2.0, kRotation / bytes + 1)));
    kivi_cache* cache = nullptr;
    ok(kivi_cache_create(&config, &cache), "create");

    constexpr int kChunk = 4096;
    std::vector<uint16_t> numbers(size_t(kChunk) * kv_heads * c.dim);
    uint32_t state = 12345;
    for (uint16_t& x : numbers) {
        state = state * 1664525u + 1013904223u;
        x = static_cast<uint16_t>((state >> 31) << 15 | (10 + (state >> 24 & 3)) << 10 | (state >> 8 & 1023));
    }
    void *tokens = nullptr, *queries = nullptr, *out = nullptr, *workspace = nullptr;
    ok(cudaMalloc(&tokens, numbers.size() * 2), "memory");
    ok(cudaMemcpy(tokens, numbers.data(), numbers.size() * 2, cudaMemcpyHostToDevice), "upload");
    const int64_t row = int64_t{1} * c.query_tokens * q_heads * c.dim;
    ok(cudaMalloc(&queries, row * shape.batch * 2), "memory");
    ok(cudaMalloc(&out, row * shape.batch * 2), "memory");
    for (int64_t at = 0; at < row * shape.batch; at += numbers.size()) {
        const int64_t count = std::min<int64_t>(numbers.size(), row * shape.batch - at);
        ok(cudaMemcpy(static_cast<uint16_t*>(queries) + at, tokens, count * 2, cudaMemcpyDeviceToDevice), "queries");
    }
    kivi_batch batch;
    ok(kivi_batch_init(&batch, sizeof batch), "batch");
    batch.rows = shape.batch;
    for (int layer = 0; layer < config.layer_count; ++layer) {
        for (int at = 0; at < length; at += kChunk) {
            batch.max_count = std::min(kChunk, length - at);
            const kivi_tensor input = tensor(tokens, {shape.batch, batch.max_count, kv_heads, c.dim}, true);
            ok(kivi_append(cache, layer, &batch, &input, &input, stream), "append");
        }
    }
    batch.max_count = c.query_tokens;
    size_t workspace_bytes = 0;
    ok(kivi_attend_workspace(cache, -1, shape.batch, c.query_tokens, &workspace_bytes), "workspace");
    ok(cudaMalloc(&workspace, workspace_bytes + 1), "memory");
    const kivi_tensor q = tensor(queries, {shape.batch, c.query_tokens, q_heads, c.dim}, false);
    const kivi_tensor to = tensor(out, {shape.batch, c.query_tokens, q_heads, c.dim}, false);
    ok(cudaDeviceSynchronize(), "append");
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    for (int i = 0; i < kAttends; ++i) {
        ok(kivi_attend(cache, i % config.layer_count, &batch, &q, &to, nullptr, workspace, workspace_bytes, stream), "attend");
    }
    ok(cudaStreamEndCapture(stream, &graph), "capture");
    ok(cudaGraphInstantiate(&replay, graph, 0), "graph");
    const double us = median_us(stream, [&] { ok(cudaGraphLaunch(replay, stream), "launch"); }) / kAttends;
    ok(cudaDeviceSynchronize(), "attend");
    std::printf("{\"bench\": \"gpu_attend\", \"spec\": \"%s\", \"batch\": %d, \"q_heads\": %d, \"kv_heads\": %d, "
                "\"tokens\": %d, \"us\": %.2f, \"gbps\": %.0f, \"copy_gbps\": %.0f, \"share\": %.3f}\n",
                c.name, shape.batch, q_heads, kv_heads, shape.tokens, us, bytes / us / 1e3, copy, bytes / us / 1e3 / copy);
    std::fflush(stdout);
    ok(cudaGraphExecDestroy(replay), "graph");
    ok(cudaGraphDestroy(graph), "graph");
    kivi_cache_destroy(cache);
    for (void* memory : {tokens, queries, out, workspace}) ok(cudaFree(memory), "free");
}

// Input rows of random numbers with exponents from 2^-5 to 2^-2, as attend's above.
void fill(void* to, int64_t count) {
    std::vector<uint16_t> numbers(1 << 22);
    uint32_t state = 99;
    for (uint16_t& x : numbers) {
        state = state * 1664525u + 1013904223u;
        x = static_cast<uint16_t>((state >> 31) << 15 | (10 + (state >> 24 & 3)) << 10 | (state >> 8 & 1023));
    }
    for (int64_t at = 0; at < count; at += static_cast<int64_t>(numbers.size())) {
        const int64_t some = std::min<int64_t>(numbers.size(), count - at);
        ok(cudaMemcpy(static_cast<uint16_t*>(to) + at, numbers.data(), some * 2, cudaMemcpyHostToDevice), "upload");
    }
}

// One prompt into every layer of an empty sequence; inputs take turns, so that none is in the L2.
void measure_pack(const Case& c, bool query_aware, int tokens, double copy, cudaStream_t stream) {
    constexpr int kLayers = 6, kHeads = 8;
    kivi_config config;
    ok(kivi_config_init(&config, sizeof config), "config");
    config.device = KIVI_CUDA;
    config.layer.kv_heads = kHeads;
    config.layer.q_heads = 4 * kHeads;
    config.layer.key_dim = config.layer.value_dim = c.dim;
    kivi_spec k{}, v{};
    k.bits = c.key_bits, k.axis = KIVI_AXIS_CHANNEL, k.group = c.group;
    v.bits = c.value_bits, v.axis = KIVI_AXIS_TOKEN, v.group = c.group;
    v.transform = c.rotated ? KIVI_TRANSFORM_HADAMARD : KIVI_TRANSFORM_NONE;
    k.rounding = query_aware ? KIVI_ROUND_QUERY_AWARE : KIVI_ROUND_NEAREST;
    config.layer.k = k;
    config.layer.v = v;
    config.sink = config.recent = config.flush = std::max(c.group, 64);
    config.max_sequences = 1;
    config.max_tokens = tokens;
    config.layer_count = kLayers;
    kivi_cache* cache = nullptr;
    ok(kivi_cache_create(&config, &cache), "create");
    if (query_aware) {
        std::vector<float> moments(size_t(kHeads) * c.dim * c.dim);
        for (size_t i = 0; i < moments.size(); ++i) {
            const int row = static_cast<int>(i / c.dim % c.dim), column = static_cast<int>(i % c.dim);
            moments[i] = (row == column ? 1.0f + row % 7 : 0.0f) + 0.5f / (1 + std::abs(row - column));
        }
        void* device = nullptr;
        ok(cudaMalloc(&device, moments.size() * 4), "memory");
        ok(cudaMemcpy(device, moments.data(), moments.size() * 4, cudaMemcpyHostToDevice), "upload");
        kivi_tensor m = tensor(device, {kHeads, c.dim, c.dim}, false);
        m.dtype = KIVI_F32;
        for (int layer = 0; layer < kLayers; ++layer) {
            ok(kivi_moments_set(cache, layer, &m, 0, stream), "moments");
            ok(kivi_moments_commit(cache, layer, stream), "moments");
        }
        ok(cudaFree(device), "free");
    }
    const int64_t row = int64_t{1} * tokens * kHeads * c.dim;
    void* inputs[4] = {};
    for (void*& input : inputs) {
        ok(cudaMalloc(&input, row * 2), "memory");
        fill(input, row);
    }
    const int32_t sequence = 0;
    kivi_batch batch;
    ok(kivi_batch_init(&batch, sizeof batch), "batch");
    batch.rows = 1;
    batch.max_count = tokens;
    batch.sequences = &sequence;
    cudaEvent_t begin, end;
    ok(cudaEventCreate(&begin), "event");
    ok(cudaEventCreate(&end), "event");
    std::vector<double> times;
    for (int replay = 0; replay < kReplays + 2; ++replay) {
        ok(kivi_sequence_reset(cache, sequence, stream), "reset");
        ok(cudaStreamSynchronize(stream), "wait");
        ok(cudaEventRecord(begin, stream), "record");
        for (int layer = 0; layer < kLayers; ++layer) {
            const kivi_tensor keys = tensor(inputs[layer % 2 * 2], {1, tokens, kHeads, c.dim}, false);
            const kivi_tensor values = tensor(inputs[layer % 2 * 2 + 1], {1, tokens, kHeads, c.dim}, false);
            ok(kivi_append(cache, layer, &batch, &keys, &values, stream), "append");
        }
        ok(cudaEventRecord(end, stream), "record");
        ok(cudaEventSynchronize(end), "wait");
        float ms = 0;
        ok(cudaEventElapsedTime(&ms, begin, end), "time");
        if (replay >= 2) times.push_back(1e3 * ms / kLayers);
    }
    std::sort(times.begin(), times.end());
    const double us = times[times.size() / 2];
    const double packed = tokens - config.recent - config.sink, windows = config.recent + config.sink;
    const double packed_bytes = c.dim * (c.key_bits + c.value_bits) / 8.0 + 2 * 4.0 * c.dim / c.group;
    const double bytes = kHeads * (4.0 * c.dim * tokens + packed * packed_bytes + windows * 4.0 * c.dim);
    std::printf("{\"bench\": \"gpu_pack\", \"spec\": \"%s\", \"rounding\": \"%s\", \"kv_heads\": %d, \"tokens\": %d, "
                "\"us\": %.2f, \"gbps\": %.0f, \"copy_gbps\": %.0f, \"share\": %.3f}\n",
                c.name, query_aware ? "query-aware" : "nearest", kHeads, tokens, us, bytes / us / 1e3, copy,
                bytes / us / 1e3 / copy);
    std::fflush(stdout);
    kivi_cache_destroy(cache);
    for (void* input : inputs) ok(cudaFree(input), "free");
}

}  // namespace

int main(int argc, char** argv) {
    const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
    cudaStream_t stream;
    ok(cudaStreamCreate(&stream), "stream");
    const double copy = copy_gbps(stream);
    const bool packing = argc > 1 && std::strcmp(argv[1], "--pack") == 0;
    const char* const only = argc > 2 && std::strcmp(argv[1], "--spec") == 0 ? argv[2] : nullptr;
    const int number = argc > 3 ? std::atoi(argv[3]) : -1;
    for (const Case& c : kCases) {
        if (only != nullptr && std::strcmp(only, c.name) != 0) continue;
        if (packing && (c.sink > 0 || c.query_tokens > 1 || c.dim != 128)) continue;
        for (int which = 0; packing && which < 2; ++which) measure_pack(c, which == 1, 32768, copy, stream);
        if (packing) measure_pack(c, false, 2048, copy, stream);
        for (const Shape& shape : kShapes) {
            if (number >= 0 && &shape != kShapes + number) continue;
            if (packing || (quick && (shape.batch != 8 || shape.kv_heads != 8))) continue;
            measure(c, shape, copy, stream);
        }
    }
    return 0;
}
