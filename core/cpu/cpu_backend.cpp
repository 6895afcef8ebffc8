// The CPU as a Backend: allocates what storage.h describes and hands every call to the file that does it,
// spread over heads and rows.
#include "cpu/cpu_backend.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include <unistd.h>

#include "backend/processors.h"
#include "cpu/append.h"
#include "cpu/attend.h"
#include "cpu/canonical.h"
#include "cpu/dequantize.h"
#include "cpu/memory.h"
#include "cpu/merge.h"
#include "cpu/moments.h"
#include "cpu/reference_attend.h"
#include "cpu/simd.h"
#include "cpu/storage.h"
#include "cpu/thread_pool.h"
#include "cpu/write_kernels.h"
#include "format/error.h"

namespace kivi::cpu {
namespace {

// Below this many rows (tokens times heads) an append is not worth waking a thread for.
constexpr int64_t kRowsWorthThreads = 512;

struct Layer {
    LayerStore store;
    Buffer windows;  // sink rows and tail rows of K, then of V
    Buffer pages;
    Buffer moments;  // [kv_heads][key_dim][key_dim], only for query-aware specs
    const std::vector<Feedback>* feedback = nullptr;  // the cache's, one a head; NULL: nearest rounding
    std::atomic<int64_t> saturated_rows{0};
};

TensorStore tensor_store(const Model& model, const kivi_layer& layer, Part part) {
    TensorStore store;
    store.part = part;
    store.spec = spec_of(layer, part);
    store.heads = layer.kv_heads;
    store.dim = dim_of(layer, part);
    store.window_dtype = model.window_dtype;
    store.windows = model.windows;
    store.order = page_order(store.spec, store.dim);
    store.tail_rows = tail_capacity(model.windows, part);
    store.page_bytes = page_bytes(layer, model.window_dtype);
    store.part_offset = part == Part::key ? 0 : page_part_bytes(layer.k, layer.key_dim, model.window_dtype);
    return store;
}

int64_t scratch_floats(const Model& model) {
    int64_t floats = 0;
    for (const kivi_layer& layer : model.layers) {
        if (layer.kv_heads > 0) floats = std::max(floats, append_scratch_floats(layer));
    }
    return floats;
}

class CpuBackend final : public Backend {
  public:
    explicit CpuBackend(const Model& model)
        : model_(model),
          pool_(model.threads),
          scratch_floats_(scratch_floats(model)),
          scratch_(static_cast<uint64_t>(model.threads * scratch_floats_) * sizeof(float), "scratch"),
          layers_(model.layers.size()) {
        const int64_t blocks = pool_blocks(model);
        for (size_t i = 0; i < layers_.size(); ++i) {
            if (model.has(static_cast<int>(i))) make_layer(static_cast<int>(i), blocks);
        }
    }

    void append(int layer, Rows rows, const View& k, const View& v, kivi_stream) override {
        write(layers_[layer], rows, k, v);
    }

    void flush(int layer, Rows rows, kivi_stream) override { write(layers_[layer], rows, View{}, View{}); }

    size_t attend_workspace(int layer, int32_t rows, int32_t max_count) const override {
        if (model_.reference) return 0;
        return cpu::attend_workspace(layers_[layer].store, model_.max_tokens, pool_.threads(), rows,
                                     max_count);
    }

    void attend(const AttendCall& call) const override {
        const LayerStore& store = layers_[call.layer].store;
        model_.reference ? reference_attend(store, call, pool_) : fast_attend(store, call, pool_);
    }

    void dequantize(int layer, const Row& row, int64_t begin, int64_t end, const View& k, const View& v,
                    bool stored_basis, kivi_stream) const override {
        const LayerStore& store = layers_[layer].store;
        if (k) cpu::dequantize(store.key, row, begin, end, k, stored_basis);
        if (v) cpu::dequantize(store.value, row, begin, end, v, stored_basis);
    }

    void export_page(int layer, Part part, int head, int32_t block, int64_t tokens,
                     uint8_t* to) const override {
        const TensorStore& store = layers_[layer].store.part(part);
        export_part(store, store.page(block, head), tokens, to);
    }

    void import_page(int layer, Part part, int head, int32_t block, int64_t tokens,
                     const uint8_t* from) override {
        const TensorStore& store = layers_[layer].store.part(part);
        import_part(store, store.page(block, head), tokens, from);
    }

    void export_window(int layer, Part part, int head, int32_t sequence, int64_t begin, int64_t end,
                       uint8_t* to) const override {
        const TensorStore& store = layers_[layer].store.part(part);
        for (int64_t position = begin; position < end; ++position, to += store.row_bytes()) {
            std::memcpy(to, window_row(store, sequence, head, position), store.row_bytes());
        }
    }

    void import_window(int layer, Part part, int head, int32_t sequence, int64_t begin, int64_t end,
                       const uint8_t* from) override {
        const TensorStore& store = layers_[layer].store.part(part);
        for (int64_t position = begin; position < end; ++position, from += store.row_bytes()) {
            std::memcpy(window_row(store, sequence, head, position), from, store.row_bytes());
        }
    }

    // Work is done when a call returns, and the cache's lengths and page tables are the only ones.
    void synchronize(kivi_stream) const override {}
    void set_sequence(int32_t, const std::vector<Span>&, const int32_t*, int64_t, kivi_stream) override {}

    void accumulate_moments(int layer, Rows rows, const View& q, kivi_stream) override {
        Layer& at = layers_[layer];
        pool_.parallel(at.store.shape.kv_heads, [&](int64_t head, int) {
            cpu::accumulate_moments(at.store, rows, q, static_cast<int>(head), moments(at, head));
        });
    }

    void read_moments(int layer, float* sums) const override {
        const Buffer& moments = layers_[layer].moments;
        std::memcpy(sums, moments.data(), moments.size());
    }

    void write_moments(int layer, const float* sums) override {
        Buffer& moments = layers_[layer].moments;
        std::memcpy(moments.data(), sums, moments.size());
    }

    void set_feedback(int layer, const std::vector<Feedback>& heads) override {
        layers_[layer].feedback = heads.empty() ? nullptr : &heads;
    }

    int64_t saturated_rows(int layer) const override { return layers_[layer].saturated_rows.load(); }

    void reset(kivi_stream) override {
        for (Layer& layer : layers_) layer.saturated_rows.store(0);
    }

    void grow_pool(int64_t more, kivi_stream) override {
        std::vector<Buffer> grown(layers_.size());
        for (size_t i = 0; i < layers_.size(); ++i) {
            if (!model_.has(static_cast<int>(i))) continue;
            grown[i] = Buffer(layers_[i].pages.size() + arena_bytes(static_cast<int>(i), more), "pages");
        }
        for (size_t i = 0; i < layers_.size(); ++i) {
            Layer& layer = layers_[i];
            if (layer.pages.size() > 0) std::memcpy(grown[i].data(), layer.pages.data(), layer.pages.size());
            layer.pages = std::move(grown[i]);
            layer.store.key.pages = layer.store.value.pages = layer.pages.data();
        }
    }

  private:
    static uint8_t* window_row(const TensorStore& store, int32_t sequence, int head, int64_t position) {
        return position < store.windows.sink ? store.sink_row(sequence, head, position)
                                             : store.tail_row(sequence, head, store.tail_slot(position));
    }

    static float* moments(Layer& layer, int64_t head) {
        const int64_t dim = layer.store.shape.key_dim;
        return reinterpret_cast<float*>(layer.moments.data()) + head * dim * dim;
    }

    uint64_t arena_bytes(int layer, int64_t blocks) const {
        const kivi_layer& shape = model_.layers[layer];
        return static_cast<uint64_t>(blocks) * shape.kv_heads * page_bytes(shape, model_.window_dtype);
    }

    void make_layer(int index, int64_t blocks) {
        const kivi_layer& shape = model_.layers[index];
        Layer& layer = layers_[index];
        layer.store.shape = shape;
        layer.pages = Buffer(arena_bytes(index, blocks), "pages");
        const uint64_t sequences = static_cast<uint64_t>(model_.max_sequences);
        layer.windows = Buffer(sequences * (window_part_bytes(model_, index, Part::key) +
                                            window_part_bytes(model_, index, Part::value)),
                               "sink windows and tails");
        uint8_t* at = layer.windows.data();
        for (Part part : {Part::key, Part::value}) {
            TensorStore& store = part == Part::key ? layer.store.key : layer.store.value;
            store = tensor_store(model_, shape, part);
            const int64_t rows = static_cast<int64_t>(model_.max_sequences) * shape.kv_heads;
            store.sink = at;
            at += rows * model_.windows.sink * store.row_bytes();
            store.tail = at;
            at += rows * store.tail_rows * store.row_bytes();
            store.pages = layer.pages.data();
        }
        if (shape.k.rounding == KIVI_ROUND_QUERY_AWARE) {
            layer.moments =
                Buffer(static_cast<uint64_t>(shape.kv_heads) * shape.key_dim * shape.key_dim * sizeof(float),
                       "moments");
        }
    }

    // One item is one tensor of one row, or a share of its heads: items touch disjoint memory.
    void write(Layer& layer, Rows rows, const View& k, const View& v) {
        const int heads = layer.store.shape.kv_heads;
        const bool threaded = rows_of_work(rows) * heads >= kRowsWorthThreads;
        const int shares = threaded ? std::min(heads, pool_.threads()) : 1;
        const auto item = [&](int64_t i, int thread) {
            const Row& row = rows.data[i / (2 * shares)];
            const bool key = i / shares % 2 == 0;
            const int share = static_cast<int>(i % shares);
            const Feedback* feedback = key && layer.feedback != nullptr ? layer.feedback->data() : nullptr;
            const AppendMeans means{model_.reference,
                                    reinterpret_cast<float*>(scratch_.data()) + thread * scratch_floats_};
            const int64_t saturated =
                append_heads(key ? layer.store.key : layer.store.value, feedback, row, heads * share / shares,
                             heads * (share + 1) / shares, key ? k : v, means);
            if (saturated > 0) layer.saturated_rows.fetch_add(saturated, std::memory_order_relaxed);
        };
        const int64_t items = static_cast<int64_t>(rows.size) * 2 * shares;
        if (threaded) {
            pool_.parallel(items, item);
        } else {
            for (int64_t i = 0; i < items; ++i) item(i, 0);
        }
    }

    static int64_t rows_of_work(Rows rows) {
        int64_t tokens = 0;
        for (const Row& row : rows) {
            tokens += row.after.length - row.before.length + row.after.key_border - row.before.key_border;
        }
        return tokens;
    }

    const Model model_;
    mutable ThreadPool pool_;
    const int64_t scratch_floats_;
    Buffer scratch_;  // [threads][scratch_floats_]
    std::vector<Layer> layers_;
};

int32_t count() { return 1; }

kivi_device_info query(int32_t) {
    kivi_device_info info{};
    info.struct_size = sizeof info;
    info.device = KIVI_CPU;
    info.available = 1;
    info.threads = processors();
    info.memory_bytes =
        static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    std::strncpy(info.name, simd::target_name(simd::best_target()), sizeof info.name - 1);
    return info;
}

PathInfo path(const Model& model, const kivi_layer& layer) {
    if (model.reference) {
        return {KIVI_PATH_REFERENCE, KIVI_PATH_REFERENCE, "the config asks for the reference backend"};
    }
    PathInfo info = attend_path(layer);
    const bool fast = suits_write_kernels(layer.key_dim) && suits_write_kernels(layer.value_dim);
    info.pack_path = fast ? KIVI_PATH_FAST : KIVI_PATH_GENERAL;
    return info;
}

// Changes with the order of bytes inside pages.
uint64_t layout_version(const Model&) { return 2; }

uint64_t scratch_bytes(const Model& model) {
    return static_cast<uint64_t>(model.threads * scratch_floats(model)) * sizeof(float);
}

std::unique_ptr<Backend> create(const Model& model) { return std::make_unique<CpuBackend>(model); }

constexpr std::align_val_t kAlignment{64};

// Not the form that throws: a sanitizer ends the program there.
void* allocate(int32_t, size_t bytes) {
    void* memory = ::operator new(bytes, kAlignment, std::nothrow);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}
void release(int32_t, void* memory) { ::operator delete(memory, kAlignment); }
void copy(int32_t, void* to, const void* from, size_t bytes, kivi_stream) { std::memcpy(to, from, bytes); }

}  // namespace

const BackendKind& backend_kind() {
    static const BackendKind kind{KIVI_CPU, count,       query,    path,    layout_version, scratch_bytes,
                                  create,   merge_parts, allocate, release, copy};
    return kind;
}

}  // namespace kivi::cpu
