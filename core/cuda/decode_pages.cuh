// A visit to a page: key products, softmax, value products, all from codes as they stand.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_codes.cuh"
#include "cuda/decode_instructions.cuh"
#include "cuda/decode_line.cuh"
#include "cuda/decode_nonfinite.cuh"
#include "cuda/decode_queries.cuh"
#include "cuda/decode_shared.cuh"
#include "cuda/decode_softmax.cuh"

namespace kivi::cuda::fast {

// q . mins for every key group of the visit, in powers of two; the result of group g ends up in the threads with
// row % groups == g. A vector of mins is an A operand as it stands: rows 0..7 are the even k-step of the pair, rows
// 8..15 the odd one, each valid for its own B operand only.
template <class C>
__device__ __forceinline__ void key_min_terms(const HeadState<C>& s, const SharedStorage<C>& shared,
                                              const uint8_t* slot, int warp, int lane,
                                              float (&term)[C::kThreadRows]) {
    const int row = lane >> 2, column = lane & 3;
    const uint8_t* const mins = slot + (row % C::kVisitGroups) * C::kGroupBytes + C::kDim * 2 + column * 16;
#pragma unroll
    for (int t = 0; t < C::kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < C::kPairs; ++i) {
            const uint4 v = load16(mins + i * 64), q = query_vector<C>(shared, t, i, warp, lane);
            float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
            const auto unit = [&](int step, int half) { return float(1 << C::key_power(2 * i + step, half)); };
            if constexpr (C::kHalfPowers) {  // rows 8..15 are the other half of the depth
                mma(even, v.x, 0, 0, v.z, q.x, q.y);
                mma(odd, v.y, 0, 0, v.w, q.z, q.w);
            } else {
                mma(even, v.x, v.y, v.z, v.w, q.x, q.y);
                mma(odd, v.x, v.y, v.z, v.w, q.z, q.w);
            }
#pragma unroll
            for (int k = 0; k < C::kTileRows; ++k) {
                const int h = t * C::kTileRows + k;
                term[h] = i == 0 ? even[k] * unit(0, 0) : fmaf(even[k], unit(0, 0), term[h]);
                if constexpr (C::kHalfPowers) {
                    term[h] = fmaf(even[2 + k], unit(0, 1), term[h]);
                    term[h] = fmaf(odd[k], unit(1, 0), term[h]);
                }
                term[h] = fmaf(odd[2 + k], unit(1, 1), term[h]);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < C::kThreadRows; ++h) term[h] *= s.factor[h] * kSmallest;
}

// q * key scale of one group.
template <class C>
struct ScaledQueries {
    uint32_t at[C::kTiles][2 * C::kSteps];
};
template <class C>
__device__ __forceinline__ void scale_queries(const SharedStorage<C>& shared, const uint8_t* slot, int group, int warp,
                                              int lane, ScaledQueries<C>& scaled) {
    const uint8_t* const scales = slot + group * C::kGroupBytes + (lane & 3) * 16;
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
        const uint4 v = load16(scales + i * 64);
#pragma unroll
        for (int t = 0; t < C::kTiles; ++t) {
            const uint4 q = query_vector<C>(shared, t, i, warp, lane);
            scaled.at[t][4 * i] = mul_half2(q.x, v.x);
            scaled.at[t][4 * i + 1] = mul_half2(q.y, v.z);
            scaled.at[t][4 * i + 2] = mul_half2(q.z, v.y);
            scaled.at[t][4 * i + 3] = mul_half2(q.w, v.w);
        }
    }
}

// Whether an operand is the first of a vector, in the order in which keys are multiplied: step by step, both units.
constexpr bool __host__ __device__ opens_vector(int bits, int dim, int number, int vector) {
    if (vector_words(bits, dim) == 2) return number == 0;
    const int n = number % 16;
    return vector_of(bits, number) == vector &&
           (bits == 3 ? n == 0 || n == (dim == 128 ? 8 : 5) || n == 10 : field_of(bits, number) == 0);
}

// Products of keys and queries for the blocks first .. first + BLOCKS - 1 of the visit: c[2 * block + unit][tile]. All
// units go forward together, for more independent mma.
template <class C, int BLOCKS, int SCALED>
__device__ __forceinline__ void key_products(const uint8_t* slot, int first, int lane,
                                             const ScaledQueries<C> (&scaled)[SCALED],
                                             float (&c)[2 * BLOCKS][C::kTiles][4]) {
    constexpr int kVectors = kCodeVectors<C::kKeyBits, C::kDim>;
    const uint8_t* const codes = slot + C::step_codes(first);
    CodeVector<C::kKeyBits, C::kDim> w[BLOCKS][kVectors], x[BLOCKS][kVectors];
#pragma unroll
    for (int u = 0; u < 2 * BLOCKS; ++u) {
#pragma unroll
        for (int t = 0; t < C::kTiles; ++t) c[u][t][0] = c[u][t][1] = c[u][t][2] = c[u][t][3] = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < C::kSteps; ++k) {
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                const int number = u * C::kSteps + k;
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
                    if (!opens_vector(C::kKeyBits, C::kDim, number, v)) continue;
                    w[b][v] = load_codes<C::kKeyBits, C::kDim>(codes + C::kKeyStride * b, v, lane);
                    x[b][v] = shift_high<C::kKeyBits>(w[b][v]);
                }
                const uint4 a = operand<C::kKeyBits>(w[b], x[b], number);
#pragma unroll
                for (int t = 0; t < C::kTiles; ++t) {
                    const uint32_t* const q = scaled[b % SCALED].at[t] + 2 * k;
                    mma(c[2 * b + u][t], a.x, a.y, a.z, a.w, q[0], q[1]);
                }
            }
        }
    }
}

// Token (of the block's 32) in row (lane / 4) + 8 * upper of the score tile of `unit`.
__device__ __forceinline__ int token_of_row(int unit, int row, int upper) {
    return 8 * (row / 2) + 4 * upper + 2 * unit + row % 2;
}

// Adds p * value of one block. p is rounded to fp16 once; the denominator sums the rounded numbers. `mins` points to
// the lane's mins (rows 0..3, or all rows with eight groups) or ones.
template <class C>
__device__ __forceinline__ void value_products(HeadState<C>& s, const uint8_t* block, const uint8_t* mins, int lane,
                                               const float (&score0)[2][C::kThreadRows],
                                               const float (&score1)[2][C::kThreadRows]) {
    constexpr int kGroups = C::kValueGroups, kVectors = C::kValueCodes / kVectorBytes;
    const uint8_t* const scales = block + C::kValueCodes + (lane & 3) * 16;
    const uint4 m = load16(mins);
    uint32_t p[2][C::kTiles][2];  // B operand: [unit][tile][half of the depth]
    probabilities<C>(score0, lane, p[0]);
    probabilities<C>(score1, lane, p[1]);
#pragma unroll
    for (int t = 0; t < C::kTiles; ++t) {
        if constexpr (kGroups > 4) {
            constexpr uint32_t kOnes = 0x3C003C00u;
            mma(s.even[t], m.x, kOnes, m.z, kOnes, p[0][t][0], p[0][t][1]);
            mma(s.odd[t], kOnes, m.y, kOnes, m.w, p[1][t][0], p[1][t][1]);
        } else {
            mma(s.even[t], m.x, m.y, m.z, m.w, p[0][t][0], p[0][t][1]);
            mma(s.odd[t], m.x, m.y, m.z, m.w, p[1][t][0], p[1][t][1]);
        }
    }
    const uint8_t* const codes = block + lane * 16;
    uint4 scale[kGroups], w[kVectors], x[kVectors];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) scale[g] = load16(scales + g * 64);
    // All tiles of one unit before those of the other: an accumulator rests in between.
#pragma unroll
    for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            uint32_t b[C::kTiles][2];
#pragma unroll
            for (int t = 0; t < C::kTiles; ++t) {
                b[t][0] = mul_half2(p[u][t][0], u ? scale[g].y : scale[g].x);
                b[t][1] = mul_half2(p[u][t][1], u ? scale[g].w : scale[g].z);
            }
#pragma unroll
            for (int j = g * (C::kSteps / kGroups); j < (g + 1) * (C::kSteps / kGroups); ++j) {
                const int number = u * C::kSteps + j;
                if (field_of(C::kValueBits, number) == 0) {
                    const int v = vector_of(C::kValueBits, number);
                    w[v] = load16(codes + v * kVectorBytes);
                    x[v] = shift_high<C::kValueBits>(w[v]);
                }
                const uint4 a = operand<C::kValueBits>(w, x, number);
#pragma unroll
                for (int t = 0; t < C::kTiles; ++t) mma(s.out[t][j], a.x, a.y, a.z, a.w, b[t][0], b[t][1]);
            }
        }
    }
}

// A visit that is not full: parameters past its end may be anything, NaN included. Makes them zero.
template <class C>
__device__ __noinline__ void clear_unused_parameters(uint8_t* slot, int valid, int lane) {
    for (int g = (valid + C::kKeyGroup - 1) / C::kKeyGroup; g < C::kVisitGroups; ++g) {
        for (int i = lane; i < C::kKeyParams / 16; i += 32) {
            reinterpret_cast<uint4*>(slot + g * C::kGroupBytes)[i] = make_uint4(0, 0, 0, 0);
        }
    }
    for (int b = valid / kBlockTokens; b < C::kVisitBlocks; ++b) {
        uint8_t* const params = slot + C::kKeyBytes + b * C::kValueBlock + C::kValueCodes;
        // kPublished: values fill a block one by one.
        if (C::kPublished && lane < valid - b * kBlockTokens) continue;
        for (int i = 0; i < 2 * C::kValueGroups; ++i) reinterpret_cast<uint16_t*>(params + i * 64)[lane] = 0;
    }
    hand_to_copies();
}

// What the key parameters and the queries give together, for one visit, or for all visits to a key group.
template <class C>
struct KeyContext {
    static constexpr bool kPerStep = C::kKeyGroup == kBlockTokens || C::kStepGroups;  // scaled queries are the step's
    static constexpr int kStepGroups = C::kStepGroups ? 1 : C::kStepBlocks;           // of so many groups
    float term[C::kThreadRows];                                                       // see key_min_terms
    ScaledQueries<C> scaled[1];
};

// One visit to a page. `follows`: its key group is that of the visit before.
template <class C>
__device__ __forceinline__ void visit_page(HeadState<C>& s, KeyContext<C>& key, SharedStorage<C>& shared,
                                           const DecodeArgs& p, uint8_t* slot, int info, bool follows, int warp,
                                           int lane) {
    constexpr int kRows = C::kThreadRows;
    const int row = lane >> 2, column = lane & 3;
    if (!info_plain(info)) {
        if (info_valid(info) < C::kVisitTokens) clear_unused_parameters<C>(slot, info_valid(info), lane);
        if (partly_seen(p, info)) set_params_apart<C>(s, p, slot, info, lane);
    }
    if (!(C::kSharedParams && follows)) {
        key_min_terms<C>(s, shared, slot, warp, lane, key.term);
        if (!KeyContext<C>::kPerStep) scale_queries<C>(shared, slot, 0, warp, lane, key.scaled[0]);
    }
    const uint8_t* const values = slot + C::kKeyBytes;
    const bool has_mins = C::kValueGroups > 4 || row < 4;
    const uint8_t* const mins =
        has_mins ? values + C::kValueCodes + (C::kValueGroups + row % C::kValueGroups) * 64 + column * 16
                 : reinterpret_cast<const uint8_t*>(shared.ones) + column * 16;
    const int mins_stride = has_mins ? C::kValueBlock : 0;
#pragma unroll 1
    for (int first = 0; first < C::kVisitBlocks; first += C::kStepBlocks) {
        float score[2 * C::kStepBlocks][2][kRows];
        {
            float c[2 * C::kStepBlocks][C::kTiles][4], bias[C::kStepBlocks][kRows];
#pragma unroll
            for (int b = 0; b < C::kStepBlocks; ++b) {
#pragma unroll
                for (int h = 0; h < kRows; ++h) {
                    bias[b][h] = C::kVisitGroups > 1
                                     ? __shfl_sync(kAll, key.term[h], (first + b) / C::kGroupBlocks * 4 + column)
                                     : key.term[h];
                    bias[b][h] -= s.reference[h];
                }
            }
            if constexpr (KeyContext<C>::kPerStep) {
                ScaledQueries<C> scaled[KeyContext<C>::kStepGroups];
#pragma unroll
                for (int g = 0; g < KeyContext<C>::kStepGroups; ++g) {
                    scale_queries<C>(shared, slot, first / C::kGroupBlocks + g, warp, lane, scaled[g]);
                }
                key_products<C, C::kStepBlocks>(slot, first, lane, scaled, c);
            } else {
                key_products<C, C::kStepBlocks>(slot, first, lane, key.scaled, c);
            }
#pragma unroll
            for (int u = 0; u < 2 * C::kStepBlocks; ++u) {
#pragma unroll
                for (int upper = 0; upper < 2; ++upper) {
#pragma unroll
                    for (int h = 0; h < kRows; ++h) {
                        const int t = h / C::kTileRows, e = 2 * upper + h % C::kTileRows;
                        score[u][upper][h] = fmaf(c[u][t][e], s.factor[h], bias[u / 2][h]);
                    }
                }
            }
        }
        if (!info_plain(info)) {
            if (p.cap > 0.0f) cap_scores<C>(s, score, p);
#pragma unroll
            for (int h = 0; h < kRows; ++h) {
                const Visible sees(p, info, query_row<C>(h, column));
#pragma unroll
                for (int u = 0; u < 2 * C::kStepBlocks; ++u) {
#pragma unroll
                    for (int upper = 0; upper < 2; ++upper) {
                        if (!sees(kBlockTokens * (first + u / 2) + token_of_row(u % 2, row, upper))) {
                            score[u][upper][h] = -INFINITY;
                        }
                    }
                }
            }
        }
        update_references<C>(s, score);
#pragma unroll
        for (int b = 0; b < C::kStepBlocks; ++b) {
            value_products<C>(s, values + (first + b) * C::kValueBlock, mins + (first + b) * mins_stride, lane,
                              score[2 * b], score[2 * b + 1]);
        }
    }
}

}  // namespace kivi::cuda::fast
