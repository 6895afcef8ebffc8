// Heads and dims of a probe are read off its tensors; specs and windows obey the rules of a cache.
#include "api/probe_check.h"

#include <cmath>

#include "api/struct_size.h"
#include "api/tensor_check.h"
#include "api/value_check.h"
#include "cache/config.h"

namespace kivi {
namespace {

constexpr int64_t kMostHeads = 65536;  // far beyond any model; the results are one struct a KV head

void check_rank3(const char* name, const kivi_tensor& tensor) {
    check_tensor(&tensor, {name, 0, 1});
    if (tensor.rank != 3) refuse_argument(name, ".rank is ", tensor.rank, "; it must be 3");
}

// A head count read off a tensor.
int32_t heads_of(const char* name, int64_t heads) {
    if (heads < 1 || heads > kMostHeads)
        refuse_argument(name, ".shape[1] (heads) is ", heads, "; it must be from 1 to ", kMostHeads);
    return static_cast<int32_t>(heads);
}

int32_t dim_of_tensor(const char* name, int64_t dim) {
    if (dim > kMaxDim) refuse_argument(name, ".shape[2] (dim) is ", dim, "; it must be at most ", kMaxDim);
    return static_cast<int32_t>(dim);
}

}  // namespace

ProbeCall check_probe(const kivi_probe_params& params) {
    check_reserved("params", params.reserved);
    if (params.reserved0 != 0) refuse_argument("params.reserved0 must be zero");
    check_rank3("params.q", params.q);
    check_rank3("params.k", params.k);
    check_rank3("params.v", params.v);

    kivi_layer layer{};
    layer.q_heads = heads_of("params.q", params.q.shape[1]);
    layer.kv_heads = heads_of("params.k", params.k.shape[1]);
    layer.key_dim = dim_of_tensor("params.k", params.k.shape[2]);
    layer.value_dim = dim_of_tensor("params.v", params.v.shape[2]);
    layer.k = params.k_spec;
    layer.v = params.v_spec;

    ProbeCall call;
    call.layer = checked_layer("params", layer);
    call.windows = checked_windows(params.sink, params.recent, params.flush, params.schedule, {call.layer});
    call.window_dtype = checked_window_dtype(params.window_dtype);
    call.tokens = params.k.shape[0];
    call.queries = params.q.shape[0];
    if (call.tokens < 1)
        refuse_argument("params.k: shape[0] (tokens) is ", call.tokens, "; it must be at least 1");
    if (call.queries < 1 || call.queries > call.tokens) {
        refuse_argument("params.q: shape[0] (queries) is ", call.queries,
                        "; it must be from 1 to the tokens, ", call.tokens);
    }
    call.q = check_tokens_tensor(&params.q, {"params.q", layer.q_heads, layer.key_dim}, call.queries);
    call.k = check_tokens_tensor(&params.k, {"params.k", layer.kv_heads, layer.key_dim}, call.tokens);
    call.v = check_tokens_tensor(&params.v, {"params.v", layer.kv_heads, layer.value_dim}, call.tokens);
    if (params.moments != nullptr) {
        call.moments = check_tokens_tensor(params.moments,
                                           {"params.moments", layer.key_dim, layer.key_dim, false, KIVI_F32},
                                           layer.kv_heads);
    }
    const double scale = checked_finite("params.scale", params.scale);
    call.scale = scale != 0 ? scale : 1 / std::sqrt(static_cast<double>(layer.key_dim));
    call.soft_cap = checked_soft_cap("params.soft_cap", params.soft_cap);
    call.window_left = checked_window_left("params.window_left", params.window_left);
    return call;
}

}  // namespace kivi
