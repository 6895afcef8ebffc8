// Cache, see cache.h.
#include "cache.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <new>

namespace kivi_python {
namespace {

// The bytes of a blob, borrowed from bytes, bytearray, memoryview or a contiguous array.
class Bytes {
  public:
    Bytes(const char* name, py::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE) != 0) {
            PyErr_Clear();
            throw py::type_error(std::string(name) + ": must be bytes or another contiguous buffer");
        }
    }
    ~Bytes() { PyBuffer_Release(&buffer_); }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;
    const void* data() const { return buffer_.buf; }
    size_t size() const { return static_cast<size_t>(buffer_.len); }

  private:
    Py_buffer buffer_ = {};
};

// A bytes object of `size` bytes that `write(memory, &written)` fills.
template <class Write>
py::bytes filled_bytes(size_t size, Write&& write) {
    PyObject* object = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
    if (object == nullptr) {
        throw py::error_already_set();
    }
    auto bytes = py::reinterpret_steal<py::bytes>(object);
    size_t written = 0;
    write(PyBytes_AS_STRING(object), &written);
    return written == size ? bytes : py::bytes(PyBytes_AS_STRING(object), written);
}

uint64_t basis_flags(bool stored_basis) { return stored_basis ? KIVI_STORED_BASIS : 0; }

}  // namespace

void* stream_of(py::handle stream) {
    return stream.is_none() ? nullptr : reinterpret_cast<void*>(integer<int64_t>("stream", stream));
}

py::object zeros_like(py::handle like, const std::vector<int64_t>& shape) {
    return py::module_::import("kivi._arrays").attr("zeros_like")(like, py::tuple(py::cast(shape)));
}

Workspaces::Lease::Lease(Workspaces& owner, const kivi_cache* cache, int32_t device, int32_t device_id, void* stream,
                         int32_t rows, int32_t max_count)
    : owner_(owner) {
    std::vector<Piece>& free = owner_.free_;
    const auto found = std::find_if(free.rbegin(), free.rend(), [&](const Piece& piece) { return piece.stream == stream; });
    if (found != free.rend()) {
        piece_ = std::move(*found);
        free.erase(std::next(found).base());
    }
    piece_.stream = stream;
    if (rows > piece_.rows || max_count > piece_.max_count) {
        piece_.rows = std::max(rows, piece_.rows);
        piece_.max_count = std::max(max_count, piece_.max_count);
        check(kivi_attend_workspace(cache, -1, piece_.rows, piece_.max_count, &piece_.bytes));
        piece_.memory = DeviceMemory();
        piece_.memory = DeviceMemory(device, device_id, piece_.bytes);
    }
}

Workspaces::Lease::~Lease() { owner_.free_.push_back(std::move(piece_)); }

Cache::Cache(py::handle config) {
    Config read(config);
    run_unlocked([&] { return kivi_cache_create(&read.c, &cache_); });
    device_ = read.c.device;
    device_id_ = read.c.device_id;
    max_sequences_ = read.c.max_sequences;
    layers_ = std::move(read.layers);
}

void* Cache::operator new(size_t bytes) {
    void* memory = std::calloc(1, bytes);
    if (memory == nullptr) {
        throw std::bad_alloc();
    }
    return memory;
}

void Cache::operator delete(void* memory) { std::free(memory); }

Cache::~Cache() { kivi_cache_destroy(cache_); }

void Cache::close() {
    if (running_ > 0 && process_ == getpid()) {
        raise(KIVI_ERROR_STATE, "cache: close while " + std::to_string(running_) +
                                    " calls on it are under way in other threads");
    }
    kivi_cache* closing = cache_;
    cache_ = nullptr;
    run_unlocked([&] {
        kivi_cache_destroy(closing);
        return KIVI_OK;
    });
}

kivi_cache* Cache::handle() const {
    if (cache_ == nullptr) {
        raise(KIVI_ERROR_STATE, "cache: it is closed");
    }
    return cache_;
}

template <class Call>
void Cache::run(Call&& call) {
    kivi_cache* cache = handle();
    struct Running {
        int& count;
        explicit Running(int& count) : count(++count) {}
        ~Running() { --count; }
    } running(running_);
    run_unlocked([&] { return call(cache); });
}

template <class Call>
void Cache::run(Staging& staging, Call&& call) {
    run([&](kivi_cache* cache) { return staging.around([&] { return call(cache); }); });
}

Staging Cache::staging_on(py::handle stream) { return Staging(pieces_, device_, device_id_, stream_of(stream)); }

// The layer's shape for what the C API leaves to its caller; the C call itself judges the index again.
const kivi_layer& Cache::layer_shape(int32_t layer) const {
    if (layer < 0 || layer >= static_cast<int32_t>(layers_.size())) {
        raise(KIVI_ERROR_INVALID_ARGUMENT,
              "layer: " + std::to_string(layer) + " is not in 0 .. " + std::to_string(layers_.size() - 1));
    }
    return layers_[layer];
}

void Cache::append(int32_t layer, py::object k, py::object v, py::object sequences, py::object counts,
                   py::object offsets, py::object stream) {
    Staging staging = staging_on(stream);
    const Tensor keys("k", k, Access::read, staging);
    const Tensor values("v", v, Access::read, staging);
    const Batch batch(sequences, counts, offsets, *keys, "k");
    run(staging, [&](kivi_cache* cache) {
        return kivi_append(cache, layer, batch.get(), keys.get(), values.get(), staging.stream());
    });
}

void Cache::flush_residual(int32_t layer, py::object sequences, py::object stream) {
    const Batch batch(sequences, max_sequences_);
    void* const on = stream_of(stream);
    run([&](kivi_cache* cache) { return kivi_flush_residual(cache, layer, batch.get(), on); });
}

py::object Cache::attend(int32_t layer, py::object q, py::object out, py::object sequences, py::object counts,
                         py::object offsets, float scale, float soft_cap, int64_t window_left, py::object k,
                         py::object v, py::object learned_sinks, py::object lse, bool invariant,
                         py::object workspace, py::object stream) {
    return answer(false, layer, q, k, v, std::move(out), sequences, counts, offsets, scale, soft_cap, window_left,
                  learned_sinks, lse, invariant, workspace, stream);
}

py::object Cache::step(int32_t layer, py::object q, py::object k, py::object v, py::object out,
                       py::object sequences, py::object counts, py::object offsets, float scale, float soft_cap,
                       int64_t window_left, py::object learned_sinks, py::object lse, bool invariant,
                       py::object workspace, py::object stream) {
    return answer(true, layer, q, k, v, std::move(out), sequences, counts, offsets, scale, soft_cap, window_left,
                  learned_sinks, lse, invariant, workspace, stream);
}

py::object Cache::answer(bool step, int32_t layer, py::handle q, py::handle k, py::handle v, py::object out,
                         py::handle sequences, py::handle counts, py::handle offsets, float scale,
                         float soft_cap, int64_t window_left, py::handle learned_sinks, py::handle lse,
                         bool invariant, py::handle workspace, py::handle stream) {
    const kivi_layer& shape = layer_shape(layer);
    Staging staging = staging_on(stream);
    const Tensor queries("q", q, Access::read, staging);
    const Batch batch(sequences, counts, offsets, *queries, "q");
    if (out.is_none()) {
        const kivi_tensor& like = *queries;
        std::vector<int64_t> sizes(like.shape, like.shape + like.rank);
        sizes.back() = shape.value_dim;
        out = zeros_like(q, sizes);
    }
    const Tensor result("out", out, Access::write, staging);
    const OptionalTensor keys("k", k, Access::read, staging);
    const OptionalTensor values("v", v, Access::read, staging);
    const OptionalTensor log_sum("lse", lse, Access::write, staging);
    const OptionalFloats sinks("learned_sinks", learned_sinks, shape.q_heads, staging);

    kivi_attend_params params = {};
    params.struct_size = sizeof params;
    params.scale = scale;
    params.soft_cap = soft_cap;
    params.window_left = window_left;
    if (!step) {
        params.k = keys.get();
        params.v = values.get();
    }
    params.learned_sinks = sinks.get();
    params.lse = log_sum.get();
    params.flags = invariant ? KIVI_ATTEND_INVARIANT : 0;

    const auto answer_with = [&](void* memory, size_t bytes) {
        run(staging, [&](kivi_cache* cache) {
            return step ? kivi_step(cache, layer, batch.get(), queries.get(), keys.get(), values.get(), result.get(),
                                    &params, memory, bytes, staging.stream())
                        : kivi_attend(cache, layer, batch.get(), queries.get(), result.get(), &params, memory, bytes,
                                      staging.stream());
        });
    };
    if (!workspace.is_none()) {
        const Array memory("workspace", workspace, Access::write, staging.stream());
        if (!memory.contiguous()) {
            raise(KIVI_ERROR_INVALID_ARGUMENT, "workspace: must be contiguous");
        }
        answer_with(memory.data, static_cast<size_t>(memory.size() * memory.element_bytes));
    } else {
        const Workspaces::Lease memory(workspaces_, handle(), device_, device_id_, staging.stream(), batch.rows(),
                                       batch.max_count());
        answer_with(memory.memory(), memory.bytes());
    }
    return out;
}

size_t Cache::attend_workspace(int32_t layer, int32_t rows, int32_t max_count) {
    size_t bytes = 0;
    run([&](kivi_cache* cache) { return kivi_attend_workspace(cache, layer, rows, max_count, &bytes); });
    return bytes;
}

void Cache::reset(py::object stream) {
    void* const on = stream_of(stream);
    run([&](kivi_cache* cache) { return kivi_cache_reset(cache, on); });
}

void Cache::sequence_reset(int32_t sequence, py::object stream) {
    void* const on = stream_of(stream);
    run([&](kivi_cache* cache) { return kivi_sequence_reset(cache, sequence, on); });
}

void Cache::reserve(int64_t tokens, py::object stream) {
    void* const on = stream_of(stream);
    run([&](kivi_cache* cache) { return kivi_reserve(cache, tokens, on); });
}

void Cache::sequence_reserve(int32_t sequence, int64_t tokens, py::object stream) {
    void* const on = stream_of(stream);
    run([&](kivi_cache* cache) { return kivi_sequence_reserve(cache, sequence, tokens, on); });
}

void Cache::synchronize(py::object stream) {
    void* const on = stream_of(stream);
    run([&](kivi_cache* cache) { return kivi_synchronize(cache, on); });
}

kivi_length Cache::length(int32_t layer, int32_t sequence) {
    kivi_length length = {};
    length.struct_size = sizeof length;
    run([&](kivi_cache* cache) {
        return kivi_sequence_length(cache, layer, sequence, &length, sizeof length);
    });
    return length;
}

kivi_statistics Cache::statistics(int32_t layer) {
    kivi_statistics statistics = {};
    run([&](kivi_cache* cache) {
        return kivi_query_statistics(cache, layer, &statistics, sizeof statistics);
    });
    return statistics;
}

kivi_memory Cache::memory() {
    kivi_memory memory = {};
    run([&](kivi_cache* cache) { return kivi_cache_memory(cache, &memory, sizeof memory); });
    return memory;
}

py::tuple Cache::dequantize(int32_t layer, int32_t sequence, int64_t begin, py::object end, py::object k,
                            py::object v, bool stored_basis, py::object stream) {
    const int64_t last = end.is_none() ? length(layer, sequence).length : integer<int64_t>("end", end);
    if (k.is_none() && v.is_none()) {
        const kivi_layer& shape = layer_shape(layer);
        const int64_t tokens = std::max<int64_t>(0, last - begin);
        const py::object float32 = py::module_::import("kivi._arrays").attr("zeros");
        k = float32(py::make_tuple(tokens, shape.kv_heads, shape.key_dim));
        v = float32(py::make_tuple(tokens, shape.kv_heads, shape.value_dim));
    }
    Staging staging = staging_on(stream);
    const OptionalTensor keys("k", k, Access::write, staging);
    const OptionalTensor values("v", v, Access::write, staging);
    run(staging, [&](kivi_cache* cache) {
        return kivi_dequantize(cache, layer, sequence, begin, last, keys.get(), values.get(),
                               basis_flags(stored_basis), staging.stream());
    });
    return py::make_tuple(k, v);
}

py::bytes Cache::export_sequence(int32_t sequence, py::object stream) {
    void* const on = stream_of(stream);
    size_t size = 0;
    run([&](kivi_cache* cache) { return kivi_export_size(cache, sequence, &size); });
    return filled_bytes(size, [&](void* memory, size_t* written) {
        run([&](kivi_cache* cache) { return kivi_export(cache, sequence, memory, size, written, on); });
    });
}

void Cache::import_sequence(int32_t sequence, py::object blob, py::object stream) {
    const Bytes bytes("blob", blob);
    void* const on = stream_of(stream);
    run([&](kivi_cache* cache) { return kivi_import(cache, sequence, bytes.data(), bytes.size(), on); });
}

void Cache::moments_accumulate(int32_t layer, py::object q, py::object counts, py::object offsets,
                               py::object stream) {
    Staging staging = staging_on(stream);
    const Tensor queries("q", q, Access::read, staging);
    const Batch batch(py::none(), counts, offsets, *queries, "q");
    run(staging, [&](kivi_cache* cache) {
        return kivi_moments_accumulate(cache, layer, batch.get(), queries.get(), staging.stream());
    });
}

void Cache::moments_set(int32_t layer, py::object m, bool stored_basis, py::object stream) {
    Staging staging = staging_on(stream);
    const Tensor moments("m", m, Access::read, staging);
    run(staging, [&](kivi_cache* cache) {
        return kivi_moments_set(cache, layer, moments.get(), basis_flags(stored_basis), staging.stream());
    });
}

void Cache::moments_commit(int32_t layer, py::object stream) {
    void* const on = stream_of(stream);
    run([&](kivi_cache* cache) { return kivi_moments_commit(cache, layer, on); });
}

py::bytes Cache::moments_export(int32_t layer) {
    size_t size = 0;
    run([&](kivi_cache* cache) { return kivi_moments_export_size(cache, layer, &size); });
    return filled_bytes(size, [&](void* memory, size_t* written) {
        run([&](kivi_cache* cache) { return kivi_moments_export(cache, layer, memory, size, written); });
    });
}

void Cache::moments_import(int32_t layer, py::object blob, py::object stream) {
    const Bytes bytes("blob", blob);
    void* const on = stream_of(stream);
    run([&](kivi_cache* cache) { return kivi_moments_import(cache, layer, bytes.data(), bytes.size(), on); });
}

}  // namespace kivi_python
