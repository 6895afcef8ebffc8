// The kinds of backend in this build: the CPU.
#include "backend/registry.h"

#include "cpu/cpu_backend.h"

namespace kivi {

const BackendKind* find_backend(int32_t device) {
    return device == KIVI_CPU ? &cpu::backend_kind() : nullptr;
}

const char* build_backends() { return "no CUDA"; }

}  // namespace kivi
