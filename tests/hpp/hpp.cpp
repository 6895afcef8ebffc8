// Every wrapper of kivi.hpp once, against the library.
#include "kivi/kivi.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>

namespace {

constexpr int kLayers = 2, kQHeads = 4, kKvHeads = 2, kDim = 64;

std::vector<float> normal(size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> distribution;
    std::vector<float> values(count);
    for (float& value : values) value = distribution(random);
    return values;
}

kivi::Config small_config(const char* preset = "k3v2") {
    kivi::Config config(preset);
    config.layers(kLayers, kQHeads, kKvHeads, kDim).capacity(2, 512).threads(1);
    return config;
}

// `count` tokens into every layer of sequence 0.
void fill(kivi::Cache& cache, int count, unsigned seed = 1) {
    const auto k = normal(static_cast<size_t>(count) * kKvHeads * kDim, seed);
    const auto v = normal(k.size(), seed + 1);
    for (int layer = 0; layer < kLayers; ++layer)
        cache.append(layer, kivi::Batch(1, count), {k, {1, count, kKvHeads, kDim}}, {v, {1, count, kKvHeads, kDim}});
}

kivi_status status_of(const std::function<void()>& call) {
    try {
        call();
    } catch (const kivi::Error& error) {
        CHECK(error.what()[0] != '\0');
        return error.status();
    }
    return KIVI_OK;
}

}  // namespace

TEST_CASE("a failure throws the status and the sentence") {
    kivi::Cache cache(small_config());
    try {
        cache.length(0, 99);
        FAIL("sequence 99 of 2 was accepted");
    } catch (const kivi::Error& error) {
        CHECK(error.status() == KIVI_ERROR_INVALID_ARGUMENT);
        CHECK(std::string(error.what()) == kivi_last_error());
        CHECK(std::string(error.status_name()) == "KIVI_ERROR_INVALID_ARGUMENT");
    }
    CHECK(status_of([] { kivi::Config("no such preset"); }) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(status_of([] { kivi::Cache(kivi::Config("f16")); }) == KIVI_ERROR_INVALID_ARGUMENT);  // no layers
}

TEST_CASE("tensors: dense and given strides, containers of the wrong size, wrong ranks") {
    std::vector<float> data(2 * 3 * 4 * 8);
    const kivi::Tensor dense(data, {2, 3, 4, 8});
    const kivi_tensor& raw = *dense.get();
    CHECK(raw.data == data.data());
    CHECK(raw.rank == 4);
    CHECK(raw.dtype == KIVI_F32);
    CHECK(raw.device == KIVI_CPU);
    CHECK((raw.stride[0] == 96 && raw.stride[1] == 32 && raw.stride[2] == 8 && raw.stride[3] == 1));
    const kivi::ConstTensor broadcast(data.data(), {2, 3, 4, 8}, {0, 32, 8, 1});
    CHECK(broadcast.get()->stride[0] == 0);
    std::vector<kivi::half> halves(16);
    CHECK(kivi::ConstTensor(halves, {2, 8}).get()->dtype == KIVI_F16);
    std::vector<kivi::bfloat> bfloats(16);
    CHECK(kivi::Tensor(bfloats, {2, 8}).on_cuda(1).get()->device_id == 1);
    CHECK(status_of([&] { kivi::Tensor(data, {2, 3, 4, 9}); }) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(status_of([&] { kivi::Tensor(data.data(), {192}); }) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(status_of([&] { kivi::ConstTensor(data.data(), {2, 96}, {1}); }) == KIVI_ERROR_INVALID_ARGUMENT);
}

TEST_CASE("batches own their arrays and keep what they are told") {
    kivi::Batch batch;
    batch.add(1, 5).add(-1, 0).add(0, 2).offsets({0, 5, 9});
    batch.set_count(0, 4);
    const kivi_batch raw = batch.get();
    CHECK(raw.rows == 3);
    CHECK((raw.sequences[0] == 1 && raw.sequences[1] == -1 && raw.sequences[2] == 0));
    CHECK((raw.counts[0] == 4 && raw.counts[2] == 2));
    CHECK(raw.offsets[2] == 9);
    CHECK(status_of([] { kivi::Batch(2, 1).offsets({0}); }) == KIVI_ERROR_INVALID_ARGUMENT);
    batch.clear();
    CHECK(batch.rows() == 0);
}

TEST_CASE("estimate is what create allocates; support and presets answer") {
    const kivi::Config config = small_config();
    kivi::Cache cache(config);
    CHECK(config.estimate().total_bytes == cache.memory().total_bytes);
    CHECK(config.query_support().supported == 1);
    kivi::Config odd = small_config();
    odd->layer.key_dim = 7;
    CHECK(odd.query_support().supported == 0);
    CHECK(odd.query_support().reason[0] != '\0');
    bool found = false;
    for (const kivi_preset& preset : kivi::presets()) found = found || std::strcmp(preset.name, "k3v2") == 0;
    CHECK(found);
    CHECK(kivi::devices(KIVI_CPU).size() == 1);
    CHECK(kivi::version() == kivi_version_string());
    CHECK(kivi::build_info() == kivi_build_info());
}

TEST_CASE("a layer table serves a mixed model and survives a copy of the config") {
    kivi::Config config = small_config();
    std::vector<kivi_layer> table(3, config.layer());
    table[1].kv_heads = 0;  // absent
    table[2].key_dim = 128;
    config.layers(table);
    const kivi::Config copy = config;
    config.layers(1, 1, 1, 64);
    kivi::Cache cache(copy);
    CHECK(status_of([&] { cache.length(1, 0); }) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(cache.length(2, 0).length == 0);
}

TEST_CASE("append, flush, attend with LSE, dequantize, reset") {
    kivi::Cache cache(small_config());
    fill(cache, 300);
    kivi::Batch row(1, 1);
    const int64_t before = cache.length(0, 0).key_border;
    cache.flush_residual(-1, row);
    CHECK(cache.length(0, 0).key_border > before);

    kivi::Workspace workspace = cache.workspace(1, 1);
    const auto q = normal(kQHeads * kDim, 8);
    std::vector<float> out(q.size()), lse(kQHeads), k(300 * kKvHeads * kDim), v(k.size());
    cache.attend(1, row, {q, {1, 1, kQHeads, kDim}}, {out, {1, 1, kQHeads, kDim}}, workspace,
                 kivi::AttendParams().scale(0.25f).lse({lse, {1, 1, kQHeads}}));
    const kivi::Tensor k_view(k, {300, kKvHeads, kDim}), v_view(v, {300, kKvHeads, kDim});
    cache.dequantize(1, 0, 0, 300, &k_view, &v_view);

    for (size_t head = 0; head < kQHeads; ++head) {  // the same in double over what was read back
        const size_t kv = head / (kQHeads / kKvHeads);
        std::vector<double> score(300), mean(kDim);
        double sum = 0, error = 0, norm = 0;
        for (size_t t = 0; t < 300; ++t) {
            for (size_t c = 0; c < kDim; ++c)
                score[t] += 0.25 * double(q[head * kDim + c]) * double(k[(t * kKvHeads + kv) * kDim + c]);
            sum += std::exp(score[t]);
        }
        for (size_t t = 0; t < 300; ++t)
            for (size_t c = 0; c < kDim; ++c)
                mean[c] += std::exp(score[t]) / sum * double(v[(t * kKvHeads + kv) * kDim + c]);
        for (size_t c = 0; c < kDim; ++c) {
            error += std::pow(double(out[head * kDim + c]) - mean[c], 2);
            norm += mean[c] * mean[c];
        }
        CHECK(std::sqrt(error / norm) < 2e-3);  // the C API's bound is per call; this is one head
        CHECK(double(lse[head]) == doctest::Approx(std::log(sum)).epsilon(1e-3));
    }
    cache.sequence_reset(0);
    CHECK(cache.length(0, 0).length == 0);
    fill(cache, 10);
    cache.reset();
    CHECK(cache.statistics().tokens == 0);
    cache.reserve(2048);
    CHECK(cache.memory().blocks >= 16);
    cache.sequence_reserve(0, 200);
    cache.synchronize();
    CHECK(cache.statistics().blocks_used > 0);
}

TEST_CASE("step is attend with fresh keys and values, then append") {
    kivi::Cache one(small_config()), two(small_config());
    kivi::Batch row(1, 1);
    const std::initializer_list<int64_t> heads{1, 1, kQHeads, kDim}, kv_heads{1, 1, kKvHeads, kDim};
    kivi::Workspace workspace = one.workspace(1, 1);
    std::vector<float> stepped(kQHeads * kDim), attended(stepped.size()), lse_one(kQHeads), lse_two(kQHeads);
    for (unsigned i = 0; i < 5; ++i) {
        const auto q = normal(kQHeads * kDim, i), k = normal(kKvHeads * kDim, 10 + i), v = normal(k.size(), 20 + i);
        for (int layer = 0; layer < 2; ++layer) {
            const kivi::ConstTensor q_view(q, heads), k_view(k, kv_heads), v_view(v, kv_heads);
            const kivi::Tensor lse_view(lse_one, {1, 1, kQHeads});
            if (i % 2 == 0) {
                one.step(layer, row, q_view, k_view, v_view, {stepped, heads}, workspace);
                two.attend(layer, row, q_view, {attended, heads}, workspace, kivi::AttendParams().fresh(k_view, v_view));
            } else {
                one.step(layer, row, q_view, k_view, v_view, {stepped, heads}, workspace,
                         kivi::AttendParams().scale(0.25f).lse(lse_view));
                two.attend(layer, row, q_view, {attended, heads}, workspace,
                           kivi::AttendParams().scale(0.25f).fresh(k_view, v_view).lse({lse_two, {1, 1, kQHeads}}));
            }
            two.append(layer, row, k_view, v_view);
            CHECK(stepped == attended);
            CHECK(lse_one == lse_two);
            CHECK(status_of([&] {
                      one.step(layer, row, q_view, k_view, v_view, {stepped, heads}, workspace,
                               kivi::AttendParams().fresh(k_view, v_view));
                  }) == KIVI_ERROR_INVALID_ARGUMENT);
        }
    }
    CHECK(one.export_sequence(0) == two.export_sequence(0));
}

TEST_CASE("buffers: a cache works on the library's own memory; they move and check their views") {
    kivi::Cache cache(small_config());
    const auto rows = normal(200 * kKvHeads * kDim, 9);
    kivi::Buffer<float> k(KIVI_CPU, 0, rows), back(KIVI_CPU, 0, rows.size());
    CHECK(k.download() == rows);
    const kivi::Buffer<float> v = std::move(k);
    CHECK(k.size() == 0);
    cache.append(0, kivi::Batch(1, 200), v.view({1, 200, kKvHeads, kDim}), v.view({1, 200, kKvHeads, kDim}));
    const kivi::Tensor view = back.view({200, kKvHeads, kDim});
    cache.dequantize(0, 0, 0, 200, &view, nullptr);
    const auto read = back.download();
    CHECK(std::abs(read.front() - rows.front()) < 1e-2f);  // sink window
    CHECK(status_of([&] { v.view({1, 199, kKvHeads, kDim}); }) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(status_of([] { kivi::Buffer<float>(KIVI_CPU, 3, size_t{1}); }) == KIVI_ERROR_NO_DEVICE);
    kivi::Workspace workspace;
    workspace.reserve(100);
    workspace.reserve(10);
    CHECK(workspace.size() == 100);
}

TEST_CASE("fresh keys merged with the past are one softmax") {
    kivi::Cache cache(small_config("f16"));
    fill(cache, 40);
    const kivi::Batch row(1, 3);
    const auto q = normal(3 * kQHeads * kDim, 2), k = normal(3 * kKvHeads * kDim, 3), v = normal(k.size(), 4);
    const kivi::ConstTensor q_view(q, {3, kQHeads, kDim}), k_view(k, {3, kKvHeads, kDim}), v_view(v, {3, kKvHeads, kDim});
    kivi::Workspace workspace = cache.workspace(2, 3);
    std::vector<float> whole(q.size()), past(q.size()), self(q.size()), joined(q.size());
    std::vector<float> past_lse(3 * kQHeads), self_lse(past_lse);
    const kivi::Tensor past_view(past, {3, kQHeads, kDim}), self_view(self, {3, kQHeads, kDim});
    const kivi::Tensor past_lse_view(past_lse, {3, kQHeads}), self_lse_view(self_lse, {3, kQHeads});
    cache.attend(0, row, q_view, {whole, {3, kQHeads, kDim}}, workspace, kivi::AttendParams().fresh(k_view, v_view));

    // The past alone: one row a query, so that each sees all 40 tokens.
    for (int query = 0; query < 3; ++query) {
        const int64_t first = query * kQHeads * kDim;
        cache.attend(0, kivi::Batch(1, 1), {q.data() + first, {1, kQHeads, kDim}}, {past.data() + first, {1, kQHeads, kDim}},
                     workspace, kivi::AttendParams().lse({past_lse.data() + query * kQHeads, {1, kQHeads}}));
    }
    kivi::Batch other;
    other.add(1, 3);  // an empty sequence: the fresh tokens alone
    cache.attend(0, other, q_view, self_view, workspace, kivi::AttendParams().fresh(k_view, v_view).lse(self_lse_view));
    kivi::merge({{past_view, past_lse_view}, {self_view, self_lse_view}}, {joined, {3, kQHeads, kDim}});
    for (size_t i = 0; i < whole.size(); ++i) CHECK(std::abs(joined[i] - whole[i]) < 2e-3f);
}

TEST_CASE("a sequence and the moments travel as blobs") {
    kivi::Config config = small_config();
    config->layer.k.rounding = KIVI_ROUND_QUERY_AWARE;
    kivi::Cache cache(config), target(config);
    const auto q = normal(128 * kQHeads * kDim, 5);
    for (int layer = 0; layer < kLayers; ++layer) {
        cache.moments_accumulate(layer, kivi::Batch(1, 128), {q, {128, kQHeads, kDim}});
        cache.moments_commit(layer);
        const auto blob = cache.moments_export(layer);
        target.moments_import(layer, blob.data(), blob.size());
        CHECK(target.moments_export(layer) == blob);
        CHECK(target.statistics(layer).key_rounding == KIVI_ROUND_QUERY_AWARE);
    }
    fill(cache, 300);
    const auto blob = cache.export_sequence(0);
    target.import_sequence(1, blob.data(), blob.size());
    CHECK(target.export_sequence(1) == blob);
    CHECK(status_of([&] { target.import_sequence(1, blob.data(), blob.size() - 1); }) == KIVI_ERROR_CORRUPT);
    CHECK(target.export_sequence(1) == blob);

    std::vector<float> moments(kKvHeads * kDim * kDim);
    for (size_t head = 0; head < kKvHeads; ++head)
        for (size_t c = 0; c < kDim; ++c) moments[(head * kDim + c) * kDim + c] = float(c + 1);
    kivi::Cache own(config);
    own.moments_set(0, {moments, {kKvHeads, kDim, kDim}});
    own.moments_commit(0);
    CHECK(own.statistics(0).moments == 2);
}

TEST_CASE("the probe measures a spec on given tensors") {
    const auto q = normal(4 * kQHeads * kDim, 1), k = normal(400 * kKvHeads * kDim, 2), v = normal(k.size(), 3);
    const kivi::Config config = small_config();
    const kivi::Probe coarse = kivi::probe(kivi::probe_params(config, {q, {4, kQHeads, kDim}}, {k, {400, kKvHeads, kDim}},
                                                              {v, {400, kKvHeads, kDim}}));
    REQUIRE(coarse.per_head.size() == kKvHeads);
    const kivi::Probe fine = kivi::probe(kivi::probe_params(small_config("kivi4"), {q, {4, kQHeads, kDim}},
                                                            {k, {400, kKvHeads, kDim}}, {v, {400, kKvHeads, kDim}}));
    CHECK(coarse.total.output_error > fine.total.output_error);
    CHECK(fine.total.output_error > 0);
}
