// Append, flush and attend take no memory of the host or the device, wait for nothing, keep to the caller's stream and
// can be captured, from the first call on. [HOT-1]
#define DOCTEST_CONFIG_IMPLEMENT
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <thread>

#include "gpu_support.h"

using namespace gpu_test;

// ---- Host memory: calls of malloc that come from libkivi, which holds the CUDA runtime, or from operator new --------

namespace {

std::atomic<bool> counting{false};
std::atomic<int64_t> allocations{0};

// Where the library that holds this code begins.
uintptr_t base_of(const void* code) {
    Dl_info info;
    return dladdr(code, &info) != 0 ? reinterpret_cast<uintptr_t>(info.dli_fbase) : 0;
}
uintptr_t kivi_base = 0, cpp_base = 0;

void count(const void* caller) {
    if (!counting) return;
    const uintptr_t base = base_of(caller);
    if (base == kivi_base || base == cpp_base) allocations++;
}

}  // namespace

extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* memory, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);

void* malloc(size_t bytes) noexcept {
    count(__builtin_return_address(0));
    return __libc_malloc(bytes);
}
void* calloc(size_t number, size_t bytes) noexcept {
    count(__builtin_return_address(0));
    return __libc_calloc(number, bytes);
}
void* realloc(void* memory, size_t bytes) noexcept {
    count(__builtin_return_address(0));
    return __libc_realloc(memory, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) noexcept {
    count(__builtin_return_address(0));
    return __libc_memalign(alignment, bytes);
}
}

namespace {

void find_libraries() {
    kivi_base = base_of(reinterpret_cast<const void*>(&kivi_append));
    void* (*const allocate)(size_t) = operator new;  // of a shared library, or, linked statically, of this program
    cpp_base = base_of(reinterpret_cast<const void*>(allocate));
}

// ---- Caches and work -------------------------------------------------------------------------------------------------

constexpr int kHeads = 2, kQueryHeads = 8, kDim = 128, kPrompt = 300;

kivi_config config_of_preset(const char* preset, int max_sequences) {
    kivi_config config;
    KIVI_OK_(kivi_config_init(&config, sizeof config));
    KIVI_OK_(kivi_config_preset(&config, preset));
    config.layer_count = 1;
    config.layer.kv_heads = kHeads;
    config.layer.q_heads = kQueryHeads;
    config.layer.key_dim = config.layer.value_dim = kDim;
    config.max_sequences = max_sequences;
    config.max_tokens = 1024;
    config.threads = 1;
    return config;
}

// Rows of sequences 0, 1, ..: a prompt, then tokens one by one, each followed by an attend, every third by kivi_step.
// Everything that a call needs is made beforehand. On the CPU the same work gives what is expected. Array: Halfs for
// the fast kernels, Floats.
template <class Array>
class Decode {
  public:
    Decode(Cache& cache, int rows, int steps)
        : cache_(cache),
          rows_(rows),
          steps_(steps),
          k_(Numbers(1).rows(int64_t{1} * rows * kPrompt * kHeads, kDim)),
          v_(Numbers(2).rows(int64_t{1} * rows * kPrompt * kHeads, kDim)),
          q_(Numbers(3).rows(int64_t{1} * rows * kQueryHeads, kDim)),
          out_(int64_t{1} * rows * kQueryHeads * kDim),
          workspace_(cache, rows, 1) {}

    // The number of calls that failed.
    int run(kivi_stream stream) {
        kivi_batch batch = batch_of(rows_, nullptr, nullptr, kPrompt);
        const int32_t device = cache_.device;
        const kivi_tensor k = k_.view(device, {rows_, kPrompt, kHeads, kDim}),
                          v = v_.view(device, {rows_, kPrompt, kHeads, kDim});
        const kivi_tensor q = q_.view(device, {rows_, 1, kQueryHeads, kDim}),
                          out = out_.view(device, {rows_, 1, kQueryHeads, kDim});
        int failures = kivi_append(cache_, 0, &batch, &k, &v, stream) != KIVI_OK;
        batch.max_count = 1;
        for (int step = 0; step < steps_; ++step) {
            if (step % 3 == 2) {
                failures += kivi_step(cache_, 0, &batch, &q, &k, &v, &out, nullptr, workspace_.data, workspace_.bytes,
                                      stream) != KIVI_OK;
                continue;
            }
            failures += kivi_append(cache_, 0, &batch, &k, &v, stream) != KIVI_OK;
            failures += kivi_attend(cache_, 0, &batch, &q, &out, nullptr, workspace_.data, workspace_.bytes,
                                    stream) != KIVI_OK;
        }
        failures += kivi_flush_residual(cache_, 0, &batch, stream) != KIVI_OK;
        failures += kivi_attend(cache_, 0, &batch, &q, &out, nullptr, workspace_.data, workspace_.bytes,
                                stream) != KIVI_OK;
        return failures;
    }
    std::vector<float> results() const { return cache_.device == KIVI_CPU ? out_.values() : out_.download(); }

  private:
    Cache& cache_;
    const int rows_, steps_;
    Array k_, v_, q_, out_;
    Workspace workspace_;
};

// Holds a stream back until it is opened, ten seconds at most.
class Gate {
  public:
    explicit Gate(cudaStream_t stream) {
        CUDA_OK(cudaLaunchHostFunc(stream, [](void* gate) { static_cast<Gate*>(gate)->wait(); }, this));
    }
    void open() { open_ = true; }
    bool held() const { return !left_; }

  private:
    void wait() {
        const auto begin = std::chrono::steady_clock::now();
        while (!open_ && std::chrono::steady_clock::now() - begin < std::chrono::seconds(10)) std::this_thread::yield();
        left_ = true;
    }
    std::atomic<bool> open_{false}, left_{false};
};

size_t free_bytes() {
    size_t available = 0, total = 0;
    CUDA_OK(cudaMemGetInfo(&available, &total));
    return available;
}

const char* const kPresets[] = {"k3v2", "kivi2-sink", "kivi4", "f16"};

}  // namespace

TEST_CASE("no host memory, however many rows, from the first call on") {
    const Stream stream;
    for (const char* preset : kPresets) {
        for (int rows : {1, 3, 150}) {  // 150: several launches
            CAPTURE(preset);
            CAPTURE(rows);
            Cache cache(config_of_preset(preset, rows), KIVI_CUDA);
            Decode<Halfs> halfs(cache, rows, 70);
            Decode<Floats> floats(cache, rows, 70);
            allocations = 0;
            counting = true;
            const int failures = halfs.run(stream) + floats.run(stream);
            counting = false;
            CHECK(failures == 0);
            CHECK(allocations == 0);
            CUDA_OK(cudaStreamSynchronize(stream));
        }
    }
    counting = true;
    void* volatile counted = operator new(100);
    counting = false;
    operator delete(counted);
    const int64_t seen = allocations;
    CHECK(seen == 1);
}

TEST_CASE("no device memory, no waiting, no stream but the caller's") {
    for (const char* preset : kPresets) {
        CAPTURE(preset);
        const kivi_config config = config_of_preset(preset, 3);
        Cache cpu(config, KIVI_CPU), gpu(config, KIVI_CUDA);
        Decode<Halfs> expected(cpu, 3, 70), decode(gpu, 3, 70);
        CHECK(expected.run(nullptr) == 0);
        const Stream stream, other;
        // All calls return while their stream is held back.
        {
            Gate first(stream);  // what the driver takes for callbacks
            first.open();
            CUDA_OK(cudaStreamSynchronize(stream));
        }
        const size_t before = free_bytes();
        Gate gate(stream);
        CHECK(decode.run(stream) == 0);
        CHECK(gate.held());
        gate.open();
        CUDA_OK(cudaStreamSynchronize(stream));
        CHECK(free_bytes() == before);
        CHECK(relative_error(decode.results(), expected.results()) < 3e-3);
        for (int32_t id = 0; id < 3; ++id) CHECK(gpu.blob(id, stream) == cpu.blob(id));
        // They finish while another stream, and the default stream, are held back.
        KIVI_OK_(kivi_cache_reset(gpu, stream));
        CUDA_OK(cudaStreamSynchronize(stream));
        Gate of_other(other), of_default(cudaStreamLegacy);
        CHECK(decode.run(stream) == 0);
        CUDA_OK(cudaStreamSynchronize(stream));
        CHECK(of_other.held());
        CHECK(of_default.held());
        of_other.open(), of_default.open();
        CUDA_OK(cudaDeviceSynchronize());
        for (int32_t id = 0; id < 3; ++id) CHECK(gpu.blob(id, stream) == cpu.blob(id));
    }
}

TEST_CASE("TEST 35: the very first calls can be captured") {
    for (const char* preset : kPresets) {
        CAPTURE(preset);
        const kivi_config config = config_of_preset(preset, 3);
        Cache cpu(config, KIVI_CPU), gpu(config, KIVI_CUDA);
        Decode<Halfs> expected(cpu, 3, 70), decode(gpu, 3, 70);
        CHECK(expected.run(nullptr) == 0);
        const Stream stream;
        const Captured captured(stream, [&] { CHECK(decode.run(stream) == 0); });
        captured.replay();
        CHECK(relative_error(decode.results(), expected.results()) < 3e-3);
        for (int32_t id = 0; id < 3; ++id) CHECK(gpu.blob(id, stream) == cpu.blob(id));
    }
}

TEST_CASE("fault 83, TEST 21: what is pending on one stream is seen on the next that waits for it [STREAM-1]") {
    const kivi_config config = config_of_preset("k3v2", 1);
    Cache cpu(config, KIVI_CPU), gpu(config, KIVI_CUDA);
    Halfs written(Numbers(1).rows(int64_t{kPrompt} * kHeads, kDim)), k(int64_t{kPrompt} * kHeads * kDim);
    const kivi_batch batch = batch_of(1, nullptr, nullptr, kPrompt);
    const kivi_tensor on_cpu = written.view(KIVI_CPU, {1, kPrompt, kHeads, kDim});
    KIVI_OK_(kivi_append(cpu, 0, &batch, &on_cpu, &on_cpu, nullptr));
    const Stream first, second;
    cudaEvent_t appended;
    CUDA_OK(cudaEventCreateWithFlags(&appended, cudaEventDisableTiming));
    const kivi_tensor from = written.view(KIVI_CUDA, {1, kPrompt, kHeads, kDim}),
                      keys = k.view(KIVI_CUDA, {1, kPrompt, kHeads, kDim});
    Gate gate(first);
    CUDA_OK(cudaMemcpyAsync(keys.data, from.data, int64_t{2} * kPrompt * kHeads * kDim,
                            cudaMemcpyDeviceToDevice, first));
    KIVI_OK_(kivi_append(gpu, 0, &batch, &keys, &keys, first));
    CUDA_OK(cudaEventRecord(appended, first));
    CUDA_OK(cudaStreamWaitEvent(second, appended, 0));
    std::thread opens([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        gate.open();
    });
    const std::vector<uint8_t> blob = gpu.blob(0, second);  // waits
    opens.join();
    CHECK(blob == cpu.blob(0));
    CUDA_OK(cudaEventDestroy(appended));
}

TEST_CASE("threads attend to one cache at once, each on its own stream") {
    const kivi_config config = config_of_preset("k3v2", 3);
    Cache cpu(config, KIVI_CPU), gpu(config, KIVI_CUDA);
    Decode<Halfs> expected(cpu, 3, 1), fill(gpu, 3, 1);
    CHECK(expected.run(nullptr) == 0);
    CHECK(fill.run(nullptr) == 0);
    CUDA_OK(cudaDeviceSynchronize());
    Halfs q(Numbers(3).rows(int64_t{3} * kQueryHeads, kDim)), out(int64_t{4} * 3 * kQueryHeads * kDim);
    std::vector<std::thread> threads;
    std::atomic<int> failures{0};
    const Workspace workspaces[] = {{gpu, 3, 1}, {gpu, 3, 1}, {gpu, 3, 1}, {gpu, 3, 1}};
    const Stream streams[4];
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
            const kivi_batch batch = batch_of(3, nullptr, nullptr, 1);
            const kivi_tensor queries = q.view(KIVI_CUDA, {3, 1, kQueryHeads, kDim});
            kivi_tensor result = out.view(KIVI_CUDA, {3, 1, kQueryHeads, kDim});
            result.data = static_cast<uint16_t*>(result.data) + t * 3 * kQueryHeads * kDim;
            for (int i = 0; i < 200; ++i) {
                failures += kivi_attend(gpu, 0, &batch, &queries, &result, nullptr, workspaces[t].data,
                                        workspaces[t].bytes, streams[t]) != KIVI_OK;
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    CUDA_OK(cudaDeviceSynchronize());
    CHECK(failures == 0);
    const std::vector<float> all = out.download(), wanted = expected.results();
    for (int t = 0; t < 4; ++t) {
        const std::vector<float> one(all.begin() + t * wanted.size(), all.begin() + (t + 1) * wanted.size());
        CHECK(relative_error(one, wanted) < 3e-3);
    }
}

int main(int argc, char** argv) {
    if (!gpu_there()) return kSkipped;
    find_libraries();
    return doctest::Context(argc, argv).run();
}
