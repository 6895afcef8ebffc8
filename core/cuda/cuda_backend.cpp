// The device as a Backend: allocates what launch.h describes, hands work to the kernels in portions that fit a
// launch, and moves what import, export and the moments need. Nothing here allocates or waits in append, flush
// and attend.
#include "cuda/cuda_backend.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/attend_call.h"
#include "cuda/decode.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/launch_order.h"
#include "cuda/pack.h"
#include "cuda/prefill.h"
#include "cuda/step.h"
#include "format/error.h"
#include "format/layout.h"

#ifndef KIVI_CUDA_ARCHITECTURES
#define KIVI_CUDA_ARCHITECTURES "unknown"
#endif

namespace kivi::cuda {
namespace {

Stream stream_of(kivi_stream stream) { return static_cast<Stream>(stream); }

LaunchPlace place_of(kivi_stream stream) {
    if (stream == cudaStreamPerThread) return {};  // another stream in each thread
    cudaStreamCaptureStatus status;
    unsigned long long capture = 0;
    if (cudaStreamGetCaptureInfo(stream_of(stream), &status, &capture) != cudaSuccess) {
        cudaGetLastError();
        return {};
    }
    return {stream_of(stream), status == cudaStreamCaptureStatusNone ? 0 : capture, true};
}

void check_launch(const char* what) { check(cudaGetLastError(), what); }

bool query_aware(const kivi_layer& layer) {
    return layer.kv_heads > 0 && layer.k.bits != 16 && layer.k.rounding == KIVI_ROUND_QUERY_AWARE;
}

bool has_codes(const kivi_layer& layer) { return layer.k.bits != 16 || layer.v.bits != 16; }

// Bytes of the tables that pack with moments, one layer: order, its inverse, weights in panels.
uint64_t feedback_bytes(const kivi_layer& layer) {
    return query_aware(layer) ? layer.kv_heads * (2 * layer.key_dim * sizeof(uint16_t) +
                                                  panel_floats(layer.key_dim) * sizeof(float))
                              : 0;
}

uint64_t matrix_bytes(const kivi_layer& layer) {
    return query_aware(layer)
               ? static_cast<uint64_t>(layer.kv_heads) * layer.key_dim * layer.key_dim * sizeof(float)
               : 0;
}

// Largest part of a page: room for one on its way to or from the host.
uint64_t staging_bytes(const Model& model) {
    int64_t bytes = 0;
    for (const kivi_layer& layer : model.layers) {
        if (layer.kv_heads == 0) continue;
        bytes = std::max({bytes, page_part_bytes(layer.k, layer.key_dim, model.window_dtype),
                          page_part_bytes(layer.v, layer.value_dim, model.window_dtype)});
    }
    return static_cast<uint64_t>(bytes);
}

// The state that lives on the device, cut from one allocation.
//
//   spans [layer][sequence] | saturated [layer] | table [sequence][page] | bound, full [sequence]
//   | arrivals [layer][sequence]
struct StateLayout {
    uint64_t saturated, table, bound, full, arrivals, bytes;
    explicit StateLayout(const Model& model) {
        const uint64_t sequences = model.max_sequences, layers = model.layers.size();
        saturated = layers * sequences * sizeof(Span);
        table = saturated + layers * sizeof(unsigned long long);
        bound = table + sequences * blocks_per_sequence(model) * sizeof(int32_t);
        full = bound + sequences * sizeof(int32_t);
        arrivals = full + sequences * sizeof(int32_t);
        bytes = arrivals + layers * sequences * sizeof(uint32_t);
    }
};

uint64_t scratch_bytes(const Model& model) {
    uint64_t bytes = StateLayout(model).bytes + staging_bytes(model);
    for (const kivi_layer& layer : model.layers) bytes += feedback_bytes(layer);
    return bytes;
}

// A stream of the library's own for copies that the host waits for: it neither waits for others nor holds them.
class OwnStream {
  public:
    OwnStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream"); }
    ~OwnStream() { cudaStreamDestroy(stream_); }
    OwnStream(const OwnStream&) = delete;
    operator Stream() const { return stream_; }
    void copy(void* to, const void* from, uint64_t bytes) const {
        if (bytes == 0) return;
        check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "copying");
        check(cudaStreamSynchronize(stream_), "copying");
    }
    void clear(void* at, uint64_t bytes) const {
        if (bytes == 0) return;
        check(cudaMemsetAsync(at, 0, bytes, stream_), "clearing");
        check(cudaStreamSynchronize(stream_), "clearing");
    }

  private:
    cudaStream_t stream_ = nullptr;
};

int32_t device_count() {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return count;
}

int checked_device(int32_t device) {
    const int32_t count = device_count();
    if (device < 0 || device >= count) {
        throw Error(KIVI_ERROR_NO_DEVICE, "device_id is " + std::to_string(device) + "; there are " +
                                              std::to_string(count) + " CUDA devices with a driver");
    }
    return device;
}

int attribute_of(int device, cudaDeviceAttr attribute) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, attribute, device), "asking the device");
    return value;
}

// 0 where there is no such device: sizes can be asked for anywhere.
int32_t capability_of(int device) {
    if (device < 0 || device >= device_count()) return 0;
    return 10 * attribute_of(device, cudaDevAttrComputeCapabilityMajor) +
           attribute_of(device, cudaDevAttrComputeCapabilityMinor);
}

// What a tensor of a layer is, without memory.
TensorStore store_of(const Model& model, const kivi_layer& layer, Part part) {
    TensorStore store;
    store.part = part;
    store.heads = layer.kv_heads;
    store.dim = dim_of(layer, part);
    store.window_dtype = model.window_dtype;
    store.windows = model.windows;
    store.order = {Order::canonical, store.dim, spec_of(layer, part)};
    return store;
}

class CudaBackend final : public Backend {
  public:
    explicit CudaBackend(const Model& model)
        : model_(model), device_(checked_device(model.device_id)), guard_(device_), layers_(model.layers.size()),
          order_(model.layers.size()) {
        if (!compiled_for_this_device()) {
            throw Error(KIVI_ERROR_UNSUPPORTED, "CUDA device " + std::to_string(device_) +
                                                    ": this build has code for " + architectures() + " only");
        }
        gpu_ = {attribute_of(device_, cudaDevAttrMultiProcessorCount), capability_of(device_)};
        own_.reset(new OwnStream);
        const StateLayout at(model);
        state_ = Memory(at.bytes, "lengths and page tables");
        staging_ = Memory(staging_bytes(model), "a page on its way to the host");
        check(cudaMemset(state_.as(), 0, state_.bytes()), "clearing the state");
        const int64_t blocks = pool_blocks(model);
        for (size_t i = 0; i < layers_.size(); ++i) {
            if (model.has(static_cast<int>(i))) make_layer(static_cast<int>(i), blocks, at);
        }
        check(cudaDeviceSynchronize(), "creating the cache");
        guard_.restore();
    }

    ~CudaBackend() override {
        // A destructor neither throws nor reports: after a device error these calls fail, and the memory goes with
        // the context.
        guard_.enter();
        cudaDeviceSynchronize();
        layers_.clear();
        state_ = Memory();
        staging_ = Memory();
        own_.reset();
        guard_.restore();
        cudaGetLastError();
    }

    void append(int layer, Rows rows, const View& k, const View& v, kivi_stream stream) override {
        const DeviceGuard guard(device_);
        check_view("k", k);
        check_view("v", v);
        order_.change(layer, place_of(stream));
        WriteArgs args;
        args.layer = layers_[layer].args;
        args.k = k;
        args.v = v;
        for_each_portion(rows, args.batch, [&] {
            write(args, gpu_.multiprocessors, stream_of(stream));
            check_launch("append");
        });
    }

    void flush(int layer, Rows rows, kivi_stream stream) override {
        const DeviceGuard guard(device_);
        order_.change(layer, place_of(stream));
        WriteArgs args;
        args.mode = WriteMode::flush;
        args.layer = layers_[layer].args;
        // Every row that is not skipped has work, whatever its count.
        DeviceRows uncounted;
        if (rows.on_device != nullptr) {
            uncounted = *rows.on_device;
            uncounted.counts = nullptr;
            uncounted.max_count = 1;
            rows.on_device = &uncounted;
        }
        for_each_portion(rows, args.batch, [&] {
            write(args, gpu_.multiprocessors, stream_of(stream));
            check_launch("flush");
        });
    }

    size_t attend_workspace(int layer, int32_t rows, int32_t max_count) const override {
        const LayerMemory& at = layers_[layer];
        return attend_call_workspace(at.args, at.fast, rows, max_count, gpu_);
    }

    void attend(const AttendCall& call) const override {
        attend_as(call, "params.k", "params.v");
    }

    void step(const AttendCall& call) override {
        // Rows of one sequence (BATCH-2) must not come to stand in launches of their own.
        if (call.rows.on_device != nullptr && call.rows.on_device->rows > kRowsAtOnce) {
            attend_as(call, "k", "v");
            return append(call.layer, call.rows, call.k, call.v, call.stream);
        }
        const DeviceGuard guard(device_);
        AttendArgs args = checked_args(call, "k", "v");
        WriteArgs append;
        append.layer = args.layer;
        append.k = call.k;
        append.v = call.v;
        const LaunchPlace place = place_of(call.stream);
        for_each_portion(call.rows, args.batch, [&] {
            args.keeps = decode_keeps(args);
            try {
                launch_attend(call, args, place);
            } catch (...) {
                order_.change(call.layer, place);  // it may be on its way
                throw;
            }
            order_.change(call.layer, place);  // after the gate that it is itself
            if (args.keeps) return;
            append.batch = args.batch;
            write(append, gpu_.multiprocessors, stream_of(call.stream));
            check_launch("append");
        });
    }

    void dequantize(int layer, const Row& row, int64_t begin, int64_t end, const View& k, const View& v,
                    bool stored_basis, kivi_stream stream) const override {
        const DeviceGuard guard(device_);
        check_view("k", k);
        check_view("v", v);
        DequantizeArgs args;
        args.layer = layers_[layer].args;
        args.sequence = row.sequence;
        args.begin = begin;
        args.end = end;
        args.stored_basis = stored_basis;
        for (Part part : {Part::key, Part::value}) {
            args.part = part;
            args.to = part == Part::key ? k : v;
            if (!args.to) continue;
            cuda::dequantize(args, stream_of(stream));
            check_launch("dequantize");
        }
    }

    void export_page(int layer, Part part, int head, int32_t block, int64_t tokens, uint8_t* to) const override {
        const DeviceGuard guard(device_);
        const std::lock_guard<std::mutex> lock(staging_mutex_);  // exports may run side by side
        const TensorStore& store = layers_[layer].args.part(part);
        cuda::export_page(store, store.page(block, head), static_cast<int32_t>(tokens), staging_.as(), *own_);
        check_launch("export");
        own_->copy(to, staging_.as(), packed_bytes(store.spec(), store.dim, store.window_dtype, tokens));
    }

    void import_page(int layer, Part part, int head, int32_t block, int64_t tokens, const uint8_t* from) override {
        const DeviceGuard guard(device_);
        order_.change(layer, place_of(*own_));
        const TensorStore& store = layers_[layer].args.part(part);
        own_->copy(staging_.as(), from, packed_bytes(store.spec(), store.dim, store.window_dtype, tokens));
        cuda::import_page(store, store.page(block, head), static_cast<int32_t>(tokens), staging_.as(), *own_);
        check_launch("import");
        check(cudaStreamSynchronize(*own_), "import");
    }

    void export_window(int layer, Part part, int head, int32_t sequence, int64_t begin, int64_t end,
                       uint8_t* to) const override {
        const DeviceGuard guard(device_);
        const TensorStore& store = layers_[layer].args.part(part);
        for_each_stretch(store, begin, end, [&](int64_t position, int64_t rows) {
            const uint64_t bytes = rows * store.row_bytes();
            own_->copy(to, store.window_row(sequence, head, position), bytes);
            to += bytes;
        });
    }

    void import_window(int layer, Part part, int head, int32_t sequence, int64_t begin, int64_t end,
                       const uint8_t* from) override {
        const DeviceGuard guard(device_);
        order_.change(layer, place_of(*own_));
        const TensorStore& store = layers_[layer].args.part(part);
        for_each_stretch(store, begin, end, [&](int64_t position, int64_t rows) {
            const uint64_t bytes = rows * store.row_bytes();
            own_->copy(store.window_row(sequence, head, position), from, bytes);
            from += bytes;
        });
    }

    void synchronize(kivi_stream stream) const override {
        const DeviceGuard guard(device_);
        check(cudaStreamSynchronize(stream_of(stream)), "waiting for the stream");
    }

    bool read_state(std::vector<Span>* spans, std::vector<int32_t>* full) const override {
        const DeviceGuard guard(device_);
        const StateLayout at(model_);
        own_->copy(spans->data(), state_.as(), spans->size() * sizeof(Span));
        own_->copy(full->data(), state_.as() + at.full, full->size() * sizeof(int32_t));
        return true;
    }

    void bind_blocks(int32_t sequence, const int32_t* blocks, int64_t begin, int64_t end,
                     kivi_stream stream) override {
        const DeviceGuard guard(device_);
        order_.change(place_of(stream));
        const StateLayout at(model_);
        BlockList list;
        for (int64_t page = begin; page < end;) {
            list.size = static_cast<int32_t>(std::min<int64_t>(kEntriesAtOnce, end - page));
            for (int32_t i = 0; i < list.size; ++i, ++page) {
                list.entries[i] = {sequence, static_cast<int32_t>(page), blocks[page]};
            }
            cuda::bind_blocks(list, reinterpret_cast<int32_t*>(state_.as() + at.table), blocks_per_sequence(model_),
                              reinterpret_cast<int32_t*>(state_.as() + at.bound), stream_of(stream));
            check_launch("page table");
        }
    }

    void set_sequence(int32_t sequence, const std::vector<Span>& layers, const int32_t* blocks, int64_t block_count,
                      kivi_stream stream) override {
        const DeviceGuard guard(device_);
        order_.change(place_of(stream));
        const StateLayout at(model_);
        SpanList list;
        list.sequence = sequence;
        list.max_sequences = model_.max_sequences;
        const int32_t count = static_cast<int32_t>(layers.size());
        for (int32_t first = 0; first < count; first += kSpansAtOnce) {
            list.first_layer = first;
            list.layers = std::min(kSpansAtOnce, count - first);
            std::copy(layers.begin() + first, layers.begin() + first + list.layers, list.spans);
            set_spans(list, state_.as<Span>(), reinterpret_cast<int32_t*>(state_.as() + at.bound),
                      reinterpret_cast<int32_t*>(state_.as() + at.full), stream_of(stream));
            check_launch("lengths");
        }
        bind_blocks(sequence, blocks, 0, block_count, stream);
    }

    void accumulate_moments(int layer, Rows rows, const View& q, kivi_stream stream) override {
        const DeviceGuard guard(device_);
        check_view("q", q);
        MomentArgs args;
        args.layer = layers_[layer].args;
        args.q = q;
        args.sums = layers_[layer].moments.as<float>();
        for_each_portion(rows, args.batch, [&] {
            cuda::accumulate_moments(args, stream_of(stream));
            check_launch("moments");
        });
    }

    void read_moments(int layer, float* sums) const override {
        const DeviceGuard guard(device_);
        const Memory& moments = layers_[layer].moments;
        own_->copy(sums, moments.as(), moments.bytes());
    }

    void write_moments(int layer, const float* sums) override {
        const DeviceGuard guard(device_);
        Memory& moments = layers_[layer].moments;
        own_->copy(moments.as(), sums, moments.bytes());
    }

    void set_feedback(int layer, const std::vector<Feedback>& heads) override {
        LayerMemory& at = layers_[layer];
        at.args.feedback = FeedbackTables{};
        if (heads.empty()) return;
        const DeviceGuard guard(device_);
        check(cudaDeviceSynchronize(), "encoder tables");  // earlier packers may still read the old ones
        const int dim = heads[0].dim;
        const int64_t count = static_cast<int64_t>(heads.size());
        std::vector<uint16_t> order, place(count * dim);
        std::vector<float> weights(count * panel_floats(dim), 0.0f);
        for (int64_t head = 0; head < count; ++head) {
            const Feedback& table = heads[head];
            order.insert(order.end(), table.order.begin(), table.order.end());
            for (int j = 0; j < dim; ++j) place[head * dim + table.order[j]] = static_cast<uint16_t>(j);
            float* const panels = weights.data() + head * panel_floats(dim);
            for (int j = 0; j < dim; ++j) {
                const float* const row = table.weights.data() + feedback_row(dim, j);
                for (int c = j + 1; c < dim; ++c) {
                    panels[panel_begin(c / kPanel) + j * kPanel + c % kPanel] = row[c - j - 1];
                }
            }
        }
        uint8_t* to = at.feedback.as();
        FeedbackTables tables;
        tables.weights = reinterpret_cast<float*>(to);
        own_->copy(to, weights.data(), weights.size() * sizeof(float));
        to += weights.size() * sizeof(float);
        tables.order = reinterpret_cast<uint16_t*>(to);
        own_->copy(to, order.data(), order.size() * sizeof(uint16_t));
        to += order.size() * sizeof(uint16_t);
        tables.place = reinterpret_cast<uint16_t*>(to);
        own_->copy(to, place.data(), place.size() * sizeof(uint16_t));
        at.args.feedback = tables;
    }

    void download(void* to, const void* from, size_t bytes, kivi_stream stream) const override {
        const DeviceGuard guard(device_);
        check_device_pointer("m", from, device_);
        check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)), "copying");
        check(cudaStreamSynchronize(stream_of(stream)), "copying");
    }

    // Waits for the device, so that appends that were made are counted. After an error, or while a stream of this
    // thread is being captured: what was last known.
    int64_t saturated_rows(int layer) const override {
        try {
            const DeviceGuard guard(device_);
            unsigned long long rows = 0;
            check(cudaDeviceSynchronize(), "statistics");
            own_->copy(&rows, layers_[layer].args.saturated, sizeof rows);
            layers_[layer].saturated_rows = static_cast<int64_t>(rows);
        } catch (const Error&) {
        }
        return layers_[layer].saturated_rows;
    }

    void reset(kivi_stream stream) override {
        const DeviceGuard guard(device_);
        order_.change(place_of(stream));
        const StateLayout at(model_);
        check(cudaMemsetAsync(state_.as() + at.saturated, 0, at.table - at.saturated, stream_of(stream)), "reset");
    }

    void grow_pool(int64_t more, kivi_stream stream) override {
        const DeviceGuard guard(device_);
        order_.change(place_of(stream));
        std::vector<Memory> grown(layers_.size());
        for (size_t i = 0; i < layers_.size(); ++i) {
            if (!model_.has(static_cast<int>(i))) continue;
            grown[i] = Memory(layers_[i].pages.bytes() + arena_bytes(static_cast<int>(i), more), "pages");
        }
        check(cudaStreamSynchronize(stream_of(stream)), "waiting for the stream");
        for (size_t i = 0; i < layers_.size(); ++i) {
            if (!model_.has(static_cast<int>(i))) continue;
            LayerMemory& layer = layers_[i];
            own_->copy(grown[i].as(), layer.pages.as(), layer.pages.bytes());
            clear_pages(layer, grown[i], layer.pages.bytes());
        }
        check(cudaDeviceSynchronize(), "growing the pool");  // readers of the old pages
        for (size_t i = 0; i < layers_.size(); ++i) {
            LayerMemory& layer = layers_[i];
            layer.pages = std::move(grown[i]);
            layer.args.key.pages = layer.args.value.pages = layer.pages.as();
        }
    }

  private:
    struct LayerMemory {
        Layer args;  // what kernels are given
        bool fast = false;  // decode.h has a kernel
        Memory pages, windows, moments, feedback;
        mutable std::atomic<int64_t> saturated_rows{0};  // as last read
    };

    // The device is current while the constructor and the destructor run, whatever throws between.
    class Current {
      public:
        explicit Current(int device) : device_(device) { enter(); }
        ~Current() { restore(); }
        void enter() { guard_.reset(new DeviceGuard(device_)); }
        void restore() { guard_.reset(); }

      private:
        int device_;
        std::unique_ptr<DeviceGuard> guard_;
    };

    void check_view(const char* name, const View& view) const {
        if (view) check_device_pointer(name, view.data, device_);
    }

    // Of a call, but for its rows. k, v: what fresh keys and values are called.
    AttendArgs checked_args(const AttendCall& call, const char* k, const char* v) const {
        check_view("q", call.q);
        check_view("out", call.out);
        check_view(k, call.k);
        check_view(v, call.v);
        check_view("params.lse", call.lse);
        if (call.learned_sinks != nullptr) check_device_pointer("params.learned_sinks", call.learned_sinks, device_);
        if (call.workspace_bytes > 0) check_device_pointer("workspace", call.workspace, device_);
        AttendArgs args;
        args.layer = layers_[call.layer].args;
        args.q = call.q;
        args.out = call.out;
        args.k = call.k;
        args.v = call.v;
        args.lse = call.lse;
        args.scale = call.scale;
        args.soft_cap = call.soft_cap;
        args.window_left = call.window_left;
        args.learned_sinks = call.learned_sinks;
        args.workspace = static_cast<float*>(call.workspace);
        args.invariant = (call.flags & KIVI_ATTEND_INVARIANT) != 0;
        return args;
    }
    void attend_as(const AttendCall& call, const char* k, const char* v) const {
        const DeviceGuard guard(device_);
        AttendArgs args = checked_args(call, k, v);
        const LaunchPlace place = place_of(call.stream);
        for_each_portion(call.rows, args.batch, [&] { launch_attend(call, args, place); });
    }
    // A portion's launches.
    void launch_attend(const AttendCall& call, AttendArgs& args, const LaunchPlace& place) const {
        args.settled = order_.settled(call.layer, place);
        const bool decoded = attend_call(args, layers_[call.layer].fast, gpu_, stream_of(call.stream));
        check_launch("attend");
        if (decoded) order_.gate(place);
    }

    // Fills `batch` with rows as many as one launch takes, and launches, until all are done.
    template <class Launch>
    void for_each_portion(Rows rows, BatchArgs& batch, const Launch& launch) const {
        const int32_t size = rows.on_device != nullptr ? rows.on_device->rows : rows.size;
        if (rows.on_device != nullptr) {
            const DeviceRows& from = *rows.on_device;
            batch.on_device = true;
            batch.max_count = from.max_count;
            batch.most_pages = blocks_per_sequence(model_);
            batch.arrays = {from.sequences,       from.counts,    from.offsets,
                            model_.max_sequences, from.max_count, from.tokens};
            if (from.sequences != nullptr) check_device_pointer("batch.sequences", from.sequences, device_);
            if (from.counts != nullptr) check_device_pointer("batch.counts", from.counts, device_);
            if (from.offsets != nullptr) check_device_pointer("batch.offsets", from.offsets, device_);
        } else {
            int64_t longest = 0;
            for (const Row& row : rows) {
                longest = std::max(longest, row.count);
                batch.most_pages = std::max(batch.most_pages, row.block_count);
            }
            batch.max_count = static_cast<int32_t>(longest);
        }
        for (int32_t first = 0; first < size; first += kRowsAtOnce) {
            batch.first_row = first;
            batch.size = std::min(kRowsAtOnce, size - first);
            for (int32_t i = 0; rows.on_device == nullptr && i < batch.size; ++i) {
                const Row& row = rows.data[first + i];
                batch.rows[i] = {row.sequence, row.index, static_cast<int32_t>(row.count), row.offset};
            }
            launch();
        }
    }

    // Window rows begin .. end - 1 as stretches that follow one another in memory (the tail is a ring).
    template <class Visit>
    static void for_each_stretch(const TensorStore& store, int64_t begin, int64_t end, const Visit& visit) {
        while (begin < end) {
            int64_t rows = end - begin;
            if (begin >= store.windows.sink) {
                rows = std::min(rows, store.tail_rows - (begin - store.windows.sink) % store.tail_rows);
            }
            visit(begin, rows);
            begin += rows;
        }
    }

    uint64_t arena_bytes(int layer, int64_t blocks) const {
        const kivi_layer& shape = model_.layers[layer];
        return static_cast<uint64_t>(blocks) * shape.kv_heads * page_bytes(shape, model_.window_dtype);
    }

    // New pages, from byte `from` on. Visits of fast kernels read blocks whole: what no token has been written to is
    // masked, but not left to be anything.
    void clear_pages(const LayerMemory& layer, const Memory& pages, uint64_t from) const {
        if (layer.args.key.order.order == Order::fragment) own_->clear(pages.as() + from, pages.bytes() - from);
    }

    void make_layer(int index, int64_t blocks, const StateLayout& at) {
        const kivi_layer& shape = model_.layers[index];
        LayerMemory& layer = layers_[index];
        layer.pages = Memory(arena_bytes(index, blocks), "pages");
        const uint64_t sequences = static_cast<uint64_t>(model_.max_sequences);
        layer.windows = Memory(sequences * (window_part_bytes(model_, index, Part::key) +
                                            window_part_bytes(model_, index, Part::value)),
                               "sink windows and tails");
        layer.moments = Memory(matrix_bytes(shape), "moments");
        layer.feedback = Memory(feedback_bytes(shape), "encoder tables");
        if (layer.moments.bytes() > 0) {
            check(cudaMemset(layer.moments.as(), 0, layer.moments.bytes()), "clearing the moments");
        }
        Layer& args = layer.args;
        args.q_heads = shape.q_heads;
        args.max_tokens = model_.max_tokens;
        args.spans = state_.as<Span>() + static_cast<int64_t>(index) * model_.max_sequences;
        args.table = reinterpret_cast<int32_t*>(state_.as() + at.table);
        args.table_stride = blocks_per_sequence(model_);
        args.bound = reinterpret_cast<int32_t*>(state_.as() + at.bound);
        args.full = reinterpret_cast<int32_t*>(state_.as() + at.full);
        args.arrivals = reinterpret_cast<uint32_t*>(state_.as() + at.arrivals) +
                        static_cast<int64_t>(index) * model_.max_sequences;
        args.saturated = reinterpret_cast<unsigned long long*>(state_.as() + at.saturated) + index;
        uint8_t* window = layer.windows.as();
        for (Part part : {Part::key, Part::value}) {
            TensorStore& store = part == Part::key ? args.key : args.value;
            store = store_of(model_, shape, part);
            store.tail_rows = tail_capacity(model_.windows, part);
            store.pages = layer.pages.as();
            store.page_bytes = page_bytes(shape, model_.window_dtype);
            store.part_offset = part == Part::key ? 0 : page_part_bytes(shape.k, shape.key_dim, model_.window_dtype);
            const int64_t rows = static_cast<int64_t>(model_.max_sequences) * shape.kv_heads;
            store.sink = window;
            window += rows * model_.windows.sink * store.row_bytes();
            store.tail = window;
            window += rows * store.tail_rows * store.row_bytes();
        }
        prepare_write(args);
        prepare_attend(args);
        layer.fast = decode_serves(args.key, args.value, shape.q_heads / shape.kv_heads, gpu_.capability);
        if (layer.fast) args.clusters = prepare_decode(args.key, args.value);
        args.steps = layer.fast && step_serves(args.key, args.value);
        if (args.steps) prepare_step(args);
        if (layer.fast && has_codes(shape)) {
            args.key.order.order = args.value.order.order = Order::fragment;
            clear_pages(layer, layer.pages, 0);
            prepare_prefill(args.key, gpu_);
            prepare_pack(args);
        }
    }

    const Model model_;
    const int device_;
    Current guard_;
    Gpu gpu_;
    std::unique_ptr<OwnStream> own_;
    Memory state_, staging_;
    mutable std::mutex staging_mutex_;
    std::vector<LayerMemory> layers_;
    mutable LaunchOrder order_;
};

kivi_device_info query(int32_t device) {
    kivi_device_info info{};
    info.struct_size = sizeof info;
    info.device = KIVI_CUDA;
    info.device_id = device;
    const auto set = [](char* to, size_t size, const std::string& text) {
        std::strncpy(to, text.c_str(), size - 1);
    };
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
        set(info.reason, sizeof info.reason, cudaGetErrorString(cudaGetLastError()));
        return info;
    }
    info.threads = properties.multiProcessorCount;
    info.capability = 10 * properties.major + properties.minor;
    info.memory_bytes = properties.totalGlobalMem;
    set(info.name, sizeof info.name, properties.name);
    try {
        const DeviceGuard guard(device);
        info.available = compiled_for_this_device();
    } catch (const Error& error) {
        set(info.reason, sizeof info.reason, error.what());
        return info;
    }
    if (!info.available) {
        set(info.reason, sizeof info.reason, std::string("this build has code for ") + architectures() + " only");
    }
    return info;
}

PathInfo path(const Model& model, const kivi_layer& layer) {
    PathInfo info;
    if (model.reference) {
        info.reason = "KIVI_CACHE_REFERENCE (flags 1) is for the CPU";
        return info;
    }
    if (layer.kv_heads > 32767) {
        info.reason = "kv_heads is " + std::to_string(layer.kv_heads) + "; on CUDA it must be at most 32767";
        return info;
    }
    const TensorStore key = store_of(model, layer, Part::key), value = store_of(model, layer, Part::value);
    info.reason = why_not_decode(key, value, layer.q_heads / layer.kv_heads, capability_of(model.device_id));
    info.attend_path = info.reason.empty() ? KIVI_PATH_FAST : KIVI_PATH_GENERAL;
    info.pack_path = info.reason.empty() && pack_serves(key, value) ? KIVI_PATH_FAST : KIVI_PATH_GENERAL;
    return info;
}

// Canonical unless some layer has codes in the fragment order.
uint64_t layout_version(const Model& model) {
    for (size_t i = 0; i < model.layers.size(); ++i) {
        if (!model.has(static_cast<int>(i)) || !has_codes(model.layers[i])) continue;
        if (path(model, model.layers[i]).attend_path == KIVI_PATH_FAST) return kFragmentVersion;
    }
    return 0;
}

std::unique_ptr<Backend> create(const Model& model) { return std::make_unique<CudaBackend>(model); }

void merge_tensors(const MergeCall& call) {
    const DeviceGuard guard(checked_device(call.device_id));
    if (call.outs.size() > kPartsAtOnce) {
        throw Error(KIVI_ERROR_UNSUPPORTED, "parts is " + std::to_string(call.outs.size()) +
                                                "; on CUDA it must be at most " + std::to_string(kPartsAtOnce));
    }
    MergeArgs args;
    args.rows = call.rows;
    args.tokens = call.tokens;
    args.heads = call.heads;
    args.dim = call.dim;
    if (args.rows * args.tokens * args.heads == 0) return;
    args.parts = static_cast<int32_t>(call.outs.size());
    for (int32_t i = 0; i < args.parts; ++i) {
        args.outs[i] = call.outs[i];
        args.lses[i] = call.lses[i];
        if (call.outs[i]) check_device_pointer("outs[i]", call.outs[i].data, call.device_id);
        check_device_pointer("lses[i]", call.lses[i].data, call.device_id);
    }
    args.out = call.out;
    args.lse = call.lse;
    args.learned_sinks = call.learned_sinks;
    if (call.out) check_device_pointer("out", call.out.data, call.device_id);
    if (call.lse) check_device_pointer("lse", call.lse.data, call.device_id);
    if (call.learned_sinks) check_device_pointer("learned_sinks", call.learned_sinks, call.device_id);
    merge(args, stream_of(call.stream));
    check_launch("merge");
}

void* allocate(int32_t device_id, size_t bytes) {
    const DeviceGuard guard(device_id);
    return Memory(bytes, "the caller").release();
}

void release(int32_t device_id, void* memory) {
    const DeviceGuard guard(device_id);
    check_device_pointer("memory", memory, device_id);
    check(cudaFree(memory), "giving memory back");
}

void copy(int32_t device_id, void* to, const void* from, size_t bytes, kivi_stream stream) {
    const DeviceGuard guard(device_id);
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)), "copying");
    check(cudaStreamSynchronize(stream_of(stream)), "copying");
}

}  // namespace

const char* architectures() { return KIVI_CUDA_ARCHITECTURES; }

const BackendKind& backend_kind() {
    static const BackendKind kind{KIVI_CUDA, device_count,  query,    path,    layout_version, scratch_bytes,
                                  create,    merge_tensors, allocate, release, copy};
    return kind;
}

}  // namespace kivi::cuda
