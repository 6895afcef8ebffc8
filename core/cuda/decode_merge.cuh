// Merging partial results: of the warps of a block, then of blocks by the last of them to arrive.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_args.h"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_output.cuh"
#include "cuda/decode_shared.cuh"

namespace kivi::cuda::fast {

// ---- Warps of a block ----

// Where a warp leaves a segment on its way: one that began before its slice, and then one that it has seen whole.
template <class C>
__device__ __forceinline__ float* spill_of(const DecodeArgs& p, int warp, bool whole) {
    return p.spills + ((size_t(blockIdx.x) * C::kWarps + warp) * 2 + whole) * C::kPartialFloats;
}

// A lane's share of a row that one warp has left.
template <class C>
struct Part {
    float4 value[C::kRowVectors] = {};
    __device__ __forceinline__ void load(const float* part, int lane) {
#pragma unroll
        for (int i = 0; i < C::kRowVectors; ++i) {
            value[i] = *reinterpret_cast<const float4*>(part + lane_channel<C>(lane, i));
        }
    }
};
template <class C>
__device__ __forceinline__ float2 exponent_of(const float* part) {
    return *reinterpret_cast<const float2*>(part + C::kPartialExponent);
}

// Merges a row over what the warps of this block left: `members` has bit i for the last segment of warp i (in its
// ring), bit 16 + i for its first segment (among the spills). Warps of a segment are neighbours, but for those without
// visits, and at most one of them left it on its way.
template <class C>
__device__ __forceinline__ Row<C> merge_warps(const DecodeArgs& p, const SharedStorage<C>& shared, unsigned members,
                                              int row, int lane) {
    const int in_rings = members & 0xFFFF, first = __ffs(in_rings) - 1,
              count = in_rings != 0 ? 32 - __clz(in_rings) - first : 0;
    const float* const spill =
        members >> 16 ? spill_of<C>(p, __ffs(members >> 16) - 1, false) + row * C::kPartialRow : nullptr;
    const auto part = [&](int i) {
        return reinterpret_cast<const float*>(shared.ring[first + i]) + row * C::kPartialRow;
    };
    float2 mine = make_float2(-INFINITY, 0.0f);
    if (lane < count) mine = exponent_of<C>(part(lane));
    Part<C> spilled;  // asked for with its exponent: a trip to the L2
    if (spill != nullptr) {
        if (lane == count) mine = exponent_of<C>(spill);
        spilled.load(spill, lane);
    }
    Row<C> r;
    const float weight = r.weigh(mine);
    constexpr int kAtOnce = C::kWarps / 2;
#pragma unroll 1
    for (int begin = 0; begin < count; begin += kAtOnce) {
        Part<C> v[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (begin + i < count) v[i].load(part(begin + i), lane);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const float its = __shfl_sync(kAll, weight, begin + i);
            r.add(begin + i < count ? its : 0.0f, v[i].value);
        }
    }
    if (spill != nullptr) r.add(__shfl_sync(kAll, weight, count), spilled.value);
    return r;
}

// ---- Blocks ----

// A block's parts of segments that are not its own alone go to the workspace: into its second place if the segment
// begins in this block (it is then the block's last one), into its first place otherwise.
template <class C>
__device__ __forceinline__ float* part_of(const DecodeArgs& p, unsigned block, bool begins_here, int row) {
    return p.partials + (size_t(block) * 2 + begins_here) * C::kPartialFloats + row * C::kPartialRow;
}

template <class C>
__device__ __forceinline__ void leave_part(float* to, int lane, const Row<C>& r) {
#pragma unroll
    for (int i = 0; i < C::kRowVectors; ++i) {
        if (lane_writes<C>(lane)) *reinterpret_cast<float4*>(to + lane_channel<C>(lane, i)) = r.value[i];
    }
    if (lane == 0) *reinterpret_cast<float2*>(to + C::kPartialExponent) = make_float2(r.reference, r.sum);
}

// Merges a row's parts part_at(0) .. part_at(last). They are read from the L2, which blocks share.
template <class C, class PartAt>
__device__ __forceinline__ Row<C> merge_parts(unsigned last, int lane, const PartAt& part_at) {
    constexpr int kAtOnce = 18 / C::kRowVectors, kTogether = kAtOnce / 3;  // more than needed are not even looked at
    Row<C> r;
#pragma unroll 1
    for (unsigned begin = 0; begin <= last; begin += kAtOnce) {
        float2 mine = make_float2(-INFINITY, 0.0f);
        if (lane < kAtOnce && begin + lane <= last) {
            mine = __ldcg(reinterpret_cast<const float2*>(part_at(begin + lane) + C::kPartialExponent));
        }
        float4 v[kAtOnce][C::kRowVectors];
#pragma unroll
        for (int group = 0; group < kAtOnce; group += kTogether) {
            if (group > 0 && begin + group > last) break;
#pragma unroll
            for (int i = group; i < group + kTogether; ++i) {  // past the last one it again, with no weight
                const float* const part = part_at(min(begin + i, last));
#pragma unroll
                for (int k = 0; k < C::kRowVectors; ++k) {
                    v[i][k] = __ldcg(reinterpret_cast<const float4*>(part + lane_channel<C>(lane, k)));
                }
            }
        }
        const float weight = r.weigh(mine);
#pragma unroll
        for (int group = 0; group < kAtOnce; group += kTogether) {
            if (group > 0 && begin + group > last) break;
#pragma unroll
            for (int i = group; i < group + kTogether; ++i) r.add(__shfl_sync(kAll, weight, i), v[i]);
        }
    }
    return r;
}

// Tickets: a block leaves its part of a row and takes a ticket; who takes the last one merges, and puts the ticket back
// to kFresh for the next launch, replayed graphs too. A segment's tickets are those of the block in which it begins.
constexpr unsigned long long kFresh = 0x6B697669'5EEDull << 16;
__device__ __forceinline__ bool is_ticket(unsigned long long word) { return word >> 16 == kFresh >> 16; }

__device__ __forceinline__ unsigned long long add_to(unsigned long long* ticket, unsigned long long count) {
    unsigned long long word;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(word) : "l"(ticket), "l"(count) : "memory");
    return word;
}
// The workspace may hold anything before the first launch: then adding has counted nothing, and one of those who
// come makes a ticket of it, on which all count anew.
inline __device__ __noinline__ unsigned make_ticket(unsigned long long* ticket, unsigned long long seen,
                                                    unsigned count) {
    for (;;) {
        unsigned long long now;
        asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
                     : "=l"(now)
                     : "l"(ticket), "l"(seen), "l"(kFresh + count)
                     : "memory");
        if (now == seen) return 0;
        if (is_ticket(now)) return static_cast<unsigned>(add_to(ticket, count) & 0xFFFF);
        seen = now;
    }
}
// Takes `count` and says how many were taken before; by one lane. What was left before by those is visible from now on.
__device__ __forceinline__ unsigned take_tickets(unsigned long long* ticket, unsigned count) {
    const unsigned long long word = add_to(ticket, count);
    return is_ticket(word) ? static_cast<unsigned>(word & 0xFFFF) : make_ticket(ticket, word + count, count);
}

}  // namespace kivi::cuda::fast
