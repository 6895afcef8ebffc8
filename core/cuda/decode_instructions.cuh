// Instructions that C++ has no words for: tensor cores, conversions of pairs, bulk copies and their barriers; a
// quick division.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace kivi::cuda::fast {

constexpr unsigned kAll = 0xFFFFFFFFu;

template <bool BF16 = false>
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
    if constexpr (BF16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}
__device__ __forceinline__ uint32_t mul_half2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
// The larger magnitudes of two pairs.
__device__ __forceinline__ uint32_t largest_half2(uint32_t a, uint32_t b) {
    const __half2 m = __hmax2(__habs2(*reinterpret_cast<__half2*>(&a)), __habs2(*reinterpret_cast<__half2*>(&b)));
    return *reinterpret_cast<const uint32_t*>(&m);
}
__device__ __forceinline__ float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
template <bool BF16 = false>
__device__ __forceinline__ uint32_t to_pair(float low, float high) {
    uint32_t r;
    if constexpr (BF16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    }
    return r;
}
template <bool BF16 = false>
__device__ __forceinline__ float2 from_pair(uint32_t x) {
    if constexpr (BF16) return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000u));
    return __half22float2(*reinterpret_cast<const __half2*>(&x));
}
// All bits of those halves of a pair that are not finite.
template <bool BF16>
__device__ __forceinline__ uint32_t nonfinite_halves(uint32_t pair) {
    constexpr uint32_t kExponent = BF16 ? 0x7F807F80u : 0x7C007C00u;
    return __vcmpeq2(pair & kExponent, kExponent);
}
__device__ __forceinline__ float largest_of_warp(float x) {
    // Floats in the order of integers.
    const auto ordered = [](int i) { return i ^ (i >> 31 & 0x7FFFFFFF); };
    return __int_as_float(ordered(__reduce_max_sync(kAll, ordered(__float_as_int(x)))));
}
// 8x8 transposition across the warp: (row r, columns 2t and 2t+1) in, (column r, rows 2t and 2t+1) out.
__device__ __forceinline__ uint32_t transpose8x8(uint32_t a) {
    uint32_t r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
    return r;
}
// One lane of the warp, asked by all of it. What it does alone compiles to a third of what `lane == 0` does: operands
// of bulk copies are uniform registers, which otherwise a loop over the active lanes fills.
__device__ __forceinline__ bool elected() {
    uint32_t is;
    asm volatile("{\n.reg .pred is;\nelect.sync _|is, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, is;\n}" : "=r"(is));
    return is != 0;
}
__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(uint32_t bar) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra READY;\nbra AGAIN;\nREADY:\n}" ::"r"(bar),
        "r"(parity)
        : "memory");
}
// Pages are read once: they leave L2 first, and what is used again stays. What createpolicy.fractional.L2::evict_first
// makes of 1.0, as a constant: it takes six instructions a copy.
constexpr uint64_t kEvictFirst = 0x12F0000000000000;
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
        "[%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(bar), "n"(kEvictFirst)
        : "memory");
}
// Past L1, which could keep what was there before another kernel wrote.
__device__ __forceinline__ int32_t load_fresh(const int32_t* from) {
    int32_t x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ __forceinline__ int64_t load_fresh(const int64_t* from) {
    int64_t x;
    asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
    return x;
}
// 16 or 4 bytes by the thread itself, and the end of all such copies of the thread.
__device__ __forceinline__ void copy16(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy4(uint32_t to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Such copies of a thread in groups: of all but the last LEFT groups.
__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
// Shared memory that threads have written and the copy engine writes next.
__device__ __forceinline__ void hand_to_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
}
__device__ __forceinline__ uint4 load16(const uint8_t* p) { return *reinterpret_cast<const uint4*>(p); }

// a / b for numbers below 2^24, without the dozens of instructions of the general division.
__device__ __forceinline__ unsigned divide(unsigned a, unsigned b) {
    unsigned q = __float2uint_rz(__uint2float_rn(a) * reciprocal(__uint2float_rn(b)));  // off by one at most
    if (q * b > a) --q;
    if (a - q * b >= b) ++q;
    return q;
}
__device__ __forceinline__ unsigned divide_up(unsigned a, unsigned b) { return divide(a + b - 1, b); }

}  // namespace kivi::cuda::fast
