// Keys of a page as the packers hold them: every lane has the elements whose codes are its own vectors
// (fragment_order.h), so that codes never leave it.
//
//   lane = 4 * row + column
//   keys     tokens   8 * (row / 2) + row % 2 + {0, 2, 4, 6}     channels  32 a + 8 * column + 0..7
//   values   tokens   8 * column + 0..7                          channels  32 a + 4 * row + 0..3
#pragma once
#include "cuda/pack_codes.cuh"
#include "cuda/warp_row.cuh"

namespace kivi::cuda {

constexpr int kPackWarps = kPageTokens / kBlockTokens;  // of a block: each has 32 tokens of a page
constexpr int kPackThreads = kPackWarps * kWarp;

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

// Parameters of the two groups whose extremes are the halves of `low` and `high`; use(half, params) for each.
struct ParamPairs {
    uint32_t scales = 0, mins = 0;
};
template <class Use>
__device__ __forceinline__ ParamPairs params_of_pair(const kivi_spec& spec, uint32_t low, uint32_t high, const Use& use) {
    ParamPairs pairs;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float least = half ? high_of(low) : low_of(low), most = half ? high_of(high) : low_of(high);
        const GroupParams params =
            finite(least) && finite(most) ? params_of_extremes(spec, least, most) : damaged_params();
        use(half, params);
        pairs.scales |= static_cast<uint32_t>(f32_to_f16(params.scale)) << (16 * half);
        pairs.mins |= static_cast<uint32_t>(f32_to_f16(params.min)) << (16 * half);
    }
    return pairs;
}

// ---- Keys ----

// Extremes of a warp's channels, for the warps of the same group.
template <int DIM>
using KeyExtremes = uint32_t[kPackWarps][2][DIM / 64][kWarp];

// 32 keys of a warp: token 8 (row / 2) + row % 2 + 2 i, channels 32 (pair / 4) + 8 column + 2 (pair % 4) + 0, 1 at
// x[i][pair]. A lane ends up with the extremes of kKeyShare pairs of channels.
template <int DIM>
constexpr int kKeyPairs = DIM / 8;
template <int DIM>
constexpr int kKeyShare = DIM / 64;

// First of the two channels of pair i of the lane's share.
template <int DIM>
__device__ __forceinline__ int share_channel(int i, int lane) {
    const int pair = (lane >> 2) * kKeyShare<DIM> + i;
    return 32 * (pair / 4) + 8 * (lane & 3) + 2 * (pair % 4);
}

// Returns how many rows have left the range of f16, in every lane.
template <int DIM>
__device__ __forceinline__ int load_keys(uint32_t (&x)[4][kKeyPairs<DIM>], const PackSource& source, bool rotated, int lane) {
    constexpr int kPairs = kKeyPairs<DIM>;
    const int row = lane >> 2, column = lane & 3;
    const uint8_t* const from = source.rows + (8 * (row >> 1) + (row & 1)) * source.stride + column * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int a = 0; a < kPairs / 4; ++a) {
            const uint4 v = load_once(reinterpret_cast<const uint4*>(from + 2 * i * source.stride + a * 64));
            x[i][4 * a] = v.x, x[i][4 * a + 1] = v.y, x[i][4 * a + 2] = v.z, x[i][4 * a + 3] = v.w;
        }
    }
    if (!rotated) return 0;
    int clamped_rows = 0;
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
    return clamped_rows;
}

// Leaves those of the lane's share in low and high. All warps of a block call, since groups may span several.
template <int DIM>
__device__ __forceinline__ void key_extremes(const uint32_t (&x)[4][kKeyPairs<DIM>], uint32_t (&low)[kKeyShare<DIM>],
                                             uint32_t (&high)[kKeyShare<DIM>], KeyExtremes<DIM>& shared, int group_blocks,
                                             bool active, int warp, int lane) {
    if (active) {
        uint32_t least[kKeyPairs<DIM>], most[kKeyPairs<DIM>];
#pragma unroll
        for (int n = 0; n < kKeyPairs<DIM>; ++n) {
            least[n] = min_pair(min_pair(x[0][n], x[1][n]), min_pair(x[2][n], x[3][n]));
            most[n] = max_pair(max_pair(x[0][n], x[1][n]), max_pair(x[2][n], x[3][n]));
        }
        reduce_to_shares<kKeyPairs<DIM>>(least, lane, [](uint32_t a, uint32_t b) { return min_pair(a, b); });
        reduce_to_shares<kKeyPairs<DIM>>(most, lane, [](uint32_t a, uint32_t b) { return max_pair(a, b); });
#pragma unroll
        for (int i = 0; i < kKeyShare<DIM>; ++i) low[i] = least[i], high[i] = most[i];
    }
    if (group_blocks == 1) return;
    if (active) {
#pragma unroll
        for (int i = 0; i < kKeyShare<DIM>; ++i) shared[warp][0][i][lane] = low[i], shared[warp][1][i][lane] = high[i];
    }
    __syncthreads();
    if (!active) return;
    const int first = warp & ~(group_blocks - 1);
#pragma unroll 1
    for (int other = first; other < first + group_blocks; ++other) {
#pragma unroll
        for (int i = 0; i < kKeyShare<DIM>; ++i) {
            low[i] = min_pair(low[i], shared[other][0][i][lane]);
            high[i] = max_pair(high[i], shared[other][1][i][lane]);
        }
    }
}

// Writes the parameters of the group, which begins at `group`, and calls use(channel, params) for the lane's share.
template <int DIM, class Use>
__device__ __forceinline__ void key_params(const kivi_spec& spec, const uint32_t (&low)[kKeyShare<DIM>],
                                           const uint32_t (&high)[kKeyShare<DIM>], uint8_t* group, bool write, int lane,
                                           const Use& use) {
#pragma unroll
    for (int i = 0; i < kKeyShare<DIM>; ++i) {
        const int channel = share_channel<DIM>(i, lane);
        const ParamPairs pairs =
            params_of_pair(spec, low[i], high[i], [&](int half, const GroupParams& params) { use(channel + half, params); });
        if (!write) continue;
        *reinterpret_cast<uint32_t*>(group + 2 * channel) = pairs.scales;
        *reinterpret_cast<uint32_t*>(group + 2 * DIM + 2 * channel) = pairs.mins;
    }
}

}  // namespace kivi::cuda
