// Checks of tensors. Strides of sizes 0 and 1 are never used and may hold anything.
#include "api/tensor_check.h"

#include <algorithm>
#include <cstdint>

#include "api/struct_size.h"
#include "format/half.h"

namespace kivi {
namespace {

// Stride that addressing may use: what stands beside a size of 1 is not looked at.
int64_t used_stride(const kivi_tensor& tensor, int axis) {
    return tensor.shape[axis] > 1 ? tensor.stride[axis] : 0;
}

bool has_elements(const kivi_tensor& tensor) {
    for (int axis = 0; axis < tensor.rank; axis++) {
        if (tensor.shape[axis] == 0) return false;
    }
    return true;
}

// No address space that libkivi runs in is larger than 2^57 bytes.
constexpr int64_t kLargestExtent = int64_t{1} << 57;

// Bytes from the base to the end of the last element, formed in 64 bits.
void check_extent(const kivi_tensor& tensor, const char* name) {
    int64_t last = 0;
    for (int axis = 0; axis < tensor.rank; axis++) {
        int64_t step;
        if (__builtin_mul_overflow(tensor.shape[axis] - 1, used_stride(tensor, axis), &step) ||
            __builtin_add_overflow(last, step, &last)) {
            refuse_argument(name, ": shape and stride of axis ", axis, " (", tensor.shape[axis], ", ",
                            tensor.stride[axis], ") reach past the limit of 64-bit offsets");
        }
    }
    if (last >= kLargestExtent / static_cast<int64_t>(dtype_bytes(tensor.dtype))) {
        refuse_argument(name, ": its last element is number ", last, ", past the limit of 2^57 bytes");
    }
}

void check_size(const char* name, int axis, const char* what, int64_t size, int64_t wanted) {
    if (size != wanted)
        refuse_argument(name, ": shape[", axis, "] (", what, ") is ", size, "; it must be ", wanted);
}

void check_inner_sizes(const kivi_tensor& tensor, const TensorRule& rule, int first) {
    check_size(rule.name, first + 1, "heads", tensor.shape[first + 1], rule.heads);
    if (rule.dim > 0) check_size(rule.name, first + 2, "dim", tensor.shape[first + 2], rule.dim);
}

}  // namespace

View make_view(const kivi_tensor& tensor, int first, bool has_dim) {
    View view;
    view.data = tensor.data;
    view.dtype = tensor.dtype;
    view.ragged = first == 0;
    view.row_stride = first == 1 ? used_stride(tensor, 0) : 0;
    view.token_stride = used_stride(tensor, first);
    view.head_stride = used_stride(tensor, first + 1);
    if (!has_dim && tensor.shape[first + 1] == 1) view.head_stride = 1;
    return view;
}

void check_tensor(const kivi_tensor* tensor, const TensorRule& rule, Place place) {
    const char* name = rule.name;
    check_pointer(name, tensor, alignof(kivi_tensor));
    if (tensor->dtype != KIVI_F32 && tensor->dtype != KIVI_F16 && tensor->dtype != KIVI_BF16) {
        refuse_argument(name, ".dtype is ", tensor->dtype, "; supported are 1 (f32), 2 (f16) and 3 (bf16)");
    }
    if (rule.dtype != 0 && tensor->dtype != rule.dtype) {
        refuse_argument(name, ".dtype is ", tensor->dtype, "; it must be ", rule.dtype, " (f32)");
    }
    if (tensor->device != place.device || tensor->device_id != place.device_id) {
        refuse_argument(name, " is on device ", tensor->device, " number ", tensor->device_id,
                        "; this call takes device ", place.device,
                        place.device == KIVI_CPU ? " (CPU)" : " (CUDA)", " number ", place.device_id);
    }
    const int inner = rule.dim > 0 ? 2 : 1;
    if (tensor->rank != inner + 1 && tensor->rank != inner + 2) {
        refuse_argument(name, ".rank is ", tensor->rank, "; it must be ", inner + 1, " or ", inner + 2);
    }
    for (int axis = 0; axis < tensor->rank; axis++) {
        const int64_t size = tensor->shape[axis];
        if (size < 0) refuse_argument(name, ": shape[", axis, "] is ", size, "; it must not be negative");
        if (size <= 1) continue;
        const int64_t stride = tensor->stride[axis];
        if (stride < 0)
            refuse_argument(name, ": stride[", axis, "] is ", stride, "; it must not be negative");
        if (axis == tensor->rank - 1 && stride != 1) {
            refuse_argument(name, ": stride[", axis, "] is ", stride, "; the innermost stride must be 1");
        }
        if (rule.output && stride == 0 && has_elements(*tensor)) {
            refuse_argument(name, ": stride[", axis, "] is 0; an output cannot be broadcast");
        }
    }
    if (!has_elements(*tensor)) return;
    if (tensor->data == nullptr) refuse_argument(name, ".data is NULL, but the tensor has elements");
    if (reinterpret_cast<uintptr_t>(tensor->data) % dtype_bytes(tensor->dtype) != 0) {
        refuse_argument(name, ".data is not aligned to its element size, ", dtype_bytes(tensor->dtype),
                        " bytes");
    }
    check_extent(*tensor, name);
}

View check_batch_tensor(const kivi_tensor* tensor, const TensorRule& rule, Batch& batch, Place place) {
    check_tensor(tensor, rule, place);
    const int first = tensor->rank - (rule.dim > 0 ? 3 : 2);  // axis of the tokens
    check_inner_sizes(*tensor, rule, first);
    if (first == 1) {
        check_size(rule.name, 0, "rows", tensor->shape[0], batch.rows);
        if (batch.offsets != nullptr) {
            refuse_argument(rule.name, ".rank is ", tensor->rank,
                            "; batch.offsets belong to tensors without a row axis, one rank lower");
        }
    }
    const int64_t needed = first == 1 ? batch.max_count : batch.tokens_end;
    if (tensor->shape[first] < needed) {
        refuse_argument(rule.name, ": shape[", first, "] (tokens) is ", tensor->shape[first],
                        "; the batch needs ", needed);
    }
    if (first == 0) batch.tokens = std::min(batch.tokens, tensor->shape[0]);
    return batch.active > 0 ? make_view(*tensor, first, rule.dim > 0) : View{};
}

View check_tokens_tensor(const kivi_tensor* tensor, const TensorRule& rule, int64_t tokens, Place place) {
    check_tensor(tensor, rule, place);
    if (tensor->rank != 3) refuse_argument(rule.name, ".rank is ", tensor->rank, "; it must be 3");
    check_size(rule.name, 0, "tokens", tensor->shape[0], tokens);
    check_inner_sizes(*tensor, rule, 0);
    return tokens > 0 ? make_view(*tensor, 0, rule.dim > 0) : View{};
}

}  // namespace kivi
