// The kinds of backend in this build.
#pragma once
#include <cstdint>

#include "backend/backend.h"

namespace kivi {

// The backend that serves a device (enum kivi_device), or NULL: not in this build.
const BackendKind* find_backend(int32_t device);

// What this build can run on, for kivi_build_info: instruction sets, CUDA architectures. Static.
const char* build_targets();

}  // namespace kivi
