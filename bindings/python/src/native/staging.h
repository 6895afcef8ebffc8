// Memory of a cache's device that the binding itself needs: what attend works in, and stand-ins for arrays of the host.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "errors.h"

namespace kivi_python {

// One piece of memory on a device, owned.
class DeviceMemory {
  public:
    DeviceMemory() = default;
    DeviceMemory(int32_t device, int32_t device_id, size_t bytes);
    ~DeviceMemory() { kivi_device_free(device_, device_id_, data_); }
    DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
    DeviceMemory& operator=(DeviceMemory&& other) noexcept;
    void* data() const { return data_; }
    size_t bytes() const { return bytes_; }

  private:
    int32_t device_ = KIVI_CPU;
    int32_t device_id_ = 0;
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

// Pieces that no call is using, so that a steady loop allocates nothing. Guarded by the GIL.
class Pieces {
  public:
    DeviceMemory take(int32_t device, int32_t device_id, size_t bytes);
    void put(DeviceMemory piece) { free_.push_back(std::move(piece)); }

  private:
    std::vector<DeviceMemory> free_;
};

enum class Access { read, write };

// The host arrays of one call on a cache that lives on a GPU: copied there before the call and, if they are written,
// back after it, for which the call then waits. On the CPU there is nothing to do.
class Staging {
  public:
    Staging(Pieces& pieces, int32_t device, int32_t device_id, void* stream)
        : pieces_(pieces), device_(device), device_id_(device_id), stream_(stream) {}
    ~Staging();
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;

    void* stream() const { return stream_; }

    // Where `tensor` is memory of the host and the cache is not: makes it a dense view of device memory.
    void place(const char* name, kivi_tensor& tensor, size_t element_bytes, Access access);

    // The library's call between the copies. Needs no GIL and throws nothing.
    template <class Call>
    kivi_status around(Call&& call) {
        kivi_status status = upload();
        if (status == KIVI_OK) {
            status = call();
        }
        return status == KIVI_OK ? download() : status;
    }

  private:
    struct Copy {
        kivi_tensor host;
        size_t element_bytes, bytes;
        Access access;
        DeviceMemory piece;
        std::vector<unsigned char> dense;  // of a host array with gaps
    };
    kivi_status upload();
    kivi_status download();

    Pieces& pieces_;
    const int32_t device_, device_id_;
    void* const stream_;
    std::vector<Copy> copies_;
};

}  // namespace kivi_python
