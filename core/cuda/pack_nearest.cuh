// Nearest rounding of 32 tokens of a head by one warp, straight from the caller's f16 rows into the fragment order. Each
// lane holds exactly the elements whose codes are its own vectors (fragment_order.h), so that codes never leave it:
//
//   lane = 4 * row + column
//   keys     tokens   8 * (row / 2) + row % 2 + {0, 2, 4, 6}     channels  32 a + 8 * column + 0..7
//   values   tokens   8 * column + 0..7                          channels  32 a + 4 * row + 0..3
//
// Extremes go over lanes by shuffles; parameters come back through shared memory. Functions are not inlined, so that
// each is given the registers that it needs.
#pragma once
#include "cuda/pack_codes.cuh"
#include "cuda/warp_row.cuh"

namespace kivi::cuda {

constexpr int kPackWarps = kPageTokens / kBlockTokens;

// Of a block of four warps.
template <int DIM>
struct PackShared {
    // Of channels (keys), or of tokens by group (values).
    struct Codings {
        float min[DIM], high[DIM], low[DIM];
    };
    static constexpr int kShare = DIM / 64;  // pairs of channels in a lane's share
    Codings codings[kPackWarps];
    uint32_t extremes[kPackWarps][2][kShare][kWarp];
};

__device__ __forceinline__ float low_of(uint32_t pair) { return f16_to_f32(static_cast<uint16_t>(pair)); }
__device__ __forceinline__ float high_of(uint32_t pair) { return f16_to_f32(static_cast<uint16_t>(pair >> 16)); }

// Rows of one head and one tensor.
struct PackSource {
    const uint8_t* rows;  // of the block's first token
    int64_t stride;       // bytes from token to token
};

// ---- Hadamard ----

template <int DIM>
constexpr float kHadamardNorm = DIM == 128 ? 0.08838834764831845f : 0.125f;

__device__ __forceinline__ void pack_butterfly(float& a, float& b) {
    const float left = a, right = b;
    a = left + right;
    b = left - right;
}
// Lanes that differ in `step` hold the halves of a butterfly.
__device__ __forceinline__ float pack_across(float x, int step, int lane) {
    const float other = __shfl_xor_sync(kAllLanes, x, step);
    return __fmaf_rn(x, (lane & step) != 0 ? -1.0f : 1.0f, other);
}

// A row's pairs after the transform; true if the lane's part of it has left the range of f16 and was clamped.
template <int PAIRS, int DIM>
__device__ __forceinline__ bool round_pairs(const float (&x)[2 * PAIRS], uint32_t (&pairs)[PAIRS]) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        pairs[i] = pair_of(x[2 * i] * kHadamardNorm<DIM>, x[2 * i + 1] * kHadamardNorm<DIM>);
        most = max_pair(most, pairs[i] & 0x7FFF7FFFu);
    }
    if ((most & 0x7C00u) != 0x7C00u && (most & 0x7C000000u) != 0x7C000000u) return false;
    bool clamped = false;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float value = x[2 * i + half] * kHadamardNorm<DIM>;
            if (!finite(value) || (pairs[i] >> (16 * half) & 0x7C00u) != 0x7C00u) continue;
            pairs[i] = (pairs[i] & (0xFFFF0000u >> (16 * half))) | (value < 0 ? 0xFBFFu : 0x7BFFu) << (16 * half);
            clamped = true;
        }
    }
    return clamped;
}

// ---- Keys ----

// `active`: whether these tokens are to be packed; all warps of a block call, since groups may span several.
// Returns how many rows have left the range of f16, in every lane.
template <int BITS, int DIM>
__device__ __noinline__ int pack_keys(PackShared<DIM>& shared, const kivi_spec& spec, PackSource source, bool active,
                                      uint8_t* part) {
    const int warp = threadIdx.x / kWarp, lane = kivi::cuda::lane();
    constexpr int kRuns = DIM / 32, kPairs = 4 * kRuns, kShare = kPairs / 8, kSteps = DIM / 16;
    const int row = lane >> 2, column = lane & 3;
    const FragmentSizes sizes(spec, DIM);
    int clamped_rows = 0;
    uint32_t x[4][kPairs];  // token 8 (row / 2) + row % 2 + 2 i: channels 32 (pair / 4) + 8 column + 2 (pair % 4)
    uint32_t low[kPairs], high[kPairs];
    if (active) {
        const uint8_t* const from = source.rows + (8 * (row >> 1) + (row & 1)) * source.stride + column * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int a = 0; a < kRuns; ++a) {
                const uint4 v = load_once(reinterpret_cast<const uint4*>(from + 2 * i * source.stride + a * 64));
                x[i][4 * a] = v.x, x[i][4 * a + 1] = v.y, x[i][4 * a + 2] = v.z, x[i][4 * a + 3] = v.w;
            }
        }
        if (spec.transform == KIVI_TRANSFORM_HADAMARD) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float y[2 * kPairs];
#pragma unroll
                for (int n = 0; n < kPairs; ++n) y[2 * n] = low_of(x[i][n]), y[2 * n + 1] = high_of(x[i][n]);
#pragma unroll
                for (int step = 1; step < 8; step *= 2) {
#pragma unroll
                    for (int n = 0; n < 2 * kPairs; ++n) {
                        if ((n & step) == 0) pack_butterfly(y[n], y[n + step]);
                    }
                }
#pragma unroll
                for (int n = 0; n < 2 * kPairs; ++n) y[n] = pack_across(pack_across(y[n], 1, lane), 2, lane);
#pragma unroll
                for (int step = 8; step < 2 * kPairs; step *= 2) {
#pragma unroll
                    for (int n = 0; n < 2 * kPairs; ++n) {
                        if ((n & step) == 0) pack_butterfly(y[n], y[n + step]);
                    }
                }
                unsigned clamped = __ballot_sync(kAllLanes, round_pairs<kPairs, DIM>(y, x[i]));
                for (; clamped != 0; clamped &= ~(0xFu << ((__ffs(clamped) - 1) & ~3))) ++clamped_rows;
            }
        }
#pragma unroll
        for (int n = 0; n < kPairs; ++n) {
            low[n] = min_pair(min_pair(x[0][n], x[1][n]), min_pair(x[2][n], x[3][n]));
            high[n] = max_pair(max_pair(x[0][n], x[1][n]), max_pair(x[2][n], x[3][n]));
        }
        reduce_to_shares(low, lane, [](uint32_t a, uint32_t b) { return min_pair(a, b); });
        reduce_to_shares(high, lane, [](uint32_t a, uint32_t b) { return max_pair(a, b); });
    }
    const int group_blocks = sizes.group_blocks, first = warp & ~(group_blocks - 1);
    if (group_blocks > 1) {
        if (active) {
#pragma unroll
            for (int i = 0; i < kShare; ++i) {
                shared.extremes[warp][0][i][lane] = low[i];
                shared.extremes[warp][1][i][lane] = high[i];
            }
        }
        __syncthreads();
        if (active) {
#pragma unroll 1
            for (int other = first; other < first + group_blocks; ++other) {
#pragma unroll
                for (int i = 0; i < kShare; ++i) {
                    low[i] = min_pair(low[i], shared.extremes[other][0][i][lane]);
                    high[i] = max_pair(high[i], shared.extremes[other][1][i][lane]);
                }
            }
        }
    }
    if (!active) return 0;

    auto& codings = shared.codings[warp];
    uint8_t* const group = part + warp / group_blocks * sizes.group_bytes();
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
        const int pair = row * kShare + i, channel = 32 * (pair / 4) + 8 * column + 2 * (pair % 4);
        uint32_t scales = 0, mins = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float least = half ? high_of(low[i]) : low_of(low[i]), most = half ? high_of(high[i]) : low_of(high[i]);
            const GroupParams params =
                finite(least) && finite(most) ? params_of_extremes(spec, least, most) : damaged_params();
            const Coding coding = coding_of<BITS>(params);
            codings.min[channel + half] = coding.min;
            codings.high[channel + half] = coding.high;
            codings.low[channel + half] = coding.low;
            scales |= static_cast<uint32_t>(f32_to_f16(params.scale)) << (16 * half);
            mins |= static_cast<uint32_t>(f32_to_f16(params.min)) << (16 * half);
        }
        if (warp == first) {
            *reinterpret_cast<uint32_t*>(group + 2 * channel) = scales;
            *reinterpret_cast<uint32_t*>(group + 2 * DIM + 2 * channel) = mins;
        }
    }
    __syncwarp();
    LaneVectors<BITS, DIM> vectors;
#pragma unroll
    for (int a = 0; a < kRuns; ++a) {
#pragma unroll
        for (int quad = 0; quad < 2; ++quad) {
            const int channel = 32 * a + 8 * column + 4 * quad;
            const float4 min4 = *reinterpret_cast<const float4*>(codings.min + channel);
            const float4 high4 = *reinterpret_cast<const float4*>(codings.high + channel);
            const float4 low4 = *reinterpret_cast<const float4*>(codings.low + channel);
            const float min[4] = {min4.x, min4.y, min4.z, min4.w}, up[4] = {high4.x, high4.y, high4.z, high4.w};
            const float down[4] = {low4.x, low4.y, low4.z, low4.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const uint32_t pair = x[i][4 * a + 2 * quad + c / 2];
                    const float y = c % 2 ? high_of(pair) : low_of(pair);
                    vectors.add((i & 1) * kSteps + 2 * a + c / 2, (i >> 1) + 2 * quad, c % 2,
                                code_of<BITS>(y, min[c], up[c], down[c]));
                }
            }
        }
    }
    vectors.store(part + sizes.codes(true, warp), lane);
    return clamped_rows;
}

// ---- Values ----

// GROUPS: side by side.
template <int BITS, int DIM, int GROUPS>
__device__ __noinline__ int pack_values(PackShared<DIM>& shared, const kivi_spec& spec, PackSource source, uint8_t* part) {
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
    reduce_to_shares(low, lane, [](uint32_t a, uint32_t b) { return min_pair(a, b); });
    reduce_to_shares(high, lane, [](uint32_t a, uint32_t b) { return max_pair(a, b); });

    auto& codings = shared.codings[warp];
    uint8_t* const block = part + sizes.codes(false, warp);
    uint8_t* const params_at = block + sizes.code_bytes;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
        const int n = kPairs >= 8 ? row * kShare + i : row / 2, group = n / 4, token = 8 * column + 2 * (n % 4);
        uint32_t scales = 0, mins = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float least = half ? high_of(low[i]) : low_of(low[i]), most = half ? high_of(high[i]) : low_of(high[i]);
            const GroupParams params =
                finite(least) && finite(most) ? params_of_extremes(spec, least, most) : damaged_params();
            const Coding coding = coding_of<BITS>(params);
            const int at = kBlockTokens * group + token + half;
            codings.min[at] = coding.min;
            codings.high[at] = coding.high;
            codings.low[at] = coding.low;
            scales |= static_cast<uint32_t>(f32_to_f16(params.scale)) << (16 * half);
            mins |= static_cast<uint32_t>(f32_to_f16(params.min)) << (16 * half);
        }
        *reinterpret_cast<uint32_t*>(params_at + 2 * (kBlockTokens * group + token)) = scales;
        *reinterpret_cast<uint32_t*>(params_at + 2 * (kBlockTokens * (GROUPS + group) + token)) = mins;
    }
    __syncwarp();
    LaneVectors<BITS, DIM> vectors;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
        for (int quad = 0; quad < 2; ++quad) {
            const int at = kBlockTokens * g + 8 * column + 4 * quad;
            const float4 min4 = *reinterpret_cast<const float4*>(codings.min + at);
            const float4 high4 = *reinterpret_cast<const float4*>(codings.high + at);
            const float4 low4 = *reinterpret_cast<const float4*>(codings.low + at);
            const float min[4] = {min4.x, min4.y, min4.z, min4.w}, up[4] = {high4.x, high4.y, high4.z, high4.w};
            const float down[4] = {low4.x, low4.y, low4.z, low4.w};
#pragma unroll
            for (int t = 0; t < 4; ++t) {  // unit t / 2, half word t % 2
#pragma unroll
                for (int n = 2 * g * kRunsAGroup; n < 2 * (g + 1) * kRunsAGroup; ++n) {
                    const uint32_t pair = x[4 * quad + t][n];
                    const int number = t / 2 * kSteps + n;  // step 2 (pair / 2) + pair % 2
                    vectors.add(number, 2 * quad, t % 2, code_of<BITS>(low_of(pair), min[t], up[t], down[t]));
                    vectors.add(number, 2 * quad + 1, t % 2, code_of<BITS>(high_of(pair), min[t], up[t], down[t]));
                }
            }
        }
    }
    vectors.store(block, lane);
    return clamped_rows;
}

}  // namespace kivi::cuda
