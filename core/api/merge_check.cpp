// All tensors of a merge have the shape of `out`, or that without its innermost size.
#include "api/merge_check.h"

#include <string>

#include "api/struct_size.h"
#include "api/tensor_check.h"

namespace kivi {
namespace {

// `tensor` has the rank and sizes of `out`, of which it lacks the last `missing` ones.
View check_like(const kivi_tensor* tensor, const kivi_tensor& out, const TensorRule& rule, int missing) {
    check_tensor(tensor, rule, {out.device, out.device_id});
    const int rank = out.rank - missing;
    if (tensor->rank != rank) refuse_argument(rule.name, ".rank is ", tensor->rank, "; it must be ", rank);
    for (int axis = 0; axis < rank; axis++) {
        if (tensor->shape[axis] != out.shape[axis]) {
            refuse_argument(rule.name, ": shape[", axis, "] is ", tensor->shape[axis], "; out has ",
                            out.shape[axis]);
        }
    }
    return make_view(*tensor, out.rank - 3, missing == 0);
}

}  // namespace

MergeCall check_merge(int32_t parts, const kivi_tensor* outs, const kivi_tensor* lses,
                      const float* learned_sinks, const kivi_tensor* out, const kivi_tensor* lse) {
    if (parts < 1) refuse_argument("parts is ", parts, "; it must be at least 1");
    check_pointer("outs", outs, alignof(kivi_tensor));
    check_pointer("lses", lses, alignof(kivi_tensor));
    if (learned_sinks != nullptr) check_pointer("learned_sinks", learned_sinks, alignof(float));
    const TensorRule with_dim{"out", 0, 1, true};
    check_pointer("out", out, alignof(kivi_tensor));
    check_tensor(out, with_dim, {out->device == KIVI_CUDA ? KIVI_CUDA : KIVI_CPU, out->device_id});

    MergeCall call;
    const int first = out->rank - 3;
    call.rows = first == 1 ? out->shape[0] : 1;
    call.tokens = out->shape[first];
    call.heads = out->shape[first + 1];
    call.dim = out->shape[first + 2];
    call.out = make_view(*out, first, true);
    for (int32_t part = 0; part < parts; part++) {
        const std::string index = "[" + std::to_string(part) + "]";
        const std::string out_name = "outs" + index, lse_name = "lses" + index;
        call.outs.push_back(check_like(&outs[part], *out, {out_name.c_str(), 0, 1}, 0));
        call.lses.push_back(check_like(&lses[part], *out, {lse_name.c_str(), 0, 0, false, KIVI_F32}, 1));
    }
    if (lse != nullptr) call.lse = check_like(lse, *out, {"lse", 0, 0, true, KIVI_F32}, 1);
    call.learned_sinks = learned_sinks;
    call.device_id = out->device_id;
    return call;
}

}  // namespace kivi
