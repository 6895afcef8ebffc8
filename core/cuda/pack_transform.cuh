// The Hadamard of a tile's rows (format/hadamard.h), by the tile's warp.
#pragma once
#include "cuda/pack_pairs.cuh"
#include "cuda/pack_tile.cuh"

namespace kivi::cuda {

template <int DIM>
constexpr float kHadamardNorm = DIM == 256 ? 0.0625f : DIM == 128 ? 0.08838834764831845f : 0.125f;
constexpr float kRescale = 1024.0f;  // of rows that are so large that sums might overflow (format/row.cpp)

// x to pairs; true if one has left the type's range and was clamped. `unit`: see kRescale.
template <class P, int PAIRS>
__device__ __forceinline__ bool round_pairs(const float (&x)[2 * PAIRS], float unit, uint32_t (&pairs)[PAIRS]) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        pairs[i] = P::of(x[2 * i] * unit, x[2 * i + 1] * unit);
        most = P::most(most, P::magnitudes(pairs[i]));
    }
    if (both_finite<P>(most)) return false;
    bool clamped = false;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float value = x[2 * i + half];
            if (!finite(value) || (pairs[i] >> (16 * half) & P::kInfinity) != P::kInfinity) continue;
            pairs[i] = (pairs[i] & (0xFFFF0000u >> (16 * half))) | (P::kLargest | (value < 0 ? 0x8000u : 0u))
                                                                       << (16 * half);
            clamped = true;
        }
    }
    return clamped;
}

// Transforms rows begin .. end - 1 of a tile where they stand, as they come, and returns how many have left the type's
// range, in every lane.
//
// A row is a pair of lanes' or four lanes'. Stages go from neighbours to halves of the row (format/hadamard.h), so
// those between lanes come last. Before each of them, the stage before leaves what the lane needs next and what its
// partner needs: sums stay in the lower lane, differences in the upper one. So half of the values are exchanged, and no
// stage is computed twice:
//
//   last stage inside a lane   kept = x + s y, given = x - s y    s = 1 in the lower lane of a pair, -1 in the upper
//   next stage                 sum = kept + got, difference = kept - got, of the other sign in the upper lane
//
// Bits of a channel's number of four lanes, the highest first: upper, pair, the lane's own before; half, upper, pair,
// the rest of the lane's own after. A zero may have another sign than the CPU's: no code and no parameter tells.
template <class P, int DIM>
__device__ __forceinline__ int transform(Tile<DIM>& tile, int lane, int begin = 0, int end = kBlockTokens) {
    constexpr int kOwn = DIM > 128 ? 64 : 32, kHalf = kOwn / 2, kRowLanes = DIM / kOwn,
                  kRows = kWarp / kRowLanes;  // at a time
    static_assert((kRowLanes == 2 || kRowLanes == 4) && kRows % Tile<DIM>::kQuarter == 0);
    const int row = lane % kRows, part = lane / kRows, pair = part & 1, upper = part >> 1;
    const float first = pair != 0 ? -1.0f : 1.0f, second = upper != 0 ? -1.0f : 1.0f;
    const float norm = kHadamardNorm<DIM>, of_pair = pair != 0 ? -norm : norm;
    const float sums = kRowLanes == 4 && upper != 0 ? of_pair : norm;
    const float differences = kRowLanes == 4 ? (upper != 0 ? -of_pair : norm) : of_pair;
    int clamped_rows = 0;
    const int first_place = tile.place(row, part * (kOwn / 8)), sum_place = tile.place(row, part * (kHalf / 8));
#pragma unroll 1
    for (int token = 0; token < kBlockTokens; token += kRows) {
        tile.wait_for_quarter((token + kRows) / Tile<DIM>::kQuarter - 1);
        float x[kOwn];
#pragma unroll
        for (int c = 0; c < kOwn / 8; ++c) {
            const Words<4> eight = tile.template words<4>(tile.step(first_place, token, c));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[8 * c + 2 * i] = P::low(eight.word[i]), x[8 * c + 2 * i + 1] = P::high(eight.word[i]);
            }
        }
        float unit = 1.0f;
        if constexpr (P::kType == KIVI_BF16) {
            float peak = 0;
#pragma unroll
            for (int i = 0; i < kOwn; ++i) peak = fmaxf(peak, finite(x[i]) ? fabsf(x[i]) : 0.0f);
#pragma unroll
            for (int step = kRows; step < kWarp; step *= 2) peak = fmaxf(peak, __shfl_xor_sync(kAllLanes, peak, step));
            if (peak > kSafePeak) {
                unit = kRescale;
#pragma unroll
                for (int i = 0; i < kOwn; ++i) x[i] *= 1.0f / kRescale;
            }
        }
#pragma unroll
        for (int step = 1; step < kHalf; step *= 2) {
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                if ((i & step) != 0) continue;
                const float a = x[i], b = x[i + step];
                x[i] = a + b, x[i + step] = a - b;
            }
        }
#pragma unroll
        for (int step = kRows; step < kWarp; step *= 2) {
            const float sign = step == kRows ? first : second;
#pragma unroll
            for (int i = 0; i < kHalf; ++i) {
                const float kept = __fmaf_rn(x[i + kHalf], sign, x[i]), given = __fmaf_rn(x[i + kHalf], -sign, x[i]);
                x[i] = kept;
                x[i + kHalf] = __shfl_xor_sync(kAllLanes, given, step);
            }
        }
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            const float kept = x[i], got = x[i + kHalf];
            x[i] = (kept + got) * sums, x[i + kHalf] = (kept - got) * differences;
        }
        uint32_t pairs[kOwn / 2];
        const bool ours = token + row >= begin && token + row < end,
                   clamped = round_pairs<P, kOwn / 2>(x, unit, pairs) && ours;
        __syncwarp();  // all of the rows have been read
        if (ours) {
#pragma unroll
            for (int c = 0; c < kOwn / 8; ++c) {
                const int chunk = c < kHalf / 8 ? c : c - kHalf / 8 + DIM / 16;
                tile.chunks[tile.step(sum_place, token, chunk)] =
                    make_uint4(pairs[4 * c], pairs[4 * c + 1], pairs[4 * c + 2], pairs[4 * c + 3]);
            }
        }
        unsigned any = __ballot_sync(kAllLanes, clamped);
        if (any != 0) {
#pragma unroll
            for (int step = kWarp / 2; step >= kRows; step /= 2) any |= any >> step;
            clamped_rows += __popc(any & ((1u << kRows) - 1));
        }
    }
    __syncwarp();
    return clamped_rows;
}

}  // namespace kivi::cuda
