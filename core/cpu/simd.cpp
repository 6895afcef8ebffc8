// Asks the processor once; see simd.h.
#include "cpu/simd.h"

#include <atomic>

namespace kivi::cpu::simd {
namespace {

std::atomic<int> in_use{-1};  // a Target, or -1 before the first question

Target ask_processor() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
    if (avx512 && __builtin_cpu_supports("avx512vnni")) return Target::avx512_vnni;
    if (avx512) return Target::avx512;
    if (avx2) return Target::avx2;
    if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("aes")) {
        return Target::sse4;
    }
#endif
    return Target::plain;
}

}  // namespace

Target best_target() {
    static const Target best = ask_processor();
    return best;
}

Target target() {
    const int now = in_use.load(std::memory_order_relaxed);
    return now < 0 ? best_target() : static_cast<Target>(now);
}

bool runs_on(Target target) { return target <= best_target(); }

void force_target(Target target) { in_use.store(static_cast<int>(target), std::memory_order_relaxed); }

const char* target_name(Target target) {
    switch (target) {
        case Target::avx512_vnni: return "AVX-512 VNNI";
        case Target::avx512: return "AVX-512";
        case Target::avx2: return "AVX2";
        case Target::sse4: return "SSE4";
        case Target::plain: break;
    }
#if defined(__aarch64__)
    return "NEON";
#else
    return "plain";
#endif
}

}  // namespace kivi::cpu::simd
