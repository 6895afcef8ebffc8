// Memory of CUDA device 0 for the suites that every backend passes. Copies wait for work queued before them.
#pragma once
#include <cstddef>

namespace kivi_test {

void* cuda_allocate(size_t bytes);
void cuda_release(void* memory);
void cuda_upload(void* device, const void* host, size_t bytes);
void cuda_download(void* host, const void* device, size_t bytes);

}  // namespace kivi_test
