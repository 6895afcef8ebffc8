// Queries, scores, softmax and weighted values of a warp's rows.
//
// Queries are the A operands, keys and values the B operands: a register pair of an operand of fragment_order.h
// serves eight tokens, or eight channels, whose order is that of the other product too:
//
//   thread            row = lane / 4 and row + 8 of each row tile; column = lane % 4
//   score tile        unit u, half h: its columns 2 column + 0, 1 are tokens 8 column + 4 h + 2 u + 0, 1 of a block
//   output tile       step j, half e: its columns 2 column + k are channels 32 (j / 2) + 8 column + 4 k + 2 (j % 2) + e
#pragma once
#include "cuda/attend_results.cuh"
#include "cuda/decode_instructions.cuh"
#include "cuda/prefill_partials.cuh"
#include "cuda/prefill_queries.cuh"
#include "cuda/prefill_tiles.cuh"

namespace kivi::cuda::prompt {

template <class C>
struct State {
    float out[C::kRowTiles][2 * C::kSteps][4];  // sum of p * values * 2^-kDown
    uint32_t unset;  // bit 2 tile + half: no visible token has been seen, so that the reference is not known
};

template <class C>
__device__ __forceinline__ void clear(State<C>& s, SharedStorage<C>& shared) {
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
        for (int n = 0; n < 2 * C::kSteps; ++n) {
            s.out[r][n][0] = s.out[r][n][1] = s.out[r][n][2] = s.out[r][n][3] = 0.0f;
        }
        for (int h = 0; h < 2; ++h) shared.softmax[threadIdx.x][r][h] = {0.0f, 0.0f};
    }
    s.unset = (1u << (2 * C::kRowTiles)) - 1;
}

// ---- Queries ----

// By the whole block: its rows of q as operands.
template <class C>
__device__ __forceinline__ void load_queries(const AttendArgs& args, SharedStorage<C>& shared, int head,
                                             bool rotated) {
    const RowArg row = shared.row;
    const int lane = fresh_lane();
#pragma unroll 1
    for (int tile = fresh_warp(); tile < C::kRows / 16; tile += C::kWarps) {
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            const int r = 16 * tile + 8 * half + lane / 4;
            const QueryRow<C> query(args, row, head, shared.visible.first_row + r,
                                    row.count * ratio(args.layer), rotated, lane);
            if (lane % 4 == 0) shared.unit[r] = query.unit;
            Operand* const to = shared.queries[tile / C::kRowTiles][tile % C::kRowTiles];
#pragma unroll
            for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {  // step 2 i + k % 2, half k / 2 of the depth
                    to[2 * i + k % 2][lane][half + k / 2 * 2] = query.pair[i][k];
                }
            }
        }
    }
}

// An fp16 operand as the sum of two bf16 operands, exact.
struct Split {
    uint4 high, low;
    __device__ explicit Split(uint4 a) {
        const auto split = [](uint32_t x, uint32_t& h, uint32_t& l) {
            const float2 whole = fast::from_pair(x);
            h = fast::to_pair<true>(whole.x, whole.y);
            const float2 rounded = fast::from_pair<true>(h);
            l = fast::to_pair<true>(whole.x - rounded.x, whole.y - rounded.y);
        };
        split(a.x, high.x, low.x);
        split(a.y, high.y, low.y);
        split(a.z, high.z, low.z);
        split(a.w, high.w, low.w);
    }
};

__device__ __forceinline__ uint4 load16(const uint32_t (&from)[4]) { return *reinterpret_cast<const uint4*>(from); }

template <bool BF16>
__device__ __forceinline__ void mma(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
    fast::mma<BF16>(c, a.x, a.y, a.z, a.w, b0, b1);
}

// ---- Softmax ----

// Makes sure that no score exceeds the reference exponents, that is, that all relative scores are <= 0; if not, moves
// the references and rescales what has been summed.
template <class C>
__device__ __forceinline__ void update_references(State<C>& s, SharedStorage<C>& shared,
                                                  float (&score)[C::kRowTiles][2 * C::kUnits][4]) {
    uint32_t negative = s.unset ? 0u : fast::kAll;
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
        for (int n = 0; n < 2 * C::kUnits; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) negative &= __float_as_uint(score[r][n][e]);
        }
    }
    if (!rarely(__any_sync(fast::kAll, static_cast<int>(negative) >= 0))) return;
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float largest = -infinity();
#pragma unroll
            for (int n = 0; n < 2 * C::kUnits; ++n) {
                largest = fmaxf(largest, fmaxf(score[r][n][2 * h], score[r][n][2 * h + 1]));
            }
            largest = fmaxf(largest, __shfl_xor_sync(fast::kAll, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(fast::kAll, largest, 2));
            const uint32_t bit = 1u << (2 * r + h);
            // A row that has seen no visible token keeps its reference of 0 and p of 0, and stays unset.
            const bool moves = (s.unset & bit) != 0 ? largest > -infinity() : largest > 0.0f;
            const float up = moves ? largest + kHeadroom : 0.0f;
            if (largest > -infinity()) s.unset &= ~bit;
            Softmax& softmax = shared.softmax[threadIdx.x][r][h];
            softmax.reference += up;
            const float down = fast::exp2_fast(fminf(-up, 0.0f));  // (if it was unset, all sums are 0)
            softmax.sum *= down;
#pragma unroll
            for (int n = 0; n < 2 * C::kUnits; ++n) score[r][n][2 * h] -= up, score[r][n][2 * h + 1] -= up;
#pragma unroll
            for (int n = 0; n < 2 * C::kSteps; ++n) s.out[r][n][2 * h] *= down, s.out[r][n][2 * h + 1] *= down;
        }
    }
}

// ---- One piece ----

// Token of the piece in column 2 * column of half `half` of a unit's score tile; the next token is in the next one.
__device__ __forceinline__ int token_of_column(int unit, int half, int column) {
    return unit / 2 * kBlockTokens + 8 * column + 4 * half + 2 * (unit % 2);
}

// BF16: the operands of keys, and of values, are bf16.
template <class C, bool BF16_KEYS, bool BF16_VALUES>
__device__ __forceinline__ void multiply(State<C>& s, SharedStorage<C>& shared, const Piece& piece,
                                         const AttendArgs& args) {
    constexpr int kTiles = 2 * C::kUnits;
    const int lane = fresh_lane(), warp = fresh_warp();
    const int row_warp = warp % C::kRowWarps, first_unit = warp / C::kRowWarps * C::kUnits;
    const int row = lane >> 2, column = lane & 3;
    const bool keys_packed = packed_keys<C>(piece), packed = piece.kind == Kind::page;

    // Products with the codes, and with the key mins. The latter have a column for each block, even columns the first,
    // odd ones the second; a warp with tokens of one block only has it in all of them.
    float score[C::kRowTiles][kTiles][4], term[C::kRowTiles][4];
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
        term[r][0] = term[r][1] = term[r][2] = term[r][3] = 0.0f;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) score[r][n][0] = score[r][n][1] = score[r][n][2] = score[r][n][3] = 0.0f;
    }
    const int mins_of = C::kUnits == C::kPieceUnits ? row % 2 : first_unit / 2;
    const uint8_t* const mins = reinterpret_cast<const uint8_t*>(shared.mins[mins_of]) + column * 16;
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
        const uint4 m = fast::load16(mins + i * 64);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            uint4 q[C::kRowTiles];
#pragma unroll
            for (int r = 0; r < C::kRowTiles; ++r) {
                q[r] = load16(shared.queries[row_warp][r][2 * i + k][lane]);
                mma<false>(term[r], q[r], k ? m.z : m.x, k ? m.w : m.y);
            }
#pragma unroll
            for (int u = 0; u < C::kUnits; ++u) {
                const uint4 b = load16(shared.keys[first_unit + u][2 * i + k][lane]);
#pragma unroll
                for (int r = 0; r < C::kRowTiles; ++r) {
                    if constexpr (BF16_KEYS) {
                        const Split split(q[r]);
                        mma<true>(score[r][2 * u], split.low, b.x, b.y);
                        mma<true>(score[r][2 * u + 1], split.low, b.z, b.w);
                        mma<true>(score[r][2 * u], split.high, b.x, b.y);
                        mma<true>(score[r][2 * u + 1], split.high, b.z, b.w);
                    } else {
                        mma<false>(score[r][2 * u], q[r], b.x, b.y);
                        mma<false>(score[r][2 * u + 1], q[r], b.z, b.w);
                    }
                }
            }
        }
    }

    // Scores in exponents of 2, relative to the references. Values of windows are not times 2^-kDown: their p are.
    const float shift = packed ? 0.0f : static_cast<float>(C::kDown);
    if (rarely(!keys_packed)) {
        // A non-finite key must not hide behind exp(-inf) or the soft cap: [ATTEND-4].
#pragma unroll
        for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) score[r][n][e] = fmaf(score[r][n][e], 0.0f, score[r][n][e]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float plain = args.scale * kLog2E * shared.unit[row_warp * C::kWarpRows + 16 * r + 8 * h + row];
            const float f = keys_packed ? plain * (1 << C::kDown) : plain;
            const float reference = shared.softmax[threadIdx.x][r][h].reference + shift;
            if (rarely(args.soft_cap > 0.0f)) {
                // cap * tanh(x / cap) = cap - 2 cap / (1 + e^(2 x / cap))
                const float cap = args.soft_cap * kLog2E, slope = __fdividef(2.0f, args.soft_cap);
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& x = score[r][n][2 * h + e];
                        const float power = fast::exp2_fast(
                            fmaf(x, f, term[r][2 * h + (n >= kTiles / 2 ? 1 : 0)] * plain) * slope);
                        x = cap - reference - __fdividef(2.0f * cap, 1.0f + power);
                    }
                }
            } else {
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                    const float bias = fmaf(term[r][2 * h + (n >= kTiles / 2 ? 1 : 0)], plain, -reference);
#pragma unroll
                    for (int e = 0; e < 2; ++e) score[r][n][2 * h + e] = fmaf(score[r][n][2 * h + e], f, bias);
                }
            }
        }
    }
    if (rarely(!seen_by_all(shared, piece))) {
#pragma unroll
        for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const Visible::Range range = seen_by(shared, piece, row_warp * C::kWarpRows + 16 * r + 8 * h + row);
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                    const int token = token_of_column(first_unit + n / 2, n % 2, column);
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        if (!range.holds(token + e)) score[r][n][2 * h + e] = -infinity();
                    }
                }
            }
        }
    }
    update_references(s, shared, score);

    // p, and its sum: of the rounded p, where they are coarse. p of windows is times 2^-kDown.
    uint32_t p[C::kRowTiles][kTiles][2];
    const float up = packed ? 1.0f : static_cast<float>(1 << C::kDown);
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = 0;
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                float2 both = make_float2(fast::exp2_fast(score[r][n][2 * h]), fast::exp2_fast(score[r][n][2 * h + 1]));
                p[r][n][h] = fast::to_pair<BF16_VALUES>(both.x, both.y);
                if constexpr (BF16_VALUES) both = fast::from_pair<true>(p[r][n][h]);
                sum += both.x + both.y;
            }
            float& whole = shared.softmax[threadIdx.x][r][h].sum;
            whole = fmaf(sum, up, whole);
        }
    }
#pragma unroll
    for (int u = 0; u < C::kUnits; ++u) {
#pragma unroll
        for (int j = 0; j < C::kSteps; ++j) {
            const uint4 b = load16(shared.values[first_unit + u][j][lane]);
#pragma unroll
            for (int r = 0; r < C::kRowTiles; ++r) {
                const uint4 a = make_uint4(p[r][2 * u][0], p[r][2 * u][1], p[r][2 * u + 1][0], p[r][2 * u + 1][1]);
                mma<BF16_VALUES>(s.out[r][2 * j], a, b.x, b.y);
                mma<BF16_VALUES>(s.out[r][2 * j + 1], a, b.z, b.w);
            }
        }
    }
}

// ---- Results ----

// visit(index of a row among the warp's, its channels 32 i + 8 column + 0..7) for the thread's rows.
template <class C, class Visit>
__device__ __forceinline__ void for_rows(State<C>& s, const Visit& visit) {
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float x[C::kPairs][8];
#pragma unroll
            for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
                for (int k = 0; k < 8; ++k) x[i][k] = s.out[r][2 * (2 * i + k % 4 / 2) + k % 2][2 * h + k / 4];
            }
            visit(r, h, x);
        }
    }
}

// What prefill_pages.cuh has left of the warp's rows, as if it had been summed here.
template <class C>
__device__ __forceinline__ void take_results(State<C>& s, SharedStorage<C>& shared, const Args& p, int head) {
    const int lane = fresh_lane(), tile = shared.visible.first_row / C::kRows - p.first_tile;
    constexpr float kDown = 1.0f / (1 << C::kDown);
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = fresh_warp() % C::kRowWarps * C::kWarpRows + 16 * r + 8 * h + lane / 4;
            Sum sum = no_sum();
#pragma unroll 1
            for (int part = 0; part < p.page_parts; ++part) {
                const PartialsOf<C> from(p, p.page_workspace, p.page_parts, blockIdx.z, head, tile, part);
                const Sum own = from.sums[row];
                if (empty(own)) continue;
                const Joint joint = join(sum, own);
                sum = joint.sum;
#pragma unroll
                for (int i = 0; i < C::kPairs; ++i) {
                    const float4* const at =
                        reinterpret_cast<const float4*>(from.rows + int64_t{row} * C::kDim + 32 * i + lane % 4 * 8);
                    const float4 low = at[0], high = at[1];
                    const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                    for (int k = 0; k < 8; ++k) {
                        float& to = s.out[r][2 * (2 * i + k % 4 / 2) + k % 2][2 * h + k / 4];
                        to = add(joint.of_first, joint.of_second, to, x[k] * kDown);
                    }
                }
            }
            if (empty(sum)) continue;
            s.unset &= ~(1u << (2 * r + h));
            shared.softmax[threadIdx.x][r][h] = {sum.max, lane % 4 == 0 ? sum.sum : 0.0f};
        }
    }
}

// What has been summed of rotated values, in the basis of the caller.
template <class C>
__device__ __forceinline__ void rotate_back(State<C>& s) {
    const int lane = fresh_lane();
    for_rows(s, [&](int r, int h, float (&x)[C::kPairs][8]) {
        rotate_row<C>(x, lane);
#pragma unroll
        for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
            for (int k = 0; k < 8; ++k) s.out[r][2 * (2 * i + k % 4 / 2) + k % 2][2 * h + k / 4] = x[i][k];
        }
    });
}

template <class C>
__device__ __forceinline__ void deposit(State<C>& s, const SharedStorage<C>& shared, Results<C>& results) {
    const int lane = fresh_lane(), warp = fresh_warp();
    const int token_warp = warp / C::kRowWarps, first = warp % C::kRowWarps * C::kWarpRows + lane / 4;
    for_rows(s, [&](int r, int h, float (&x)[C::kPairs][8]) {
        const int row = first + 16 * r + 8 * h;
        const Softmax softmax = shared.softmax[threadIdx.x][r][h];
        float sum = softmax.sum;
        sum += __shfl_xor_sync(fast::kAll, sum, 1);
        sum += __shfl_xor_sync(fast::kAll, sum, 2);
        const bool none = (s.unset >> (2 * r + h) & 1) != 0 && sum == 0.0f;
        if (lane % 4 == 0) {
            results.sums[token_warp][row] = make_float2(none ? -infinity() : softmax.reference, sum);
        }
        constexpr float kUp = 1 << C::kDown;
#pragma unroll
        for (int i = 0; i < C::kPairs; ++i) {
            float4* const to = reinterpret_cast<float4*>(&results.rows[token_warp][row][32 * i + lane % 4 * 8]);
            to[0] = make_float4(x[i][0] * kUp, x[i][1] * kUp, x[i][2] * kUp, x[i][3] * kUp);
            to[1] = make_float4(x[i][4] * kUp, x[i][5] * kUp, x[i][6] * kUp, x[i][7] * kUp);
        }
    });
}

}  // namespace kivi::cuda::prompt
