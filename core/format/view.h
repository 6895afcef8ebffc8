// A tensor whose shape has been checked.
#pragma once
#include <cstdint>

#include "format/host_device.h"
#include "kivi/kivi.h"

namespace kivi {

// Row r, token t, head h starts at element origin(r) + t * token_stride + h * head_stride; its channels are
// contiguous.
struct View {
    void* data = nullptr;
    int32_t dtype = KIVI_F32;
    bool ragged = false;  // rank 3: rows are found by their token offset
    int64_t row_stride = 0;
    int64_t token_stride = 0;
    int64_t head_stride = 0;

    KIVI_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
    // First element of a row: `index` counts rows of the batch, `offset` tokens before it in a ragged tensor.
    KIVI_HOST_DEVICE int64_t origin(int64_t index, int64_t offset) const {
        return ragged ? offset * token_stride : index * row_stride;
    }
};

}  // namespace kivi
