// The Python face of one kivi_cache: turns arguments into C structs, releases the GIL, calls, raises.
#pragma once
#include <vector>

#include <unistd.h>

#include "array.h"
#include "batch.h"
#include "config.h"
#include "gil.h"

namespace kivi_python {

// A kivi_stream given as an integer (the cudaStream_t); None is NULL.
void* stream_of(py::handle stream);

// An array of the same library, dtype and device as `like`, filled with zeros.
py::object zeros_like(py::handle like, const std::vector<int64_t>& shape);

// Work memory of attend on the cache's device, one piece for each call that runs at the same time, and for each stream,
// which may still use it after the call. A piece grows when a call brings more rows or queries than any before, so a
// steady loop allocates nothing. Guarded by the GIL.
class Workspaces {
  public:
    struct Piece {
        int32_t rows = -1;
        int32_t max_count = -1;
        size_t bytes = 0;
        void* stream = nullptr;
        DeviceMemory memory;
    };

    // Takes a piece for the time of one call and puts it back.
    class Lease {
      public:
        Lease(Workspaces& owner, const kivi_cache* cache, int32_t device, int32_t device_id, void* stream,
              int32_t rows, int32_t max_count);
        ~Lease();
        Lease(const Lease&) = delete;
        Lease& operator=(const Lease&) = delete;
        void* memory() const { return piece_.memory.data(); }
        size_t bytes() const { return piece_.bytes; }

      private:
        Workspaces& owner_;
        Piece piece_;
    };

  private:
    std::vector<Piece> free_;
};

class Cache {
  public:
    explicit Cache(py::handle config);
    ~Cache();
    Cache(const Cache&) = delete;
    Cache& operator=(const Cache&) = delete;

    // pybind11 gives methods of an object whose __init__ never ran memory from here: zeros are a closed cache.
    static void* operator new(size_t bytes);
    static void operator delete(void* memory);

    void close();
    bool closed() const { return cache_ == nullptr; }

    void append(int32_t layer, py::object k, py::object v, py::object sequences, py::object counts,
                py::object offsets, py::object stream);
    void flush_residual(int32_t layer, py::object sequences, py::object stream);
    py::object attend(int32_t layer, py::object q, py::object out, py::object sequences, py::object counts,
                      py::object offsets, float scale, float soft_cap, int64_t window_left, py::object k,
                      py::object v, py::object learned_sinks, py::object lse, bool invariant,
                      py::object workspace, py::object stream);
    py::object step(int32_t layer, py::object q, py::object k, py::object v, py::object out, py::object sequences,
                    py::object counts, py::object offsets, float scale, float soft_cap, int64_t window_left,
                    py::object learned_sinks, py::object lse, bool invariant, py::object workspace,
                    py::object stream);
    size_t attend_workspace(int32_t layer, int32_t rows, int32_t max_count);

    void reset(py::object stream);
    void sequence_reset(int32_t sequence, py::object stream);
    void reserve(int64_t tokens, py::object stream);
    void sequence_reserve(int32_t sequence, int64_t tokens, py::object stream);
    void synchronize(py::object stream);

    kivi_length length(int32_t layer, int32_t sequence);
    kivi_statistics statistics(int32_t layer);
    kivi_memory memory();

    py::tuple dequantize(int32_t layer, int32_t sequence, int64_t begin, py::object end, py::object k,
                         py::object v, bool stored_basis, py::object stream);
    py::bytes export_sequence(int32_t sequence, py::object stream);
    void import_sequence(int32_t sequence, py::object blob, py::object stream);

    void moments_accumulate(int32_t layer, py::object q, py::object counts, py::object offsets,
                            py::object stream);
    void moments_set(int32_t layer, py::object m, bool stored_basis, py::object stream);
    void moments_commit(int32_t layer, py::object stream);
    py::bytes moments_export(int32_t layer);
    void moments_import(int32_t layer, py::object blob, py::object stream);

  private:
    // Runs one library call without the GIL; close() waits for none, it refuses while calls run.
    template <class Call>
    void run(Call&& call);
    // Likewise, between the copies of host arrays to and from the cache's device.
    template <class Call>
    void run(Staging& staging, Call&& call);
    // attend, or step: k and v are fresh ones to read, or new ones to keep.
    py::object answer(bool step, int32_t layer, py::handle q, py::handle k, py::handle v, py::object out,
                      py::handle sequences, py::handle counts, py::handle offsets, float scale, float soft_cap,
                      int64_t window_left, py::handle learned_sinks, py::handle lse, bool invariant,
                      py::handle workspace, py::handle stream);
    Staging staging_on(py::handle stream);
    kivi_cache* handle() const;
    const kivi_layer& layer_shape(int32_t layer) const;

    kivi_cache* cache_ = nullptr;
    int running_ = 0;  // calls under way in other threads, guarded by the GIL
    const pid_t process_ = getpid();  // whose threads those are: the child of a fork has none of them
    int32_t device_, device_id_;
    int32_t max_sequences_;
    std::vector<kivi_layer> layers_;
    Workspaces workspaces_;
    Pieces pieces_;
};

}  // namespace kivi_python
