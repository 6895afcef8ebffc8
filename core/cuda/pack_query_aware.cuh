// Query-aware rounding (format/feedback.h) of one page of keys by a block, straight from the caller's rows.
//
// A page's tokens are a chain, or two that know nothing of each other, of some warps each; a lane has some tokens of
// its chain. Channels go in panels of eight, in coding order, and panels round the warps of a chain:
//
//   values [coded channel][token]   | errors of finished panels | panel | values to come |
//                                     every one goes into the panel, in order; then the panel's own channels are
//                                     coded one after the other, and their errors take the values' places
//
// So a warp has its panel's values in registers while it takes in the panels before, waiting for each to be finished,
// and the weights that it fetches serve all of a lane's tokens. They stand in shared memory, where all lanes read the
// same ones; where there is no room for all, each warp fetches its own a few panels ahead.
#pragma once
#include "cuda/pack_codes.cuh"
#include "cuda/pack_transform.cuh"

namespace kivi::cuda {

template <class P, int DIM>
struct AwareShared {
    static constexpr int kPanels = DIM / kPanel, kPanelPair = kPanel * kPanel;
    static constexpr int kChains = DIM > 128 ? 2 : 1, kChainWarps = DIM > 64 ? 8 : 4;
    static constexpr int kWarps = kChains * kChainWarps, kThreads = kWarps * kWarp;
    static constexpr int kLaneTokens = kPageTokens / kChains / kWarp;
    static constexpr bool kAllWeights = DIM <= 128;  // have room
    static constexpr int kSlots = 8;                 // of a warp, where they have not
    using LaneCodes = std::conditional_t<kLaneTokens == 4, uint16_t, uint8_t>;  // four bits each
    static constexpr int kCodeStride = kPageTokens / kLaneTokens + 4 / sizeof(LaneCodes);  // other banks side by side
    struct Coding {
        uint32_t min_scale;  // f16 each
        float inverse;       // 1 / scale, or 0
    };
    // Panels, see FeedbackTables; or each warp's slots.
    alignas(16) float weights[kAllWeights ? kPanelPair * kPanels * (kPanels + 1) / 2 : kWarps * kSlots * kPanelPair];
    union {
        float values[DIM][kPageTokens];
        Tile<DIM> tiles[kPackWarps];  // before
    };
    union {
        alignas(4) LaneCodes codes[DIM][kCodeStride];  // by channel
        typename KeyExtremes<P, DIM>::Shared extremes;  // before
    };
    Coding codings[kPackWarps][DIM];  // [group][coded channel]
    alignas(16) uint16_t order[DIM], place[DIM];
    uint64_t finished[kChains][kPanels];  // barriers
};

// The weights that a warp takes in, 64 floats for each panel before one of its own, and for its own.
template <class Shared>
class PanelWeights {
  public:
    // `all`: of the head.
    __device__ __forceinline__ PanelWeights(Shared& shared, const float* all, int warp) {
        if constexpr (!Shared::kAllWeights) {
            slots_ = shared.weights + warp * Shared::kSlots * Shared::kPanelPair;
            all_ = all, panel_ = warp % Shared::kChainWarps;
#pragma unroll 1
            for (int i = 1; i < Shared::kSlots; ++i) fetch();
        }
    }
    __device__ __forceinline__ void begin(const Shared& shared, int panel) {
        if constexpr (Shared::kAllWeights) next_ = shared.weights + panel_begin(panel);
    }
    __device__ __forceinline__ const float* next() {
        if constexpr (Shared::kAllWeights) {
            const float* const these = next_;
            next_ += Shared::kPanelPair;
            return these;
        } else {
            fast::wait_for_groups<Shared::kSlots - 2>();
            __syncwarp();  // all have their part of these, and are done with those before
            const float* const these = slots_ + taken_ * Shared::kPanelPair;
            taken_ = (taken_ + 1) % Shared::kSlots;
            fetch();
            return these;
        }
    }

  private:
    // The next ones to come, if there are any.
    __device__ __forceinline__ void fetch() {
        if (panel_ < Shared::kPanels) {
            const int at = 4 * lane();
            if (at < Shared::kPanelPair) {
                fast::copy16(fast::shared_address(slots_ + fetched_ * Shared::kPanelPair + at),
                             all_ + panel_begin(panel_) + before_ * Shared::kPanelPair + at);
            }
            fetched_ = (fetched_ + 1) % Shared::kSlots;
            if (++before_ > panel_) before_ = 0, panel_ += Shared::kChainWarps;
        }
        fast::end_copy_group();
    }

    const float* next_ = nullptr;
    float* slots_ = nullptr;
    const float* all_ = nullptr;
    int panel_ = 0, before_ = 0, fetched_ = 0, taken_ = 0;
};

// A panel's barrier, at which all lanes of its warp arrive: what a lane has written is seen by its own arrival.
__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t threads) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_at(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Differences may be so large that products with them overflow. Clamped, they keep their codes.
__device__ __forceinline__ float near_distance(float distance) {
    constexpr float kFar = 1152921504606846976.0f;  // 2^60
    return fminf(fmaxf(distance, -kFar), kFar);
}

// What a head's keys are rounded with, on its way.
template <class P, int DIM>
__device__ __forceinline__ void fetch_tables(AwareShared<P, DIM>& shared, const FeedbackTables& tables, int head) {
    using Shared = AwareShared<P, DIM>;
    if constexpr (Shared::kAllWeights) {
        const float* const weights = tables.weights + head * panel_floats(DIM);
        for (int i = 4 * threadIdx.x; i < panel_floats(DIM); i += 4 * Shared::kThreads) {
            fast::copy16(fast::shared_address(shared.weights + i), weights + i);
        }
    }
    for (int i = threadIdx.x; i < DIM; i += Shared::kThreads) {
        shared.order[i] = tables.order[head * DIM + i];
        shared.place[i] = tables.place[head * DIM + i];
    }
}

template <class P, int BITS, int DIM, int GROUP>
__device__ __forceinline__ void encode_panels(AwareShared<P, DIM>& shared, const float* all_weights) {
    using Shared = AwareShared<P, DIM>;
    constexpr int kTokens = Shared::kLaneTokens;
    struct alignas(4 * kTokens) Lane {
        float t[kTokens];
    };
    const int warp = threadIdx.x / kWarp, lane = kivi::cuda::lane(), chain = warp / Shared::kChainWarps;
    const int token = chain * (kPageTokens / Shared::kChains) + kTokens * lane;
    const auto& codings = shared.codings[token / GROUP];
    const auto at = [&](int channel) { return reinterpret_cast<Lane*>(shared.values[channel] + token); };
    const auto finished = [&](int panel) { return fast::shared_address(&shared.finished[chain][panel]); };
    constexpr float kRound = power_of_two(23 - BITS);
    constexpr uint32_t kRoundBits = static_cast<uint32_t>(127 + 23 - BITS) << 23;
    PanelWeights<Shared> panel_weights(shared, all_weights, warp);
#pragma unroll 1
    for (int panel = warp % Shared::kChainWarps; panel < Shared::kPanels; panel += Shared::kChainWarps) {
        const int begin = panel * kPanel;
        panel_weights.begin(shared, panel);
        Lane y[kPanel];
#pragma unroll
        for (int i = 0; i < kPanel; ++i) y[i] = *at(begin + i);
#pragma unroll 1
        for (int before = 0; before < panel; ++before) {
            const float* const weights = panel_weights.next();
            // The others were there before the warp's last panel was.
            if (panel - before < Shared::kChainWarps) fast::barrier_wait(finished(before), 0);
#pragma unroll
            for (int j = 0; j < kPanel; ++j) {
                const Lane error = *at(before * kPanel + j);
                const float4 a = *reinterpret_cast<const float4*>(weights + kPanel * j),
                             b = *reinterpret_cast<const float4*>(weights + kPanel * j + 4);
                const float w[kPanel] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
                for (int i = 0; i < kPanel; ++i) {
#pragma unroll
                    for (int t = 0; t < kTokens; ++t) y[i].t[t] = __fmaf_rn(-error.t[t], w[i], y[i].t[t]);
                }
            }
        }
        // One channel waits for the other: nothing is read or written between them.
        const float* const weights = panel_weights.next();
        typename Shared::Coding coding[kPanel];
        float own[kPanel][kPanel];
        uint32_t codes[kPanel];
#pragma unroll
        for (int j = 0; j < kPanel; ++j) {
            coding[j] = codings[begin + j];
#pragma unroll
            for (int i = j + 1; i < kPanel; ++i) own[j][i] = weights[kPanel * j + i];
        }
#pragma unroll
        for (int j = 0; j < kPanel; ++j) {
            const float min = f16_to_f32(static_cast<uint16_t>(coding[j].min_scale));
            const float scale = f16_to_f32(static_cast<uint16_t>(coding[j].min_scale >> 16));
            const Inverse inverse(scale, coding[j].inverse, power_of_two(-BITS));
            codes[j] = 0;
#pragma unroll
            for (int t = 0; t < kTokens; ++t) {
                // Feedback may drive values anywhere. In units of 2^-BITS, added to kRound, ratios are rounded to
                // codes.
                const float ratio = inverse.ratio(near_distance(y[j].t[t] - min));
                const float code = fminf(ratio, 1.0f - power_of_two(-BITS)) + kRound;
                codes[j] |= (__float_as_uint(code) - kRoundBits) << (4 * t);
                // A damaged group passes nothing on.
                const float decoded = __fmaf_rn(code - kRound, scale * power_of_two(BITS), min);
                const float error = scale == scale ? y[j].t[t] - decoded : 0.0f;
                y[j].t[t] = error;
#pragma unroll
                for (int i = j + 1; i < kPanel; ++i) y[i].t[t] = __fmaf_rn(-error, own[j][i], y[i].t[t]);
            }
        }
#pragma unroll
        for (int j = 0; j < kPanel; ++j) *at(begin + j) = y[j];
        arrive_at(finished(panel));
#pragma unroll
        for (int j = 0; j < kPanel; ++j) {
            shared.codes[shared.order[begin + j]][token / kTokens] = static_cast<typename Shared::LaneCodes>(codes[j]);
        }
    }
}

// Tables and tiles are on their way. `active`: the tokens of the warp's tile are to be packed, whole groups of the
// page; rows from `fresh` on are the caller's. Returns how many have left the range of their type, in every lane.
template <class P, int BITS, int DIM, int GROUP>
__device__ __forceinline__ int pack_keys_aware(AwareShared<P, DIM>& shared, const float* all_weights, bool active,
                                               bool rotated, int fresh, uint8_t* part) {
    using Shared = AwareShared<P, DIM>;
    const int lane = kivi::cuda::lane(), row = lane >> 2, column = lane & 3;
    constexpr int kShares = Shared::kWarps / kPackWarps;  // of a tile's work
    const int warp = threadIdx.x / kWarp % kPackWarps, share = threadIdx.x / kPackThreads;
    constexpr FragmentSizes sizes(key_spec<BITS, GROUP>(), DIM);
    Tile<DIM>& tile = shared.tiles[warp];
    const int barriers = Shared::kChains * Shared::kPanels;
    if (threadIdx.x < barriers) init_barrier(fast::shared_address(&shared.finished[0][0] + threadIdx.x), kWarp);
    fast::wait_for_copies();
    __syncthreads();
    int clamped_rows = 0;
    if (active && share == 0) {
        if (rotated) clamped_rows = transform<P>(tile, lane, fresh);
        KeyExtremes<P, DIM> extremes;
        extremes.find(tile, lane);
        extremes.share(shared.extremes, sizes.group_blocks, warp, lane);
        if (warp % sizes.group_blocks == 0) {
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
    }
    if (kShares > 1) __syncthreads();
    // A lane takes a row, or its share of one, out of the tiles, and puts its values where they are wanted when all
    // have theirs.
    constexpr int kChunks = DIM / 8 / kShares;
    Words<4> x[kChunks];
    const int first = tile.place(lane, 0);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        x[c] = active ? tile.template words<4>(tile.step(first, 0, share * kChunks + c)) : Words<4>{};
    }
    __syncthreads();
    float* const values = &shared.values[0][warp * kBlockTokens + lane];
    const uint16_t* const place = shared.place + share * (8 * kChunks);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const Words<4> places = *reinterpret_cast<const Words<4>*>(place + 8 * c);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            values[(places.word[i] & 0xFFFFu) * kPageTokens] = P::low(x[c].word[i]);
            values[(places.word[i] >> 16) * kPageTokens] = P::high(x[c].word[i]);
        }
    }
    __syncthreads();
    encode_panels<P, BITS, DIM, GROUP>(shared, all_weights);
    __syncthreads();
    if (!active) return 0;
    using Turn = kivi::cuda::Turn<BITS, DIM>;
    const int first_token = warp * kBlockTokens + 8 * (row >> 1);  // of eight
#pragma unroll 1
    for (int turn = share; turn < Turn::kTurns; turn += kShares) {
        Turn words;
#pragma unroll
        for (int r = 0; r < Turn::kRuns; ++r) {
            const int shift = 4 * ((row & 1) + 2 * (Turn::first_unit(turn) + Turn::unit(r)));
            const int channel = 32 * (Turn::first_run(turn) + Turn::run(r)) + 8 * column;
#pragma unroll
            for (int c = 0; c < 8; c += 2) {
                const auto of = [&](int channel) {  // of two tokens, four apart
                    return reinterpret_cast<const uint32_t*>(shared.codes[channel])[first_token / 8] >> shift &
                           0x000F000Fu;
                };
                const uint32_t even = of(channel + c), odd = of(channel + c + 1);
                words.add(2 * r + c / 2 % 2, 2 * (c / 4), __byte_perm(even, odd, 0x5410));
                words.add(2 * r + c / 2 % 2, 2 * (c / 4) + 1, __byte_perm(even, odd, 0x7632));
            }
        }
        words.store(part + sizes.codes(true, warp), turn, lane);
    }
    return clamped_rows;
}

}  // namespace kivi::cuda
