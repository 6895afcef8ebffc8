// Nearest rounding of a tile by one warp, into the fragment order. Extremes are found where they need few steps between
// lanes; parameters go to the lanes that make the codes through shared memory.
//
//   lane = 4 * row + column
//   keys     tokens   8 * (row / 2) + row % 2 + {0, 2, 4, 6}     channels  32 run + 8 * column + 0..7
//   values   tokens   8 * column + 0..7                          channels  32 run + 4 * row + 0..3
#pragma once
#include "cuda/pack_codes.cuh"

namespace kivi::cuda {

// Keys of a warp's tokens, which are a block of the page. Warps whose tokens share a group are neighbours in the order
// of their blocks and call this together.
template <class P, int BITS, int DIM, int GROUP>
__device__ __forceinline__ void pack_keys(const Tile<DIM>& tile, typename CoderOf<P, BITS>::template Keys<DIM>& groups,
                                          typename KeyExtremes<P, DIM>::Shared& shared, uint8_t* part, int block) {
    constexpr FragmentSizes sizes(key_spec<BITS, GROUP>(), DIM);
    using Coder = CoderOf<P, BITS>;
    const int lane = fresh_lane(), row = lane >> 2, column = lane & 3;
    KeyExtremes<P, DIM> extremes;
    extremes.find(tile, lane);
    extremes.share(shared, sizes.group_blocks, block, lane);
    uint8_t* const group = part + block / sizes.group_blocks * sizes.group_bytes();
    extremes.template params<BITS>(group, block % sizes.group_blocks == 0, lane,
                                   [&](int channel, const GroupParams& a, const GroupParams& b) {
                                       groups.set(channel, Coder::group_of(a), Coder::group_of(b));
                                   });
    __syncwarp();
    using Turn = kivi::cuda::Turn<BITS, DIM>;
    const int first = tile.place(8 * (row >> 1) + (row & 1), column);
#pragma unroll 1
    for (int turn = 0; turn < Turn::kTurns; ++turn) {
        const int from = tile.step(first, 2 * Turn::first_unit(turn), 4 * Turn::first_run(turn));
        const int channel = 32 * Turn::first_run(turn) + 8 * column;
        typename Coder::template Codes<DIM> codes;
#pragma unroll
        for (int run = 0; run < Turn::kUnitRuns; ++run) {
            if constexpr (Turn::kRuns > 4) __syncwarp();  // what later runs load takes no registers before
            typename Coder::Pair of[4];
            groups.get(channel + 32 * run, of);
#pragma unroll
            for (int r = run; r < Turn::kRuns; r += Turn::kUnitRuns) {
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    const Words<4> x = tile.template words<4>(tile.step(from, 2 * Turn::unit(r) + 4 * t, 4 * run));
#pragma unroll
                    for (int i = 0; i < 4; ++i) codes.add(2 * r + i % 2, t + i / 2 * 2, x.word[i], of[i]);
                }
            }
        }
        codes.finish().store(part + sizes.codes(true, block), turn, lane);
    }
}

// Values of a warp's tokens, which are a block of the page. GROUPS: side by side. Where only tokens begin .. end - 1
// are packed, those before have been, and those after will be.
template <class P, int BITS, int DIM, int GROUPS>
__device__ __forceinline__ void pack_values(const Tile<DIM>& tile,
                                            typename CoderOf<P, BITS>::template Values<GROUPS>& groups,
                                            uint8_t* part, int number, int begin = 0, int end = kBlockTokens) {
    constexpr FragmentSizes sizes(value_spec<BITS, DIM / GROUPS>(), DIM);
    using Coder = CoderOf<P, BITS>;
    const int lane = fresh_lane(), row = lane >> 2, column = lane & 3;
    uint8_t* const block = part + sizes.codes(false, number);
    auto* const params_at = reinterpret_cast<uint16_t*>(block + sizes.code_bytes) + lane;
    // Two groups at a time, in the halves of a pair; where there is one, it is in both.
    constexpr int kTogether = GROUPS > 1 ? 2 : 1;
    tile.wait();
    const int row_place = tile.place(lane, 0);
#pragma unroll 1
    for (int group = 0; group < GROUPS; group += kTogether) {
        constexpr int kChunks = DIM / GROUPS / 8;
        uint32_t least[kTogether], most[kTogether];  // over even and odd channels of the lane's token
#pragma unroll
        for (int g = 0; g < kTogether; ++g) {
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
                const Words<4> x = tile.template words<4>(tile.step(row_place, 0, (group + g) * kChunks + c));
                if (c == 0) least[g] = most[g] = x.word[0];
#pragma unroll
                for (int i = c == 0 ? 1 : 0; i < 4; ++i) {
                    least[g] = P::least(least[g], x.word[i]), most[g] = P::most(most[g], x.word[i]);
                }
            }
        }
        const auto sides = [](const uint32_t (&x)[kTogether], int which) {
            return __byte_perm(x[0], x[kTogether - 1], which == 0 ? 0x5410 : 0x7632);
        };
        const ParamPair params = params_of<P, BITS>(P::least(sides(least, 0), sides(least, 1)),
                                                    P::most(sides(most, 0), sides(most, 1)));
        uint16_t* const at = params_at + group * kBlockTokens;
        groups.set(group, lane, Coder::group_of(params.low));
        if (kTogether == 2) groups.set(group + 1, lane, Coder::group_of(params.high));
        if (lane < begin || lane >= end) continue;
        at[0] = static_cast<uint16_t>(params.scales);
        at[GROUPS * kBlockTokens] = static_cast<uint16_t>(params.mins);
        if (kTogether == 1) continue;
        at[kBlockTokens] = static_cast<uint16_t>(params.scales >> 16);
        at[(GROUPS + 1) * kBlockTokens] = static_cast<uint16_t>(params.mins >> 16);
    }
    __syncwarp();
    using Turn = kivi::cuda::Turn<BITS, DIM>;
    const int first = tile.place(8 * column, row / 2);
#pragma unroll 1
    for (int turn = 0; turn < Turn::kTurns; ++turn) {
        const int from = tile.step(first, 2 * Turn::first_unit(turn), 4 * Turn::first_run(turn));
        const int group_place = value_place(column, 2 * Turn::first_unit(turn));
        typename Coder::template Codes<DIM> codes;
#pragma unroll
        for (int r = 0; r < Turn::kRuns; ++r) {
            const int group = (Turn::first_run(turn) + Turn::run(r)) * 32 / (DIM / GROUPS);
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const int token = 2 * Turn::unit(r) + t % 2 + 4 * (t / 2);
                const Words<2> x = tile.template words<2>(tile.step(from, token, 4 * Turn::run(r)), row % 2);
                const auto of = groups.get(group, group_place ^ token);
#pragma unroll
                for (int i = 0; i < 2; ++i) codes.add(2 * r + i, t, x.word[i], of);
            }
        }
        auto& words = codes.finish();
        words.transpose();
        if (begin > 0) {
            Turn packed;
#pragma unroll
            for (int number = 0; number < Turn::kOperands; ++number) {
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const int token = 8 * column + 2 * (Turn::first_unit(turn) + Turn::unit(number / 2)) + 4 * (w / 2);
                    constexpr uint32_t kLevels = (1u << BITS) - 1;
                    packed.add(number, w, (token >= begin ? kLevels : 0) | (token + 1 >= begin ? kLevels << 16 : 0));
                }
            }
            words.merge(block, turn, lane, packed);
        }
        words.store(block, turn, lane);
    }
}

}  // namespace kivi::cuda
