// Short segments: each is one cluster's, whose blocks run at the same time and read each other's shared memory. That
// merges them in a third of the time that tickets and memory take.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_args.h"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_line.cuh"
#include "cuda/decode_merge.cuh"
#include "cuda/decode_output.cuh"
#include "cuda/decode_shared.cuh"

namespace kivi::cuda::fast {

__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// A barrier of all threads of the cluster's blocks: what they did before they arrived is done for those that waited.
__device__ __forceinline__ void arrive_at_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The address of a place in this block's shared memory in that of another.
__device__ __forceinline__ uint32_t address_in_block(const void* p, unsigned rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
    return address;
}
__device__ __forceinline__ float2 load_pair_of_cluster(uint32_t address) {
    float2 x;
    asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
    return x;
}
__device__ __forceinline__ float4 load_four_of_cluster(uint32_t address) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address));
    return x;
}

// Merges the cluster's segment, whose warps have left what their deposits say; by all threads.
template <class C>
__device__ __forceinline__ void merge_cluster(const DecodeArgs& p, SharedStorage<C>& shared, int segment, int worker,
                                              int lane) {
    // The block's part of each row, where queries were.
    static_assert(sizeof shared.queries >= C::kPartialFloats * sizeof(float));
    const int rows = p.query_rows.by;
    float* const parts = reinterpret_cast<float*>(shared.queries);
    const unsigned members = __ballot_sync(kAll, shared.deposits[lane].segment >= 0);
#pragma unroll 1
    for (int row = worker; row < rows; row += C::kWarps) {
        leave_part<C>(parts + row * C::kPartialRow, lane, merge_warps<C>(p, shared, members, row, lane));
    }
    arrive_at_cluster();
    wait_for_cluster();
    static_assert(C::kRows <= kClusterBlocks * C::kWarps, "a warp a row");
    const int row = cluster_rank() + kClusterBlocks * worker;
    const float* const part = parts + row * C::kPartialRow;
    float2 mine = make_float2(-INFINITY, 0.0f);
    float4 v[kClusterBlocks][C::kRowVectors];
    if (row < rows) {
        if (lane < kClusterBlocks) mine = load_pair_of_cluster(address_in_block(part + C::kPartialExponent, lane));
#pragma unroll
        for (int block = 0; block < kClusterBlocks; ++block) {
#pragma unroll
            for (int i = 0; i < C::kRowVectors; ++i) {
                v[block][i] = load_four_of_cluster(address_in_block(part + lane_channel<C>(lane, i), block));
            }
        }
    }
    arrive_at_cluster();  // a block's memory is there until all have read it
    if (row < rows) {
        Row<C> r;
        const float weight = r.weigh(mine);
#pragma unroll
        for (int block = 0; block < kClusterBlocks; ++block) r.add(__shfl_sync(kAll, weight, block), v[block]);
        write_row<C>(p, shared, row_of(segment), head_of(segment), row, lane, r);
    }
    wait_for_cluster();
}

}  // namespace kivi::cuda::fast
