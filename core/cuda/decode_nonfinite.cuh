// Values that are not finite, in visits of which some rows do not see all tokens: 0 times NaN is NaN, so that products
// would carry them to rows whose p is 0. They become zeros in the slot, and rows that see them become NaN there.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_instructions.cuh"
#include "cuda/decode_line.cuh"
#include "cuda/decode_softmax.cuh"

namespace kivi::cuda::fast {

// Whether there may be tokens that some rows see and others do not.
__device__ __forceinline__ bool partly_seen(const DecodeArgs& p, int info) {
    return open_tokens(p, info) < info_valid(info) || info_cut(info) > 0;
}

// Of a block's tokens, those that a row sees, as bits.
__device__ __forceinline__ unsigned seen_of_block(const Visible& sees, int block) {
    const int begin = min(max(sees.begin - block * kBlockTokens, 0), kBlockTokens);
    const int end = min(max(sees.end - block * kBlockTokens, 0), kBlockTokens);
    return end > begin ? kAll >> (kBlockTokens - (end - begin)) << begin : 0u;
}

// In a page parameters are not finite, of a token and value group; the damage is the group's.
template <class C>
__device__ __forceinline__ void set_params_apart(HeadState<C>& s, const DecodeArgs& p, uint8_t* slot, int info,
                                                 int lane) {
    constexpr int kGroupSteps = C::kSteps / C::kValueGroups;
    bool changed = false;
#pragma unroll 1
    for (int b = 0; b < C::kVisitBlocks; ++b) {
        uint16_t* const params =
            reinterpret_cast<uint16_t*>(slot + C::kKeyBytes + b * C::kValueBlock + C::kValueCodes) + lane;
#pragma unroll
        for (int g = 0; g < C::kValueGroups; ++g) {
            uint16_t* const scale = params + g * kBlockTokens;
            uint16_t* const min = scale + C::kValueGroups * kBlockTokens;
            const bool bad = nonfinite_halves<false>(*scale | *min << 16) != 0;
            const unsigned tokens = __ballot_sync(kAll, bad);
            if (tokens == 0) continue;
            if (bad) *scale = *min = 0;
            changed = true;
#pragma unroll
            for (int h = 0; h < C::kThreadRows; ++h) {
                if ((tokens & seen_of_block(Visible(p, info, query_row<C>(h, lane & 3)), b)) == 0) continue;
#pragma unroll
                for (int j = g * kGroupSteps; j < (g + 1) * kGroupSteps; ++j) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        if (h % C::kTileRows == e % C::kTileRows) {
                            s.out[h / C::kTileRows][j][e] = NAN;
                        }
                    }
                }
            }
        }
    }
    if (changed) hand_to_copies();
}

// In a window elements are not finite.
template <class C>
__device__ __forceinline__ void set_elements_apart(HeadState<C>& s, const DecodeArgs& p, uint8_t* slot, int info,
                                                   int lane) {
    constexpr int kPairsOfToken = C::kDim / 2;
    uint32_t* const values = reinterpret_cast<uint32_t*>(slot + C::kWindowHalf);
    uint32_t found = 0;
    for (int i = lane; i < C::kWindowTokens * kPairsOfToken; i += 32) found |= nonfinite_halves<C::kBf16>(values[i]);
    if (!__any_sync(kAll, found != 0)) return;
#pragma unroll 1
    for (int token = 0; token < C::kWindowTokens; ++token) {
#pragma unroll
        for (int j = 0; j < C::kSteps; ++j) {
            // The thread's two channels of the output tile.
            const uint32_t* const pair = values + token * kPairsOfToken + 16 * (j / 2) + 2 * (lane / 4) + j % 2;
            const uint32_t bad = nonfinite_halves<C::kBf16>(*pair);
#pragma unroll
            for (int h = 0; h < C::kThreadRows; ++h) {
                if (!Visible(p, info, query_row<C>(h, lane & 3))(token)) continue;
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const bool its = h % C::kTileRows == e % C::kTileRows;
                    if (its && (bad >> (e / 2 * 16) & 1) != 0) s.out[h / C::kTileRows][j][e] = NAN;
                }
            }
        }
    }
    __syncwarp();
    for (int i = lane; i < C::kWindowTokens * kPairsOfToken; i += 32) {
        values[i] &= ~nonfinite_halves<C::kBf16>(values[i]);
    }
    hand_to_copies();
}

}  // namespace kivi::cuda::fast
