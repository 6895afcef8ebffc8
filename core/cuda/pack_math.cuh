// Arithmetic of the packers. Pairs are two f16 in a word, the lower half first.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "format/quantize.h"

namespace kivi::cuda {

// NaN where either is.
__device__ __forceinline__ uint32_t min_pair(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ uint32_t pair_of(float low, float high) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
// a * b + c, rounded once, and clamped to 0 .. 1; NaN becomes 0.
__device__ __forceinline__ float fma_clamped(float a, float b, float c) {
    float r;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}
// Rows of the caller are read once.
__device__ __forceinline__ uint4 load_once(const uint4* from) { return __ldcs(from); }
__device__ __forceinline__ uint2 load_once(const uint2* from) { return __ldcs(from); }

// 16 bytes from global to shared memory behind the thread's back, and the wait for all of them.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from)
                 : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace kivi::cuda
