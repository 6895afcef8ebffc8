// libkivi for C++17: owning types over kivi.h. Header only, no ABI and no behaviour of its own.
//
//   kivi::Config config("k3v2");
//   config.layers(32, /*q_heads*/ 32, /*kv_heads*/ 8, /*head_dim*/ 128).capacity(/*sequences*/ 4, /*tokens*/ 32768);
//   kivi::Cache cache(config);
//   kivi::Workspace workspace = cache.workspace(/*rows*/ 1, /*max_count*/ 1);
//   kivi::Batch batch;
//   batch.add(/*sequence*/ 0, /*count*/ 1);
//   for each token, for each layer:
//     cache.append(layer, batch, {k, {1, 1, 8, 128}}, {v, {1, 1, 8, 128}});
//     cache.attend(layer, batch, {q, {1, 1, 32, 128}}, {out, {1, 1, 32, 128}}, workspace);
//
// A call that fails throws kivi::Error with the status and the sentence of kivi_last_error(); the cache and
// the outputs are then as they were. Units, shapes, ownership, streams and threads: kivi.h. Calls have the
// names of kivi.h. What is not wrapped is reached through get(). SPDX-License-Identifier: Apache-2.0
#ifndef KIVI_KIVI_HPP
#define KIVI_KIVI_HPP

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kivi/kivi.h"

namespace kivi {
inline namespace hpp {  // keeps these types apart from any other kivi:: in the program, the library's own included

// ---- Version ------------------------------------------------------------------------------------------

// "major.minor.patch" of the library that runs.
inline std::string version() { return kivi_version_string(); }
// One line about its build.
inline std::string build_info() { return kivi_build_info(); }

// ---- Errors -------------------------------------------------------------------------------------------

class Error : public std::runtime_error {
  public:
    Error(kivi_status status, const std::string& sentence) : std::runtime_error(sentence), status_(status) {}
    kivi_status status() const noexcept { return status_; }
    const char* status_name() const noexcept { return kivi_status_name(status_); }

  private:
    kivi_status status_;
};

// Throws if `status` is a failure. For direct calls of kivi.h.
inline void check(kivi_status status) {
    if (status != KIVI_OK) throw Error(status, kivi_last_error());
}

// ---- Tensors ------------------------------------------------------------------------------------------

// IEEE binary16 and bfloat16 as bits, for callers without such types of their own.
struct half {
    uint16_t bits;
};
struct bfloat {
    uint16_t bits;
};

// enum kivi_dtype of an element type. Specialise it for your own 16-bit type.
template <class T>
struct dtype_of;
template <>
struct dtype_of<float> : std::integral_constant<int32_t, KIVI_F32> {};
template <>
struct dtype_of<half> : std::integral_constant<int32_t, KIVI_F16> {};
template <>
struct dtype_of<bfloat> : std::integral_constant<int32_t, KIVI_BF16> {};

// Sizes or strides, in elements.
using Extents = std::initializer_list<int64_t>;

// A borrowed view of memory that is only read. The memory must outlive every call it is passed to.
class ConstTensor {
  public:
    // Dense, the last size innermost.
    template <class T>
    ConstTensor(const T* data, Extents shape) : ConstTensor(const_cast<T*>(data), dtype_of<T>::value, shape) {}
    template <class T>
    ConstTensor(const T* data, Extents shape, Extents stride) : ConstTensor(data, shape) {
        set_strides(stride);
    }
    // Dense, over a container or span; it must hold exactly the elements of the shape.
    template <class C, class T = std::remove_pointer_t<decltype(std::declval<const C&>().data())>>
    ConstTensor(const C& values, Extents shape) : ConstTensor(values.data(), shape) {
        require_elements(values.size());
    }
    // Any view: other devices, other dtypes.
    explicit ConstTensor(const kivi_tensor& tensor) : tensor_(tensor) {}

    // On a CUDA device instead of the CPU.
    ConstTensor& on_cuda(int32_t device_id) {
        tensor_.device = KIVI_CUDA;
        tensor_.device_id = device_id;
        return *this;
    }

    const kivi_tensor* get() const noexcept { return &tensor_; }

  protected:
    ConstTensor(void* data, int32_t dtype, Extents shape) : tensor_() {
        require_rank(shape.size());
        tensor_.data = data;
        tensor_.dtype = dtype;
        tensor_.device = KIVI_CPU;
        tensor_.rank = static_cast<int32_t>(shape.size());
        size_t axis = 0;
        for (const int64_t size : shape) tensor_.shape[axis++] = size;
        for (uint64_t step = 1; axis-- > 0; step *= static_cast<uint64_t>(tensor_.shape[axis]))
            tensor_.stride[axis] = static_cast<int64_t>(step);
    }
    void set_strides(Extents stride) {
        if (stride.size() != static_cast<size_t>(tensor_.rank))
            throw Error(KIVI_ERROR_INVALID_ARGUMENT, "tensor: " + std::to_string(stride.size()) +
                                                         " strides for " + std::to_string(tensor_.rank) + " sizes");
        size_t axis = 0;
        for (const int64_t step : stride) tensor_.stride[axis++] = step;
    }
    void require_elements(size_t held) const {
        uint64_t wanted = 1;
        for (int32_t axis = 0; axis < tensor_.rank; ++axis) wanted *= static_cast<uint64_t>(tensor_.shape[axis]);
        if (held != wanted)
            throw Error(KIVI_ERROR_INVALID_ARGUMENT, "tensor: the shape has " + std::to_string(wanted) +
                                                         " elements, the container " + std::to_string(held));
    }

  private:
    static void require_rank(size_t rank) {
        if (rank < 2 || rank > 4)
            throw Error(KIVI_ERROR_INVALID_ARGUMENT, "tensor: rank " + std::to_string(rank) + ", must be 2 to 4");
    }

    kivi_tensor tensor_;
};

// A borrowed view of memory that is written.
class Tensor : public ConstTensor {
  public:
    template <class T>
    Tensor(T* data, Extents shape) : ConstTensor(data, dtype_of<T>::value, shape) {}
    template <class T>
    Tensor(T* data, Extents shape, Extents stride) : Tensor(data, shape) {
        set_strides(stride);
    }
    template <class C, class T = std::remove_pointer_t<decltype(std::declval<C&>().data())>>
    Tensor(C& values, Extents shape) : Tensor(values.data(), shape) {
        require_elements(values.size());
    }
    explicit Tensor(const kivi_tensor& tensor) : ConstTensor(tensor) {}

    Tensor& on_cuda(int32_t device_id) {
        ConstTensor::on_cuda(device_id);
        return *this;
    }
};

// ---- Memory -------------------------------------------------------------------------------------------

// `size` elements on a device (enum kivi_device), owned: for programs without a runtime of their own for it. Moves, does
// not copy.
template <class T>
class Buffer {
  public:
    Buffer() = default;
    // Contents undefined.
    Buffer(int32_t device, int32_t device_id, size_t size) : device_(device), device_id_(device_id), size_(size) {
        void* memory = nullptr;
        check(kivi_device_allocate(device, device_id, size * sizeof(T), &memory));
        data_ = static_cast<T*>(memory);
    }
    Buffer(int32_t device, int32_t device_id, const std::vector<T>& values) : Buffer(device, device_id, values.size()) {
        upload(values.data());
    }
    ~Buffer() { kivi_device_free(device_, device_id_, data_); }
    Buffer(Buffer&& other) noexcept { *this = std::move(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(device_, other.device_);
        std::swap(device_id_, other.device_id_);
        std::swap(size_, other.size_);
        std::swap(data_, other.data_);
        return *this;
    }

    T* data() noexcept { return data_; }
    const T* data() const noexcept { return data_; }
    size_t size() const noexcept { return size_; }

    // All elements, from and to the host: after what is queued on the stream, complete on return.
    void upload(const T* values, kivi_stream stream = nullptr) {
        check(kivi_device_copy(device_, device_id_, data_, values, size_ * sizeof(T), stream));
    }
    std::vector<T> download(kivi_stream stream = nullptr) const {
        std::vector<T> values(size_);
        check(kivi_device_copy(device_, device_id_, values.data(), data_, size_ * sizeof(T), stream));
        return values;
    }

    // Dense, over all elements.
    ConstTensor view(Extents shape) const { return on_device(ConstTensor(*this, shape)); }
    Tensor view(Extents shape) { return on_device(Tensor(*this, shape)); }

  private:
    template <class View>
    View on_device(const View& view) const {
        kivi_tensor tensor = *view.get();
        tensor.device = device_;
        tensor.device_id = device_id_;
        return View(tensor);
    }

    int32_t device_ = KIVI_CPU, device_id_ = 0;
    size_t size_ = 0;
    T* data_ = nullptr;
};

// ---- Batches ------------------------------------------------------------------------------------------

// Which sequences a call is about and how many tokens each brings; owns its arrays. Build it once and
// change the counts from step to step: no call here allocates once the rows are there.
class Batch {
  public:
    Batch() = default;
    // Rows 0 .. rows - 1 are the sequences 0 .. rows - 1 with `count` tokens each.
    Batch(int32_t rows, int32_t count) {
        for (int32_t sequence = 0; sequence < rows; ++sequence) add(sequence, count);
    }

    // Sequence -1 or count 0: a row that is skipped.
    Batch& add(int32_t sequence, int32_t count) {
        sequences_.push_back(sequence);
        counts_.push_back(count);
        return *this;
    }
    // The tokens of every row start at these offsets of rank-3 tensors, one a row. Without it the rows
    // follow one another.
    Batch& offsets(std::vector<int64_t> offsets) {
        if (offsets.size() != sequences_.size())
            throw Error(KIVI_ERROR_INVALID_ARGUMENT, "batch: " + std::to_string(offsets.size()) + " offsets for " +
                                                         std::to_string(sequences_.size()) + " rows");
        offsets_ = std::move(offsets);
        return *this;
    }
    void set_count(int32_t row, int32_t count) { counts_.at(static_cast<size_t>(row)) = count; }
    void set_sequence(int32_t row, int32_t sequence) { sequences_.at(static_cast<size_t>(row)) = sequence; }
    void clear() noexcept {
        sequences_.clear();
        counts_.clear();
        offsets_.clear();
    }
    int32_t rows() const noexcept { return static_cast<int32_t>(sequences_.size()); }

    // The view that kivi.h takes; valid until the batch changes.
    kivi_batch get() const {
        kivi_batch batch;
        check(kivi_batch_init(&batch, sizeof batch));
        batch.rows = rows();
        batch.sequences = sequences_.data();
        batch.counts = counts_.data();
        batch.offsets = offsets_.empty() ? nullptr : offsets_.data();
        return batch;
    }

  private:
    std::vector<int32_t> sequences_, counts_;
    std::vector<int64_t> offsets_;
};

// ---- Configuration ------------------------------------------------------------------------------------

// A growable kivi_config that owns its layer table. Fields without a helper are reached by ->.
class Config {
  public:
    explicit Config(const char* preset = "k3v2") : config_() {
        check(kivi_config_init(&config_, sizeof config_));
        check(kivi_config_preset(&config_, preset));
    }

    // `count` layers of the same shape, stored as the preset says.
    Config& layers(int32_t count, int32_t q_heads, int32_t kv_heads, int32_t key_dim, int32_t value_dim) {
        table_.clear();
        config_.layer_count = count;
        config_.layer.q_heads = q_heads;
        config_.layer.kv_heads = kv_heads;
        config_.layer.key_dim = key_dim;
        config_.layer.value_dim = value_dim;
        return *this;
    }
    Config& layers(int32_t count, int32_t q_heads, int32_t kv_heads, int32_t head_dim) {
        return layers(count, q_heads, kv_heads, head_dim, head_dim);
    }
    // Every layer described by itself; start each from layer(), which holds the preset's specs.
    Config& layers(std::vector<kivi_layer> table) {
        table_ = std::move(table);
        config_.layer_count = static_cast<int32_t>(table_.size());
        return *this;
    }
    const kivi_layer& layer() const noexcept { return config_.layer; }

    // Slots, and the longest sequence in tokens.
    Config& capacity(int32_t max_sequences, int64_t max_tokens) {
        config_.max_sequences = max_sequences;
        config_.max_tokens = max_tokens;
        return *this;
    }
    Config& windows(int32_t sink, int32_t recent, int32_t flush) {
        config_.sink = sink;
        config_.recent = recent;
        config_.flush = flush;
        return *this;
    }
    Config& threads(int32_t count) {
        config_.threads = count;
        return *this;
    }

    kivi_config* operator->() noexcept { return &config_; }
    const kivi_config* operator->() const noexcept { return &config_; }

    // The view that kivi.h takes; valid until this object changes.
    kivi_config get() const {
        kivi_config config = config_;
        if (!table_.empty()) config.layers = table_.data();
        return config;
    }

    // Bytes of the cache that this would create, exact.
    kivi_memory estimate() const {
        const kivi_config config = get();
        kivi_memory memory{};
        check(kivi_cache_estimate(&config, &memory, sizeof memory));
        return memory;
    }
    // Whether create takes layer `index`, by which code path, or the reason why not.
    kivi_support query_support(int32_t index = 0) const {
        const kivi_config config = get();
        kivi_support support{};
        check(kivi_query_support(&config, index, &support, sizeof support));
        return support;
    }

  private:
    kivi_config config_;
    std::vector<kivi_layer> table_;
};

inline std::vector<kivi_preset> presets() {
    std::vector<kivi_preset> all(static_cast<size_t>(kivi_preset_count()));
    int32_t index = 0;
    for (kivi_preset& preset : all) check(kivi_preset_at(index++, &preset, sizeof preset));
    return all;
}

// Devices of one kind (enum kivi_device).
inline std::vector<kivi_device_info> devices(int32_t device) {
    int32_t count = 0;
    check(kivi_device_count(device, &count));
    std::vector<kivi_device_info> all(static_cast<size_t>(count));
    int32_t id = 0;
    for (kivi_device_info& info : all) check(kivi_device_query(device, id++, &info, sizeof info));
    return all;
}

// ---- Attention ----------------------------------------------------------------------------------------

// Memory of the cache's device that attend works in. One for each thread and each stream that attends.
class Workspace {
  public:
    explicit Workspace(size_t bytes = 0, int32_t device = KIVI_CPU, int32_t device_id = 0)
        : device_(device), device_id_(device_id), bytes_(device, device_id, bytes) {}
    // Never shrinks; what attend left there is lost.
    void reserve(size_t bytes) {
        if (bytes > bytes_.size()) bytes_ = Buffer<unsigned char>(device_, device_id_, bytes);
    }
    void* data() noexcept { return bytes_.data(); }
    size_t size() const noexcept { return bytes_.size(); }

  private:
    int32_t device_, device_id_;
    Buffer<unsigned char> bytes_;
};

// What attend may be told beyond its tensors; the defaults are those of kivi.h.
class AttendParams {
  public:
    AttendParams() : params_() { check(kivi_attend_params_init(&params_, sizeof params_)); }

    AttendParams& scale(float factor) {
        params_.scale = factor;
        return *this;
    }
    AttendParams& soft_cap(float cap) {
        params_.soft_cap = cap;
        return *this;
    }
    AttendParams& window_left(int64_t keys) {
        params_.window_left = keys;
        return *this;
    }
    // Keys and values of the queries' own tokens, not appended yet; not quantised (kivi_attend_params).
    AttendParams& fresh(const ConstTensor& k, const ConstTensor& v) {
        k_ = k;
        v_ = v;
        return *this;
    }
    // [q_heads] logits in memory of the cache's device; stays the caller's.
    AttendParams& learned_sinks(const float* logits) {
        params_.learned_sinks = logits;
        return *this;
    }
    // Receives the natural log of the sum of exp(score), f32.
    AttendParams& lse(const Tensor& out) {
        lse_ = out;
        return *this;
    }
    AttendParams& flags(uint64_t bits) {
        params_.flags = bits;
        return *this;
    }

    // The view that kivi.h takes; valid until this object changes.
    kivi_attend_params get() const {
        kivi_attend_params params = params_;
        params.k = k_ ? k_->get() : nullptr;
        params.v = v_ ? v_->get() : nullptr;
        params.lse = lse_ ? lse_->get() : nullptr;
        return params;
    }

  private:
    kivi_attend_params params_;
    std::optional<ConstTensor> k_, v_;
    std::optional<Tensor> lse_;
};

// One partial result: attention over some of the keys, with its LSE.
struct Partial {
    ConstTensor out;
    ConstTensor lse;
};

// Combines partial results over disjoint keys (kivi_merge). `out` may be the memory of one of the parts.
inline void merge(const std::vector<Partial>& parts, const Tensor& out, const Tensor* lse = nullptr,
                  const float* learned_sinks = nullptr, kivi_stream stream = nullptr) {
    std::vector<kivi_tensor> outs, lses;
    for (const Partial& part : parts) {
        outs.push_back(*part.out.get());
        lses.push_back(*part.lse.get());
    }
    check(kivi_merge(static_cast<int32_t>(parts.size()), outs.data(), lses.data(), learned_sinks, out.get(),
                     lse ? lse->get() : nullptr, stream));
}

// ---- Cache --------------------------------------------------------------------------------------------

// Owns one cache. Moves, does not copy. Const members may run together from several threads, each attend
// with its own workspace; every other member needs the cache to itself.
class Cache {
  public:
    explicit Cache(const Config& config) {
        const kivi_config raw = config.get();
        device_ = raw.device, device_id_ = raw.device_id;
        kivi_cache* cache = nullptr;
        check(kivi_cache_create(&raw, &cache));
        cache_.reset(cache);
    }
    // Takes over a cache made by kivi_cache_create on this device.
    explicit Cache(kivi_cache* cache, int32_t device = KIVI_CPU, int32_t device_id = 0) noexcept
        : cache_(cache), device_(device), device_id_(device_id) {}
    kivi_cache* get() const noexcept { return cache_.get(); }

    // Empties every sequence; committed moments stay.
    void reset(kivi_stream stream = nullptr) { check(kivi_cache_reset(get(), stream)); }
    void sequence_reset(int32_t sequence, kivi_stream stream = nullptr) {
        check(kivi_sequence_reset(get(), sequence, stream));
    }
    // Enlarges the pool to at least `tokens` packed tokens over all sequences.
    void reserve(int64_t tokens, kivi_stream stream = nullptr) { check(kivi_reserve(get(), tokens, stream)); }
    // Gives one sequence all blocks that it needs at a length of `tokens`, for captured graphs.
    void sequence_reserve(int32_t sequence, int64_t tokens, kivi_stream stream = nullptr) {
        check(kivi_sequence_reserve(get(), sequence, tokens, stream));
    }
    // Waits for the stream and takes the lengths from the device. Does nothing on the CPU.
    void synchronize(kivi_stream stream = nullptr) { check(kivi_synchronize(get(), stream)); }

    kivi_memory memory() const {
        kivi_memory memory{};
        check(kivi_cache_memory(get(), &memory, sizeof memory));
        return memory;
    }
    kivi_length length(int32_t layer, int32_t sequence) const {
        kivi_length length{};
        check(kivi_sequence_length(get(), layer, sequence, &length, sizeof length));
        return length;
    }
    // layer -1: sums over all layers.
    kivi_statistics statistics(int32_t layer = -1) const {
        kivi_statistics statistics{};
        check(kivi_query_statistics(get(), layer, &statistics, sizeof statistics));
        return statistics;
    }

    // k [rows, tokens, kv_heads, key_dim], v [rows, tokens, kv_heads, value_dim], or without rows.
    void append(int32_t layer, const Batch& batch, const ConstTensor& k, const ConstTensor& v,
                kivi_stream stream = nullptr) {
        const kivi_batch raw = batch.get();
        check(kivi_append(get(), layer, &raw, k.get(), v.get(), stream));
    }
    // Packs each tail of the batch's sequences as far as whole groups go. layer -1: every layer.
    void flush_residual(int32_t layer, const Batch& batch, kivi_stream stream = nullptr) {
        const kivi_batch raw = batch.get();
        check(kivi_flush_residual(get(), layer, &raw, stream));
    }

    // Bytes that suffice for any attend or step of at most `rows` rows with at most `max_count` queries each.
    size_t attend_workspace(int32_t rows, int32_t max_count, int32_t layer = -1) const {
        size_t bytes = 0;
        check(kivi_attend_workspace(get(), layer, rows, max_count, &bytes));
        return bytes;
    }
    Workspace workspace(int32_t rows, int32_t max_count, int32_t layer = -1) const {
        return Workspace(attend_workspace(rows, max_count, layer), device_, device_id_);
    }
    // q [rows, tokens, q_heads, key_dim], out [rows, tokens, q_heads, value_dim], or without rows.
    void attend(int32_t layer, const Batch& batch, const ConstTensor& q, const Tensor& out, Workspace& workspace,
                const AttendParams& params, kivi_stream stream = nullptr) const {
        const kivi_attend_params raw = params.get();
        attend(layer, batch, q, out, workspace, &raw, stream);
    }
    void attend(int32_t layer, const Batch& batch, const ConstTensor& q, const Tensor& out, Workspace& workspace,
                kivi_stream stream = nullptr) const {
        attend(layer, batch, q, out, workspace, static_cast<const kivi_attend_params*>(nullptr), stream);
    }

    // Attends with the new tokens k and v, shaped as in append, and appends them: one call, whole or not at all.
    // params without fresh ones of their own.
    void step(int32_t layer, const Batch& batch, const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
              const Tensor& out, Workspace& workspace, const AttendParams& params, kivi_stream stream = nullptr) {
        const kivi_attend_params raw = params.get();
        step(layer, batch, q, k, v, out, workspace, &raw, stream);
    }
    void step(int32_t layer, const Batch& batch, const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
              const Tensor& out, Workspace& workspace, kivi_stream stream = nullptr) {
        step(layer, batch, q, k, v, out, workspace, static_cast<const kivi_attend_params*>(nullptr), stream);
    }

    // Tokens begin .. end - 1 as attend reads them: k [tokens, kv_heads, key_dim], v likewise; either may
    // be null.
    void dequantize(int32_t layer, int32_t sequence, int64_t begin, int64_t end, const Tensor* k, const Tensor* v,
                    uint64_t flags = 0, kivi_stream stream = nullptr) const {
        check(kivi_dequantize(get(), layer, sequence, begin, end, k ? k->get() : nullptr, v ? v->get() : nullptr,
                              flags, stream));
    }

    // One sequence, all layers, as a blob that any backend imports: kivi_export and kivi_import, whose names
    // alone are reserved words.
    std::vector<unsigned char> export_sequence(int32_t sequence, kivi_stream stream = nullptr) const {
        size_t bytes = 0;
        check(kivi_export_size(get(), sequence, &bytes));
        std::vector<unsigned char> blob(bytes);
        check(kivi_export(get(), sequence, blob.data(), blob.size(), &bytes, stream));
        return blob;
    }
    void import_sequence(int32_t sequence, const void* blob, size_t bytes, kivi_stream stream = nullptr) {
        check(kivi_import(get(), sequence, blob, bytes, stream));
    }

    // Moments of the queries, for keys with query-aware rounding: accumulate and commit, or set and commit.
    void moments_accumulate(int32_t layer, const Batch& batch, const ConstTensor& q, kivi_stream stream = nullptr) {
        const kivi_batch raw = batch.get();
        check(kivi_moments_accumulate(get(), layer, &raw, q.get(), stream));
    }
    void moments_set(int32_t layer, const ConstTensor& m, uint64_t flags = 0, kivi_stream stream = nullptr) {
        check(kivi_moments_set(get(), layer, m.get(), flags, stream));
    }
    void moments_commit(int32_t layer, kivi_stream stream = nullptr) {
        check(kivi_moments_commit(get(), layer, stream));
    }
    std::vector<unsigned char> moments_export(int32_t layer) const {
        size_t bytes = 0;
        check(kivi_moments_export_size(get(), layer, &bytes));
        std::vector<unsigned char> blob(bytes);
        check(kivi_moments_export(get(), layer, blob.data(), blob.size(), &bytes));
        return blob;
    }
    void moments_import(int32_t layer, const void* blob, size_t bytes, kivi_stream stream = nullptr) {
        check(kivi_moments_import(get(), layer, blob, bytes, stream));
    }

  private:
    void attend(int32_t layer, const Batch& batch, const ConstTensor& q, const Tensor& out, Workspace& workspace,
                const kivi_attend_params* params, kivi_stream stream) const {
        const kivi_batch raw = batch.get();
        check(kivi_attend(get(), layer, &raw, q.get(), out.get(), params, workspace.data(), workspace.size(),
                          stream));
    }
    void step(int32_t layer, const Batch& batch, const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
              const Tensor& out, Workspace& workspace, const kivi_attend_params* params, kivi_stream stream) {
        const kivi_batch raw = batch.get();
        check(kivi_step(get(), layer, &raw, q.get(), k.get(), v.get(), out.get(), params, workspace.data(),
                        workspace.size(), stream));
    }

    struct Destroy {
        void operator()(kivi_cache* cache) const noexcept { kivi_cache_destroy(cache); }
    };
    std::unique_ptr<kivi_cache, Destroy> cache_;
    int32_t device_ = KIVI_CPU, device_id_ = 0;
};

// ---- Probe --------------------------------------------------------------------------------------------

// Error of storing a model's own k and v, measured where they are consumed.
struct Probe {
    kivi_probe_result total;
    std::vector<kivi_probe_result> per_head;
};

// Defaults for k_spec, v_spec and the windows are the preset's; change them before the call of probe().
// q [queries, q_heads, key_dim], k [tokens, kv_heads, key_dim], v [tokens, kv_heads, value_dim].
inline kivi_probe_params probe_params(const Config& preset, const ConstTensor& q, const ConstTensor& k,
                                      const ConstTensor& v) {
    kivi_probe_params params;
    check(kivi_probe_params_init(&params, sizeof params));
    params.q = *q.get();
    params.k = *k.get();
    params.v = *v.get();
    params.k_spec = preset->layer.k;
    params.v_spec = preset->layer.v;
    params.sink = preset->sink;
    params.recent = preset->recent;
    params.flush = preset->flush;
    params.schedule = preset->schedule;
    params.window_dtype = preset->window_dtype;
    return params;
}

inline Probe probe(const kivi_probe_params& params) {
    if (params.k.rank != 3 || params.k.shape[1] < 1)  // the head count sizes the result
        throw Error(KIVI_ERROR_INVALID_ARGUMENT, "probe: k must be [tokens, kv_heads, key_dim]");
    Probe result{};
    result.per_head.resize(static_cast<size_t>(params.k.shape[1]));
    check(kivi_probe(&params, &result.total, result.per_head.data(), sizeof(kivi_probe_result)));
    return result;
}

}  // namespace hpp
}  // namespace kivi
#endif  // KIVI_KIVI_HPP
