// Query-aware rounding (format/feedback.h) of one page of keys by a block, straight from the caller's rows.
//
// A lane has four tokens. Channels go in panels of eight, in coding order, and panels round the warps:
//
//   values [coded channel][token]   | errors of finished panels | panel | values to come |
//                                     every one goes into the panel, in order; then the panel's own channels are
//                                     coded one after the other, and their errors take the values' places
//
// So a warp has its panel's values in registers while it takes in the panels before, waiting for each to be finished,
// and the weights that it fetches serve four tokens. They stand in shared memory, where all lanes read the same ones.
#pragma once
#include "cuda/pack_codes.cuh"

namespace kivi::cuda {

constexpr int kLaneTokens = 4;

template <class P, int DIM>
struct AwareShared {
    static constexpr int kPanels = DIM / kPanel;
    static constexpr int kCodeStride = kWarp + 2;  // channels that a lane reads together stand in different banks
    struct Coding {
        uint32_t min_scale;  // f16 each
        float inverse;       // 1 / scale, or 0
    };
    float weights[kPanel * kPanel * kPanels * (kPanels + 1) / 2];  // panels, see FeedbackTables
    union {
        float values[DIM][kPageTokens];
        Tile<DIM> tiles[kPackWarps];  // before
    };
    union {
        uint16_t codes[DIM][kCodeStride];  // of a lane's tokens, four bits each; by channel
        typename KeyExtremes<P, DIM>::Shared extremes;  // before
    };
    Coding codings[kPackWarps][DIM];  // [group][coded channel]
    uint16_t order[DIM], place[DIM];
};

// From a warp that has finished a panel to one that waits for it. A barrier of the two serves panel after panel: a warp
// finishes none before the other has taken in the last, since it needs the other's panel between them.
struct PanelSignal {
    int barrier;
    __device__ __forceinline__ PanelSignal(int from, int to) : barrier(1 + 3 * from + (to - from + 3) % 4) {}
    __device__ __forceinline__ void give() const { asm volatile("bar.arrive %0, 64;" ::"r"(barrier) : "memory"); }
    __device__ __forceinline__ void await() const { asm volatile("bar.sync %0, 64;" ::"r"(barrier) : "memory"); }
};

// The weights of a head on their way.
template <class P, int DIM>
__device__ __forceinline__ void fetch_tables(AwareShared<P, DIM>& shared, const FeedbackTables& tables, int head) {
    const float* const weights = tables.weights + head * panel_floats(DIM);
    for (int i = 4 * threadIdx.x; i < panel_floats(DIM); i += 4 * kPackThreads) {
        copy_async(shared.weights + i, weights + i);
    }
    for (int i = threadIdx.x; i < DIM; i += kPackThreads) {
        shared.order[i] = tables.order[head * DIM + i];
        shared.place[i] = tables.place[head * DIM + i];
    }
}

template <class P, int BITS, int DIM, int GROUP>
__device__ __forceinline__ void encode_panels(AwareShared<P, DIM>& shared) {
    const int warp = threadIdx.x / kWarp, lane = kivi::cuda::lane();
    const auto& codings = shared.codings[kLaneTokens * lane / GROUP];
    const auto at = [&](int channel) { return reinterpret_cast<float4*>(shared.values[channel]) + lane; };
#pragma unroll 1
    for (int panel = warp; panel < AwareShared<P, DIM>::kPanels; panel += kPackWarps) {
        const int begin = panel * kPanel;
        const float* weights = shared.weights + panel_begin(panel);
        float y[kPanel][kLaneTokens];
#pragma unroll
        for (int i = 0; i < kPanel; ++i) {
            const float4 value = *at(begin + i);
            y[i][0] = value.x, y[i][1] = value.y, y[i][2] = value.z, y[i][3] = value.w;
        }
        const auto add = [&](const float4& error, int from) {
            const float4 a = *reinterpret_cast<const float4*>(weights),
                         b = *reinterpret_cast<const float4*>(weights + 4);
            const float w[kPanel] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = from; i < kPanel; ++i) {
                y[i][0] = __fmaf_rn(-error.x, w[i], y[i][0]);
                y[i][1] = __fmaf_rn(-error.y, w[i], y[i][1]);
                y[i][2] = __fmaf_rn(-error.z, w[i], y[i][2]);
                y[i][3] = __fmaf_rn(-error.w, w[i], y[i][3]);
            }
            weights += kPanel;
        };
#pragma unroll 1
        for (int before = 0; before < panel; ++before) {
            // The others were there before the warp's last panel was.
            if (panel - before < kPackWarps) PanelSignal(before % kPackWarps, warp).await();
#pragma unroll
            for (int j = 0; j < kPanel; ++j) add(*at(before * kPanel + j), 0);
        }
#pragma unroll
        for (int j = 0; j < kPanel; ++j) {
            const auto coding = codings[begin + j];
            const float min = f16_to_f32(static_cast<uint16_t>(coding.min_scale));
            const float scale = f16_to_f32(static_cast<uint16_t>(coding.min_scale >> 16));
            const float high = coding.inverse * power_of_two(-BITS);
            const float low = __fmaf_rn(-scale, coding.inverse, 1.0f) * high;
            uint32_t codes = 0;
            float error[kLaneTokens];
#pragma unroll
            for (int t = 0; t < kLaneTokens; ++t) {
                // Feedback may drive values anywhere.
                const float code = code_of_distance<BITS>(near_distance(y[j][t] - min), high, low);
                codes |= (__float_as_uint(code) - kCodeOne<BITS>) << (4 * t);
                // A damaged group passes nothing on.
                const float decoded = __fmaf_rn(code - kCodeUnit<BITS>, scale * power_of_two(BITS), min);
                error[t] = scale == scale ? y[j][t] - decoded : 0.0f;
            }
            shared.codes[shared.order[begin + j]][lane] = static_cast<uint16_t>(codes);
            const float4 errors = make_float4(error[0], error[1], error[2], error[3]);
            *at(begin + j) = errors;
            add(errors, j + 1);
        }
        for (int after = panel + 1; after < panel + kPackWarps && after < AwareShared<P, DIM>::kPanels; ++after) {
            PanelSignal(warp, after % kPackWarps).give();
        }
    }
}

// `begin`, `end`: tokens of the page that are to be packed, whole groups. Returns how many rows have left the range of
// their type, in every lane.
template <class P, int BITS, int DIM, int GROUP>
__device__ __forceinline__ int pack_keys_aware(AwareShared<P, DIM>& shared, bool rotated, const uint8_t* rows,
                                               uint32_t stride, int begin, int end, uint8_t* part) {
    const int warp = threadIdx.x / kWarp, lane = kivi::cuda::lane(), row = lane >> 2, column = lane & 3;
    constexpr FragmentSizes sizes(key_spec<BITS, GROUP>(), DIM);
    const bool active = warp * kBlockTokens >= begin && warp * kBlockTokens < end;
    Tile<DIM>& tile = shared.tiles[warp];
    if (active) tile.fetch(rows + uint64_t{stride} * (warp * kBlockTokens), stride, lane);
    end_copy_group();
    wait_for_copies<0>();
    __syncthreads();
    int clamped_rows = 0;
    if (active && rotated) clamped_rows = transform<P>(tile, lane);
    {
        KeyExtremes<P, DIM> extremes;
        if (active) extremes.find(tile, lane);
        if (active) extremes.share(shared.extremes, sizes.group_blocks, warp, lane);
        if (active && warp % sizes.group_blocks == 0) {
            const int group = warp / sizes.group_blocks;
            const auto set = [&](int channel, const GroupParams& params) {
                auto& coding = shared.codings[group][shared.place[channel]];
                coding.min_scale = f32_to_f16(params.min) | static_cast<uint32_t>(f32_to_f16(params.scale)) << 16;
                coding.inverse = params.scale > 0.0f ? __frcp_rn(params.scale) : 0.0f;
            };
            extremes.template params<BITS>(part + group * sizes.group_bytes(), true, lane,
                                           [&](int channel, const GroupParams& a, const GroupParams& b) {
                                               set(channel, a), set(channel + 1, b);
                                           });
        }
        // A lane takes a row out of the tiles, and puts its values where they are wanted when all have theirs.
        Words<4> x[DIM / 8];
#pragma unroll
        for (int c = 0; c < DIM / 8; ++c) {
            x[c] = active ? tile.template words<4>(tile.step(tile.place(lane, 0), 0, c)) : Words<4>{};
        }
        __syncthreads();
        float* const values = &shared.values[0][warp * kBlockTokens + lane];
#pragma unroll
        for (int c = 0; c < DIM / 8; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                values[shared.place[8 * c + 2 * i] * kPageTokens] = P::low(x[c].word[i]);
                values[shared.place[8 * c + 2 * i + 1] * kPageTokens] = P::high(x[c].word[i]);
            }
        }
    }
    __syncthreads();
    encode_panels<P, BITS, DIM, GROUP>(shared);
    __syncthreads();
    if (!active) return 0;
    using Turn = kivi::cuda::Turn<BITS, DIM>;
    const int first_lane = (warp * kBlockTokens + 8 * (row >> 1)) / kLaneTokens;  // of two, four tokens apart
#pragma unroll 1
    for (int turn = 0; turn < Turn::kTurns; ++turn) {
        Turn words(0);
#pragma unroll
        for (int r = 0; r < Turn::kRuns; ++r) {
            const int shift = 4 * ((row & 1) + 2 * (Turn::first_unit(turn) + Turn::unit(r)));
            const int channel = 32 * (Turn::first_run(turn) + Turn::run(r)) + 8 * column;
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                const uint32_t codes =
                    *reinterpret_cast<const uint32_t*>(shared.codes[channel + c] + first_lane) >> shift;
                words.add(2 * r + c / 2 % 2, 2 * (c / 4), c % 2, codes & 15);
                words.add(2 * r + c / 2 % 2, 2 * (c / 4) + 1, c % 2, codes >> 16 & 15);
            }
        }
        words.store(part + sizes.codes(true, warp), turn, lane);
    }
    return clamped_rows;
}

}  // namespace kivi::cuda
