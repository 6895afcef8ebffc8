// kivi_tensor -> View: every rule of kivi_tensor (kivi.h), with a sentence that names argument, value, limit.
#pragma once
#include "backend/backend.h"
#include "cache/batch.h"
#include "kivi/kivi.h"

namespace kivi {

// The memory that a call's tensors must be in.
struct Place {
    int32_t device = KIVI_CPU;
    int32_t device_id = 0;
};
inline Place place_of(const Model& model) { return {model.device, model.device_id}; }

// What a call expects of one tensor.
struct TensorRule {
    const char* name;
    int64_t heads;
    int64_t dim;  // 0: the tensor has no innermost channel size (LSE)
    bool output = false;
    int32_t dtype = 0;  // 0: any
};

// [rows, tokens, heads, dim] or [tokens, heads, dim] (without dim: one size less) for the rows of a batch.
// An empty view if the batch has no work. Which rows of device arrays a rank-3 tensor has room for is not known here:
// its tokens are noted in the batch.
View check_batch_tensor(const kivi_tensor* tensor, const TensorRule& rule, Batch& batch, Place place);

// [tokens, heads, dim] with exactly `tokens` tokens.
View check_tokens_tensor(const kivi_tensor* tensor, const TensorRule& rule, int64_t tokens, Place place = {});

// Rules that every tensor obeys, whatever its shape: pointer, dtype, device, rank, sizes, strides, extent.
void check_tensor(const kivi_tensor* tensor, const TensorRule& rule, Place place = {});

// View of a checked tensor whose axes from `first` (0 or 1) on are [tokens, heads, dim] or [tokens, heads].
View make_view(const kivi_tensor& tensor, int first, bool has_dim);

}  // namespace kivi
