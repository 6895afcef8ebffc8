// Query-aware packing of keys: codes fed back through format/feedback.h, one token a lane and one channel after
// the other.
#if defined(KIVI_CPU_PACK_QUERY_AWARE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_PACK_QUERY_AWARE_INL_H_
#undef KIVI_CPU_PACK_QUERY_AWARE_INL_H_
#else
#define KIVI_CPU_PACK_QUERY_AWARE_INL_H_
#endif

#include <algorithm>

#include "cpu/pack_channel-inl.h"
#include "format/feedback.h"

#if HWY_TARGET != HWY_SCALAR  // see write_kernels.h: processors without vectors take the plain path
HWY_BEFORE_NAMESPACE();
namespace kivi::cpu::HWY_NAMESPACE {
namespace {

#if HWY_NATIVE_FMA

// A pass takes kVectors vectors of tokens together, and passes the errors of kChannels channels on together:
// as much as the registers hold.
constexpr int kShortPass = kLanes == 4 ? 4 : 2;  // vectors
constexpr int kLongPass = kLanes == 16 ? 4 : kShortPass;
constexpr int kMaxTurned = kMaxDim * kShortPass * kLanes;
template <int kVectors>
constexpr int kChannels = kLanes == 16 && kVectors == 2 ? 8 : 4;

// Rows of four tokens: block b of out[i] = those tokens of channel 4b + i.
HWY_INLINE void turn_four(const float* HWY_RESTRICT rows, int dim, VF* out) {
    const F32 d;
    const hn::Repartition<uint64_t, F32> d64;
    const VF a = hn::LoadU(d, rows), b = hn::LoadU(d, rows + dim);
    const VF e = hn::LoadU(d, rows + 2 * dim), f = hn::LoadU(d, rows + 3 * dim);
    const auto ab0 = hn::BitCast(d64, hn::InterleaveLower(d, a, b)),
               ab1 = hn::BitCast(d64, hn::InterleaveUpper(d, a, b));
    const auto ef0 = hn::BitCast(d64, hn::InterleaveLower(d, e, f)),
               ef1 = hn::BitCast(d64, hn::InterleaveUpper(d, e, f));
    out[0] = hn::BitCast(d, hn::InterleaveLower(d64, ab0, ef0));
    out[1] = hn::BitCast(d, hn::InterleaveUpper(d64, ab0, ef0));
    out[2] = hn::BitCast(d, hn::InterleaveLower(d64, ab1, ef1));
    out[3] = hn::BitCast(d, hn::InterleaveUpper(d64, ab1, ef1));
}

// Block j of out[i] = block i of in[j], for as many vectors as a vector has blocks.
HWY_INLINE void turn_blocks(const VF* in, VF* out) {
#if HWY_TARGET <= HWY_AVX2
    const F32 d;
    if constexpr (kLanes == 8) {
        out[0] = hn::ConcatLowerLower(d, in[1], in[0]);
        out[1] = hn::ConcatUpperUpper(d, in[1], in[0]);
        return;
    }
    if constexpr (kLanes == 16) {
        const VF even0 = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(in[1]), in[0]);
        const VF even2 = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(in[3]), in[2]);
        const VF odd0 = hn::OddEvenBlocks(in[1], hn::SwapAdjacentBlocks(in[0]));
        const VF odd2 = hn::OddEvenBlocks(in[3], hn::SwapAdjacentBlocks(in[2]));
        out[0] = hn::ConcatLowerLower(d, even2, even0);
        out[1] = hn::ConcatLowerLower(d, odd2, odd0);
        out[2] = hn::ConcatUpperUpper(d, even2, even0);
        out[3] = hn::ConcatUpperUpper(d, odd2, odd0);
        return;
    }
#endif
    out[0] = in[0];
}

// turned[channel][token] = rows[token][channel].
template <int kTokens>
void turn(const float* HWY_RESTRICT rows, int dim, float* HWY_RESTRICT turned) {
    constexpr int kBlocks = kLanes / 4;
    const F32 d;
    for (int t = 0; t < kTokens; t += kLanes) {
        for (int c = 0; c < dim; c += kLanes) {
            VF four[kBlocks][4];  // [tokens t + 4j ..][i]: channels c + 4b + i
            HWY_UNROLL(4)
            for (int j = 0; j < kBlocks; ++j)
                turn_four(rows + static_cast<int64_t>(t + 4 * j) * dim + c, dim, four[j]);
            HWY_UNROLL(4)
            for (int i = 0; i < 4; ++i) {
                VF in[kBlocks], out[kBlocks];
                for (int j = 0; j < kBlocks; ++j) in[j] = four[j][i];
                turn_blocks(in, out);
                for (int b = 0; b < kBlocks; ++b)
                    hn::Store(out[b], d, turned + static_cast<int64_t>(c + 4 * b + i) * kTokens + t);
            }
        }
    }
}

// The recursion of format/feedback.cpp for one pass. `y` [channel][tokens of the pass] is replaced by codes.
// Errors of a few channels in coding order are passed on together; each later channel still gets one
// fused multiply-add for each of them, in that order. params[v]: of the group that vector v belongs to.
template <int kVectors>
void encode_turned(const Feedback& feedback, int bits, const ChannelParams* const* params,
                   float* HWY_RESTRICT y, RowsAhead& ahead) {
    const F32 d;
    constexpr int kTogether = kChannels<kVectors>;
    constexpr int kTokens = kVectors * kLanes;
    const int dim = feedback.dim;
    const uint16_t* order = feedback.order.data();
    const VF levels = levels_of(bits);
    const VF no_steps = hn::Set(d, kZeroSteps), all_steps = hn::Add(no_steps, levels);
    bool quick = bits <= 4;
    for (int v = 0; v < kVectors; ++v) quick = quick && params[v]->inverses;
    for (int j0 = 0; j0 < dim; j0 += kTogether) {
        ahead.fetch(kTokens * kTogether / kTile * kLinesATile / kTile);
        VF error[kTogether][kVectors];
        const float*
            weight[kTogether];  // weight[k][c]: from channel j0 + k to channel c, both in coding order
        HWY_UNROLL(8)
        for (int k = 0; k < kTogether; ++k) {
            const int j = j0 + k, channel = order[j];
            float* at = y + static_cast<int64_t>(channel) * kTokens;
            weight[k] = feedback.weights.data() + feedback_row(dim, j) - (j + 1);
            VF x[kVectors], value[kVectors];
            VU codes[kVectors];
            VU16 fractions = all_fractions();
            HWY_UNROLL(4)
            for (int v = 0; v < kVectors; ++v) {
                x[v] = hn::Load(d, at + v * kLanes);
                HWY_UNROLL(8)
                for (int i = 0; i < k; ++i) x[v] = hn::NegMulAdd(error[i][v], hn::Set(d, weight[i][j]), x[v]);
                const VU steps = quick_codes(x[v], hn::Set(d, params[v]->inverse[channel]),
                                             hn::Set(d, params[v]->min[channel]));
                // Fed errors lead out of the group's range. NaN becomes no steps, or stays one and is a near tie.
                const VF inside = hn::Min(hn::Max(hn::BitCast(d, steps), no_steps), all_steps);
                codes[v] = hn::BitCast(U32(), inside);
                collect_fractions(codes[v], fractions);
                const VU whole = hn::And(codes[v], hn::Set(U32(), ~0u << kFractionBits));
                value[v] = hn::Sub(hn::BitCast(d, whole), hn::Set(d, 128.0f));
            }
            if (HWY_UNLIKELY(!quick || !no_near_tie(fractions))) {
                for (int v = 0; v < kVectors; ++v) {
                    const VF scale = hn::Set(d, params[v]->scale[channel]),
                             min = hn::Set(d, params[v]->min[channel]);
                    codes[v] = exact_codes(x[v], scale, min, levels);
                    value[v] = hn::ConvertTo(d, hn::BitCast(I32(), hn::ShiftRight<kFractionBits>(codes[v])));
                }
            }
            HWY_UNROLL(4)
            for (int v = 0; v < kVectors; ++v) {
                const VF scale = hn::Set(d, params[v]->scale[channel]),
                         min = hn::Set(d, params[v]->min[channel]);
                error[k][v] = hn::Sub(x[v], hn::MulAdd(value[v], scale, min));
                hn::Store(hn::BitCast(d, codes[v]), d, at + v * kLanes);
            }
        }
        for (int c = j0 + kTogether; c < dim; ++c) {
            float* at = y + static_cast<int64_t>(order[c]) * kTokens;
            VF x[kVectors];
            HWY_UNROLL(4)
            for (int v = 0; v < kVectors; ++v) x[v] = hn::Load(d, at + v * kLanes);
            HWY_UNROLL(8)
            for (int k = 0; k < kTogether; ++k) {
                const VF w = hn::Set(d, weight[k][c]);
                HWY_UNROLL(4)
                for (int v = 0; v < kVectors; ++v) x[v] = hn::NegMulAdd(error[k][v], w, x[v]);
            }
            HWY_UNROLL(4)
            for (int v = 0; v < kVectors; ++v) hn::Store(x[v], d, at + v * kLanes);
        }
    }
}

// Codes [channel][tokens], of which one unit is put.
template <int kBits>
void put_turned_tiles(int dim, const uint32_t* HWY_RESTRICT codes, int tokens, int unit, uint8_t* part) {
    const U32 d;
    const TileLines<kBits> lines(dim, unit, part);
    for (int tile = 0; tile < dim / kTile; ++tile) {
        for (int lane = 0; lane < kTile; lane += kLanes) {
            const uint32_t* at = codes + static_cast<int64_t>(tile) * kTile * tokens + lane;
            lines.put(tile, lane, build_lines<kBits>([&](int c) { return hn::Load(d, at + c * tokens); }));
        }
    }
}

void put_turned(const TensorStore& store, const uint32_t* HWY_RESTRICT codes, int tokens, int first,
                uint8_t* part) {
    const int dim = store.dim, unit = first / kTile;
    if (store.order.order == Order::lanes) {
        switch (store.spec.bits) {
            case 2: return put_turned_tiles<2>(dim, codes, tokens, unit, part);
            case 3: return put_turned_tiles<3>(dim, codes, tokens, unit, part);
            default: return put_turned_tiles<4>(dim, codes, tokens, unit, part);
        }
    }
    HWY_ALIGN uint8_t bytes[kTile * kMaxDim];
    for (int t = 0; t < kTile; ++t) {
        for (int c = 0; c < dim; ++c)
            bytes[t * dim + c] = static_cast<uint8_t>(codes[c * tokens + t] >> kFractionBits);
    }
    put_canonical(store, bytes, first, kTile, part);
}

// Tokens first .. of one pass; groups[i] are the parameters of its i-th group.
template <int kVectors>
void query_aware_pass(const TensorStore& store, const Feedback& feedback, const ChannelParams* groups,
                      const float* rows, int first, float* HWY_RESTRICT y, uint8_t* part, RowsAhead& ahead) {
    constexpr int kTokens = kVectors * kLanes;
    const ChannelParams* params[kVectors];
    for (int v = 0; v < kVectors; ++v) params[v] = groups + v * kLanes / store.spec.group;
    turn<kTokens>(rows, store.dim, y);
    encode_turned<kVectors>(feedback, store.spec.bits, params, y, ahead);
    for (int unit = 0; unit < kTokens; unit += kTile) {
        put_turned(store, reinterpret_cast<const uint32_t*>(y) + unit, kTokens, first + unit, part);
    }
}

void query_aware(const TensorStore& store, const Feedback& feedback, const float* rows, int first, int count,
                 uint8_t* part, RowsAhead& ahead) {
    constexpr int kLong = kLongPass * kLanes, kShort = kShortPass * kLanes;
    const int dim = store.dim, group = store.spec.group;
    ChannelParams groups[2];  // those of a pass
    HWY_ALIGN float y[kMaxTurned];
    for (int t = 0; t < count;) {
        const bool is_long = kLong * dim <= kMaxTurned && count - t >= kLong;
        const int tokens = is_long ? kLong : kShort;
        const float* x = rows + static_cast<int64_t>(t) * dim;
        for (int begin = 0; begin < tokens; begin += group) {
            if ((t + begin) % group != 0) continue;  // of the pass before
            ChannelParams& at = groups[begin / group];
            channel_params(store, x + static_cast<int64_t>(begin) * dim, first + t + begin, part, &at);
        }
        if (is_long) {
            query_aware_pass<kLongPass>(store, feedback, groups, x, first + t, y, part, ahead);
        } else {
            query_aware_pass<kShortPass>(store, feedback, groups, x, first + t, y, part, ahead);
        }
        t += tokens;
    }
}

#endif  // HWY_NATIVE_FMA

}  // namespace
}  // namespace kivi::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_SCALAR

#endif  // include guard of this instruction set
