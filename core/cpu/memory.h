// One block of memory of the cache: aligned to cache lines, backed by huge pages where that pays.
#pragma once
#include <cstdint>

namespace kivi::cpu {

class Buffer {
  public:
    Buffer() = default;
    // Zero-filled. Throws Error(KIVI_ERROR_OUT_OF_MEMORY) that names `what`.
    Buffer(uint64_t bytes, const char* what);
    Buffer(Buffer&& other) noexcept;
    Buffer& operator=(Buffer&& other) noexcept;
    ~Buffer();

    uint8_t* data() const { return data_; }
    uint64_t size() const { return size_; }

  private:
    uint8_t* data_ = nullptr;
    uint64_t size_ = 0;
};

}  // namespace kivi::cpu
