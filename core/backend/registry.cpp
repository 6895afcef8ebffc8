// The kinds of backend in this build: the CPU, and CUDA where it was asked for.
#include "backend/registry.h"

#include <string>

#include "cpu/cpu_backend.h"
#if defined(KIVI_WITH_CUDA)
#include "cuda/cuda_backend.h"
#endif

namespace kivi {

const BackendKind* find_backend(int32_t device) {
    if (device == KIVI_CPU) return &cpu::backend_kind();
#if defined(KIVI_WITH_CUDA)
    if (device == KIVI_CUDA) return &cuda::backend_kind();
#endif
    return nullptr;
}

const char* build_targets() {
#if defined(KIVI_WITH_CUDA)
    static const std::string gpus = std::string("CUDA ") + cuda::architectures();
#else
    static const std::string gpus = "no CUDA";
#endif
#if defined(__aarch64__)
    static const std::string targets = "aarch64 with NEON, " + gpus;
#else
    static const std::string targets = "x86-64 with SSE4, AVX2, AVX-512 and VNNI by the machine, " + gpus;
#endif
    return targets.c_str();
}

}  // namespace kivi
