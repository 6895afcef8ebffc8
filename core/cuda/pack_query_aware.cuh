// Query-aware rounding (format/feedback.h) of one page of keys by a block, straight from the caller's f16 rows.
//
// A thread has two tokens and goes through their channels in coding order, eight at a time (a panel):
//
//   values [coded channel][token]   | errors of finished channels | panel | values to come |
//                                     every one goes into the panel, in order; then the panel's own channels are
//                                     coded one after the other, and their errors take the values' places
//
// Values and errors of a thread's tokens are its own, so threads wait for each other only before and after. The weights
// of the head stand in shared memory, where all lanes read the same ones.
#pragma once
#include "cuda/pack_rows.cuh"

namespace kivi::cuda {

constexpr int kPairThreads = kPageTokens / 2;  // threads with two tokens

template <int DIM>
struct AwareShared {
    static constexpr int kStride = kPageTokens + 2;    // of values: channels beside each other go to other banks
    static constexpr int kCodeStride = kPairThreads + 4;  // likewise
    struct Coding {
        uint32_t min_scale;  // f16 each
        float inverse;       // 1 / scale, or 0
    };
    float weights[kPanel * kPanel * (DIM / kPanel) * (DIM / kPanel + 1) / 2];  // panels, see FeedbackTables
    float values[DIM][kStride];
    uint8_t codes[DIM][kCodeStride];       // [channel][pair of tokens]: two codes of four bits
    Coding codings[kPackWarps][DIM];       // [group][coded channel]
    uint16_t order[DIM], place[DIM];
};

// The weights of a head on their way.
template <int DIM>
__device__ __forceinline__ void fetch_tables(AwareShared<DIM>& shared, const FeedbackTables& tables, int head) {
    const float* const weights = tables.weights + head * panel_floats(DIM);
    for (int i = 4 * threadIdx.x; i < panel_floats(DIM); i += 4 * kPackThreads) copy_async(shared.weights + i, weights + i);
    for (int i = threadIdx.x; i < DIM; i += kPackThreads) {
        shared.order[i] = tables.order[head * DIM + i];
        shared.place[i] = tables.place[head * DIM + i];
    }
}

// Two numbers of a thread's tokens.
struct TokenPair {
    float first, second;
};
template <int BITS>
__device__ __forceinline__ uint32_t aware_code(float y, float min, float high, float low) {
    // Feedback may drive values anywhere; clamped, the products below stay finite.
    constexpr float kFar = 1152921504606846976.0f;  // 2^60
    const float distance = y - min, near = fabsf(distance) > kFar ? copysignf(kFar, distance) : distance;
    return code_of_distance<BITS>(near, high, low);
}

template <int BITS, int DIM>
__device__ __forceinline__ void encode_pair(AwareShared<DIM>& shared, int group_tokens) {
    const int thread = threadIdx.x, group = 2 * thread / group_tokens;
    const auto at = [&](int channel) { return reinterpret_cast<float2*>(shared.values[channel] + 2 * thread); };
    const float* weights = shared.weights;
#pragma unroll 1
    for (int panel = 0; panel < DIM / kPanel; ++panel) {
        const int begin = panel * kPanel;
        float y[kPanel][2];
#pragma unroll
        for (int i = 0; i < kPanel; ++i) {
            const float2 value = *at(begin + i);
            y[i][0] = value.x, y[i][1] = value.y;
        }
        const auto add = [&](const float2& error, int from) {
            const float4 a = *reinterpret_cast<const float4*>(weights), b = *reinterpret_cast<const float4*>(weights + 4);
            const float w[kPanel] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = from; i < kPanel; ++i) {
                y[i][0] = __fmaf_rn(-error.x, w[i], y[i][0]);
                y[i][1] = __fmaf_rn(-error.y, w[i], y[i][1]);
            }
            weights += kPanel;
        };
#pragma unroll 8
        for (int j = 0; j < begin; ++j) add(*at(j), 0);
#pragma unroll
        for (int j = 0; j < kPanel; ++j) {
            const auto coding = shared.codings[group][begin + j];
            const float min = low_of(coding.min_scale), scale = high_of(coding.min_scale);
            const float high = coding.inverse * power_of_two(-BITS);
            const float low = __fmaf_rn(-scale, coding.inverse, 1.0f) * high;
            uint32_t code[2];
            float error[2];
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                code[t] = aware_code<BITS>(y[j][t], min, high, low) - kCodeOne<BITS>;
                // A damaged group passes nothing on.
                error[t] = scale == scale ? y[j][t] - __fmaf_rn(static_cast<float>(code[t]), scale, min) : 0.0f;
            }
            shared.codes[shared.order[begin + j]][thread] = static_cast<uint8_t>(code[0] | code[1] << 4);
            *at(begin + j) = make_float2(error[0], error[1]);
            add(make_float2(error[0], error[1]), j + 1);
        }
    }
}

// `begin`, `end`: tokens of the page that are to be packed, whole groups. Returns how many rows have left the range of
// f16, in every lane.
template <int BITS, int DIM>
__device__ __forceinline__ int pack_keys_aware(AwareShared<DIM>& shared, const kivi_spec& spec, const PackSource& page,
                                               int begin, int end, uint8_t* part) {
    constexpr int kPairs = kKeyPairs<DIM>;
    const int warp = threadIdx.x / kWarp, lane = kivi::cuda::lane(), row = lane >> 2, column = lane & 3;
    const FragmentSizes sizes(spec, DIM);
    const bool active = warp * kBlockTokens >= begin && warp * kBlockTokens < end;
    int clamped_rows = 0;
    {
        uint32_t x[4][kPairs], low[kKeyShare<DIM>], high[kKeyShare<DIM>];
        if (active) {
            const PackSource source{page.rows + warp * kBlockTokens * page.stride, page.stride};
            clamped_rows = load_keys<DIM>(x, source, spec.transform == KIVI_TRANSFORM_HADAMARD, lane);
        }
        // The values' place is free until all extremes are known.
        auto& extremes = *reinterpret_cast<KeyExtremes<DIM>*>(shared.values);
        key_extremes<DIM>(x, low, high, extremes, sizes.group_blocks, active, warp, lane);
        wait_for_copies();
        __syncthreads();
        if (active) {
            const int group = warp / sizes.group_blocks;
            const bool first = warp % sizes.group_blocks == 0;
            key_params<DIM>(spec, low, high, part + group * sizes.group_bytes(), first, lane,
                            [&](int channel, const GroupParams& params) {
                                if (!first) return;
                                auto& coding = shared.codings[group][shared.place[channel]];
                                coding.min_scale = f32_to_f16(params.min) | static_cast<uint32_t>(f32_to_f16(params.scale)) << 16;
                                coding.inverse = params.scale > 0.0f ? __frcp_rn(params.scale) : 0.0f;
                            });
            const int token = warp * kBlockTokens + 8 * (row >> 1) + (row & 1);
#pragma unroll
            for (int n = 0; n < kPairs; ++n) {
                const int channel = 32 * (n / 4) + 8 * column + 2 * (n % 4);
                float* const even = shared.values[shared.place[channel]] + token;
                float* const odd = shared.values[shared.place[channel + 1]] + token;
#pragma unroll
                for (int i = 0; i < 4; ++i) even[2 * i] = low_of(x[i][n]), odd[2 * i] = high_of(x[i][n]);
            }
        }
    }
    __syncthreads();
    const int thread = threadIdx.x;
    if (thread < kPairThreads && 2 * thread >= begin && 2 * thread < end) encode_pair<BITS, DIM>(shared, spec.group);
    __syncthreads();
    if (!active) return 0;
    // The lane's four tokens are four pairs beside each other: row % 2 tells which of each.
    LaneVectors<BITS, DIM> vectors(0);
    const int first_pair = warp * kBlockTokens / 2 + 4 * (row >> 1), shift = 4 * (row & 1);
#pragma unroll
    for (int a = 0; a < kPairs / 4; ++a) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const uint32_t four =
                *reinterpret_cast<const uint32_t*>(shared.codes[32 * a + 8 * column + c] + first_pair) >> shift;
#pragma unroll
            for (int i = 0; i < 4; ++i) vectors.add_key(i, c, a, four >> (8 * i) & 15);
        }
    }
    vectors.store(part + sizes.codes(true, warp), lane);
    return clamped_rows;
}

}  // namespace kivi::cuda
