// Calls of the CUDA runtime for the host side: checked, and leaving the thread's current device alone.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace kivi::cuda {

// Throws Error for anything but success; `what` names the call. Errors of a capture are of the caller's state,
// lack of memory is named as such, the rest is a device error.
void check(cudaError_t result, const char* what);

// Loads a kernel on the current device and lets its blocks have this much dynamic shared memory: a kernel that is
// first loaded by its launch takes memory then. `carveout`: what it prefers of a multiprocessor's memory to be shared,
// in percent; one with another share than the kernel before it waits until that has left the multiprocessor.
void prepare_kernel(const void* kernel, size_t shared_bytes, int carveout = cudaSharedmemCarveoutDefault);
template <class... Args>
void prepare_kernel(void (*kernel)(Args...), size_t shared_bytes, int carveout = cudaSharedmemCarveoutDefault) {
    prepare_kernel(reinterpret_cast<const void*>(kernel), shared_bytes, carveout);
}

// Makes a device current for a scope.
class DeviceGuard {
  public:
    explicit DeviceGuard(int device);
    ~DeviceGuard();
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    int before_ = 0;
    bool changed_ = false;
};

// Device memory that ends with its owner. The device must be current when it begins and ends.
class Memory {
  public:
    Memory() = default;
    Memory(uint64_t bytes, const char* what);
    ~Memory();
    Memory(Memory&& other) noexcept : data_(other.data_), bytes_(other.bytes_) {
        other.data_ = nullptr, other.bytes_ = 0;
    }
    Memory& operator=(Memory&& other) noexcept;

    template <class T = uint8_t>
    T* as() const {
        return static_cast<T*>(data_);
    }
    uint64_t bytes() const { return bytes_; }
    // Leaves the memory to the caller.
    void* release() {
        bytes_ = 0;
        return std::exchange(data_, nullptr);
    }

  private:
    void* data_ = nullptr;
    uint64_t bytes_ = 0;
};

// Refuses memory that is not of this device: host memory, pinned or not, and that of another GPU.
void check_device_pointer(const char* name, const void* pointer, int device);

}  // namespace kivi::cuda
