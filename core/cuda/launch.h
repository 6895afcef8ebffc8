// What the host hands to kernels, and the functions that launch them. Plain data; everything here lives in
// device memory unless it says otherwise.
//
//   sink   [sequence][head][position 0 .. S-1][dim]                            window_dtype
//   tail   [sequence][head][slot][dim], slot = (position - S) mod tail_rows    window_dtype
//   pages  [block][head][page bytes]: K part, then V part
//
// The truth of lengths, borders and page tables is on the device, so that a captured step can be replayed:
// kernels read the state of a sequence, and the last block to have read it moves it on.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cuda/page_order.h"
#include "format/half.h"
#include "format/host_device.h"
#include "format/policy.h"
#include "format/view.h"

struct CUstream_st;

namespace kivi::cuda {

using Stream = CUstream_st*;

struct TensorStore {
    Part part = Part::key;
    int32_t heads = 0;
    int32_t dim = 0;
    int32_t window_dtype = KIVI_F16;
    Windows windows;
    PageOrder order;
    uint8_t* sink = nullptr;
    uint8_t* tail = nullptr;
    int64_t tail_rows = 0;     // capacity of the ring
    uint8_t* pages = nullptr;  // base of the layer's arena
    int64_t page_bytes = 0;    // K part + V part
    int64_t part_offset = 0;   // of this tensor inside a page

    KIVI_HOST_DEVICE const kivi_spec& spec() const { return order.spec; }
    KIVI_HOST_DEVICE int32_t group() const { return spec().group == KIVI_GROUP_HEAD ? dim : spec().group; }
    KIVI_HOST_DEVICE bool rotated() const { return order.spec.transform == KIVI_TRANSFORM_HADAMARD; }
    KIVI_HOST_DEVICE int64_t row_bytes() const { return dim * static_cast<int64_t>(dtype_bytes(window_dtype)); }
    KIVI_HOST_DEVICE uint8_t* sink_row(int32_t sequence, int head, int64_t position) const {
        return sink + ((static_cast<int64_t>(sequence) * heads + head) * windows.sink + position) * row_bytes();
    }
    KIVI_HOST_DEVICE uint8_t* tail_row(int32_t sequence, int head, int64_t position) const {
        const int64_t slot = (position - windows.sink) % tail_rows;
        return tail + ((static_cast<int64_t>(sequence) * heads + head) * tail_rows + slot) * row_bytes();
    }
    KIVI_HOST_DEVICE uint8_t* window_row(int32_t sequence, int head, int64_t position) const {
        return position < windows.sink ? sink_row(sequence, head, position) : tail_row(sequence, head, position);
    }
    KIVI_HOST_DEVICE uint8_t* page(int32_t block, int head) const {
        return pages + (static_cast<int64_t>(block) * heads + head) * page_bytes + part_offset;
    }
};

// Encoder tables of query-aware rounding, all heads of a layer (format/feedback.h). Weights stand in panels of
// eight channels in coding order: panel p holds rows j = 0 .. 8p+7 of eight weights W[j][8p .. 8p+7], 0 where
// the column is not after the row.
struct FeedbackTables {
    const uint16_t* order = nullptr;    // [head][dim]; NULL: nearest rounding
    const uint16_t* place = nullptr;    // [head][dim]: the inverse of order
    const float* weights = nullptr;     // [head][panel_floats(dim)]
};
constexpr int kPanel = 8;
KIVI_HOST_DEVICE inline int64_t panel_begin(int panel) {
    return static_cast<int64_t>(kPanel) * kPanel * panel * (panel + 1) / 2;
}
KIVI_HOST_DEVICE inline int64_t panel_floats(int dim) { return panel_begin(dim / kPanel); }

// One layer of a cache.
struct Layer {
    TensorStore key, value;
    int32_t q_heads = 0;
    int64_t max_tokens = 0;
    Span* spans = nullptr;           // [sequence], of this layer
    const int32_t* table = nullptr;  // [sequence][table_stride]: block of page p
    int64_t table_stride = 0;
    const int32_t* bound = nullptr;  // [sequence]: valid entries of the table
    int32_t* full = nullptr;         // [sequence]: 1 after an append that found no room
    // [sequence], of this layer: blocks that have read the state; the first one also of a step's whole batch. Calls that
    // change a layer come one after the other.
    uint32_t* arrivals = nullptr;
    unsigned long long* saturated = nullptr;
    FeedbackTables feedback;
    int32_t clusters = 0;  // of the decode kernel (decode.h) that can run at the same time
    bool steps = false;    // step.h has a kernel

    KIVI_HOST_DEVICE const TensorStore& part(Part part) const { return part == Part::key ? key : value; }
    KIVI_HOST_DEVICE int32_t block(int32_t sequence, int64_t page) const {
        return table[sequence * table_stride + page];
    }
};

// Rows of a batch: by value, so that a captured graph owns them, or in device arrays.
struct RowArg {
    int32_t sequence;
    int32_t index;  // of rank-4 tensors
    int32_t count;
    int64_t offset;  // of rank-3 tensors
};
// The arrays of a device batch, each of which may be NULL (kivi_batch), and the limits of what they hold.
struct BatchArrays {
    const int32_t* sequences = nullptr;
    const int32_t* counts = nullptr;
    const int64_t* offsets = nullptr;
    int32_t max_sequences = 0;
    int32_t max_count = 0;
    int64_t tokens = 0;  // of the shortest rank-3 tensor
};
constexpr int kRowsAtOnce = 64;  // larger batches take several launches
struct BatchArgs {
    int32_t size = 0;         // rows of this launch
    int32_t max_count = 0;    // tokens of the longest row; on the device, rows with more are skipped
    int32_t least_count = 0;  // rows with fewer are skipped
    int64_t most_pages = 0;   // of a row, until the host binds more
    bool on_device = false;   // rows are those of the arrays, from first_row on
    int32_t first_row = 0;
    BatchArrays arrays;
    RowArg rows[kRowsAtOnce];
};

// ---- state.cu ----

bool compiled_for_this_device();  // the current one

struct BlockEntry {
    int32_t sequence, page, block;
};
constexpr int kEntriesAtOnce = 256;
struct BlockList {
    int32_t size = 0;
    BlockEntry entries[kEntriesAtOnce];
};
// Adds entries to the page tables; table and bound as in Layer, writable.
void bind_blocks(const BlockList& list, int32_t* table, int64_t table_stride, int32_t* bound, Stream stream);

constexpr int kSpansAtOnce = 128;
struct SpanList {
    int32_t sequence = 0, first_layer = 0, layers = 0, max_sequences = 0;
    Span spans[kSpansAtOnce];
};
// Sets the state of one sequence in some layers; with first_layer 0 its table becomes empty and its flag clear.
void set_spans(const SpanList& list, Span* spans, int32_t* bound, int32_t* full, Stream stream);

// ---- write.cu ----

enum class WriteMode : int32_t { append, flush };
struct WriteArgs {
    WriteMode mode = WriteMode::append;
    Layer layer;
    View k, v;
    BatchArgs batch;
};
void prepare_write(const Layer& layer);  // before the first write, on each device: loads kernels
void write(const WriteArgs& args, int32_t multiprocessors, Stream stream);

// What of a GPU decides how work is cut: its multiprocessors and its compute capability, like 90.
struct Gpu {
    int32_t multiprocessors = 0, capability = 0;
};

// ---- attend.cu ----

struct AttendArgs {
    Layer layer;
    View q, out, k, v, lse;
    float scale = 1;
    float soft_cap = 0;
    int64_t window_left = -1;
    const float* learned_sinks = nullptr;
    float* workspace = nullptr;
    bool keeps = false;      // k and v are appended by the same kernel: where decode_keeps(*this)
    bool settled = false;    // no kernel in front changes the layer any more when this one starts (launch_order.h)
    bool invariant = false;  // KIVI_ATTEND_INVARIANT: rows of a batch that need different kernels have launches of their own
    BatchArgs batch;
};
// Whether rows of 16-bit elements begin at multiples of 16 bytes, as the fast kernels read and write them.
inline bool aligned(const View& view) {
    return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.token_stride % 8 == 0 &&
           view.head_stride % 8 == 0 && (view.ragged || view.row_stride % 8 == 0);
}
void prepare_attend(const Layer& layer);  // likewise
size_t attend_workspace(const Layer& layer, int32_t rows, int32_t max_count);
void attend(const AttendArgs& args, Stream stream);

// ---- read.cu ----

struct DequantizeArgs {
    Layer layer;
    Part part = Part::key;
    int32_t sequence = 0;
    int64_t begin = 0, end = 0;
    View to;
    bool stored_basis = false;
};
void dequantize(const DequantizeArgs& args, Stream stream);
// Canonical bytes of the first `tokens` tokens of a page part.
void export_page(const TensorStore& store, const uint8_t* part, int32_t tokens, uint8_t* to, Stream stream);
void import_page(const TensorStore& store, uint8_t* part, int32_t tokens, const uint8_t* from, Stream stream);

// ---- merge.cu ----

constexpr int kPartsAtOnce = 32;
struct MergeArgs {
    int64_t rows = 1, tokens = 0, heads = 0, dim = 0;
    int32_t parts = 0;
    View outs[kPartsAtOnce], lses[kPartsAtOnce];
    View out, lse;
    const float* learned_sinks = nullptr;
};
void merge(const MergeArgs& args, Stream stream);

// ---- moments.cu ----

struct MomentArgs {
    Layer layer;
    View q;
    BatchArgs batch;
    float* sums = nullptr;  // [head][dim][dim]
};
void accumulate_moments(const MomentArgs& args, Stream stream);

}  // namespace kivi::cuda
