// The backend that a run of the conformance and property suites is about, and its memory. The cases know no
// other way to device memory, so a new backend is one more row of the table in backend.cpp.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kivi/kivi.h"

namespace kivi_test {

struct Backend {
    const char* name;
    int32_t device;        // enum kivi_device
    uint64_t cache_flags;  // enum kivi_cache_flags
    double tolerance;      // of attend against double precision, of the output's norm over a call
    void* (*allocate)(size_t bytes);
    void (*release)(void* memory);
    void (*upload)(void* device, const void* host, size_t bytes);
    void (*download)(void* host, const void* device, size_t bytes);
    bool host_memory;  // tensors may be any memory of the process
};

const std::vector<Backend>& backends();

// The one of this run; chosen once, by the program's argument.
const Backend& backend();
void choose(const Backend& backend);

// Why the backend cannot run on this machine; "" if it can.
std::string missing(const Backend& backend);

}  // namespace kivi_test
