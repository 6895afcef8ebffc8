// 32 rows of a head in shared memory: how a warp fetches and reads them.
#pragma once
#include "cuda/decode_instructions.cuh"
#include "cuda/fragment_order.h"
#include "cuda/warp_row.cuh"
#include "format/view.h"

namespace kivi::cuda {

constexpr int kPackWarps = kPageTokens / kBlockTokens;  // of a block: each has 32 tokens of a page
constexpr int kPackThreads = kPackWarps * kWarp;

// The lane's number, made again: what follows from it is not kept ready for the next tile, which would cost registers.
__device__ __forceinline__ int fresh_lane() {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread % kWarp;
}

__device__ __forceinline__ uint4 load_shared16(uint32_t at) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at)
                 : "memory");
    return x;
}
__device__ __forceinline__ void store_shared16(uint32_t at, const uint4& x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

template <int N>
struct alignas(4 * N) Words {
    uint32_t word[N];
};

// 16-byte chunks of a row stand in an order of its own, so that no bank is met twice by lanes that read
//   one chunk of eight rows side by side         (a lane a row)
//   four chunks of two rows side by side         (codes of keys)
//   two chunks of four rows that are eight apart (codes of values)
//
// A place is the number of a chunk in the tile. A lane finds its first one, and others by a step from it.
template <int DIM>
struct alignas(128) Tile {
    static constexpr int kChunks = DIM / 8;
    uint4 chunks[kBlockTokens * kChunks];

    static __device__ __forceinline__ constexpr int swizzle(int token) {
        return ((token & 1) << 2) ^ (token >> 1 & 3) ^ (token >> 3 << 1);
    }
    static __device__ __forceinline__ int place(int token, int chunk) {
        return token * kChunks + (chunk ^ swizzle(token));
    }
    // Of the token and chunk that far on. The numbers at `place` and the steps have no bits in common.
    static __device__ __forceinline__ int step(int place, int tokens, int chunks) {
        return (place ^ swizzle(tokens) ^ (chunks & 7)) + tokens * kChunks + (chunks & ~7);
    }
    // The same on addresses of shared memory: a tile is aligned to its steps inside 128 bytes.
    static __device__ __forceinline__ uint32_t step_address(uint32_t at, int tokens, int chunks) {
        return (at ^ 16 * swizzle(tokens) ^ 16 * (chunks & 7)) + 16 * (tokens * kChunks + (chunks & ~7));
    }
    // The number-th N words of a chunk.
    template <int N>
    __device__ __forceinline__ Words<N> words(int place, int number = 0) const {
        return reinterpret_cast<const Words<N>*>(chunks)[place * (4 / N) + number];
    }

    // Rows on their way; row(first, further) is where row first + further stands in global memory.
    template <class Row>
    __device__ __forceinline__ void fetch(int lane, const Row& row) {
        constexpr int kRows = kWarp / kChunks;  // at a time
        const int first = lane / kChunks;
        const uint32_t at = fast::shared_address(chunks + place(first, lane % kChunks));
#pragma unroll
        for (int further = 0; further < kBlockTokens; further += kRows) {
            fast::copy16(step_address(at, further, 0), row(first, further) + lane % kChunks * 16);
            if ((further + kRows) % kQuarter == 0) fast::end_copy_group();
        }
    }
    // Waits until all rows are there, but for those of the last LEFT quarters.
    static constexpr int kQuarter = kBlockTokens / 4;
    template <int LEFT = 0>
    static __device__ __forceinline__ void wait() {
        fast::wait_for_groups<LEFT>();
        __syncwarp();
    }
    static __device__ __forceinline__ void wait_for_quarter(int number) {
        switch (number) {
            case 0: return wait<3>();
            case 1: return wait<2>();
            case 2: return wait<1>();
            default: return wait<0>();
        }
    }
    // Rows that are `stride` bytes apart.
    __device__ __forceinline__ void fetch(int lane, const uint8_t* rows, uint32_t stride) {
        fetch(lane, [&](int first, int further) {
            return rows + uint64_t{stride} * static_cast<uint32_t>(first) +
                   uint64_t{stride} * static_cast<uint32_t>(further);
        });
    }
};

}  // namespace kivi::cuda
