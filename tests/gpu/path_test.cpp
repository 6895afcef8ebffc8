// Which kernels a call of attend takes, told from a captured graph: those that kivi_query_support and kivi.h say.
#define DOCTEST_CONFIG_IMPLEMENT
#include <cuda.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gpu_support.h"

using namespace gpu_test;

namespace {

// A function of the driver, which nothing here is linked with.
template <class Function>
Function* driver(const char* name) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    CUDA_OK(cudaGetDriverEntryPointByVersion(name, &function, 12030, cudaEnableDefault, &result));
    REQUIRE(result == cudaDriverEntryPointSuccess);
    return reinterpret_cast<Function*>(function);
}

// "decode prefill" or whatever kernels of attention a graph launches, in the order of the alphabet.
std::string kernels_of(cudaGraph_t graph) {
    static auto* const params_of =
        driver<CUresult(CUgraphNode, CUDA_KERNEL_NODE_PARAMS_v2*)>("cuGraphKernelNodeGetParams");
    static auto* const name_of_function = driver<CUresult(const char**, CUfunction)>("cuFuncGetName");
    static auto* const name_of_kernel = driver<CUresult(const char**, CUkernel)>("cuKernelGetName");
    size_t count = 0;
    CUDA_OK(cudaGraphGetNodes(graph, nullptr, &count));
    std::vector<cudaGraphNode_t> nodes(count);
    CUDA_OK(cudaGraphGetNodes(graph, nodes.data(), &count));
    std::vector<std::string> found;
    for (cudaGraphNode_t node : nodes) {
        CUDA_KERNEL_NODE_PARAMS_v2 params{};
        REQUIRE(params_of(node, &params) == CUDA_SUCCESS);
        const char* name = "";
        REQUIRE((params.func != nullptr ? name_of_function(&name, params.func)
                                        : name_of_kernel(&name, params.kern)) == CUDA_SUCCESS);
        for (const char* kernel : {"decode", "prefill", "attend"}) {
            if (std::strstr(name, (std::string(kernel) + "_kernel").c_str()) != nullptr) found.push_back(kernel);
        }
    }
    std::sort(found.begin(), found.end());
    std::string kernels;
    for (const std::string& kernel : found) kernels += (kernels.empty() ? "" : " ") + kernel;
    return kernels;
}

kivi_config config_for(const char* name) {
    kivi_config config;
    kivi_config_init(&config, sizeof config);
    KIVI_OK_(kivi_config_preset(&config, name));
    config.layer_count = 1;
    config.layer.kv_heads = 2, config.layer.q_heads = 8;
    config.layer.key_dim = config.layer.value_dim = 128;
    config.max_sequences = 3;
    config.max_tokens = 700;
    return config;
}

struct Call {
    std::vector<int32_t> counts{1};
    uint64_t flags = 0;
    bool floats = false, fresh = false;  // f32 queries and results; keys and values of the call
};

std::string kernels_of(const kivi_config& config, const Call& call) {
    const Cache cache(config, KIVI_CUDA);
    const int heads = config.layer.q_heads, kv_heads = config.layer.kv_heads, dim = config.layer.key_dim;
    int tokens = 0, most = 0;
    for (int32_t count : call.counts) tokens += count, most = std::max(most, count);
    Halfs q(int64_t{1} * tokens * heads * dim), out(int64_t{1} * tokens * heads * dim),
        k(int64_t{1} * tokens * kv_heads * dim);
    Floats wide(int64_t{1} * tokens * heads * dim);
    const int rows = static_cast<int>(call.counts.size());
    const kivi_batch batch = batch_of(rows, nullptr, call.counts.data(), most);
    const kivi_tensor in =
        call.floats ? wide.view(KIVI_CUDA, {tokens, heads, dim}) : q.view(KIVI_CUDA, {tokens, heads, dim});
    const kivi_tensor to = call.floats ? in : out.view(KIVI_CUDA, {tokens, heads, dim});
    const kivi_tensor fresh = k.view(KIVI_CUDA, {tokens, kv_heads, dim});
    kivi_attend_params params;
    kivi_attend_params_init(&params, sizeof params);
    params.flags = call.flags;
    if (call.fresh) params.k = params.v = &fresh;
    const Workspace workspace(cache, rows, most);
    const Stream stream;
    const Captured captured(stream, [&] {
        KIVI_OK_(kivi_attend(cache, 0, &batch, &in, &to, &params, workspace.data, workspace.bytes, stream));
    });
    return kernels_of(captured.graph());
}

kivi_support support_of(kivi_config config) {
    config.device = KIVI_CUDA;
    kivi_support support{};
    KIVI_OK_(kivi_query_support(&config, 0, &support, sizeof support));
    return support;
}

}  // namespace

TEST_CASE("the path said is the path taken") {
    const auto with = [](kivi_config config, const auto& change) {
        change(config);
        return config;
    };
    const kivi_config fast[] = {
        config_for("k3v2"),
        config_for("kivi2-sink"),
        config_for("k4v2"),
        config_for("kivi4"),
        config_for("f16"),
        config_for("kivi2-paper"),
        with(config_for("k3v2"), [](kivi_config& c) { c.window_dtype = KIVI_F16, c.layer.q_heads = 32; })};
    for (const kivi_config& config : fast) {
        const kivi_support support = support_of(config);
        CHECK(support.attend_path == KIVI_PATH_FAST);
        CHECK(support.pack_path == (config.layer.k.bits == 16 ? KIVI_PATH_GENERAL : KIVI_PATH_FAST));
        CHECK(std::string(support.reason) == "");
        for (const uint64_t flags : {uint64_t{0}, uint64_t{KIVI_ATTEND_INVARIANT}}) {
            CHECK(kernels_of(config, {{1}, flags}) == "decode");
            CHECK(kernels_of(config, {{1, 1}, flags}) == "decode");
            CHECK(kernels_of(config, {{1}, flags, true}) == "attend");
        }
    }
    const kivi_config general[] = {
        with(config_for("kivi2-paper"), [](kivi_config& c) { c.layer.v.bits = 4; }),
        with(config_for("kivi4"), [](kivi_config& c) { c.layer.k.bits = 8; }),
        with(config_for("kivi4"), [](kivi_config& c) { c.layer.v.param_dtype = KIVI_F32; }),
        with(config_for("kivi4"), [](kivi_config& c) { c.layer.k.axis = KIVI_AXIS_TOKEN; }),
        with(config_for("kivi4"), [](kivi_config& c) { c.layer.key_dim = c.layer.value_dim = 96; }),
        with(config_for("kivi4"), [](kivi_config& c) { c.layer.q_heads = 34; }),
    };
    for (const kivi_config& config : general) {
        const kivi_support support = support_of(config);
        CHECK(support.attend_path == KIVI_PATH_GENERAL);
        CHECK(support.pack_path == KIVI_PATH_GENERAL);
        CHECK(std::string(support.reason).find("fast kernel") != std::string::npos);
        CHECK(kernels_of(config, {{1}}) == "attend");
        CHECK(kernels_of(config, {{40}}) == "attend");
    }
    kivi_config aware = config_for("k3v2");
    aware.layer.k.rounding = KIVI_ROUND_QUERY_AWARE;
    for (int32_t dim : {64, 128, 256}) {
        aware.layer.key_dim = aware.layer.value_dim = dim;
        CHECK(support_of(aware).attend_path == KIVI_PATH_FAST);
        CHECK(support_of(aware).pack_path == KIVI_PATH_FAST);
    }
}

TEST_CASE("on the fast path many query tokens, fresh keys and mixed counts have their kernels too") {
    const uint64_t invariant = KIVI_ATTEND_INVARIANT;
    const kivi_config config = config_for("k3v2");  // four query heads a KV head
    CHECK(kernels_of(config, {{4}}) == "decode");
    CHECK(kernels_of(config, {{5}}) == "prefill");
    CHECK(kernels_of(config, {{1, 4}}) == "prefill");
    CHECK(kernels_of(config, {{1}, 0, false, true}) == "decode");
    CHECK(kernels_of(config, {{4}, 0, false, true}) == "decode");
    CHECK(kernels_of(config, {{5}, 0, false, true}) == "prefill");
    CHECK(kernels_of(config, {{2, 1}, 0, false, true}) == "prefill");
    CHECK(kernels_of(config, {{2, 5}, invariant, false, true}) == "decode prefill");
    CHECK(kernels_of(config, {{4}, invariant}) == "decode");
    CHECK(kernels_of(config, {{5}, invariant}) == "prefill");
    CHECK(kernels_of(config, {{1, 4}, invariant}) == "decode decode");
    CHECK(kernels_of(config, {{20, 1, 5}, invariant}) == "decode prefill prefill");
    CHECK(kernels_of(config, {{5, 6}, invariant}) == "prefill");
    kivi_config wide = config;
    wide.layer.key_dim = wide.layer.value_dim = 256;
    CHECK(kernels_of(wide, {{2}}) == "decode");
    CHECK(kernels_of(wide, {{3}}) == "prefill");
    CHECK(kernels_of(wide, {{3, 2}, invariant}) == "decode prefill");
    CHECK(kernels_of(config_for("f16"), {{5}}) == "attend");  // 16 bits have no kernel for many tokens
    CHECK(kernels_of(config_for("kivi2-paper"), {{4}}) == "decode");
    CHECK(kernels_of(config_for("kivi2-paper"), {{5}}) == "prefill");
}

int main(int argc, char** argv) {
    if (!gpu_there()) return kSkipped;
    doctest::Context context(argc, argv);
    return context.run();
}
