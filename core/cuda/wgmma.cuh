// Instructions of compute capability 9.0 alone (sm_90a): products of a warpgroup, its registers.
//
// wgmma multiplies 64 rows of A, four registers of each thread as in mma.m16n8k16, warp w having rows 16 w and on, by B
// in shared memory: n rows of 16 numbers of the depth. B stands in panels of 64 numbers of the depth, 128 bytes a row,
// whose 16-byte vectors are permuted within each eight rows (the 128-byte swizzle):
//
//   byte of (row, number) = 128 row + 16 (number / 8 ^ row % 8) + 2 (number % 8), in a panel at a multiple of 1024
//
// Element 4 j + 2 h + e of a thread's result is row lane / 4 + 8 h of the warp's 16, column 8 j + 2 (lane % 4) + e.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace kivi::cuda::hopper {

// A panel at a shared address, or what of it begins at a multiple of 32 bytes of the depth.
__device__ __forceinline__ uint64_t panel(uint32_t address) {
    constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 / 16} << 32,
                       kUnused = uint64_t{1} << 16;
    return kSwizzle128 | kEightRows | kUnused | (address & 0x3FFFF) >> 4;
}

// Before products whose registers have been written; they are ordered among each other.
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all products have been done.
__device__ __forceinline__ void wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Shared memory that this thread has written and products read next.
__device__ __forceinline__ void hand_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Named barriers of the block, `threads` at each. One who does not wait arrives.
__device__ __forceinline__ void meet(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive(int name, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_init(uint32_t bar, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// d = a * b, and d += a * b, of fp16 or bf16; d has n / 2 elements of n columns.
#define KIVI_D4(how, i) how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3])
#define KIVI_D32(how, i)                                                                                   \
    KIVI_D4(how, i), KIVI_D4(how, i + 4), KIVI_D4(how, i + 8), KIVI_D4(how, i + 12), KIVI_D4(how, i + 16), \
        KIVI_D4(how, i + 20), KIVI_D4(how, i + 24), KIVI_D4(how, i + 28)
#define KIVI_WGMMA(columns, type, add, registers, ...)                                                        \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add ", 0;\n"                                        \
                 "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " " registers           \
                 ", add, 1, 1, 0;\n}"                                                                         \
                 : __VA_ARGS__                                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define KIVI_REGISTERS_32 \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
    "%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36"
#define KIVI_REGISTERS_36 \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
    "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35}, {%36,%37,%38,%39}, %40"
#define KIVI_REGISTERS_64 \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
    "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49," \
    "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68"

__device__ __forceinline__ void multiply(float (&d)[36], const uint32_t (&a)[4], uint64_t b) {
    KIVI_WGMMA("72", "f16", "0", KIVI_REGISTERS_36, KIVI_D32("=f", 0), KIVI_D4("=f", 32));
}
__device__ __forceinline__ void multiply_add(float (&d)[36], const uint32_t (&a)[4], uint64_t b) {
    KIVI_WGMMA("72", "f16", "1", KIVI_REGISTERS_36, KIVI_D32("+f", 0), KIVI_D4("+f", 32));
}
template <bool BF16>
__device__ __forceinline__ void multiply(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
    if constexpr (BF16) {
        KIVI_WGMMA("64", "bf16", "0", KIVI_REGISTERS_32, KIVI_D32("=f", 0));
    } else {
        KIVI_WGMMA("64", "f16", "0", KIVI_REGISTERS_32, KIVI_D32("=f", 0));
    }
}
template <bool BF16>
__device__ __forceinline__ void multiply_add(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
    if constexpr (BF16) {
        KIVI_WGMMA("64", "bf16", "1", KIVI_REGISTERS_32, KIVI_D32("+f", 0));
    } else {
        KIVI_WGMMA("64", "f16", "1", KIVI_REGISTERS_32, KIVI_D32("+f", 0));
    }
}
template <bool BF16>
__device__ __forceinline__ void multiply_add(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
    if constexpr (BF16) {
        KIVI_WGMMA("128", "bf16", "1", KIVI_REGISTERS_64, KIVI_D32("+f", 0), KIVI_D32("+f", 32));
    } else {
        KIVI_WGMMA("128", "f16", "1", KIVI_REGISTERS_64, KIVI_D32("+f", 0), KIVI_D32("+f", 32));
    }
}
#undef KIVI_REGISTERS_64
#undef KIVI_REGISTERS_36
#undef KIVI_REGISTERS_32
#undef KIVI_WGMMA
#undef KIVI_D32
#undef KIVI_D4

}  // namespace kivi::cuda::hopper
