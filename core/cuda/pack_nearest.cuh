// Nearest rounding of 32 tokens of a head by one warp, straight from the caller's f16 rows into the fragment order.
// Extremes go over lanes by shuffles; parameters come back through shared memory.
#pragma once
#include "cuda/pack_rows.cuh"

namespace kivi::cuda {

// Of a block of four warps.
template <int DIM>
struct PackShared {
    // Of channels (keys), or of tokens by group (values).
    struct Codings {
        float min[DIM], high[DIM], low[DIM];
        __device__ void set(int i, const Coding& coding) { min[i] = coding.min, high[i] = coding.high, low[i] = coding.low; }
    };
    Codings codings[kPackWarps];
    KeyExtremes<DIM> extremes;
};
// Four of them.
struct CodingQuad {
    float min[4], high[4], low[4];
    template <class Codings>
    __device__ __forceinline__ CodingQuad(const Codings& from, int i) {
        *reinterpret_cast<float4*>(min) = *reinterpret_cast<const float4*>(from.min + i);
        *reinterpret_cast<float4*>(high) = *reinterpret_cast<const float4*>(from.high + i);
        *reinterpret_cast<float4*>(low) = *reinterpret_cast<const float4*>(from.low + i);
    }
};

// Both functions return how many rows have left the range of f16, in every lane. `active`: whether the warp's tokens are to be packed.
template <int BITS, int DIM>
__device__ __forceinline__ int pack_keys(PackShared<DIM>& shared, const kivi_spec& spec, PackSource source, bool active,
                                      uint8_t* part) {
    constexpr int kPairs = kKeyPairs<DIM>;
    const int warp = threadIdx.x / kWarp, lane = kivi::cuda::lane(), column = lane & 3;
    const FragmentSizes sizes(spec, DIM);
    uint32_t x[4][kPairs], low[kKeyShare<DIM>], high[kKeyShare<DIM>];
    int clamped_rows = 0;
    if (active) clamped_rows = load_keys<DIM>(x, source, spec.transform == KIVI_TRANSFORM_HADAMARD, lane);
    key_extremes<DIM>(x, low, high, shared.extremes, sizes.group_blocks, active, warp, lane);
    if (!active) return 0;
    auto& codings = shared.codings[warp];
    key_params<DIM>(spec, low, high, part + warp / sizes.group_blocks * sizes.group_bytes(), warp % sizes.group_blocks == 0,
                    lane, [&](int channel, const GroupParams& params) { codings.set(channel, coding_of<BITS>(params)); });
    __syncwarp();
    LaneVectors<BITS, DIM> vectors(kCodeOne<BITS>);
#pragma unroll
    for (int a = 0; a < kPairs / 4; ++a) {
#pragma unroll
        for (int quad = 0; quad < 2; ++quad) {
            const CodingQuad coding(codings, 32 * a + 8 * column + 4 * quad);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const uint32_t pair = x[i][4 * a + 2 * quad + c / 2];
                    vectors.add_key(i, 4 * quad + c, a,
                                    code_of<BITS>(c % 2 ? high_of(pair) : low_of(pair), coding.min[c], coding.high[c], coding.low[c]));
                }
            }
        }
    }
    vectors.store(part + sizes.codes(true, warp), lane);
    return clamped_rows;
}

// GROUPS: side by side.
template <int BITS, int DIM, int GROUPS>
__device__ __forceinline__ int pack_values(PackShared<DIM>& shared, const kivi_spec& spec, PackSource source, uint8_t* part) {
    const int warp = threadIdx.x / kWarp, lane = kivi::cuda::lane();
    constexpr int kRuns = DIM / 32, kSteps = DIM / 16, kRunsAGroup = kRuns / GROUPS;
    constexpr int kPairs = 4 * GROUPS;  // of tokens, by group
    constexpr int kShare = kPairs >= 8 ? kPairs / 8 : 1;
    const int row = lane >> 2, column = lane & 3;
    const FragmentSizes sizes(spec, DIM);
    int clamped_rows = 0;
    uint32_t x[8][2 * kRuns];  // token 8 column + j: channels 32 (pair / 2) + 4 row + 2 (pair % 2)
    const uint8_t* const from = source.rows + 8 * column * source.stride + row * 8;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int a = 0; a < kRuns; ++a) {
            const uint2 v = load_once(reinterpret_cast<const uint2*>(from + j * source.stride + a * 64));
            x[j][2 * a] = v.x, x[j][2 * a + 1] = v.y;
        }
    }
    if (spec.transform == KIVI_TRANSFORM_HADAMARD) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float y[4 * kRuns];
#pragma unroll
            for (int n = 0; n < 2 * kRuns; ++n) y[2 * n] = low_of(x[j][n]), y[2 * n + 1] = high_of(x[j][n]);
#pragma unroll
            for (int step = 1; step < 4; step *= 2) {
#pragma unroll
                for (int n = 0; n < 4 * kRuns; ++n) {
                    if ((n & step) == 0) pack_butterfly(y[n], y[n + step]);
                }
            }
#pragma unroll
            for (int n = 0; n < 4 * kRuns; ++n) {
                y[n] = pack_across(pack_across(pack_across(y[n], 4, lane), 8, lane), 16, lane);
            }
#pragma unroll
            for (int step = 4; step < 4 * kRuns; step *= 2) {
#pragma unroll
                for (int n = 0; n < 4 * kRuns; ++n) {
                    if ((n & step) == 0) pack_butterfly(y[n], y[n + step]);
                }
            }
            unsigned clamped = __ballot_sync(kAllLanes, round_pairs<2 * kRuns, DIM>(y, x[j]));
            for (; clamped != 0; clamped &= ~(0x11111111u << ((__ffs(clamped) - 1) & 3))) ++clamped_rows;
        }
    }

    uint32_t low[kPairs], high[kPairs];  // [group][pair of tokens]
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            uint32_t least[2], most[2];  // of a token: over even and odd channels
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t* const at = x[2 * pair + half] + 2 * g * kRunsAGroup;
                least[half] = min_pair(at[0], at[1]);
                most[half] = max_pair(at[0], at[1]);
#pragma unroll
                for (int n = 2; n < 2 * kRunsAGroup; ++n) {
                    least[half] = min_pair(least[half], at[n]);
                    most[half] = max_pair(most[half], at[n]);
                }
            }
            low[4 * g + pair] = min_pair(__byte_perm(least[0], least[1], 0x5410), __byte_perm(least[0], least[1], 0x7632));
            high[4 * g + pair] = max_pair(__byte_perm(most[0], most[1], 0x5410), __byte_perm(most[0], most[1], 0x7632));
        }
    }
    reduce_to_shares<kPairs>(low, lane, [](uint32_t a, uint32_t b) { return min_pair(a, b); });
    reduce_to_shares<kPairs>(high, lane, [](uint32_t a, uint32_t b) { return max_pair(a, b); });

    auto& codings = shared.codings[warp];
    uint8_t* const block = part + sizes.codes(false, warp);
    uint8_t* const params_at = block + sizes.code_bytes;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
        const int n = kPairs >= 8 ? row * kShare + i : row / 2, group = n / 4, token = 8 * column + 2 * (n % 4);
        const int at = kBlockTokens * group + token;
        const ParamPairs pairs = params_of_pair(spec, low[i], high[i], [&](int half, const GroupParams& params) {
            codings.set(at + half, coding_of<BITS>(params));
        });
        *reinterpret_cast<uint32_t*>(params_at + 2 * at) = pairs.scales;
        *reinterpret_cast<uint32_t*>(params_at + 2 * (kBlockTokens * GROUPS + at)) = pairs.mins;
    }
    __syncwarp();
    LaneVectors<BITS, DIM> vectors(kCodeOne<BITS>);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
        for (int quad = 0; quad < 2; ++quad) {
            const CodingQuad coding(codings, kBlockTokens * g + 8 * column + 4 * quad);
#pragma unroll
            for (int t = 0; t < 4; ++t) {  // unit t / 2, half word t % 2
#pragma unroll
                for (int n = 2 * g * kRunsAGroup; n < 2 * (g + 1) * kRunsAGroup; ++n) {
                    const uint32_t pair = x[4 * quad + t][n];
                    const int number = t / 2 * kSteps + n;  // step 2 (pair / 2) + pair % 2
                    vectors.add(number, 2 * quad, t % 2, code_of<BITS>(low_of(pair), coding.min[t], coding.high[t], coding.low[t]));
                    vectors.add(number, 2 * quad + 1, t % 2, code_of<BITS>(high_of(pair), coding.min[t], coding.high[t], coding.low[t]));
                }
            }
        }
    }
    vectors.store(block, lane);
    return clamped_rows;
}

}  // namespace kivi::cuda
