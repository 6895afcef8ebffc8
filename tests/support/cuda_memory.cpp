// Device memory begins as 0xFE bytes, as that of malloc does in these suites.
#include "support/cuda_memory.h"

#include <cuda_runtime.h>

#include <stdexcept>

namespace kivi_test {
namespace {

void check(cudaError_t result) {
    if (result != cudaSuccess) throw std::runtime_error(cudaGetErrorString(result));
}

}  // namespace

void* cuda_allocate(size_t bytes) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes > 0 ? bytes : 1));
    check(cudaMemset(memory, 0xFE, bytes));
    return memory;
}

void cuda_release(void* memory) { cudaFree(memory); }

void cuda_upload(void* device, const void* host, size_t bytes) {
    check(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
}

void cuda_download(void* host, const void* device, size_t bytes) {
    check(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost));
}

}  // namespace kivi_test
