// One row of a head, held by a warp: to a page of 16 bits, or, of values, as codes to its place in the fragment order.
#pragma once
#include "cuda/fragment_order.h"
#include "cuda/pack_groups.cuh"
#include "cuda/warp_row.cuh"

namespace kivi::cuda {

// Extremes over the lanes of a group: LANES neighbours.
template <int LANES>
struct RowExtremes {
    float low, high;
    bool damaged;

    __device__ __forceinline__ explicit RowExtremes(const float (&x)[kLaneChannels])
        : low(x[0]), high(x[0]), damaged(false) {
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) {
            low = fminf(low, x[i]), high = fmaxf(high, x[i]);
            damaged = damaged || !finite(x[i]);
        }
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) {
            low = fminf(low, __shfl_xor_sync(kAllLanes, low, step));
            high = fmaxf(high, __shfl_xor_sync(kAllLanes, high, step));
            damaged = __shfl_xor_sync(kAllLanes, static_cast<int>(damaged), step) != 0 || damaged;
        }
    }
};

// Values of one token of a page. A byte of codes is of one token alone, in each of two words:
//
//   lane's channels 4 l + {0, 2} and {1, 3}: two fields each of words 0 and 1 of vectors that are the row's
//   BITS 4   a byte a lane and word
//   BITS 2   a byte of lanes l and l ^ 8
template <int BITS, int DIM, int GROUPS>
__device__ __forceinline__ void pack_value_row(const WarpRow<stripes(DIM)>& row, int token, uint8_t* part) {
    static_assert(BITS == 2 || BITS == 4);
    constexpr int kGroup = DIM / GROUPS;
    constexpr FragmentSizes kSizes(value_spec<BITS, kGroup>(), DIM);
    kivi_spec spec = value_spec<BITS, kGroup>();
    spec.range = KIVI_RANGE_MINMAX, spec.param_dtype = KIVI_F16;
    uint8_t* const block = part + kSizes.codes(false, token / kBlockTokens);
    const int in_block = token % kBlockTokens, unit = in_block / 2 % 2;
    row.for_each(stripes(DIM) * kStripe, [&](int j, int channel) {  // all lanes: they exchange
        const RowExtremes<kGroup / kLaneChannels> extremes(row.x[j]);
        const GroupParams params =
            extremes.damaged ? damaged_params() : params_of_extremes(spec, extremes.low, extremes.high);
        uint32_t codes[2] = {0, 0};  // of words 0 and 1
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) {
            codes[i % 2] |= static_cast<uint32_t>(encode(row.x[j][i], params, BITS)) << (i / 2 * BITS);
        }
        const int run = channel / 32, number = unit * (DIM / 16) + 2 * run;  // of the first operand
        if constexpr (BITS == 2) {
#pragma unroll
            for (int w = 0; w < 2; ++w) codes[w] |= __shfl_down_sync(kAllLanes, codes[w], 8) << 4;
        }
        if (channel >= DIM) return;
        if (channel % kGroup == 0) {
            auto* const scales = reinterpret_cast<uint16_t*>(block + kSizes.code_bytes);
            const int at = channel / kGroup * kBlockTokens + in_block;
            scales[at] = f32_to_f16(params.scale);
            scales[at + GROUPS * kBlockTokens] = f32_to_f16(params.min);
        }
        if (BITS == 2 && run % 2 != 0) return;
        const int lane = 4 * (channel / kLaneChannels % 8) + in_block / 8, word = in_block / 4 % 2 * 2;
        uint8_t* const to = block + number / fields_of(BITS) * kVectorBytes + lane * 16 + word * 4 + in_block % 2 * 2 +
                            field_bit(BITS, number % fields_of(BITS)) / 8;
        to[0] = static_cast<uint8_t>(codes[0]), to[4] = static_cast<uint8_t>(codes[1]);
    });
}

}  // namespace kivi::cuda
