// Batches in device memory whose entries are out of range [BATCH-3]: the GPU leaves out what the CPU is not given, and
// touches nothing else. Every kernel that appends, flushes or attends, small enough for tools that watch each access.
#include <cmath>
#include <limits>

#include "gpu_support.h"
#include "instances.h"

using namespace gpu_test;

namespace {

constexpr int32_t kMost = std::numeric_limits<int32_t>::max(), kLeast = std::numeric_limits<int32_t>::min();
constexpr int64_t kFarthest = std::numeric_limits<int64_t>::max(), kNearest = std::numeric_limits<int64_t>::min();
constexpr int kSequences = 10;

struct Rows {
    std::vector<int32_t> ids, counts;
    int32_t most;                    // max_count
    int64_t tokens = 0;              // of rank-3 tensors; 0: rank 4
    std::vector<int64_t> offsets{};  // of rank-3 tensors; empty: running sums
    int size() const { return static_cast<int>(ids.size()); }
};

// Ids and counts out of range among sound ones; sequence 6 stands twice.
Rows ids_and_counts(int32_t most, bool ragged) {
    return {{6, kSequences, 2, 3, kMost, kLeast, 0, 6, 4, 1},
            {most, 1, -1, most, most, 1, most + 1, most, kLeast, most},
            most,
            ragged ? 5 * most + 2 : 0};
}
// Offsets that are negative, too far, or whose low halves are not. The first row's too: a warp without work of its own
// asks for that row's queries.
Rows far_offsets(int32_t most) {
    const int64_t tokens = 4 * most, wrap = int64_t{1} << 32;
    return {{6, 2, 3, 0, 4, 1, 5, 7, 8, 9},
            std::vector<int32_t>(10, most),
            most,
            tokens,
            {kFarthest, -1, 0, kNearest, 2 * most, tokens - most, tokens - most + 1, most, wrap, wrap + most}};
}
// More rows than one launch has, half of them not there; the last ones do not fit the tensors.
Rows many(int sequences) {
    Rows rows{{}, {}, 1, sequences - 3};
    for (int r = 0; r < sequences; ++r) {
        rows.ids.push_back(r % 4 == 1 ? sequences + r : r % 4 == 3 ? kMost - r : sequences - 1 - r);
        rows.counts.push_back(r % 8 == 6 ? -r : 1);
    }
    for (int32_t count : rows.counts) rows.tokens -= count < 0;
    return rows;
}

// What is left of the rows, as host arrays may have it. A call that moves sequences takes each once.
Rows sound(Rows rows, int sequences, bool moves) {
    std::vector<bool> seen(sequences);
    int64_t running = 0;
    for (int r = 0; r < rows.size(); ++r) {
        int32_t &id = rows.ids[r], &count = rows.counts[r];
        if (count < 0 || count > rows.most) count = 0;
        const int64_t offset = rows.offsets.empty() ? running : rows.offsets[r];
        running += count;
        const bool fits = rows.tokens == 0 || (offset >= 0 && offset <= rows.tokens - count);
        const bool again = id >= 0 && id < sequences && count > 0 && moves && seen[id];
        if (id < 0 || id >= sequences || !fits || again) id = -1;
        if (id >= 0 && count > 0) seen[id] = true;
        if (!fits && !rows.offsets.empty()) rows.offsets[r] = 0;
    }
    return rows;
}

struct Batch {
    DeviceArray<int32_t> ids, counts;
    DeviceArray<int64_t> offsets;
    kivi_batch batch;
    Batch(const Rows& rows, bool on_device)
        : ids(on_device ? rows.ids : std::vector<int32_t>{}),
          counts(on_device ? rows.counts : std::vector<int32_t>{}),
          offsets(on_device ? rows.offsets : std::vector<int64_t>{}),
          batch(batch_of(rows.size(), on_device ? ids.data() : rows.ids.data(),
                         on_device ? counts.data() : rows.counts.data(), rows.most)) {
        batch.offsets = on_device ? offsets.data() : rows.offsets.empty() ? nullptr : rows.offsets.data();
        batch.device = on_device ? KIVI_CUDA : KIVI_CPU;
    }
};

enum class Tokens { cached, fresh, kept };  // what an attend sees: without tokens of the call, with, or a step

// The CPU is given what is sound of the batch in host arrays, the GPU all of it in device arrays.
class Twins {
  public:
    // Sequence 3 is empty, the others have `prompt` tokens and some more.
    explicit Twins(const kivi_config& config, int prompt = 150)
        : cpu(config, KIVI_CPU), gpu(config, KIVI_CUDA), layer_(config.layer), sequences_(config.max_sequences) {
        if (layer_.k.rounding == KIVI_ROUND_QUERY_AWARE) commit_moments();
        for (int32_t id = 0; id < sequences_; ++id) {
            KIVI_OK_(kivi_sequence_reserve(gpu, id, config.max_tokens, nullptr));
            const int count = prompt + 40 * (id % kSequences);
            if (count <= 0 || id == 3) continue;
            Floats k(numbers.rows(int64_t{count} * layer_.kv_heads, layer_.key_dim)),
                v(numbers.rows(int64_t{count} * layer_.kv_heads, layer_.value_dim));
            const kivi_batch batch = batch_of(1, &id, nullptr, count);
            for (Cache* cache : {&cpu, &gpu}) {
                const kivi_tensor keys = k.view(cache->device, {1, count, layer_.kv_heads, layer_.key_dim}),
                                  values = v.view(cache->device, {1, count, layer_.kv_heads, layer_.value_dim});
                KIVI_OK_(kivi_append(*cache, 0, &batch, &keys, &values, nullptr));
            }
        }
    }

    // Array: of inputs and results.
    template <class Array>
    void append(const Rows& rows) {
        Array k(of(rows, layer_.kv_heads, layer_.key_dim)), v(of(rows, layer_.kv_heads, layer_.value_dim));
        for (Cache* cache : {&cpu, &gpu}) {
            const Rows sound_rows = sound(rows, sequences_, true);
            const Batch batch(cache == &gpu ? rows : sound_rows, cache == &gpu);
            const kivi_tensor keys = view(k, *cache, rows, layer_.kv_heads, layer_.key_dim),
                              values = view(v, *cache, rows, layer_.kv_heads, layer_.value_dim);
            KIVI_OK_(kivi_append(*cache, 0, &batch.batch, &keys, &values, nullptr));
            CUDA_OK(cudaDeviceSynchronize());
        }
    }
    void flush(Rows rows) {
        rows.tokens = 0;
        rows.counts.assign(rows.size(), rows.most);
        for (Cache* cache : {&cpu, &gpu}) {
            const Rows sound_rows = sound(rows, sequences_, true);
            const Batch batch(cache == &gpu ? rows : sound_rows, cache == &gpu);
            KIVI_OK_(kivi_flush_residual(*cache, 0, &batch.batch, nullptr));
            CUDA_OK(cudaDeviceSynchronize());
        }
    }
    void compare_sequences() {
        KIVI_OK_(kivi_synchronize(gpu, nullptr));
        for (int32_t id = 0; id < sequences_; ++id) {
            CHECK(gpu.length(id) == cpu.length(id));
            check_same_blob(cpu, gpu, id);
        }
    }
    // An attend, or a step, which keeps the fresh tokens.
    template <class Array>
    void attend(const Rows& rows, Tokens tokens = Tokens::cached, uint64_t flags = 0) {
        CAPTURE(static_cast<int>(tokens));
        CAPTURE(flags);
        Array q(of(rows, layer_.q_heads, layer_.key_dim)), k(of(rows, layer_.kv_heads, layer_.key_dim)),
            v(of(rows, layer_.kv_heads, layer_.value_dim));
        const int64_t items = tokens_of(rows) * layer_.q_heads, behind = 64;
        Array out((items + behind) * layer_.value_dim);
        Floats lse(items + behind);
        for (Cache* cache : {&cpu, &gpu}) {
            const Rows sound_rows = sound(rows, sequences_, false);
            const Batch batch(cache == &gpu ? rows : sound_rows, cache == &gpu);
            const Workspace workspace(*cache, rows.size(), rows.most);
            const kivi_tensor queries = view(q, *cache, rows, layer_.q_heads, layer_.key_dim),
                              result = view(out, *cache, rows, layer_.q_heads, layer_.value_dim),
                              keys = view(k, *cache, rows, layer_.kv_heads, layer_.key_dim),
                              values = view(v, *cache, rows, layer_.kv_heads, layer_.value_dim);
            const kivi_tensor sums = rows.tokens > 0
                                         ? lse.view(cache->device, {rows.tokens, layer_.q_heads})
                                         : lse.view(cache->device, {rows.size(), rows.most, layer_.q_heads});
            kivi_attend_params params;
            KIVI_OK_(kivi_attend_params_init(&params, sizeof params));
            params.lse = &sums;
            params.flags = flags;
            if (tokens == Tokens::fresh) params.k = &keys, params.v = &values;
            if (tokens == Tokens::kept) {
                KIVI_OK_(kivi_step(*cache, 0, &batch.batch, &queries, &keys, &values, &result, &params, workspace.data,
                                   workspace.bytes, nullptr));
            } else {
                KIVI_OK_(kivi_attend(*cache, 0, &batch.batch, &queries, &result, &params, workspace.data,
                                     workspace.bytes, nullptr));
            }
            CUDA_OK(cudaDeviceSynchronize());
        }
        compare_results(out.values(), out.download());
        compare_results(lse.values(), lse.download());
    }

    Cache cpu, gpu;
    Numbers numbers{23};

  private:
    void commit_moments() {
        const int dim = layer_.key_dim, heads = layer_.kv_heads;
        std::vector<float> m(size_t(heads) * dim * dim, 0.0f);
        for (size_t i = 0; i < m.size(); ++i) m[i] = i / dim % dim == i % dim ? 2.0f + i % 7 : 0.25f;
        Floats matrices(m);
        for (Cache* cache : {&cpu, &gpu}) {
            const kivi_tensor tensor = matrices.view(cache->device, {heads, dim, dim});
            KIVI_OK_(kivi_moments_set(*cache, 0, &tensor, 0, nullptr));
            KIVI_OK_(kivi_moments_commit(*cache, 0, nullptr));
        }
    }

    static int64_t tokens_of(const Rows& rows) {
        return rows.tokens > 0 ? rows.tokens : int64_t{rows.size()} * rows.most;
    }
    std::vector<float> of(const Rows& rows, int heads, int dim) { return numbers.rows(tokens_of(rows) * heads, dim); }
    template <class Array>
    static kivi_tensor view(Array& array, const Cache& cache, const Rows& rows, int heads, int dim) {
        return rows.tokens > 0 ? array.view(cache.device, {rows.tokens, heads, dim})
                               : array.view(cache.device, {rows.size(), rows.most, heads, dim});
    }

    // What the CPU has left as it was, the GPU has too.
    static void compare_results(const std::vector<float>& expected, const std::vector<float>& got) {
        std::vector<float> of_cpu, of_gpu;
        int64_t touched = 0;
        for (size_t i = 0; i < expected.size(); ++i) {
            if (expected[i] == -7.0f) {
                touched += got[i] != -7.0f;
            } else if (std::isinf(expected[i])) {
                touched += got[i] != expected[i];
            } else {
                of_cpu.push_back(expected[i]), of_gpu.push_back(got[i]);
            }
        }
        CHECK(touched == 0);
        REQUIRE(!of_cpu.empty());
        CHECK(relative_error(of_gpu, of_cpu) < 3e-3);
    }

    const kivi_layer layer_;
    const int sequences_;
};

kivi_config small_config(const kivi_spec& k, const kivi_spec& v, int sequences = kSequences) {
    kivi_config config = gpu_test::config_of(k, v, {2, 4, 64, 64}, 32, 32, 32);
    config.max_sequences = sequences;
    return config;
}
const kivi_spec kKeys = spec_of(2, KIVI_AXIS_CHANNEL, 32, false), kValues = spec_of(2, KIVI_AXIS_TOKEN, 32, true);

// Appends of `few` and `many` tokens a row, and flushes.
template <class Array>
void check_appends(const kivi_config& config, int few, int many) {
    Twins twins(config);
    for (const int most : {few, many}) {
        CAPTURE(most);
        for (const Rows& rows : {ids_and_counts(most, false), ids_and_counts(most, true), far_offsets(most)}) {
            twins.append<Array>(rows);
        }
        Rows short_by_one = ids_and_counts(most, true);
        --short_by_one.tokens;
        twins.append<Array>(short_by_one);
        twins.compare_sequences();
        twins.flush(ids_and_counts(1, false));
        twins.compare_sequences();
    }
}

template <class Array>
void check_attends(Twins& twins, int most, Tokens tokens, uint64_t flags) {
    CAPTURE(most);
    for (Rows rows : {ids_and_counts(most, false), ids_and_counts(most, true), far_offsets(most)}) {
        if (rows.offsets.empty()) rows.ids[7] = -1;  // the CPU does not take a sequence twice
        twins.attend<Array>(rows, tokens, flags);
        rows.tokens -= rows.tokens > 0 && rows.offsets.empty() ? 1 : 0;  // the last row does not fit
        twins.attend<Array>(rows, tokens, flags);
    }
}

}  // namespace

TEST_CASE("ids, counts and offsets out of range in device memory: appends and flushes") {
    SUBCASE("fast kernels") { check_appends<Halfs>(small_config(kKeys, kValues), 3, 40); }
    SUBCASE("16 bits") {
        check_appends<Halfs>(small_config(spec_of(16, 0, 0, false), spec_of(16, 0, 0, false)), 3, 40);
    }
    SUBCASE("any spec") {
        check_appends<Floats>(
            small_config(spec_of(4, KIVI_AXIS_TOKEN, 32, true), spec_of(8, KIVI_AXIS_TOKEN, 64, false)), 3, 40);
    }
}

TEST_CASE("ids, counts and offsets out of range in device memory: appends with query-aware rounding") {
    kivi_spec keys = kKeys;
    keys.rounding = KIVI_ROUND_QUERY_AWARE;
    check_appends<Halfs>(small_config(keys, kValues), 3, 40);
}

TEST_CASE("ids, counts and offsets out of range in device memory: attends") {
    SUBCASE("fast kernels") {
        Twins twins(small_config(kKeys, kValues));
        for (const uint64_t flags : {uint64_t{0}, uint64_t{KIVI_ATTEND_INVARIANT}}) {
            const Tokens tokens = flags == 0 ? Tokens::fresh : Tokens::cached;
            for (const int most : {1, 5, 40}) check_attends<Halfs>(twins, most, tokens, flags);
        }
        check_attends<Floats>(twins, 3, Tokens::fresh, 0);
    }
    SUBCASE("16 bits") {
        Twins twins(small_config(spec_of(16, 0, 0, false), spec_of(16, 0, 0, false)));
        for (const int most : {1, 5}) check_attends<Halfs>(twins, most, Tokens::fresh, 0);
    }
    SUBCASE("any spec") {
        Twins twins(small_config(spec_of(4, KIVI_AXIS_TOKEN, 32, true), spec_of(8, KIVI_AXIS_TOKEN, 64, false)));
        for (const int most : {1, 20}) check_attends<Floats>(twins, most, Tokens::fresh, KIVI_ATTEND_INVARIANT);
    }
}

TEST_CASE("ids, counts and offsets out of range in device memory: steps") {
    SUBCASE("fast kernels") {
        Twins twins(small_config(kKeys, kValues));
        for (const int most : {1, 1, 5}) check_attends<Halfs>(twins, most, Tokens::kept, 0);
        twins.compare_sequences();
    }
    SUBCASE("any spec") {
        Twins twins(small_config(spec_of(4, KIVI_AXIS_TOKEN, 32, true), spec_of(8, KIVI_AXIS_TOKEN, 64, false)));
        check_attends<Floats>(twins, 1, Tokens::kept, 0);
        twins.compare_sequences();
    }
}

TEST_CASE("ids out of range in device memory: more rows than a launch has") {
    constexpr int kMany = 80;
    kivi_config config = small_config(kKeys, kValues, kMany);
    config.max_tokens = 200;
    config.pool_tokens = kMany * 256;
    Twins twins(config, -290);  // two of ten have tokens
    Rows rows = many(kMany);
    twins.attend<Halfs>(rows);
    rows.ids[72] = rows.ids[4];  // of another launch
    twins.append<Halfs>(rows);
    rows.ids[72] = -1;
    twins.attend<Halfs>(rows, Tokens::kept);
    twins.compare_sequences();
}

TEST_CASE("ids that stand twice in device memory: both rows are attended to") {
    Twins twins(small_config(kKeys, kValues));
    const Batch batch({{6, 6}, {1, 1}, 1}, true);
    const Workspace workspace(twins.gpu, 2, 1);
    for (const int32_t dtype : {KIVI_F16, KIVI_F32}) {  // of queries: fast and general kernels
        Halfs narrow(twins.numbers.rows(4, 64)), narrow_out(2 * 4 * 64);
        Floats wide(twins.numbers.rows(4, 64)), wide_out(2 * 4 * 64);
        const bool half = dtype == KIVI_F16;
        kivi_tensor queries = half ? narrow.view(KIVI_CUDA, {2, 1, 4, 64}) : wide.view(KIVI_CUDA, {2, 1, 4, 64});
        queries.stride[0] = 0;
        const kivi_tensor out =
            half ? narrow_out.view(KIVI_CUDA, {2, 1, 4, 64}) : wide_out.view(KIVI_CUDA, {2, 1, 4, 64});
        KIVI_OK_(kivi_attend(twins.gpu, 0, &batch.batch, &queries, &out, nullptr, workspace.data, workspace.bytes,
                             nullptr));
        CUDA_OK(cudaDeviceSynchronize());
        const std::vector<float> got = half ? narrow_out.download() : wide_out.download();
        CHECK(got[0] != -7.0f);
        for (size_t i = 0; i < 4 * 64; ++i) CHECK(std::fabs(got[i] - got[i + 4 * 64]) < 1e-3f);
    }
}
