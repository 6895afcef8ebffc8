// One block of memory of the cache. Mapped anonymously: the system hands out zeroed pages on first touch,
// so a large cache costs what it holds, not what it could hold.
#include "cpu/memory.h"

#include <string>
#include <utility>

#include <sys/mman.h>

#include "format/error.h"

namespace kivi::cpu {
namespace {

constexpr uint64_t kHugePage = uint64_t{1} << 21;

}  // namespace

Buffer::Buffer(uint64_t bytes, const char* what) {
    if (bytes == 0) return;
    void* p = bytes > SIZE_MAX / 2
                  ? MAP_FAILED
                  : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        throw Error(KIVI_ERROR_OUT_OF_MEMORY,
                    std::string("no memory for ") + what + ": " + std::to_string(bytes) + " bytes asked for");
    }
    // Fewer misses of the address cache while attend walks the pages; a hint that may be ignored.
    if (bytes >= kHugePage) (void)madvise(p, bytes, MADV_HUGEPAGE);
    data_ = static_cast<uint8_t*>(p);
    size_ = bytes;
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

Buffer::~Buffer() {
    if (data_ != nullptr) munmap(data_, size_);
}

}  // namespace kivi::cpu
