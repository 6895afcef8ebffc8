// Merging partials: of the warps of a block, then of blocks by the last of them to arrive.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_args.h"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_result.cuh"
#include "cuda/decode_rows.cuh"
#include "cuda/decode_shared.cuh"

namespace kivi::cuda::fast {

// A row while it is merged: every lane holds four channels (at 64, lanes 16.. the same as lanes 0..), all lanes know
// exponent and sum.
struct Row {
    float reference = -INFINITY, sum = 0.0f;
    float4 value = make_float4(0, 0, 0, 0);
    __device__ __forceinline__ void add(float weight, float more, const float4& v) {
        sum = fmaf(weight, more, sum);
        value.x = fmaf(weight, v.x, value.x);
        value.y = fmaf(weight, v.y, value.y);
        value.z = fmaf(weight, v.z, value.z);
        value.w = fmaf(weight, v.w, value.w);
    }
    // Adds partials relative to `largest`, the greatest exponent among them and this row's.
    __device__ __forceinline__ void move_to(float largest) {
        const float old = exp2_fast(reference - largest);
        reference = largest;
        sum *= old;
        value = make_float4(value.x * old, value.y * old, value.z * old, value.w * old);
    }
};
constexpr float kNoExponent = -1e30f;  // instead of -inf, for rows that see nothing

template <class C>
__device__ __forceinline__ int lane_channel(int lane) { return 4 * (lane % (C::kDim / 4)); }

template <class C>
__device__ __forceinline__ void write_row(const DecodeArgs& p, int segment, int row, int lane, Row r) {
    const QueryRow to(p, segment, row);
    float factor = inverse_of(r.sum);
    if (p.rotated_values) {
        butterfly(r.value);
#pragma unroll
        for (int step = 1; step < C::kDim / 4; step *= 2) across(r.value, step, lane);
        factor *= hadamard_norm<C>();
    }
    if (lane < C::kDim / 4) {
        *reinterpret_cast<uint2*>(static_cast<uint8_t*>(p.out) +
                                  2 * (to.in(p, p.out_strides) + lane_channel<C>(lane))) = to_output<C>(r.value, factor);
    }
    if (lane == 0) write_lse(p, to, lse_of(r.reference, r.sum));
}

// Merges a row over what the warps of this block left: `members` has bit i for the last segment of warp i (in its
// ring), bit 16 + i for its first segment (among the spills; at most one warp leaves a segment on its way).
template <class C>
__device__ __forceinline__ Row merge_warps(const DecodeArgs& p, const SharedStorage<C>& shared, unsigned members,
                                           int row, int lane) {
    Row r;
    r.reference = kNoExponent;
    // Every lane looks at all exponents itself: shuffles would take longer.
    float2 e[C::kWarps];
    float4 v[C::kWarps];
#pragma unroll
    for (int i = 0; i < C::kWarps; ++i) {
        const float* const from = reinterpret_cast<const float*>(shared.ring[i]) + row * C::kPartialRow;
        const bool is = members >> i & 1;
        e[i] = is ? *reinterpret_cast<const float2*>(from + C::kPartialExponent) : make_float2(-INFINITY, 0.0f);
        v[i] = is ? *reinterpret_cast<const float4*>(from + lane_channel<C>(lane)) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < C::kWarps; ++i) r.reference = fmaxf(r.reference, e[i].x);
#pragma unroll
    for (int i = 0; i < C::kWarps; ++i) r.add(exp2_fast(e[i].x - r.reference), e[i].y, v[i]);
    if (members >> 16) {
        const int w = __ffs(members >> 16) - 1;
        const float* const from =
            p.spills + (size_t(blockIdx.x) * C::kWarps + w) * C::kPartialFloats + row * C::kPartialRow;
        const float2 other = *reinterpret_cast<const float2*>(from + C::kPartialExponent);
        r.move_to(fmaxf(r.reference, other.x));
        r.add(exp2_fast(other.x - r.reference), other.y, *reinterpret_cast<const float4*>(from + lane_channel<C>(lane)));
    }
    return r;
}

// Where a block leaves its part of a segment that is not its own alone: in its second place if the segment begins in
// this block (it is then the block's last one), in its first place otherwise.
__device__ __forceinline__ size_t place_of(unsigned block, bool begins_here) { return size_t(block) * 2 + begins_here; }

// Tickets: a block writes its part and takes a ticket of the segment; who takes the last one merges, and puts the
// ticket back to kFresh for the next launch, replayed graphs too. A segment's ticket is that of the block in which it
// begins. The workspace may hold anything before: every block that will take a ticket looks at it early, and makes it
// kFresh if its upper bits do not say that it is a ticket.
constexpr unsigned long long kFresh = 0x6B697669'5EEDull << 16;
__device__ __forceinline__ unsigned long long look_at_ticket(const DecodeArgs& p, unsigned block) {
    return __ldcg(&p.tickets[block].word);
}
__device__ __forceinline__ void make_ticket(const DecodeArgs& p, unsigned block, unsigned long long seen) {
    if (seen >> 16 != kFresh >> 16) atomicCAS(&p.tickets[block].word, seen, kFresh);
}
// How many were taken before. What was written before by those is visible from now on.
__device__ __forceinline__ unsigned take_ticket(const DecodeArgs& p, unsigned block) {
    unsigned long long word;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;" : "=l"(word) : "l"(&p.tickets[block].word) : "memory");
    return static_cast<unsigned>(word & 0xFFFF);
}

// Adds a row's partials of blocks first .. last, in their order.
template <class C>
__device__ __forceinline__ Row merge_blocks(const DecodeArgs& p, unsigned first, unsigned last, int row, int lane) {
    constexpr int kAtOnce = 18, kStride = 2 * C::kPartialFloats;
    Row r;
    r.reference = kNoExponent;
    const float* from = p.partials + size_t(first) * kStride + row * C::kPartialRow;
#pragma unroll 1
    for (unsigned b = first; b <= last; b += kAtOnce, from += kAtOnce * kStride) {
        const int count = min(unsigned(kAtOnce), last - b + 1);
        float2 e[kAtOnce];
        float4 v[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (i >= count) continue;
            const float* const at = from + i * kStride + (i == 0 && b == first ? C::kPartialFloats : 0);
            e[i] = __ldcg(reinterpret_cast<const float2*>(at + C::kPartialExponent));
            v[i] = __ldcg(reinterpret_cast<const float4*>(at + lane_channel<C>(lane)));
        }
        float largest = r.reference;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (i < count) largest = fmaxf(largest, e[i].x);
        }
        r.move_to(largest);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (i < count) r.add(exp2_fast(e[i].x - largest), e[i].y, v[i]);
        }
    }
    return r;
}

}  // namespace kivi::cuda::fast
