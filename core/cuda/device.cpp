// Errors, the current device, memory.
#include "cuda/device.h"

#include <string>
#include <utility>

#include "format/error.h"

namespace kivi::cuda {

void check(cudaError_t result, const char* what) {
    if (result == cudaSuccess) return;
    cudaGetLastError();  // what can be cleared is
    const std::string sentence = std::string(what) + ": " + cudaGetErrorString(result);
    switch (result) {
        case cudaErrorMemoryAllocation: throw Error(KIVI_ERROR_OUT_OF_MEMORY, sentence);
        case cudaErrorStreamCaptureUnsupported:
        case cudaErrorStreamCaptureInvalidated:
        case cudaErrorStreamCaptureImplicit:
        case cudaErrorStreamCaptureIsolation:
        case cudaErrorStreamCaptureWrongThread:
            throw Error(KIVI_ERROR_STATE, sentence + "; this call cannot be part of a captured graph");
        case cudaErrorInvalidResourceHandle: throw Error(KIVI_ERROR_INVALID_ARGUMENT, sentence + " (stream)");
        default: throw Error(KIVI_ERROR_DEVICE, sentence);
    }
}

void prepare_kernel(const void* kernel, size_t shared_bytes, int carveout) {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
          "shared memory of a kernel");
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, carveout),
          "shared memory of a kernel");
}

DeviceGuard::DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "current device");
    if (before_ == device) return;
    check(cudaSetDevice(device), "choosing the device");
    changed_ = true;
}

DeviceGuard::~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
}

Memory::Memory(uint64_t bytes, const char* what) : bytes_(bytes) {
    if (bytes == 0) return;
    const cudaError_t result = cudaMalloc(&data_, bytes);
    if (result == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        throw Error(KIVI_ERROR_OUT_OF_MEMORY,
                    "the device has no " + std::to_string(bytes) + " bytes for " + std::string(what));
    }
    check(result, what);
}

Memory::~Memory() {
    if (data_ != nullptr) cudaFree(data_);
}

Memory& Memory::operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
}

void check_device_pointer(const char* name, const void* pointer, int device) {
    cudaPointerAttributes attributes{};
    check(cudaPointerGetAttributes(&attributes, pointer), name);
    if (attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged) {
        throw Error(KIVI_ERROR_INVALID_ARGUMENT, std::string(name) +
                                                     " is host memory; it must be memory of CUDA device " +
                                                     std::to_string(device));
    }
    if (attributes.type == cudaMemoryTypeDevice && attributes.device != device) {
        throw Error(KIVI_ERROR_INVALID_ARGUMENT, std::string(name) + " is memory of CUDA device " +
                                                     std::to_string(attributes.device) + "; it must be of device " +
                                                     std::to_string(device));
    }
}

}  // namespace kivi::cuda
