// The state machine: lengths, borders and blocks of every sequence, and what each call may do to them. Every
// change is made in two phases: check everything, then act, so that a failed call changes nothing.
//
//   (layer, sequence) -> Span     length and packed borders (format/policy.h)
//   sequence -> blocks            page table, shared by all layers
//   layer -> Moments              query-aware rounding
//
// Knows no device: a Backend moves and computes.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "cache/batch.h"
#include "cache/blob.h"
#include "cache/page_table.h"
#include "format/model.h"
#include "format/policy.h"

namespace kivi {

// What attend is asked for, before the rows are planned.
struct AttendRequest {
    View q, out, k, v, lse;  // k and v: fresh, or empty
    float scale = 0;         // 0: 1 / sqrt(key_dim)
    float soft_cap = 0;
    int64_t window_left = -1;
    const float* learned_sinks = nullptr;
    uint64_t flags = 0;
};

class Cache {
  public:
    Cache(Model model, std::unique_ptr<Backend> backend, const kivi_memory& memory);  // memory: estimate()

    const Model& model() const { return model_; }
    // The layer's shape; refuses what is out of range or absent.
    const kivi_layer& layer(int32_t layer) const;
    // Likewise, and refuses layers without query-aware rounding.
    const kivi_layer& query_aware_layer(int32_t layer) const;
    void check_sequence(int32_t sequence) const;

    // Work. Views are checked against the layer and the batch by the caller.
    void append(int32_t layer, const Batch& batch, const View& k, const View& v, kivi_stream stream);
    // Attends with the fresh k and v of the request, then appends them.
    void step(int32_t layer, const Batch& batch, const AttendRequest& request, void* workspace,
              size_t workspace_bytes, kivi_stream stream);
    void flush(int32_t layer, const Batch& batch, kivi_stream stream);              // layer -1: all
    size_t attend_workspace(int32_t layer, int32_t rows, int32_t max_count) const;  // layer -1: any
    void attend(int32_t layer, const Batch& batch, const AttendRequest& request, void* workspace,
                size_t workspace_bytes, kivi_stream stream) const;
    void dequantize(int32_t layer, int32_t sequence, int64_t begin, int64_t end, const View& k, const View& v,
                    bool stored_basis, kivi_stream stream) const;

    // Sequences and the pool.
    void reset(kivi_stream stream);
    void reset_sequence(int32_t sequence, kivi_stream stream);
    void reserve(int64_t tokens, kivi_stream stream);
    void reserve_sequence(int32_t sequence, int64_t tokens, kivi_stream stream);
    void synchronize(kivi_stream stream);  // and takes lengths from the device

    // Moving one sequence.
    size_t export_size(int32_t sequence) const;
    size_t export_sequence(int32_t sequence, void* buffer, size_t bytes, kivi_stream stream) const;
    void import_sequence(int32_t sequence, const void* buffer, size_t bytes, kivi_stream stream);

    // Moments.
    void accumulate_moments(int32_t layer, const Batch& batch, const View& q, kivi_stream stream);
    void set_moments(int32_t layer, const View& m, bool stored_basis, kivi_stream stream);
    void commit_moments(int32_t layer, kivi_stream stream);
    size_t moments_export_size(int32_t layer) const;
    size_t export_moments(int32_t layer, void* buffer, size_t bytes) const;
    void import_moments(int32_t layer, const void* buffer, size_t bytes, kivi_stream stream);

    // Queries.
    kivi_length length(int32_t layer, int32_t sequence) const;
    const kivi_memory& memory() const { return memory_; }
    kivi_statistics statistics(int32_t layer) const;  // layer -1: sums over all

  private:
    // Query moments of one layer. The backend holds the matrices: sums of q q', or means if they came as such.
    struct Moments {
        bool present = false;
        bool are_means = false;
        int64_t queries = 0;           // query rows behind each matrix; 0: the caller set it
        std::vector<Feedback> tables;  // committed: one a head, which the backend reads; else empty
        uint32_t crc = 0;              // of the tables
    };

    Span& span_at(int32_t layer, int32_t sequence) { return spans_[index_of(layer, sequence)]; }
    const Span& span_at(int32_t layer, int32_t sequence) const { return spans_[index_of(layer, sequence)]; }
    size_t index_of(int32_t layer, int32_t sequence) const {
        return static_cast<size_t>(layer) * model_.max_sequences + sequence;
    }

    void check_stream(kivi_stream stream) const;
    void check_healthy() const;
    void check_nothing_packed(int32_t layer, const char* what) const;
    void use_tables(int32_t layer, std::vector<Feedback> tables);
    void write_means(int32_t layer, const std::vector<float>& means, int64_t queries);
    std::vector<float> mean_moments(int32_t layer) const;
    std::vector<EncoderMark> encoder_marks() const;
    std::vector<Span> spans_of(int32_t sequence) const;  // of all layers; refused if their lengths differ

    // The batch's rows with their spans before and after; `after_of(sequence, before, count)` may refuse.
    template <class AfterOf>
    Rows plan_rows(int32_t layer, const Batch& batch, AfterOf&& after_of) const;
    // Runs `work(rows)` on the rows of a batch in device memory, whose lengths are then behind.
    template <class Work>
    void run_on_device(const Batch& batch, Work&& work) const;
    int64_t missing_blocks(int32_t sequence, const Span& after) const;
    void check_blocks(int64_t needed) const;
    void bind(int32_t sequence, int64_t count, kivi_stream stream);  // grows the page table to `count` blocks
    // Gives the planned rows their blocks, runs `work`, moves the spans; takes the blocks back if it throws.
    template <class Work>
    void apply(int32_t layer, Rows rows, kivi_stream stream, Work&& work);
    // Runs `work(rows)`, which appends the batch's tokens; refuses what max_tokens or the pool cannot hold.
    template <class Work>
    void grow(int32_t layer, const Batch& batch, kivi_stream stream, Work&& work);
    // Runs a call of the backend and remembers a device error.
    template <class Work>
    void run(Work&& work) const;

    int32_t layer_count() const { return static_cast<int32_t>(model_.layers.size()); }
    // First and one past the last of a call's layers; -1: all.
    std::pair<int32_t, int32_t> layers_of(int32_t layer) const {
        return layer == -1 ? std::pair{0, layer_count()} : std::pair{layer, layer + 1};
    }
    size_t plan_bytes(int32_t rows) const;
    int32_t plan_attend(int32_t layer, const Batch& batch, Row* rows, uint8_t* seen) const;
    void check_workspace(int32_t layer, const Batch& batch, const void* workspace, size_t bytes) const;
    // What the backend is asked, but for the rows.
    AttendCall attend_call(int32_t layer, const Batch& batch, const AttendRequest& request, void* workspace,
                           size_t workspace_bytes, kivi_stream stream) const;
    void drop_contents(int32_t sequence);
    void publish(int32_t sequence, const std::vector<Span>& spans, kivi_stream stream);

    Model model_;
    std::unique_ptr<Backend> backend_;
    kivi_memory memory_;
    std::vector<Span> spans_;  // [layer][sequence]
    PageTable table_;
    // Rows of the call that is being made: one that has the cache alone, or, with plan_mutex_, an attend on a device.
    mutable std::vector<Row> plan_;
    mutable std::vector<int64_t> planned_;  // [sequence]: number of the plan that last held it, to find doubles
    mutable int64_t plan_number_ = 0;
    mutable std::mutex plan_mutex_;
    std::vector<Moments> moments_;  // [layer]
    mutable std::atomic<bool> device_error_{false};
};

// Memory of a cache of this model, exact.
kivi_memory estimate(const Model& model, uint64_t layout_version, uint64_t scratch_bytes);

}  // namespace kivi
