// Extremes and parameters of groups, from a tile.
#pragma once
#include "cuda/pack_pairs.cuh"
#include "cuda/pack_tile.cuh"

namespace kivi::cuda {

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

// Extremes of the lane's channels, DIM / 32 of them from DIM / 32 * lane on, in pairs, over the rows of a tile as they
// come.
template <class P, int DIM>
struct KeyExtremes {
    static constexpr int kPairs = DIM / 64;
    uint32_t least[kPairs], most[kPairs];

    __device__ __forceinline__ void find(const Tile<DIM>& tile, int lane) {
        const int first = tile.place(0, lane * kPairs / 4);
        const auto at = [&](int token) {
            return tile.template words<kPairs>(tile.step(first, token, 0), lane % (4 / kPairs));
        };
        tile.wait_for_quarter(0);
        const Words<kPairs> x = at(0);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) least[i] = most[i] = x.word[i];
#pragma unroll
        for (int token = 1; token < kBlockTokens; ++token) {
            if (token % tile.kQuarter == 0) tile.wait_for_quarter(token / tile.kQuarter);
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
        // Numbers of barriers are constants: for others a block is given all sixteen, and a multiprocessor has 64.
        if (group_warps == kPackWarps || threadIdx.x / kWarp < group_warps) {
            asm volatile("bar.sync 1, %0;" ::"r"(group_warps * kWarp) : "memory");
        } else {
            asm volatile("bar.sync 2, %0;" ::"r"(group_warps * kWarp) : "memory");
        }
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
