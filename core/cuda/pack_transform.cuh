// The Hadamard of a tile's rows (format/hadamard.h), by the tile's warp.
#pragma once
#include "cuda/pack_pairs.cuh"
#include "cuda/pack_tile.cuh"

namespace kivi::cuda {

template <int DIM>
constexpr float kHadamardNorm = DIM == 256 ? 0.0625f : DIM == 128 ? 0.08838834764831845f : 0.125f;

// Row `token` of a tile by its warp, with all that format/row.h asks for: true if a number has left the type's range
// and was clamped.
template <class P, int DIM>
__device__ __noinline__ bool transform_any_row(Tile<DIM>& tile, int token) {
    using Row = WarpRow<stripes(DIM)>;
    const auto at = [&](int channel) {
        return reinterpret_cast<uint2*>(tile.chunks + tile.place(token, channel / 8)) + channel / kLaneChannels % 2;
    };
    typename Row::Raw raw{};
    Row::for_each(DIM, [&](int j, int channel) { raw.words[j].x = at(channel)->x, raw.words[j].y = at(channel)->y; });
    Row row;
    row.set(raw, P::kType);
    const bool clamped = round_row(row, DIM, true, P::kType);
    Row::for_each(DIM, [&](int j, int channel) {
        *at(channel) = make_uint2(P::of(row.x[j][0], row.x[j][1]), P::of(row.x[j][2], row.x[j][3]));
    });
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
    const uint32_t from = fast::shared_address(tile.chunks + tile.place(row, part * (kOwn / 8)));
    const uint32_t to = fast::shared_address(tile.chunks + tile.place(row, part * (kHalf / 8)));
#pragma unroll 1
    for (int token = 0; token < kBlockTokens; token += kRows) {
        tile.wait_for_quarter((token + kRows) / Tile<DIM>::kQuarter - 1);
        float x[kOwn];
#pragma unroll
        for (int c = 0; c < kOwn / 8; ++c) {
            const uint4 eight = load_shared16(tile.step_address(from, token, c));
            const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) x[8 * c + 2 * i] = P::low(pairs[i]), x[8 * c + 2 * i + 1] = P::high(pairs[i]);
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
        uint32_t pairs[kOwn / 2], most = 0;
#pragma unroll
        for (int i = 0; i < kHalf; i += 2) {
            const auto sum = [&](int i) { return (x[i] + x[i + kHalf]) * sums; };
            const auto difference = [&](int i) { return (x[i] - x[i + kHalf]) * differences; };
            pairs[i / 2] = P::of(sum(i), sum(i + 1));
            pairs[(i + kHalf) / 2] = P::of(difference(i), difference(i + 1));
        }
#pragma unroll
        for (int i = 0; i < kOwn / 2; ++i) most = P::most(most, P::magnitudes(pairs[i]));
        const bool ours = token + row >= begin && token + row < end;
        const bool plain = __all_sync(kAllLanes, both_plain<P>(most));
        __syncwarp();  // all of the rows have been read
        if (!plain) {
#pragma unroll 1
            for (int i = max(begin, token); i < min(end, token + kRows); ++i) {
                clamped_rows += transform_any_row<P>(tile, i);
            }
        } else if (ours) {
#pragma unroll
            for (int c = 0; c < kOwn / 8; ++c) {
                const int chunk = c < kHalf / 8 ? c : c - kHalf / 8 + DIM / 16;
                store_shared16(tile.step_address(to, token, chunk),
                               make_uint4(pairs[4 * c], pairs[4 * c + 1], pairs[4 * c + 2], pairs[4 * c + 3]));
            }
        }
    }
    __syncwarp();
    return clamped_rows;
}

}  // namespace kivi::cuda
