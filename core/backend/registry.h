// The kinds of backend in this build.
#pragma once
#include <cstdint>

#include "backend/backend.h"

namespace kivi {

// The backend that serves a device (enum kivi_device), or NULL: not in this build.
const BackendKind* find_backend(int32_t device);

// Instruction sets or architectures that this build knows, for kivi_build_info.
const char* build_backends();

}  // namespace kivi
