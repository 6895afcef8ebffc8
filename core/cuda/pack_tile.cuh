// 32 rows of a head in shared memory: how a warp fetches, transforms and reads them.
#pragma once
#include "cuda/fragment_order.h"
#include "cuda/pack_math.cuh"
#include "cuda/warp_row.cuh"

namespace kivi::cuda {

constexpr int kPackWarps = kPageTokens / kBlockTokens;  // of a block: each has 32 tokens of a page
constexpr int kPackThreads = kPackWarps * kWarp;

// What sizes of pages depend on.
template <int BITS, int GROUP>
constexpr kivi_spec key_spec() {
    kivi_spec spec{};
    spec.bits = BITS, spec.axis = KIVI_AXIS_CHANNEL, spec.group = GROUP;
    return spec;
}
template <int BITS, int GROUP>
constexpr kivi_spec value_spec() {
    kivi_spec spec{};
    spec.bits = BITS, spec.axis = KIVI_AXIS_TOKEN, spec.group = GROUP;
    return spec;
}

template <int N>
struct alignas(4 * N) Words {
    uint32_t word[N];
};

// 16-byte chunks of a row stand in an order of its own, so that no bank is met twice by lanes that read
//   one chunk of eight rows side by side         (a lane a row)
//   four chunks of two rows side by side         (codes of keys)
//   two chunks of four rows that are eight apart (codes of values)
//
// A place is the number of a chunk in the tile. A lane finds its first one, and others by a step from it.
template <int DIM>
struct alignas(128) Tile {
    static constexpr int kChunks = DIM / 8;
    uint4 chunks[kBlockTokens * kChunks];

    static __device__ __forceinline__ constexpr int swizzle(int token) {
        return ((token & 1) << 2) ^ (token >> 1 & 3) ^ (token >> 3 << 1);
    }
    static __device__ __forceinline__ int place(int token, int chunk) {
        return token * kChunks + (chunk ^ swizzle(token));
    }
    // Of the token and chunk that far on. The numbers at `place` and the steps have no bits in common.
    static __device__ __forceinline__ int step(int place, int tokens, int chunks) {
        return (place ^ swizzle(tokens) ^ (chunks & 7)) + tokens * kChunks + (chunks & ~7);
    }
    // The number-th N words of a chunk.
    template <int N>
    __device__ __forceinline__ Words<N> words(int place, int number = 0) const {
        return reinterpret_cast<const Words<N>*>(chunks)[place * (4 / N) + number];
    }

    __device__ __forceinline__ void fetch(const uint8_t* rows, uint32_t stride, int lane) {
        constexpr int kRows = kWarp / kChunks;  // at a time
        const int at = place(lane / kChunks, lane % kChunks);
        const uint8_t* const from = rows + uint64_t{stride} * (lane / kChunks) + lane % kChunks * 16;
#pragma unroll
        for (int token = 0; token < kBlockTokens; token += kRows) {
            copy_async(chunks + step(at, token, 0), from + uint64_t{stride} * static_cast<uint32_t>(token));
        }
    }
};

// ---- Hadamard ----

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
    if ((most & 0xFFFFu) < P::kInfinity && most >> 16 < P::kInfinity) return false;
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

// Transforms the rows of a tile where they stand, and returns how many have left the type's range, in every lane.
//
// Four lanes have a quarter of a row each. Stages go from neighbours to halves of the row (format/hadamard.h), so those
// between lanes come last. Before each of the two, the last stage inside a lane leaves what the lane needs next and
// what its partner needs: sums stay in the lower lane, differences in the upper one. So half of the values are
// exchanged, and no stage is computed twice:
//
//   quarter's last stage   kept = x + s y, given = x - s y        s = 1 in the lower lane of a pair, -1 in the upper
//   next stage             sum = kept + got, difference = kept - got, of the other sign in the upper lane
//
// Bits of a channel's number, the highest first: upper, pair, the lane's own before; half, upper, pair, the rest of the
// lane's own after. A zero may have another sign than the CPU's: no code and no parameter tells.
template <class P, int DIM>
__device__ __forceinline__ int transform(Tile<DIM>& tile, int lane) {
    constexpr int kOwn = DIM / 4, kHalf = kOwn / 2, kLanes = 8;  // rows at a time, a lane each
    const int row = lane % kLanes, pair = lane / kLanes & 1, upper = lane / (2 * kLanes);
    const float first = pair != 0 ? -1.0f : 1.0f, second = upper != 0 ? -1.0f : 1.0f;
    const float sums = upper != 0 && pair != 0 ? -kHadamardNorm<DIM> : kHadamardNorm<DIM>;
    const float differences = upper != 0 && pair == 0 ? -kHadamardNorm<DIM> : kHadamardNorm<DIM>;
    int clamped_rows = 0;
    const int quarter = pair + 2 * upper, first_place = tile.place(row, quarter * (kOwn / 8));
    const int sum_place = tile.place(row, quarter * (kHalf / 8));
#pragma unroll 1
    for (int token = 0; token < kBlockTokens; token += kLanes) {
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
            peak = fmaxf(peak, __shfl_xor_sync(kAllLanes, peak, kLanes));
            peak = fmaxf(peak, __shfl_xor_sync(kAllLanes, peak, 2 * kLanes));
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
        for (int stage = 0; stage < 2; ++stage) {
            const float sign = stage == 0 ? first : second;
#pragma unroll
            for (int i = 0; i < kHalf; ++i) {
                const float kept = __fmaf_rn(x[i + kHalf], sign, x[i]), given = __fmaf_rn(x[i + kHalf], -sign, x[i]);
                x[i] = kept;
                x[i + kHalf] = __shfl_xor_sync(kAllLanes, given, kLanes << stage);
            }
        }
        float sum[kHalf], difference[kHalf];
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            sum[i] = (x[i] + x[i + kHalf]) * sums, difference[i] = (x[i] - x[i + kHalf]) * differences;
        }
        bool clamped = false;
        const auto put = [&](const float (&y)[kHalf], int chunk) {
            uint32_t pairs[kHalf / 2];
            clamped = round_pairs<P, kHalf / 2>(y, unit, pairs) || clamped;
#pragma unroll
            for (int c = 0; c < kHalf / 8; ++c) {
                tile.chunks[tile.step(sum_place, token, chunk + c)] =
                    make_uint4(pairs[4 * c], pairs[4 * c + 1], pairs[4 * c + 2], pairs[4 * c + 3]);
            }
        };
        __syncwarp();  // all of the rows have been read
        put(sum, 0), put(difference, DIM / 16);
        const unsigned any = __ballot_sync(kAllLanes, clamped);
        clamped_rows += __popc((any | any >> 8 | any >> 16 | any >> 24) & 0xFFu);
    }
    __syncwarp();
    return clamped_rows;
}

// ---- Groups ----

// Parameters of two groups, whose extremes are the halves of pairs. `scales` and `mins` are what the page holds.
struct ParamPair {
    GroupParams low, high;
    uint32_t scales, mins;
};
template <class P, int BITS>
__device__ __forceinline__ ParamPair params_of(uint32_t least, uint32_t most) {
    ParamPair pair{};
    const auto pack = [&] {
        pair.scales = f32_to_f16(pair.low.scale) | static_cast<uint32_t>(f32_to_f16(pair.high.scale)) << 16;
        pair.mins = f32_to_f16(pair.low.min) | static_cast<uint32_t>(f32_to_f16(pair.high.min)) << 16;
    };
    if constexpr (P::kType == KIVI_F16) {
        // params_of_extremes for numbers that none of its clamps reaches. The quotient, corrected once, is rounded
        // as a division would round it. Where an extreme is no number, the range is none.
        constexpr float kLevels = (1 << BITS) - 1, kInverse = 1.0f / kLevels;
        const auto divided = [](float x) {
            const float q = x * kInverse;
            return __fmaf_rn(__fmaf_rn(-q, kLevels, x), kInverse, q);
        };
        pair.low.min = P::low(least), pair.high.min = P::high(least);
        const float a = P::low(most) - pair.low.min, b = P::high(most) - pair.high.min;
        pair.scales = P::of(divided(a), divided(b));
        pair.low.scale = P::low(pair.scales), pair.high.scale = P::high(pair.scales);
        pair.mins = P::without_minus_zero(least);
        if (!finite(a + b)) {
            pair.low.min = P::low(pair.mins), pair.high.min = P::high(pair.mins);
            if (!finite(a)) pair.low = damaged_params();
            if (!finite(b)) pair.high = damaged_params();
            pack();
        }
    } else {
        kivi_spec spec{};
        spec.bits = BITS, spec.range = KIVI_RANGE_MINMAX, spec.param_dtype = KIVI_F16;
        const auto of = [&](float low, float high) {
            return finite(low) && finite(high) ? params_of_extremes(spec, low, high) : damaged_params();
        };
        pair.low = of(P::low(least), P::low(most)), pair.high = of(P::high(least), P::high(most));
        pack();
    }
    return pair;
}

// Extremes of the lane's channels, DIM / 32 of them from DIM / 32 * lane on, in pairs, over the rows of a tile.
template <class P, int DIM>
struct KeyExtremes {
    static constexpr int kPairs = DIM / 64;
    uint32_t least[kPairs], most[kPairs];

    __device__ __forceinline__ void find(const Tile<DIM>& tile, int lane) {
        const int first = tile.place(0, lane * kPairs / 4);
        const auto at = [&](int token) {
            return tile.template words<kPairs>(tile.step(first, token, 0), lane % (4 / kPairs));
        };
        const Words<kPairs> x = at(0);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) least[i] = most[i] = x.word[i];
#pragma unroll
        for (int token = 1; token < kBlockTokens; ++token) {
            const Words<kPairs> y = at(token);
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                least[i] = P::least(least[i], y.word[i]), most[i] = P::most(most[i], y.word[i]);
            }
        }
    }

    // Over the warps whose blocks of the page share groups; they are active together, and wait for each other alone.
    using Shared = uint32_t[kPackWarps][2][kPairs][kWarp];
    __device__ __forceinline__ void share(Shared& shared, int group_warps, int block, int lane) {
        if (group_warps == 1) return;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) shared[block][0][i][lane] = least[i], shared[block][1][i][lane] = most[i];
        const int barrier = 1 + threadIdx.x / kWarp / group_warps;
        asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(group_warps * kWarp) : "memory");
        const int begin = block & ~(group_warps - 1);
#pragma unroll 1
        for (int other = begin; other < begin + group_warps; ++other) {
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                least[i] = P::least(least[i], shared[other][0][i][lane]);
                most[i] = P::most(most[i], shared[other][1][i][lane]);
            }
        }
    }

    // Parameters of the lane's channels: to the group's place in the page, where `write` says so, and to
    // use(first channel of a pair, parameters of its two).
    template <int BITS, class Use>
    __device__ __forceinline__ void params(uint8_t* group, bool write, int lane, const Use& use) const {
        Words<kPairs> scales, mins;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const auto pair = params_of<P, BITS>(least[i], most[i]);
            use(2 * (kPairs * lane + i), pair.low, pair.high);
            scales.word[i] = pair.scales, mins.word[i] = pair.mins;
        }
        if (!write) return;
        reinterpret_cast<Words<kPairs>*>(group)[lane] = scales;
        reinterpret_cast<Words<kPairs>*>(group + 2 * DIM)[lane] = mins;
    }
};

}  // namespace kivi::cuda
