// The CPU as a Backend: owns windows, pages, moments and threads of one cache.
#pragma once
#include "backend/backend.h"

namespace kivi::cpu {

const BackendKind& backend_kind();

}  // namespace kivi::cpu
