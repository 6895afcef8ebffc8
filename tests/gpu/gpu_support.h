// The same small models on the CPU and on a GPU.
#pragma once
#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "format/half.h"
#include "kivi/kivi.h"

namespace gpu_test {

constexpr int kSkipped = 77;

// False, with the reason printed, where no cache can be made on device 0.
inline bool gpu_there() {
    int32_t count = 0;
    kivi_device_info info{};
    if (kivi_device_count(KIVI_CUDA, &count) == KIVI_OK && count > 0 &&
        kivi_device_query(KIVI_CUDA, 0, &info, sizeof info) == KIVI_OK && info.available) {
        std::printf("on %s\n", info.name);
        return true;
    }
    std::printf("SKIP: no GPU that this build has code for %s\n", info.reason);
    return false;
}

#define CUDA_OK(call) REQUIRE_MESSAGE((call) == cudaSuccess, cudaGetErrorString(cudaPeekAtLastError()))
#define KIVI_OK_(call)                             \
    do {                                           \
        const kivi_status status_ = (call);        \
        INFO(kivi_last_error());                   \
        REQUIRE(status_ == KIVI_OK);               \
    } while (false)

// Uniform numbers in [-1, 1), alike everywhere.
class Numbers {
  public:
    explicit Numbers(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
    float next() {
        state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
        return static_cast<float>(state_ >> 40) / static_cast<float>(1 << 23) - 1;
    }
    // Rows of `dim` channels of different width and offset, as keys are.
    std::vector<float> rows(int64_t count, int dim) {
        std::vector<float> x(count * dim);
        for (size_t i = 0; i < x.size(); ++i) {
            const int c = static_cast<int>(i % dim);
            x[i] = next() * (c % 3 == 0 ? 4.0f : 1.0f) + (c % 16 == 5 ? 6.0f : 0.0f);
        }
        return x;
    }

  private:
    uint64_t state_;
};

inline kivi_tensor dense_view(void* data, int32_t dtype, int32_t device, std::initializer_list<int64_t> shape) {
    kivi_tensor tensor{};
    tensor.data = data;
    tensor.dtype = dtype;
    tensor.device = device;
    tensor.rank = static_cast<int32_t>(shape.size());
    int64_t stride = 1;
    for (int axis = tensor.rank - 1; axis >= 0; --axis) {
        tensor.shape[axis] = shape.begin()[axis];
        tensor.stride[axis] = stride;
        stride *= shape.begin()[axis];
    }
    return tensor;
}

// f32 memory on the host and on the device with the same contents.
class Floats {
  public:
    explicit Floats(std::vector<float> values) : host(std::move(values)) {
        CUDA_OK(cudaMalloc(&device_, host.size() * sizeof(float) + 4));
        upload();
    }
    explicit Floats(int64_t count) : Floats(std::vector<float>(count, -7.0f)) {}
    ~Floats() { cudaFree(device_); }
    Floats(const Floats&) = delete;
    float* device() const { return static_cast<float*>(device_); }
    void upload() {
        CUDA_OK(cudaMemcpy(device_, host.data(), host.size() * sizeof(float), cudaMemcpyHostToDevice));
        CUDA_OK(cudaDeviceSynchronize());  // other streams do not wait for it
    }
    std::vector<float> values() const { return host; }
    std::vector<float> download() const {
        std::vector<float> values(host.size());
        CUDA_OK(cudaMemcpy(values.data(), device_, values.size() * sizeof(float), cudaMemcpyDeviceToHost));
        return values;
    }
    // A dense view of the shape, on either side.
    kivi_tensor view(int32_t device, std::initializer_list<int64_t> shape) {
        return dense_view(device == KIVI_CPU ? static_cast<void*>(host.data()) : device_, KIVI_F32, device, shape);
    }

    std::vector<float> host;

  private:
    void* device_ = nullptr;
};

// f16 or bf16 memory on the host and on the device with the same contents.
class Halfs {
  public:
    explicit Halfs(const std::vector<float>& values, int32_t dtype = KIVI_F16) : host(values.size()), dtype_(dtype) {
        CUDA_OK(cudaMalloc(&device_, host.size() * 2 + 16));
        set(values);
    }
    explicit Halfs(int64_t count, int32_t dtype = KIVI_F16) : Halfs(std::vector<float>(count, -7.0f), dtype) {}
    ~Halfs() { cudaFree(device_); }
    Halfs(const Halfs&) = delete;
    void upload() {
        CUDA_OK(cudaMemcpy(device_, host.data(), host.size() * 2, cudaMemcpyHostToDevice));
        CUDA_OK(cudaDeviceSynchronize());
    }
    void set(const std::vector<float>& values) {
        for (size_t i = 0; i < values.size(); ++i) kivi::store_element(host.data(), dtype_, i, values[i]);
        upload();
    }
    std::vector<float> values() const { return floats(host); }
    std::vector<float> download() const {
        std::vector<uint16_t> bits(host.size());
        CUDA_OK(cudaMemcpy(bits.data(), device_, bits.size() * 2, cudaMemcpyDeviceToHost));
        return floats(bits);
    }
    kivi_tensor view(int32_t device, std::initializer_list<int64_t> shape) {
        return dense_view(device == KIVI_CPU ? static_cast<void*>(host.data()) : device_, dtype_, device, shape);
    }
    std::vector<uint16_t> host;

  private:
    std::vector<float> floats(const std::vector<uint16_t>& bits) const {
        std::vector<float> x(bits.size());
        for (size_t i = 0; i < x.size(); ++i) x[i] = kivi::load_element(bits.data(), dtype_, i);
        return x;
    }
    int32_t dtype_;
    void* device_ = nullptr;
};

// An array on the device, or NULL if it is empty.
template <class T>
class DeviceArray {
  public:
    explicit DeviceArray(const std::vector<T>& values) {
        if (values.empty()) return;
        CUDA_OK(cudaMalloc(&data_, values.size() * sizeof(T)));
        CUDA_OK(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    ~DeviceArray() { cudaFree(data_); }
    DeviceArray(const DeviceArray&) = delete;
    const T* data() const { return data_; }

  private:
    T* data_ = nullptr;
};

class Cache {
  public:
    Cache(kivi_config config, int32_t device) : device(device) {
        config.device = device;
        KIVI_OK_(kivi_cache_create(&config, &handle_));
    }
    ~Cache() { kivi_cache_destroy(handle_); }
    Cache(const Cache&) = delete;
    operator kivi_cache*() const { return handle_; }
    std::vector<uint8_t> blob(int32_t sequence, kivi_stream stream = nullptr) const {
        size_t bytes = 0, written = 0;
        KIVI_OK_(kivi_export_size(handle_, sequence, &bytes));
        std::vector<uint8_t> blob(bytes);
        KIVI_OK_(kivi_export(handle_, sequence, blob.data(), bytes, &written, stream));
        return blob;
    }
    int64_t length(int32_t sequence, int32_t layer = 0) const {
        kivi_length length{};
        KIVI_OK_(kivi_sequence_length(handle_, layer, sequence, &length, sizeof length));
        return length.length;
    }

    const int32_t device;

  private:
    kivi_cache* handle_ = nullptr;
};

// A sequence of both caches holds the same bytes, which it returns.
inline std::vector<uint8_t> check_same_blob(const Cache& cpu, const Cache& gpu, int32_t sequence) {
    CAPTURE(sequence);
    const std::vector<uint8_t> expected = cpu.blob(sequence), got = gpu.blob(sequence);
    REQUIRE(expected.size() == got.size());
    size_t wrong = 0, first = 0;
    for (size_t byte = expected.size(); byte-- > 0;) {
        if (expected[byte] != got[byte]) ++wrong, first = byte;
    }
    CAPTURE(first);
    CHECK(wrong == 0);
    return expected;
}

inline void check_same_saturation(const Cache& cpu, const Cache& gpu) {
    kivi_statistics of_cpu{}, of_gpu{};
    KIVI_OK_(kivi_query_statistics(cpu, 0, &of_cpu, sizeof of_cpu));
    KIVI_OK_(kivi_query_statistics(gpu, 0, &of_gpu, sizeof of_gpu));
    CHECK(of_cpu.saturated_rows == of_gpu.saturated_rows);
}

// Device memory for attend.
class Workspace {
  public:
    Workspace(const Cache& cache, int rows, int count) {
        KIVI_OK_(kivi_attend_workspace(cache, -1, rows, count, &bytes));
        if (cache.device == KIVI_CUDA) {
            CUDA_OK(cudaMalloc(&data, bytes + 1));
            CUDA_OK(cudaMemset(data, 0xFE, bytes));
        } else {
            host_.resize(bytes + 1);
            data = host_.data();
        }
        on_device_ = cache.device == KIVI_CUDA;
    }
    ~Workspace() {
        if (on_device_) cudaFree(data);
    }
    Workspace(const Workspace&) = delete;
    void* data = nullptr;
    size_t bytes = 0;

  private:
    std::vector<uint8_t> host_;
    bool on_device_ = false;
};

// A stream that does not wait for the default one.
class Stream {
  public:
    Stream() { CUDA_OK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
    ~Stream() { cudaStreamDestroy(stream_); }
    Stream(const Stream&) = delete;
    operator cudaStream_t() const { return stream_; }

  private:
    cudaStream_t stream_ = nullptr;
};

// What calls() enqueues on the stream, captured once. Capture in global mode refuses whatever allocates or waits, in any
// thread.
class Captured {
  public:
    template <class Calls>
    Captured(cudaStream_t stream, const Calls& calls) : stream_(stream) {
        CUDA_OK(cudaDeviceSynchronize());
        CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        calls();
        CUDA_OK(cudaStreamEndCapture(stream, &graph_));
        CUDA_OK(cudaGraphInstantiate(&replay_, graph_, 0));
    }
    ~Captured() {
        cudaGraphExecDestroy(replay_);
        cudaGraphDestroy(graph_);
    }
    Captured(const Captured&) = delete;
    cudaGraph_t graph() const { return graph_; }
    // Once more, to its end.
    void replay() const {
        CUDA_OK(cudaGraphLaunch(replay_, stream_));
        CUDA_OK(cudaStreamSynchronize(stream_));
    }

  private:
    cudaStream_t stream_;
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t replay_ = nullptr;
};

struct Shape {
    int kv_heads = 2, q_heads = 4, key_dim = 64, value_dim = 64;
};

inline kivi_config config_of(const kivi_spec& k, const kivi_spec& v, const Shape& shape, int sink, int recent,
                             int flush) {
    kivi_config config;
    kivi_config_init(&config, sizeof config);
    config.layer_count = 1;
    config.layer.kv_heads = shape.kv_heads;
    config.layer.q_heads = shape.q_heads;
    config.layer.key_dim = shape.key_dim;
    config.layer.value_dim = shape.value_dim;
    config.layer.k = k;
    config.layer.v = v;
    config.max_sequences = 3;
    config.max_tokens = 1200;
    config.sink = sink;
    config.recent = recent;
    config.flush = flush;
    config.threads = 1;
    return config;
}

inline kivi_batch batch_of(int rows, const int32_t* sequences, const int32_t* counts, int max_count) {
    kivi_batch batch;
    kivi_batch_init(&batch, sizeof batch);
    batch.rows = rows;
    batch.sequences = sequences;
    batch.counts = counts;
    batch.max_count = max_count;
    return batch;
}

inline double relative_error(const std::vector<float>& x, const std::vector<float>& reference) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < x.size(); ++i) {
        error += (double(x[i]) - reference[i]) * (double(x[i]) - reference[i]);
        norm += double(reference[i]) * reference[i];
    }
    return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

}  // namespace gpu_test
