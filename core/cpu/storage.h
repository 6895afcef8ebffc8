// Memory of one tensor (K or V) of one layer on the CPU: sink rows, tail rows, and its part of the pages.
// Plain data with address functions; the backend allocates, the packers write, attend reads.
//
//   sink   [sequence][head][position 0 .. S-1][dim]                         window_dtype
//   tail   [sequence][head][slot][dim], slot = (position - S) mod tail_rows   window_dtype
//   pages  [block][head][page bytes]; K part, then V part (part_offset)
#pragma once
#include <cstdint>

#include "cpu/page_order.h"
#include "format/half.h"
#include "format/layout.h"
#include "format/policy.h"

namespace kivi::cpu {

struct TensorStore {
    Part part = Part::key;
    kivi_spec spec{};
    int heads = 0;
    int dim = 0;
    int32_t window_dtype = KIVI_F16;
    Windows windows;
    PageOrder order{};

    uint8_t* sink = nullptr;
    uint8_t* tail = nullptr;
    int64_t tail_rows = 0;     // capacity of the ring
    uint8_t* pages = nullptr;  // base of the layer's arena
    int64_t page_bytes = 0;    // K part + V part
    int64_t part_offset = 0;   // of this tensor inside a page

    bool rotated() const { return spec.transform == KIVI_TRANSFORM_HADAMARD; }
    int64_t row_bytes() const { return dim * static_cast<int64_t>(dtype_bytes(window_dtype)); }
    int64_t tail_slot(int64_t position) const { return (position - windows.sink) % tail_rows; }

    uint8_t* sink_row(int32_t sequence, int head, int64_t position) const {
        return sink +
               ((static_cast<int64_t>(sequence) * heads + head) * windows.sink + position) * row_bytes();
    }
    uint8_t* tail_row(int32_t sequence, int head, int64_t slot) const {
        return tail + ((static_cast<int64_t>(sequence) * heads + head) * tail_rows + slot) * row_bytes();
    }
    uint8_t* page(int32_t block, int head) const {
        return pages + (static_cast<int64_t>(block) * heads + head) * page_bytes + part_offset;
    }
};

// The two tensors of a layer.
struct LayerStore {
    kivi_layer shape{};
    TensorStore key, value;

    const TensorStore& part(Part part) const { return part == Part::key ? key : value; }
};

}  // namespace kivi::cpu
