// The seam between the cache and the code that runs on a device. The cache decides and checks everything
// (which rows, which lengths, which borders, which blocks); a backend only moves and computes, and can
// fail only for reasons of its device, by throwing Error.
//
// A backend keeps, per layer and tensor, three stores: sink rows and tail rows of every sequence, and the
// pages of the pool. It is told a sequence's state before and after each call. A backend whose truth lives
// on a device (CUDA, where graphs replay a captured step) keeps lengths and page tables there and takes
// what it is told as the host's mirror.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "format/feedback.h"
#include "format/model.h"
#include "format/policy.h"
#include "format/view.h"
#include "kivi/kivi.h"

namespace kivi {

// One row of a batch that has work to do. Skipped rows never reach a backend.
struct Row {
    int32_t index = 0;  // row of rank-4 tensors
    int32_t sequence = 0;
    int64_t offset = 0;               // first token in rank-3 tensors
    int64_t count = 0;                // tokens of this call
    Span before, after;               // state of (layer, sequence); calls that only read look at `before`
    const int32_t* blocks = nullptr;  // page table of the sequence: block of page p
    int64_t block_count = 0;          // its valid entries before the call
};

inline int64_t origin(const View& view, const Row& row) { return view.origin(row.index, row.offset); }

// A batch whose arrays are on the device (kivi_batch): the host knows bounds only.
struct DeviceRows {
    int32_t rows = 0;
    int32_t max_count = 0;
    const int32_t* sequences = nullptr;
    const int32_t* counts = nullptr;
    const int64_t* offsets = nullptr;
    int64_t tokens = 0;  // of the shortest rank-3 tensor of the call
};

struct Rows {
    const Row* data = nullptr;
    int32_t size = 0;
    const DeviceRows* on_device = nullptr;  // then there are no rows here; never given to a CPU backend
    const Row* begin() const { return data; }
    const Row* end() const { return data + size; }
};

struct AttendCall {
    int32_t layer = 0;
    Rows rows;
    View q, out;
    View k, v;        // fresh, or empty
    View lse;         // or empty; head_stride steps over query heads
    float scale = 1;  // resolved
    float soft_cap = 0;
    int64_t window_left = -1;
    const float* learned_sinks = nullptr;
    uint64_t flags = 0;
    void* workspace = nullptr;  // at least attend_workspace bytes, 64-byte aligned
    size_t workspace_bytes = 0;
    kivi_stream stream = nullptr;
};

// Partial results of attention over disjoint keys, to be combined (kivi_merge).
struct MergeCall {
    int64_t rows = 1, tokens = 0, heads = 0, dim = 0;
    std::vector<View> outs;
    std::vector<View> lses;
    const float* learned_sinks = nullptr;  // [heads] or NULL
    View out;
    View lse;  // or empty
    int32_t device_id = 0;
    kivi_stream stream = nullptr;
};

// How a layer is served (kivi_query_support).
struct PathInfo {
    int32_t attend_path = KIVI_PATH_NONE;
    int32_t pack_path = KIVI_PATH_NONE;
    std::string reason;  // why not the fast path, or why refused
};

class Backend {
  public:
    virtual ~Backend() = default;

    // Packs what moves behind the borders (before -> after) and stores the rest of the new tokens.
    virtual void append(int layer, Rows rows, const View& k, const View& v, kivi_stream stream) = 0;
    // Packs from the tail what moves behind the borders.
    virtual void flush(int layer, Rows rows, kivi_stream stream) = 0;

    virtual size_t attend_workspace(int layer, int32_t rows, int32_t max_count) const = 0;
    virtual void attend(const AttendCall& call) const = 0;
    // Attends with the call's keys and values, then appends them: rows before -> after as of an append.
    virtual void step(const AttendCall& call) {
        attend(call);
        append(call.layer, call.rows, call.k, call.v, call.stream);
    }

    // Rows begin .. end - 1 of row.sequence as attend reads them; either view may be empty.
    virtual void dequantize(int layer, const Row& row, int64_t begin, int64_t end, const View& k,
                            const View& v, bool stored_basis, kivi_stream stream) const = 0;

    // Canonical bytes of one tensor of one head (layout.h), host memory. Packed groups of page `page` of
    // the sequence, the first `tokens` tokens of it (a multiple of the group): codes, scales, mins of those.
    virtual void export_page(int layer, Part part, int head, int32_t block, int64_t tokens,
                             uint8_t* to) const = 0;
    virtual void import_page(int layer, Part part, int head, int32_t block, int64_t tokens,
                             const uint8_t* from) = 0;
    // Window rows of positions begin .. end - 1 (all in the sink window, or all in the tail), window dtype.
    virtual void export_window(int layer, Part part, int head, int32_t sequence, int64_t begin, int64_t end,
                               uint8_t* to) const = 0;
    virtual void import_window(int layer, Part part, int head, int32_t sequence, int64_t begin, int64_t end,
                               const uint8_t* from) = 0;
    // Finishes queued work.
    virtual void synchronize(kivi_stream stream) const = 0;
    // A backend whose truth lives on the device: after synchronize, writes the spans [layer][sequence] and marks
    // the sequences that an append on the device found full. False: the host's are the truth.
    virtual bool read_state(std::vector<Span>*, std::vector<int32_t>*) const { return false; }
    // Entries begin .. end - 1 of a page table have become valid. Comes before the call that needs them.
    virtual void bind_blocks(int32_t /*sequence*/, const int32_t* /*blocks*/, int64_t /*begin*/,
                             int64_t /*end*/, kivi_stream) {}
    // Sets the state of a sequence, whatever it was.
    virtual void set_sequence(int32_t sequence, const std::vector<Span>& layers, const int32_t* blocks,
                              int64_t block_count, kivi_stream stream) = 0;

    // Adds the rows' queries to the moment sums of the layer.
    virtual void accumulate_moments(int layer, Rows rows, const View& q, kivi_stream stream) = 0;
    // The layer's matrices, [kv_heads][dim][dim], stored basis: sums of q q' as accumulated, or what was written.
    virtual void read_moments(int layer, float* matrices) const = 0;
    virtual void write_moments(int layer, const float* matrices) = 0;
    // Encoder tables, one per KV head, which the caller keeps until the next call; empty: nearest rounding.
    virtual void set_feedback(int layer, const std::vector<Feedback>& heads) = 0;
    // The caller's memory on the device to the host, after what is queued on the stream.
    virtual void download(void* to, const void* from, size_t bytes, kivi_stream) const {
        std::memcpy(to, from, bytes);
    }

    virtual int64_t saturated_rows(int layer) const = 0;  // since create or reset
    virtual void reset(kivi_stream stream) = 0;           // counters; lengths are the cache's
    virtual void grow_pool(int64_t more, kivi_stream stream) = 0;  // blocks to add; contents stay
};

// What the registry knows of a kind of backend, before any cache exists.
struct BackendKind {
    int32_t device;
    int32_t (*count)();
    kivi_device_info (*query)(int32_t device_id);
    // Path of one layer; NONE with a reason refuses it.
    PathInfo (*path)(const Model& model, const kivi_layer& layer);
    uint64_t (*layout_version)(const Model& model);  // changes with the order of bytes inside pages
    uint64_t (*scratch_bytes)(const Model& model);   // allocated by create beside pages and windows
    std::unique_ptr<Backend> (*create)(const Model& model);
    void (*merge)(const MergeCall& call);
    // Memory for callers, at least one byte, and complete copies of it (kivi_device_allocate, ..). device_id is below
    // count().
    void* (*allocate)(int32_t device_id, size_t bytes);
    void (*free)(int32_t device_id, void* memory);
    void (*copy)(int32_t device_id, void* to, const void* from, size_t bytes, kivi_stream stream);
};

}  // namespace kivi
