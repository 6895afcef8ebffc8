// Reading rows back: sink window, pages and tail.
#include "cpu/dequantize.h"

#include <vector>

#include "cpu/rows.h"
#include "format/hadamard.h"
#include "format/quantize.h"

namespace kivi::cpu {

void unpack_rows(const TensorStore& store, const uint8_t* part, int first, int count, float* rows) {
    const PageOrder& order = store.order;
    const int32_t param_dtype = store.spec.param_dtype == KIVI_F32 ? KIVI_F32 : KIVI_F16;
    for (int t = 0; t < count; ++t) {
        float* x = rows + static_cast<int64_t>(t) * store.dim;
        if (store.spec.bits == 16) {
            load_row_plain(part + (first + t) * store.row_bytes(), store.window_dtype, store.dim, x);
            continue;
        }
        const int group =
            store.spec.axis == KIVI_AXIS_CHANNEL ? 1 : group_shape(store.spec, store.dim).channels;
        GroupParams params{};
        for (int c = 0; c < store.dim; ++c) {
            if (c % group == 0) {
                params.scale = load_element(part + scale_offset(order, first + t, c), param_dtype, 0);
                params.min = load_element(part + min_offset(order, first + t, c), param_dtype, 0);
            }
            x[c] = decode(code_get(order, part, first + t, c), params);
        }
    }
}

void stored_row(const TensorStore& store, const Row& row, int head, int64_t position, float* x) {
    const Windows& windows = store.windows;
    if (position < windows.sink) {
        load_row_plain(store.sink_row(row.sequence, head, position), store.window_dtype, store.dim, x);
    } else if (position >= tail_begin(windows, row.before, store.part)) {
        load_row_plain(store.tail_row(row.sequence, head, store.tail_slot(position)), store.window_dtype,
                       store.dim, x);
    } else {
        const int64_t slot = position - windows.sink;
        const int32_t block = row.blocks[slot / kPageTokens];
        unpack_rows(store, store.page(block, head), static_cast<int>(slot % kPageTokens), 1, x);
    }
}

void dequantize(const TensorStore& store, const Row& row, int64_t begin, int64_t end, const View& view,
                bool stored_basis) {
    const bool rotate_back = store.rotated() && !stored_basis;
    std::vector<float> x(store.dim);
    std::vector<double> wide(store.dim);
    for (int64_t position = begin; position < end; ++position) {
        for (int head = 0; head < store.heads; ++head) {
            stored_row(store, row, head, position, x.data());
            if (rotate_back) {
                wide.assign(x.begin(), x.end());
                hadamard(wide.data(), store.dim);
                x.assign(wide.begin(), wide.end());
            }
            const int64_t at =
                origin(view, row) + (position - begin) * view.token_stride + head * view.head_stride;
            for (int c = 0; c < store.dim; ++c) store_element(view.data, view.dtype, at + c, x[c]);
        }
    }
}

}  // namespace kivi::cpu
