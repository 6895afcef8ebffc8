// The kinds of backend in this build: the CPU.
#include "backend/registry.h"

#include "cpu/cpu_backend.h"

namespace kivi {

const BackendKind* find_backend(int32_t device) {
    return device == KIVI_CPU ? &cpu::backend_kind() : nullptr;
}

const char* build_targets() {
#if defined(__aarch64__)
    return "aarch64 with NEON, no CUDA";
#else
    return "x86-64 with SSE4, AVX2, AVX-512 and VNNI by the machine, no CUDA";
#endif
}

}  // namespace kivi
