// A CUDA device as a Backend: owns pages, windows, page tables, lengths and moments of one cache.
#pragma once
#include "backend/backend.h"

namespace kivi::cuda {

const BackendKind& backend_kind();

// Architectures that kernels were compiled for, for kivi_build_info: "sm_80 sm_90".
const char* architectures();

}  // namespace kivi::cuda
