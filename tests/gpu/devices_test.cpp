// Two GPUs: caches on both with their calls in turns, the thread's current device left alone, memory of the other GPU
// refused wherever it is given.
#define DOCTEST_CONFIG_IMPLEMENT
#include <cmath>

#include "gpu_support.h"

using namespace gpu_test;

namespace {

constexpr int kHeads = 2, kQueryHeads = 8, kDim = 128, kTokens = 400;

int current() {
    int device = -1;
    CUDA_OK(cudaGetDevice(&device));
    return device;
}

kivi_config config_on(int device_id) {
    kivi_config config;
    KIVI_OK_(kivi_config_init(&config, sizeof config));
    config.device_id = device_id;
    config.layer_count = 1;
    config.layer.kv_heads = kHeads;
    config.layer.q_heads = kQueryHeads;
    config.layer.key_dim = config.layer.value_dim = kDim;
    config.max_sequences = 1;
    config.max_tokens = 1024;
    return config;
}

int use(int device) {
    CUDA_OK(cudaSetDevice(device));
    return device;
}

// A cache and the arrays of its calls, all on one GPU.
struct Side {
    explicit Side(int id)
        : device(use(id)),
          cache(config_on(id), KIVI_CUDA),
          k(Numbers(1).rows(kTokens * kHeads, kDim)),
          v(Numbers(2).rows(kTokens * kHeads, kDim)),
          q(Numbers(3).rows(kQueryHeads, kDim)),
          out(kQueryHeads * kDim),
          workspace(cache, 1, 1) {}
    kivi_tensor view(Halfs& array, std::initializer_list<int64_t> shape) const {
        kivi_tensor tensor = array.view(KIVI_CUDA, shape);
        tensor.device_id = device;
        return tensor;
    }
    kivi_tensor token(Halfs& array, int position) const {
        kivi_tensor tensor = view(array, {1, 1, kHeads, kDim});
        tensor.data = static_cast<uint16_t*>(tensor.data) + position * kHeads * kDim;
        return tensor;
    }
    kivi_tensor queries() { return view(q, {1, 1, kQueryHeads, kDim}); }
    kivi_tensor result() { return view(out, {1, 1, kQueryHeads, kDim}); }

    const int device;
    const Stream stream;
    Cache cache;
    Halfs k, v, q, out;
    Workspace workspace;
};

const int32_t kFirst = 0;
const kivi_batch kOne = batch_of(1, &kFirst, nullptr, 1);

}  // namespace

TEST_CASE("fault 80, S3: calls in turns on two GPUs, and the current device stays, whatever it is") {
    kivi_config on_cpu = config_on(0);
    on_cpu.threads = 1;
    Cache cpu(on_cpu, KIVI_CPU);
    Side sides[] = {Side(0), Side(1)};
    for (int token = 0; token < kTokens; ++token) {
        const kivi_tensor k = sides[0].k.view(KIVI_CPU, {kTokens, kHeads, kDim}),
                          v = sides[0].v.view(KIVI_CPU, {kTokens, kHeads, kDim});
        if (token == 0) {
            const kivi_batch all = batch_of(1, &kFirst, nullptr, kTokens);
            KIVI_OK_(kivi_append(cpu, 0, &all, &k, &v, nullptr));
        }
        CUDA_OK(cudaSetDevice(token % 3 == 0));
        const int before = current();
        for (Side& side : sides) {
            const kivi_tensor key = side.token(side.k, token), value = side.token(side.v, token);
            KIVI_OK_(kivi_append(side.cache, 0, &kOne, &key, &value, side.stream));
            CHECK(current() == before);
            const kivi_tensor queries = side.queries(), result = side.result();
            KIVI_OK_(kivi_attend(side.cache, 0, &kOne, &queries, &result, nullptr, side.workspace.data,
                                 side.workspace.bytes, side.stream));
            CHECK(current() == before);
        }
    }
    std::vector<float> outs[2];
    for (Side& side : sides) {
        CUDA_OK(cudaSetDevice(1 - side.device));
        KIVI_OK_(kivi_flush_residual(side.cache, 0, &kOne, side.stream));
        KIVI_OK_(kivi_synchronize(side.cache, side.stream));
        CHECK(current() == 1 - side.device);
        outs[side.device] = side.out.download();
    }
    KIVI_OK_(kivi_flush_residual(cpu, 0, &kOne, nullptr));
    CHECK(outs[0] == outs[1]);
    const std::vector<uint8_t> expected = cpu.blob(0);
    for (Side& side : sides) {
        CUDA_OK(cudaSetDevice(1 - side.device));
        const std::vector<uint8_t> blob = side.cache.blob(0, side.stream);
        CHECK(blob == expected);
        KIVI_OK_(kivi_sequence_reset(side.cache, 0, side.stream));
        KIVI_OK_(kivi_import(side.cache, 0, blob.data(), blob.size(), side.stream));
        CHECK(side.cache.blob(0, side.stream) == expected);
        KIVI_OK_(kivi_sequence_reserve(side.cache, 0, 1000, side.stream));
        KIVI_OK_(kivi_reserve(side.cache, 4096, side.stream));
        KIVI_OK_(kivi_cache_reset(side.cache, side.stream));
        kivi_device_info info{};
        KIVI_OK_(kivi_device_query(KIVI_CUDA, side.device, &info, sizeof info));
        kivi_statistics statistics{};
        KIVI_OK_(kivi_query_statistics(side.cache, 0, &statistics, sizeof statistics));
        CHECK(current() == 1 - side.device);
    }
}

TEST_CASE("memory of the other GPU is refused by name, and nothing changes") {
    Side here(0), there(1);
    CUDA_OK(cudaSetDevice(0));
    const kivi_tensor key = here.token(here.k, 0), value = here.token(here.v, 0);
    const kivi_tensor queries = here.queries(), result = here.result();
    KIVI_OK_(kivi_append(here.cache, 0, &kOne, &key, &value, here.stream));
    const std::vector<uint8_t> before = here.cache.blob(0, here.stream);
    const auto refused = [&](kivi_status status, const char* name) {
        CAPTURE(name);
        CHECK(status == KIVI_ERROR_INVALID_ARGUMENT);
        const std::string sentence = kivi_last_error();
        CHECK(sentence.find(name) == 0);
        CHECK(sentence.find("memory of CUDA device 1; it must be of device 0") != std::string::npos);
        CHECK(current() == 0);
    };
    // Memory of device 1 that says it is of device 0.
    const auto lie = [&](kivi_tensor tensor) {
        tensor.device_id = 0;
        return tensor;
    };
    const kivi_tensor wrong_key = lie(there.token(there.k, 0)), wrong_q = lie(there.queries()),
                      wrong_out = lie(there.result());
    const auto attend = [&](const kivi_tensor& q, const kivi_tensor& out, const kivi_attend_params* params,
                            void* workspace) {
        return kivi_attend(here.cache, 0, &kOne, &q, &out, params, workspace, here.workspace.bytes, here.stream);
    };
    kivi_attend_params params;
    KIVI_OK_(kivi_attend_params_init(&params, sizeof params));
    refused(kivi_append(here.cache, 0, &kOne, &wrong_key, &value, here.stream), "k ");
    refused(kivi_append(here.cache, 0, &kOne, &key, &wrong_key, here.stream), "v ");
    refused(attend(wrong_q, result, nullptr, here.workspace.data), "q ");
    refused(attend(queries, wrong_out, nullptr, here.workspace.data), "out ");
    refused(attend(queries, result, nullptr, there.workspace.data), "workspace ");
    params.k = params.v = &wrong_key;
    refused(attend(queries, result, &params, here.workspace.data), "params.k ");
    params.k = params.v = nullptr;
    params.learned_sinks = static_cast<const float*>(wrong_q.data);
    refused(attend(queries, result, &params, here.workspace.data), "params.learned_sinks ");
    kivi_batch on_device = batch_of(1, static_cast<const int32_t*>(wrong_q.data), nullptr, 1);
    on_device.device = KIVI_CUDA;
    refused(kivi_append(here.cache, 0, &on_device, &key, &value, here.stream), "batch.sequences ");
    // And a tensor that says so.
    const kivi_tensor honest = there.token(there.k, 0);
    CHECK(kivi_append(here.cache, 0, &kOne, &honest, &value, here.stream) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(std::string(kivi_last_error()).find("k is on device 2 number 1") == 0);
    CHECK(here.cache.blob(0, here.stream) == before);
}

int main(int argc, char** argv) {
    if (!gpu_there()) return kSkipped;
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count < 2) {
        std::printf("SKIP: there is one GPU only\n");
        return kSkipped;
    }
    return doctest::Context(argc, argv).run();
}
