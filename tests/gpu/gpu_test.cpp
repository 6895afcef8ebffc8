// A GPU against the CPU, and what only a GPU has: streams, graphs, device arrays, pointers of the wrong memory.
#define DOCTEST_CONFIG_IMPLEMENT
#include <cmath>

#include "gpu_support.h"

using namespace gpu_test;

namespace {

kivi_spec spec_of(int bits, int axis, int group) {
    kivi_spec spec{};
    spec.bits = bits;
    if (bits == 16) return spec;
    spec.axis = axis;
    spec.group = group;
    return spec;
}

// A stream is a GPU's; the CPU has none.
kivi_stream stream_for(const Cache& cache, kivi_stream stream) { return cache.device == KIVI_CUDA ? stream : nullptr; }

// Appends the same tokens to both caches, in chunks, to every sequence of the batch.
class Pair {
  public:
    Pair(const kivi_config& config, uint64_t seed)
        : cpu(config, KIVI_CPU), gpu(config, KIVI_CUDA), shape_{config.layer.kv_heads, config.layer.q_heads,
                                                                config.layer.key_dim, config.layer.value_dim},
          numbers_(seed) {}

    void append(const std::vector<int32_t>& sequences, int count, kivi_stream stream = nullptr) {
        const int rows = static_cast<int>(sequences.size());
        Floats k(numbers_.rows(int64_t{1} * rows * count * shape_.kv_heads, shape_.key_dim));
        Floats v(numbers_.rows(int64_t{1} * rows * count * shape_.kv_heads, shape_.value_dim));
        const kivi_batch batch = batch_of(rows, sequences.data(), nullptr, count);
        for (Cache* cache : {&cpu, &gpu}) {
            const kivi_tensor keys = k.view(cache->device, {rows, count, shape_.kv_heads, shape_.key_dim});
            const kivi_tensor values = v.view(cache->device, {rows, count, shape_.kv_heads, shape_.value_dim});
            KIVI_OK_(kivi_append(*cache, 0, &batch, &keys, &values, stream_for(*cache, stream)));
        }
        CUDA_OK(cudaDeviceSynchronize());
    }

    // Outputs of both, with LSE behind them.
    void attend(const std::vector<int32_t>& sequences, int count, std::vector<float>* of_cpu,
                std::vector<float>* of_gpu, const kivi_attend_params* params = nullptr) {
        const int rows = static_cast<int>(sequences.size());
        const int64_t heads = int64_t{1} * rows * count * shape_.q_heads;
        Floats q(numbers_.rows(heads, shape_.key_dim)), out(heads * shape_.value_dim);
        const kivi_batch batch = batch_of(rows, sequences.data(), nullptr, count);
        for (Cache* cache : {&cpu, &gpu}) {
            const Workspace workspace(*cache, rows, count);
            const kivi_tensor queries = q.view(cache->device, {rows, count, shape_.q_heads, shape_.key_dim});
            const kivi_tensor result = out.view(cache->device, {rows, count, shape_.q_heads, shape_.value_dim});
            KIVI_OK_(kivi_attend(*cache, 0, &batch, &queries, &result, params, workspace.data,
                                 workspace.bytes, nullptr));
            if (cache == &cpu) {
                *of_cpu = out.host;
            } else {
                CUDA_OK(cudaDeviceSynchronize());
                *of_gpu = out.download();
            }
        }
    }

    Cache cpu, gpu;

  private:
    Shape shape_;
    Numbers numbers_;
};

struct NamedSpec {
    std::string name;
    kivi_spec spec;
};

std::vector<NamedSpec> all_specs(bool key) {
    std::vector<NamedSpec> specs;
    specs.push_back({"16", spec_of(16, 0, 0)});
    for (int bits : {2, 3, 4, 8}) {
        for (int group : {32, 64, 128}) {
            specs.push_back({std::to_string(bits) + " channel " + std::to_string(group),
                             spec_of(bits, KIVI_AXIS_CHANNEL, group)});
            specs.push_back({std::to_string(bits) + " token " + std::to_string(group),
                             spec_of(bits, KIVI_AXIS_TOKEN, group)});
        }
        specs.push_back({std::to_string(bits) + " token head", spec_of(bits, KIVI_AXIS_TOKEN, KIVI_GROUP_HEAD)});
    }
    const size_t plain = specs.size();
    for (size_t i = 0; i < plain; ++i) {
        NamedSpec rotated = specs[i];
        rotated.name += " hadamard";
        rotated.spec.transform = KIVI_TRANSFORM_HADAMARD;
        specs.push_back(rotated);
    }
    for (size_t i = 1; i < plain; i += 5) {
        NamedSpec wide = specs[i];
        wide.name += " f32 ratio";
        wide.spec.param_dtype = KIVI_F32;
        wide.spec.range = KIVI_RANGE_RATIO;
        wide.spec.range_ratio = 0.9f;
        specs.push_back(wide);
    }
    if (!key) return specs;
    for (size_t i = 1; i < plain; ++i) {
        if (specs[i].spec.axis != KIVI_AXIS_CHANNEL) continue;
        NamedSpec aware = specs[i];
        aware.name += " query-aware";
        aware.spec.rounding = KIVI_ROUND_QUERY_AWARE;
        specs.push_back(aware);
    }
    return specs;
}

// Moments of the same matrix in both caches.
void commit_moments(Pair& pair, const Shape& shape) {
    Numbers numbers(99);
    const int dim = shape.key_dim;
    std::vector<float> m(size_t(shape.kv_heads) * dim * dim, 0.0f);
    for (int head = 0; head < shape.kv_heads; ++head) {
        const std::vector<float> q = numbers.rows(2 * dim, dim);
        for (int row = 0; row < 2 * dim; ++row) {
            for (int i = 0; i < dim; ++i) {
                for (int j = 0; j < dim; ++j) {
                    m[(size_t(head) * dim + i) * dim + j] += q[row * dim + i] * q[row * dim + j] / float(2 * dim);
                }
            }
        }
    }
    Floats matrices(m);
    for (Cache* cache : {&pair.cpu, &pair.gpu}) {
        const kivi_tensor tensor = matrices.view(cache->device, {shape.kv_heads, dim, dim});
        KIVI_OK_(kivi_moments_set(*cache, 0, &tensor, 0, nullptr));
        KIVI_OK_(kivi_moments_commit(*cache, 0, nullptr));
    }
}

}  // namespace

namespace {

// Appends, flushes, exports, imports and attends on both backends.
void compare(const NamedSpec& key, const NamedSpec& value, const Shape& shape, int recent, int32_t window_dtype,
             int prompt, uint64_t seed) {
    CAPTURE(key.name);
    CAPTURE(value.name);
    CAPTURE(shape.key_dim);
    CAPTURE(shape.value_dim);
    kivi_config config = config_of(key.spec, value.spec, shape, 128, recent, 128);
    config.window_dtype = window_dtype;
    Pair pair(config, seed);
    if (key.spec.rounding == KIVI_ROUND_QUERY_AWARE) commit_moments(pair, shape);
    pair.append({1}, prompt);
    for (int step = 0; step < 3; ++step) pair.append({1, 0}, 1);
    pair.append({0, 1}, 260);
    const int32_t flushed = 0;
    const kivi_batch batch = batch_of(1, &flushed, nullptr, 1);
    KIVI_OK_(kivi_flush_residual(pair.cpu, 0, &batch, nullptr));
    KIVI_OK_(kivi_flush_residual(pair.gpu, 0, &batch, nullptr));
    for (int32_t sequence : {0, 1}) {
        const std::vector<uint8_t> expected = check_same_blob(pair.cpu, pair.gpu, sequence);
        KIVI_OK_(kivi_import(pair.gpu, 2, expected.data(), expected.size(), nullptr));
        CHECK(pair.gpu.blob(2) == expected);
    }
    for (int count : {1, 5}) {
        std::vector<float> of_cpu, of_gpu;
        pair.attend({1, 0}, count, &of_cpu, &of_gpu);
        CAPTURE(count);
        CHECK(relative_error(of_gpu, of_cpu) < 3e-3);
    }
}

}  // namespace

TEST_CASE("every spec stores the same bytes as the CPU, and attends alike") {
    const std::vector<NamedSpec> keys = all_specs(true), values = all_specs(false);
    const int dims[] = {64, 128, 80, 256, 112, 192, 96};
    for (size_t i = 0; i < keys.size(); ++i) {
        const NamedSpec& key = keys[i];
        const NamedSpec& value = values[(i * 7 + 3) % values.size()];
        Shape shape{2, 4, dims[i % 7], dims[(i / 7 + i) % 7]};
        if (key.spec.axis == KIVI_AXIS_TOKEN && key.spec.group > shape.key_dim) shape.key_dim = 128;
        if (value.spec.axis == KIVI_AXIS_TOKEN && value.spec.group > shape.value_dim) shape.value_dim = 128;
        const int32_t window_dtype = i % 3 == 0 ? KIVI_BF16 : i % 3 == 1 ? KIVI_F16 : KIVI_F32;
        compare(key, value, shape, i % 2 == 0 ? 100 : 0, window_dtype, 397, 10 + i);
    }
}

// Every kernel once, small enough for tools that watch each access.
TEST_CASE("sanitized: a few specs") {
    NamedSpec aware{"3 channel 64 query-aware", spec_of(3, KIVI_AXIS_CHANNEL, 64)};
    aware.spec.rounding = KIVI_ROUND_QUERY_AWARE;
    NamedSpec rotated{"2 token 64 hadamard", spec_of(2, KIVI_AXIS_TOKEN, 64)};
    rotated.spec.transform = KIVI_TRANSFORM_HADAMARD;
    compare(aware, rotated, {1, 2, 64, 128}, 64, KIVI_F16, 300, 1);
    compare({"4 channel 128", spec_of(4, KIVI_AXIS_CHANNEL, 128)},
            {"3 token head", spec_of(3, KIVI_AXIS_TOKEN, KIVI_GROUP_HEAD)}, {1, 1, 80, 96}, 0, KIVI_BF16, 300,
            2);
    compare({"16", spec_of(16, 0, 0)}, {"8 token 32", spec_of(8, KIVI_AXIS_TOKEN, 32)}, {2, 2, 64, 264}, 32,
            KIVI_F32, 300, 3);
}

TEST_CASE("fault 88, 89: a captured decode step is replayed across flush boundaries") {
    kivi_config config;
    kivi_config_init(&config, sizeof config);
    config.layer_count = 1;
    config.layer.kv_heads = 2, config.layer.q_heads = 8;
    config.layer.key_dim = config.layer.value_dim = 128;
    config.max_sequences = 3;
    config.max_tokens = 900;
    config.threads = 1;
    const int heads = 2, q_heads = 8, dim = 128, rows = 3, steps = 300;
    Cache cpu(config, KIVI_CPU), gpu(config, KIVI_CUDA);
    const Stream stream;
    const int32_t ids[rows] = {2, 0, 1};
    const int32_t prompts[rows] = {300, 5, 130};
    Numbers numbers(5);
    Floats prompt_k(numbers.rows(int64_t{1} * rows * 300 * heads, dim)),
        prompt_v(numbers.rows(int64_t{1} * rows * 300 * heads, dim));
    const kivi_batch prompt = batch_of(rows, ids, prompts, 300);
    for (Cache* cache : {&cpu, &gpu}) {
        const kivi_tensor k = prompt_k.view(cache->device, {rows, 300, heads, dim});
        const kivi_tensor v = prompt_v.view(cache->device, {rows, 300, heads, dim});
        KIVI_OK_(kivi_append(*cache, 0, &prompt, &k, &v, stream_for(*cache, stream)));
    }
    for (int32_t id : ids) KIVI_OK_(kivi_sequence_reserve(gpu, id, 900, stream));

    Floats k(int64_t{1} * rows * heads * dim), v(int64_t{1} * rows * heads * dim),
        q(int64_t{1} * rows * q_heads * dim), out(int64_t{1} * rows * q_heads * dim);
    const Workspace workspace(gpu, rows, 1), cpu_workspace(cpu, rows, 1);
    const kivi_batch step = batch_of(rows, ids, nullptr, 1);
    const auto decode = [&](Cache& cache, const Workspace& at, kivi_stream on) {
        const kivi_tensor keys = k.view(cache.device, {rows, 1, heads, dim}),
                          values = v.view(cache.device, {rows, 1, heads, dim});
        const kivi_tensor queries = q.view(cache.device, {rows, 1, q_heads, dim}),
                          result = out.view(cache.device, {rows, 1, q_heads, dim});
        KIVI_OK_(kivi_append(cache, 0, &step, &keys, &values, on));
        KIVI_OK_(kivi_attend(cache, 0, &step, &queries, &result, nullptr, at.data, at.bytes, on));
    };
    const Captured captured(stream, [&] { decode(gpu, workspace, stream); });
    for (int i = 0; i < steps; ++i) {
        k.host = numbers.rows(rows * heads, dim), v.host = numbers.rows(rows * heads, dim);
        q.host = numbers.rows(rows * q_heads, dim);
        k.upload(), v.upload(), q.upload();
        captured.replay();
        decode(cpu, cpu_workspace, nullptr);
        if (i % 37 == 0 || i + 1 == steps) {
            CAPTURE(i);
            CHECK(relative_error(out.download(), out.host) < 3e-3);
        }
    }
    KIVI_OK_(kivi_synchronize(gpu, stream));
    for (int32_t id : ids) {
        CHECK(gpu.length(id) == cpu.length(id));
        CHECK(gpu.blob(id, stream) == cpu.blob(id));
    }

    // The longest one runs full: nothing more is written, and synchronize says so.
    for (int i = 0; i < 301; ++i) captured.replay();
    CHECK(kivi_synchronize(gpu, stream) == KIVI_ERROR_CAPACITY);
    CHECK(std::string(kivi_last_error()).find("sequence 2") != std::string::npos);
    CHECK(gpu.length(2) == 900);
    CHECK(gpu.length(0) == 5 + steps + 301);
    KIVI_OK_(kivi_sequence_reset(gpu, 2, stream));
    KIVI_OK_(kivi_synchronize(gpu, stream));
}

TEST_CASE("ids, counts and offsets in device memory") {
    kivi_config config = config_of(spec_of(2, KIVI_AXIS_CHANNEL, 32), spec_of(2, KIVI_AXIS_TOKEN, 32), {}, 32, 96, 32);
    Cache cpu(config, KIVI_CPU), gpu(config, KIVI_CUDA);
    for (int32_t id = 0; id < 3; ++id) KIVI_OK_(kivi_sequence_reserve(gpu, id, 1200, nullptr));
    const int32_t arrays[6] = {2, -1, 0, 150, 3, 290};  // ids, then counts
    int32_t* device;
    CUDA_OK(cudaMalloc(&device, sizeof arrays));
    CUDA_OK(cudaMemcpy(device, arrays, sizeof arrays, cudaMemcpyHostToDevice));
    Numbers numbers(3);
    const int tokens = 150 + 3 + 290;
    Floats k(numbers.rows(tokens * 2, 64)), v(numbers.rows(tokens * 2, 64));
    kivi_batch on_host = batch_of(3, arrays, arrays + 3, 290), on_device = batch_of(3, device, device + 3, 290);
    on_device.device = KIVI_CUDA;
    for (Cache* cache : {&cpu, &gpu}) {
        const kivi_tensor keys = k.view(cache->device, {tokens, 2, 64}),
                          values = v.view(cache->device, {tokens, 2, 64});
        KIVI_OK_(kivi_append(*cache, 0, cache == &cpu ? &on_host : &on_device, &keys, &values, nullptr));
    }
    CHECK(gpu.length(0) == 0);
    KIVI_OK_(kivi_synchronize(gpu, nullptr));
    CHECK(gpu.length(2) == 150);
    CHECK(gpu.length(1) == 0);
    CHECK(gpu.blob(0) == cpu.blob(0));
    CHECK(gpu.blob(2) == cpu.blob(2));
    CUDA_OK(cudaFree(device));
}

namespace {

// Array: of queries and results.
template <class Array>
void check_independence() {
    kivi_config small = config_of(spec_of(3, KIVI_AXIS_CHANNEL, 64), spec_of(2, KIVI_AXIS_TOKEN, 64),
                                  {8, 32, 128, 128}, 64, 64, 64);
    small.max_tokens = 5000;
    kivi_config large = small;
    large.max_sequences = 70;
    large.max_tokens = 40000;
    large.pool_tokens = 700000;
    Cache one(small, KIVI_CUDA), many(large, KIVI_CUDA);
    Numbers numbers(8);
    const int tokens = 4500;
    Floats k(numbers.rows(tokens * 8, 128)), v(numbers.rows(tokens * 8, 128));
    const kivi_tensor keys = k.view(KIVI_CUDA, {1, tokens, 8, 128}), values = v.view(KIVI_CUDA, {1, tokens, 8, 128});
    const int32_t last = 69, first = 0;
    const kivi_batch to_first = batch_of(1, &first, nullptr, tokens), to_last = batch_of(1, &last, nullptr, tokens);
    KIVI_OK_(kivi_append(one, 0, &to_first, &keys, &values, nullptr));
    KIVI_OK_(kivi_append(many, 0, &to_first, &keys, &values, nullptr));
    KIVI_OK_(kivi_append(many, 0, &to_last, &keys, &values, nullptr));
    kivi_attend_params params;
    kivi_attend_params_init(&params, sizeof params);
    params.flags = KIVI_ATTEND_INVARIANT;
    Array q(numbers.rows(32, 128)), alone(32 * 128), together(int64_t{70} * 32 * 128);
    const Workspace small_space(one, 1, 1), large_space(many, 70, 1);
    const kivi_tensor query = q.view(KIVI_CUDA, {1, 1, 32, 128}), result = alone.view(KIVI_CUDA, {1, 1, 32, 128});
    const kivi_batch single = batch_of(1, &first, nullptr, 1);
    KIVI_OK_(kivi_attend(one, 0, &single, &query, &result, &params, small_space.data, small_space.bytes, nullptr));
    kivi_tensor queries = query;
    queries.shape[0] = 70;
    queries.stride[0] = 0;
    const kivi_tensor results = together.view(KIVI_CUDA, {70, 1, 32, 128});
    const kivi_batch all = batch_of(70, nullptr, nullptr, 1);
    KIVI_OK_(kivi_attend(many, 0, &all, &queries, &results, &params, large_space.data, large_space.bytes, nullptr));
    const std::vector<float> expected = alone.download(), got = together.download();
    CHECK(std::memcmp(expected.data(), got.data(), expected.size() * 4) == 0);
    CHECK(std::memcmp(expected.data(), got.data() + size_t{69} * 32 * 128, expected.size() * 4) == 0);
    CHECK(got[32 * 128] == 0.0f);  // sequence 1 is empty
}

}  // namespace

TEST_CASE("fault 95: results do not depend on batch, capacity or splits") {
    SUBCASE("of f32, on the general kernel") { check_independence<Floats>(); }
    SUBCASE("of f16, on the fast one") { check_independence<Halfs>(); }
}

TEST_CASE("two caches on two streams at once") {
    kivi_config config = config_of(spec_of(4, KIVI_AXIS_CHANNEL, 32), spec_of(4, KIVI_AXIS_TOKEN, 32), {}, 32, 32, 32);
    Cache reference(config, KIVI_CPU), first(config, KIVI_CUDA), second(config, KIVI_CUDA);
    const Stream streams[2];
    Numbers numbers(4);
    Floats k(numbers.rows(400 * 2, 64)), v(numbers.rows(400 * 2, 64));
    const int32_t id = 0;
    for (int token = 0; token < 400; ++token) {
        const kivi_batch batch = batch_of(1, &id, nullptr, 1);
        for (Cache* cache : {&reference, &first, &second}) {
            kivi_tensor keys = k.view(cache->device, {1, 1, 2, 64}), values = v.view(cache->device, {1, 1, 2, 64});
            keys.data = static_cast<float*>(keys.data) + token * 128;
            values.data = static_cast<float*>(values.data) + token * 128;
            KIVI_OK_(kivi_append(*cache, 0, &batch, &keys, &values, stream_for(*cache, streams[cache == &second])));
        }
    }
    CHECK(first.blob(0, streams[0]) == reference.blob(0));
    CHECK(second.blob(0, streams[1]) == reference.blob(0));
}

TEST_CASE("memory of the wrong kind is refused, and nothing changes") {
    kivi_config config = config_of(spec_of(4, KIVI_AXIS_CHANNEL, 32), spec_of(4, KIVI_AXIS_TOKEN, 32), {}, 32, 32, 32);
    Cache gpu(config, KIVI_CUDA);
    Numbers numbers(6);
    Floats k(numbers.rows(2 * 3, 64)), v(numbers.rows(2 * 3, 64)), out(4 * 64);
    const int32_t id = 0;
    const kivi_batch batch = batch_of(1, &id, nullptr, 1);
    const kivi_tensor keys = k.view(KIVI_CUDA, {1, 1, 2, 64});
    kivi_tensor values = v.view(KIVI_CUDA, {1, 1, 2, 64});
    void* pinned;
    CUDA_OK(cudaMallocHost(&pinned, 4096));
    for (void* wrong : {static_cast<void*>(v.host.data()), pinned}) {
        values.data = wrong;
        CHECK(kivi_append(gpu, 0, &batch, &keys, &values, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
        CHECK(std::string(kivi_last_error()).find("v is host memory") != std::string::npos);
    }
    kivi_tensor on_cpu = v.view(KIVI_CPU, {1, 1, 2, 64});
    CHECK(kivi_append(gpu, 0, &batch, &keys, &on_cpu, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    KIVI_OK_(kivi_synchronize(gpu, nullptr));
    CHECK(gpu.length(0) == 0);
    values = v.view(KIVI_CUDA, {1, 1, 2, 64});
    KIVI_OK_(kivi_append(gpu, 0, &batch, &keys, &values, nullptr));
    // A base that is a multiple of the element size and no more.
    Floats shifted(numbers.rows(3, 64));
    kivi_tensor odd = shifted.view(KIVI_CUDA, {1, 1, 2, 64});
    odd.data = static_cast<float*>(odd.data) + 1;
    KIVI_OK_(kivi_append(gpu, 0, &batch, &odd, &odd, nullptr));
    const Workspace workspace(gpu, 1, 1);
    Floats q(numbers.rows(4, 64));
    const kivi_tensor queries = q.view(KIVI_CUDA, {1, 1, 4, 64}), result = out.view(KIVI_CUDA, {1, 1, 4, 64});
    CHECK(kivi_attend(gpu, 0, &batch, &queries, &result, nullptr, pinned, workspace.bytes, nullptr) !=
          (workspace.bytes > 0 ? KIVI_OK : KIVI_ERROR_INTERNAL));
    KIVI_OK_(kivi_attend(gpu, 0, &batch, &queries, &result, nullptr, workspace.data, workspace.bytes, nullptr));
    CUDA_OK(cudaFreeHost(pinned));
}

TEST_CASE("addresses: any multiple of the element size, and nothing less") {
    kivi_config config = config_of(spec_of(4, KIVI_AXIS_CHANNEL, 32), spec_of(4, KIVI_AXIS_TOKEN, 32),
                                   {2, 4, 128, 128}, 32, 32, 32);
    Cache cpu(config, KIVI_CPU), gpu(config, KIVI_CUDA);
    Numbers numbers(7);
    const int32_t id = 0;
    const int tokens = 300;
    const kivi_batch all = batch_of(1, &id, nullptr, tokens), one = batch_of(1, &id, nullptr, 1);
    // Everything begins `shift` bytes behind a 256-byte boundary.
    for (int shift : {0, 2, 4, 8, 1, 5}) {
        CAPTURE(shift);
        Halfs k(numbers.rows(tokens * 2 + 1, 128)), q(numbers.rows(4 + 1, 128)), out(5 * 128);
        const Workspace space(gpu, 1, 1), on_cpu(cpu, 1, 1);
        const auto shifted = [&](kivi_tensor tensor) {
            tensor.data = static_cast<char*>(tensor.data) + shift;
            return tensor;
        };
        const kivi_tensor keys = shifted(k.view(KIVI_CUDA, {1, tokens, 2, 128}));
        const kivi_tensor queries = shifted(q.view(KIVI_CUDA, {1, 1, 4, 128})),
                          result = shifted(out.view(KIVI_CUDA, {1, 1, 4, 128}));
        if (shift % 2 != 0) {
            const std::vector<uint8_t> before = gpu.blob(0);
            CHECK(kivi_append(gpu, 0, &all, &keys, &keys, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
            CHECK(std::string(kivi_last_error()) == "k.data is not aligned to its element size, 2 bytes");
            CHECK(kivi_attend(gpu, 0, &one, &queries, &result, nullptr, space.data, space.bytes, nullptr) ==
                  KIVI_ERROR_INVALID_ARGUMENT);
            CHECK(gpu.blob(0) == before);
            continue;
        }
        for (Cache* cache : {&cpu, &gpu}) {
            KIVI_OK_(kivi_sequence_reset(*cache, 0, nullptr));
            const kivi_tensor input = shifted(k.view(cache->device, {1, tokens, 2, 128}));
            const kivi_tensor from = shifted(q.view(cache->device, {1, 1, 4, 128})),
                              to = shifted(out.view(cache->device, {1, 1, 4, 128}));
            KIVI_OK_(kivi_append(*cache, 0, &all, &input, &input, nullptr));
            // The workspace begins at an odd address.
            const Workspace& at = cache == &cpu ? on_cpu : space;
            KIVI_OK_(kivi_attend(*cache, 0, &one, &from, &to, nullptr, static_cast<char*>(at.data) + 1,
                                 at.bytes, nullptr));
        }
        CUDA_OK(cudaDeviceSynchronize());
        CHECK(gpu.blob(0) == cpu.blob(0));
        const std::vector<float> expected = out.values(), got = out.download();
        for (size_t i = 0; i < got.size(); ++i) {
            const bool written = i >= size_t(shift) / 2 && i < size_t(shift) / 2 + 4 * 128;
            if (written ? std::fabs(got[i] - expected[i]) > 0.02f : got[i] != -7.0f) {
                CAPTURE(i);
                CHECK(got[i] == expected[i]);
                break;
            }
        }
    }
}

TEST_CASE("memory that the device does not have, and devices that do not exist") {
    kivi_config config = config_of(spec_of(4, KIVI_AXIS_CHANNEL, 32), spec_of(4, KIVI_AXIS_TOKEN, 32),
                                   {64, 64, 256, 256}, 32, 32, 32);
    config.device = KIVI_CUDA;
    kivi_device_info info{};
    kivi_memory memory{};
    KIVI_OK_(kivi_device_query(KIVI_CUDA, 0, &info, sizeof info));
    KIVI_OK_(kivi_cache_estimate(&config, &memory, sizeof memory));
    // Of two layers with three fifths of the memory each the first finds room, and gives it back.
    config.pool_tokens = static_cast<int64_t>(info.memory_bytes * 3 / 5 / memory.block_bytes) * 128;
    kivi_cache* cache = nullptr;
    for (int attempt = 0; attempt < 2; ++attempt) {
        config.layer_count = 2;
        CHECK(kivi_cache_create(&config, &cache) == KIVI_ERROR_OUT_OF_MEMORY);
        CHECK(cache == nullptr);
        CHECK(std::string(kivi_last_error()).find("the device has no ") == 0);
        CHECK(std::string(kivi_last_error()).find(" bytes for pages") != std::string::npos);
        config.layer_count = 1;
        KIVI_OK_(kivi_cache_create(&config, &cache));
        kivi_cache_destroy(cache);
    }
    // A pool that cannot grow stays as it is.
    config.pool_tokens = 0;
    {
        Cache small(config, KIVI_CUDA);
        CHECK(kivi_reserve(small, int64_t{1} << 30, nullptr) == KIVI_ERROR_OUT_OF_MEMORY);
        kivi_statistics statistics{};
        KIVI_OK_(kivi_query_statistics(small, -1, &statistics, sizeof statistics));
        CHECK(statistics.device_error == 0);
        KIVI_OK_(kivi_reserve(small, 8192, nullptr));
    }
    int count = 0;
    CUDA_OK(cudaGetDeviceCount(&count));
    for (int32_t device_id : {count, 64, -1}) {
        config.device_id = device_id;
        CHECK(kivi_cache_create(&config, &cache) ==
              (device_id < 0 ? KIVI_ERROR_INVALID_ARGUMENT : KIVI_ERROR_NO_DEVICE));
        CHECK(std::string(kivi_last_error()).find("device_id is " + std::to_string(device_id)) != std::string::npos);
    }
}

int main(int argc, char** argv) {
    if (!gpu_there()) return kSkipped;
    return doctest::Context(argc, argv).run();
}
