// Table of backends.
#include "support/backend.h"

#include <cstdlib>
#include <cstring>

#if defined(KIVI_WITH_CUDA)
#include "support/cuda_memory.h"
#endif

namespace kivi_test {
namespace {

void copy(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

const Backend* chosen = nullptr;

}  // namespace

const std::vector<Backend>& backends() {
    static const std::vector<Backend> table = {
        {"cpu", KIVI_CPU, 0, 1e-3, std::malloc, std::free, copy, copy, true},
        {"cpu-reference", KIVI_CPU, KIVI_CACHE_REFERENCE, 1e-6, std::malloc, std::free, copy, copy, true},
#if defined(KIVI_WITH_CUDA)
        {"cuda", KIVI_CUDA, 0, 3e-3, cuda_allocate, cuda_release, cuda_upload, cuda_download, false},
#endif
    };
    return table;
}

const Backend& backend() { return *chosen; }

void choose(const Backend& backend) { chosen = &backend; }

std::string missing(const Backend& backend) {
    int32_t count = 0;
    if (kivi_device_count(backend.device, &count) != KIVI_OK) return kivi_last_error();
    if (count > 0) return "";
    kivi_device_info info{};
    if (kivi_device_query(backend.device, 0, &info, sizeof info) != KIVI_OK) return kivi_last_error();
    return info.reason;
}

}  // namespace kivi_test
