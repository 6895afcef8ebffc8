// Scores from packed keys and sums of packed values, straight from the codes (lanes order, page_order.cpp).
//
//   key    k_tc = code * scale_c + min_c        s_t = sum_c (q_c scale_c) code_tc + sum_c q_c min_c
//   value  v_tc = code * scale_t + min_t        o_c = sum_t (p_t scale_t) code_tc + sum_t p_t min_t
//
// The folded factor in brackets is rounded to 16 bits, one step for a query row (and value group) in a page, and
// codes are operands of 16-bit dot products as they come out of their lane, two for each 32-bit lane. The error
// is that of a 15-bit number relative to the largest one of the page, far below the error of the codes. Where
// that is not enough (an outlier channel that dwarfs the rest), keys take the exact way: fp32, same loads.
#if defined(KIVI_CPU_KERNELS_PACKED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_KERNELS_PACKED_INL_H_
#undef KIVI_CPU_KERNELS_PACKED_INL_H_
#else
#define KIVI_CPU_KERNELS_PACKED_INL_H_
#endif

#include <algorithm>
#include <cmath>

#include "cpu/kernels_common-inl.h"

#if HWY_TARGET != HWY_SCALAR  // see kernels.h: processors without vectors take the plain path
HWY_BEFORE_NAMESPACE();
namespace kivi::cpu::HWY_NAMESPACE {

constexpr int kTile = 16;         // tokens and channels of a tile
constexpr int kLineBytes = 64;
constexpr int kPairs = kTile / 2;  // inner elements of a tile, two at a time
constexpr int kRowsAtOnce = 4;    // query rows whose sums stay in registers
constexpr int kMaxGroups = kPageTokens / kPackedStep;
constexpr float kTop = 32767.0f;

// acc + a_0 b_0 + a_1 b_1 for the two halves of each 32-bit lane.
template <bool kVnni>
HWY_INLINE V32 Dot(V32 acc, V16 a, V16 b) {
#if HWY_TARGET == HWY_AVX3
    if constexpr (kVnni) {
        asm("vpdpwssd %2, %1, %0" : "+v"(acc.raw) : "v"(a.raw), "v"(b.raw));
        return acc;
    }
#endif
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4
    V32 unused = hn::Zero(D32());
    return hn::ReorderWidenMulAccumulate(D32(), a, b, acc, unused);
#elif HWY_TARGET == HWY_NEON
    const int32x4_t lower = vmull_s16(vget_low_s16(a.raw), vget_low_s16(b.raw));
    const int32x4_t upper = vmull_s16(vget_high_s16(a.raw), vget_high_s16(b.raw));
    return hn::Add(acc, V32(vpaddq_s32(lower, upper)));
#else
    const D32 d;
    const V32 x = hn::BitCast(d, a), y = hn::BitCast(d, b);
    const V32 even = hn::Mul(hn::ShiftRight<16>(hn::ShiftLeft<16>(x)), hn::ShiftRight<16>(hn::ShiftLeft<16>(y)));
    return hn::Add(acc, hn::Add(even, hn::Mul(hn::ShiftRight<16>(x), hn::ShiftRight<16>(y))));
#endif
}

// Where the pair of inner elements 16 i + 2t, 16 i + 2t + 1 stands in an operand row. ReorderDemote2To joins two
// vectors of N elements; on x86 it alternates between them in steps of two pairs.
HWY_INLINE constexpr int PairBase(int i) { return N == 16 ? i / 2 * 16 + i % 2 * 2 : i * kPairs; }
HWY_INLINE constexpr int PairAt(int t) {
    if (N == 16) return t / 2 * 4 + t % 2;
    if (N == 8) return t < 4 ? t / 2 * 4 + t % 2 : 2 + (t - 4) / 2 * 4 + t % 2;
    return t;
}

// The codes of N lanes of one tile, handed out pair by pair: t = 0 .. 7 in this order.
template <int kBits>
struct Codes {
    V16 a, b;

    // `tile` counts lines of two-bit codes; `third` is the line of third bits of these lanes.
    static HWY_INLINE Codes Load(const uint8_t* HWY_RESTRICT part, int64_t tile, int lane_bytes,
                                 const uint8_t* HWY_RESTRICT third, bool odd_unit) {
        const D16 d;
        const auto line = [&](const uint8_t* from) HWY_ATTR {
            return hn::LoadU(d, reinterpret_cast<const int16_t*>(from));
        };
        if constexpr (kBits == 4) {
            const uint8_t* from = part + tile * 2 * kLineBytes + lane_bytes;
            return {line(from), line(from + kLineBytes)};
        } else {
            const V16 low = line(part + tile * kLineBytes + lane_bytes);
            if constexpr (kBits == 2) return {low, low};
            // Third bits into bit 2 of each nibble: even t as they stand, odd t one bit higher.
            V16 high = line(third + lane_bytes);
            if (odd_unit) high = hn::ShiftLeft<2>(high);
            const V16 bit = hn::Set(d, 0x4444);
            return {hn::Or(hn::And(high, bit), hn::AndNot(bit, low)),
                    hn::Or(hn::And(hn::ShiftRight<1>(high), bit), hn::AndNot(bit, hn::ShiftRight<2>(low)))};
        }
    }

    HWY_INLINE V16 Next(int t) {
        const D16 d;
        if constexpr (kBits == 2) {
            const V16 pair = hn::And(a, hn::Set(d, 3));
            a = hn::ShiftRight<2>(a);
            return pair;
        } else {
            V16& from = t % 2 == 0 ? a : b;
            const V16 pair = hn::And(from, hn::Set(d, kBits == 3 ? 7 : 15));
            from = hn::ShiftRight<4>(from);
            return pair;
        }
    }
};

// Addresses of the codes of a part.
template <int kBits>
struct CodeLines {
    const uint8_t* part;
    int64_t tiles_a_unit;
    const uint8_t* third;

    explicit CodeLines(const PackedPart& p)
        : part(p.data), tiles_a_unit(p.dim / kTile), third(p.data + kPageTokens / kTile * tiles_a_unit * kLineBytes) {}

    HWY_INLINE Codes<kBits> operator()(int unit, int64_t block, int lane) const {
        return Codes<kBits>::Load(part, unit * tiles_a_unit + block, lane * 4,
                                  third + (unit / 2 * tiles_a_unit + block) * kLineBytes, unit % 2 != 0);
    }
};

HWY_INLINE V16 Broadcast(const int32_t* HWY_RESTRICT pair) { return hn::BitCast(D16(), hn::Set(D32(), *pair)); }

HWY_INLINE void StorePairs(VF x, VF y, int32_t* HWY_RESTRICT to) {
    hn::StoreU(hn::BitCast(D32(), hn::ReorderDemote2To(D16(), ToInt(x), ToInt(y))), D32(), to);
}

HWY_INLINE int OperandStride(int elements) { return (elements + 31) / 32 * 16; }

// ---- keys ----

// Key scales of the groups first .. last folded into q.
struct FoldedKeys {
    float step[kBlockRows];
    float bias[kMaxGroups][kBlockRows];  // q . min
    bool exact[kBlockRows];              // 16 bits are not enough for this row
};

HWY_INLINE const uint8_t* KeyParams(const PackedPart& keys, int64_t at, int group, int channel) {
    return keys.data + at + (static_cast<int64_t>(group) * keys.dim + channel) * 2;
}

// Largest |q * scale| of each row, and what follows from it.
HWY_INLINE void ChooseSteps(const PackedPart& keys, int bits, int first, int last, const float* HWY_RESTRICT q,
                            int q_stride, int rows, FoldedKeys& folded) {
    const DF d;
    VF top[kBlockRows];
    for (int r = 0; r < rows; ++r) top[r] = hn::Zero(d);
    for (int c = 0; c < keys.dim; c += N) {
        VF scale = LoadHalfs(KeyParams(keys, keys.scales, first, c));
        for (int g = first + 1; g <= last; ++g) {
            scale = hn::Max(scale, LoadHalfs(KeyParams(keys, keys.scales, g, c)));
        }
        for (int r = 0; r < rows; ++r) {
            top[r] = hn::Max(hn::Abs(hn::Mul(hn::LoadU(d, q + r * q_stride + c), scale)), top[r]);
        }
    }
    // Rounding errors of a score: step / sqrt(12) for each channel, times the code, adding up like noise.
    const float noise = 0.29f * ((1 << bits) - 1) * std::sqrt(static_cast<float>(keys.dim));
    constexpr float kMaxNoise = 1.0f / 512;  // in log2 units
    for (int r = 0; r < rows; ++r) {
        folded.step[r] = MaxLanes(top[r]) / kTop;
        folded.exact[r] = !(folded.step[r] * noise <= kMaxNoise);
    }
}

HWY_INLINE void FoldKeys(const PackedPart& keys, int bits, int first, int last, const float* HWY_RESTRICT q,
                         int q_stride, int rows, const PackedScratch& scratch, FoldedKeys& folded, Ahead& ahead) {
    const DF d;
    ChooseSteps(keys, bits, first, last, q, q_stride, rows, folded);
    const int stride = OperandStride(keys.dim);
    VF sums[kBlockRows][kMaxGroups];
    VF inverse[kBlockRows];
    for (int r = 0; r < rows; ++r) {
        for (VF& x : sums[r]) x = hn::Zero(d);
        inverse[r] = hn::Set(d, folded.step[r] > 0 ? 1.0f / folded.step[r] : 0.0f);
    }
    const int lines = (last - first + 1) * N * 2 * 2 * 2 / kLineBytes;
    for (int c = 0; c < keys.dim; c += 2 * N) {
        const bool both = c + N < keys.dim;  // else the upper vector repeats the lower one and is not used
        const int c1 = both ? c + N : c;
        ahead.step(lines);
        for (int g = first; g <= last; ++g) {
            const VF scale0 = LoadHalfs(KeyParams(keys, keys.scales, g, c));
            const VF scale1 = LoadHalfs(KeyParams(keys, keys.scales, g, c1));
            const VF min0 = LoadHalfs(KeyParams(keys, keys.mins, g, c));
            const VF min1 = both ? LoadHalfs(KeyParams(keys, keys.mins, g, c1)) : hn::Zero(d);
            for (int r = 0; r < rows; ++r) {
                const VF q0 = hn::LoadU(d, q + r * q_stride + c), q1 = hn::LoadU(d, q + r * q_stride + c1);
                sums[r][g - first] = hn::MulAdd(q1, min1, hn::MulAdd(q0, min0, sums[r][g - first]));
                StorePairs(hn::Mul(hn::Mul(q0, inverse[r]), scale0), hn::Mul(hn::Mul(q1, inverse[r]), scale1),
                           scratch.operand + (g * rows + r) * stride + c / 2);
            }
        }
    }
    for (int r = 0; r < rows; ++r) {
        float bias[4];
        Sum4(sums[r][0], sums[r][1], sums[r][2], sums[r][3], bias);
        for (int g = first; g <= last; ++g) folded.bias[g][r] = bias[g - first];
    }
}

// V vectors of tokens from `token` on, R query rows.
template <int kBits, bool kVnni, int V, int R>
HWY_INLINE void ScoreCodes(const CodeLines<kBits>& lines, int token, const int32_t* HWY_RESTRICT operand, int stride,
                           const float* HWY_RESTRICT step, const float* HWY_RESTRICT bias, float* HWY_RESTRICT s) {
    V32 acc[V][R];
    for (auto& of_vector : acc) {
        for (V32& a : of_vector) a = hn::Zero(D32());
    }
    for (int block = 0; block < lines.tiles_a_unit; ++block) {
        Codes<kBits> codes[V];
        for (int v = 0; v < V; ++v) codes[v] = lines((token + v * N) / kTile, block, (token + v * N) % kTile);
        const int32_t* pairs = operand + PairBase(block);
        HWY_UNROLL(8) for (int t = 0; t < kPairs; ++t) {
            V16 pair[V];
            HWY_UNROLL(2) for (int v = 0; v < V; ++v) pair[v] = codes[v].Next(t);
            HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
                const V16 factor = Broadcast(pairs + r * stride + PairAt(t));
                HWY_UNROLL(2) for (int v = 0; v < V; ++v) acc[v][r] = Dot<kVnni>(acc[v][r], pair[v], factor);
            }
        }
    }
    const DF d;
    for (int r = 0; r < R; ++r) {
        const VF vstep = hn::Set(d, step[r]), vbias = hn::Set(d, bias[r]);
        for (int v = 0; v < V; ++v) {
            hn::StoreU(hn::MulAdd(hn::ConvertTo(d, acc[v][r]), vstep, vbias), d, s + r * kPageTokens + token + v * N);
        }
    }
}

// N tokens and one query row in fp32. factors: q * scale of the tokens' group.
template <int kBits>
HWY_INLINE void ScoreExactly(const CodeLines<kBits>& lines, int token, const float* HWY_RESTRICT factors, float bias,
                             float* HWY_RESTRICT s) {
    const DF d;
    VF acc0 = hn::Set(d, bias), acc1 = hn::Zero(d);
    for (int block = 0; block < lines.tiles_a_unit; ++block) {
        Codes<kBits> codes = lines(token / kTile, block, token % kTile);
        HWY_UNROLL(8) for (int t = 0; t < kPairs; ++t) {
            const V32 pair = hn::BitCast(D32(), codes.Next(t));
            const float* f = factors + block * kTile + 2 * t;
            acc0 = hn::MulAdd(hn::ConvertTo(d, hn::And(pair, hn::Set(D32(), 15))), hn::Set(d, f[0]), acc0);
            acc1 = hn::MulAdd(hn::ConvertTo(d, hn::ShiftRight<16>(pair)), hn::Set(d, f[1]), acc1);
        }
    }
    hn::StoreU(hn::Add(acc0, acc1), d, s + token);
}

template <int kBits, bool kVnni>
void ScorePacked(const PackedPart& keys, int begin, int end, const float* q, int q_stride, int rows, float* s,
                 const PackedScratch& scratch, Ahead& ahead) {
    constexpr int kVectors = 2;
    const int first = begin / keys.group, last = (end - 1) / keys.group;
    const int from = begin / kPackedStep * kPackedStep, to = (end + kPackedStep - 1) / kPackedStep * kPackedStep;
    const CodeLines<kBits> lines(keys);
    const int stride = OperandStride(keys.dim);
    FoldedKeys folded;
    FoldKeys(keys, kBits, first, last, q, q_stride, rows, scratch, folded, ahead);
    const int lines_a_step = kVectors * N * keys.dim * kBits / 8 / kLineBytes;
    for (int token = from; token < to; token += kVectors * N) {
        const int g = std::min(std::max(token / keys.group, first), last);
        ahead.step(lines_a_step);
        for (int r = 0; r < rows; r += kRowsAtOnce) {
            const int32_t* operand = scratch.operand + (g * rows + r) * stride;
            const float* step = folded.step + r;
            const float* bias = folded.bias[g] + r;
            float* sr = s + r * kPageTokens;
            switch (std::min(kRowsAtOnce, rows - r)) {
                case 1: ScoreCodes<kBits, kVnni, kVectors, 1>(lines, token, operand, stride, step, bias, sr); break;
                case 2: ScoreCodes<kBits, kVnni, kVectors, 2>(lines, token, operand, stride, step, bias, sr); break;
                case 3: ScoreCodes<kBits, kVnni, kVectors, 3>(lines, token, operand, stride, step, bias, sr); break;
                default: ScoreCodes<kBits, kVnni, kVectors, 4>(lines, token, operand, stride, step, bias, sr); break;
            }
        }
    }
    const DF d;
    for (int r = 0; r < rows; ++r) {
        if (!folded.exact[r]) continue;
        for (int g = first; g <= last; ++g) {
            for (int c = 0; c < keys.dim; c += N) {
                const VF scale = LoadHalfs(KeyParams(keys, keys.scales, g, c));
                hn::StoreU(hn::Mul(hn::LoadU(d, q + r * q_stride + c), scale), d, scratch.values + c);
            }
            const int stop = std::min(to, (g + 1) * keys.group);
            for (int token = std::max(from, g * keys.group); token < stop; token += N) {
                ScoreExactly<kBits>(lines, token, scratch.values, folded.bias[g][r], s + r * kPageTokens);
            }
        }
    }
}

// ---- values ----

// Value scales of group g folded into p: one step for each query row. Tokens from .. to - 1, whole pairs of units;
// parameters outside begin .. end - 1 are not looked at.
HWY_INLINE void FoldValues(const PackedPart& values, int g, int begin, int end, int from, int to,
                           const float* HWY_RESTRICT p, int rows, float* const* acc, int acc_mins,
                           const PackedScratch& scratch, int32_t* HWY_RESTRICT operand, int stride,
                           float* HWY_RESTRICT step) {
    const DF d;
    float* scale = scratch.values;
    float* min = scratch.values + kPageTokens;
    for (int unit = from / kTile; unit < to / kTile; ++unit) {
        const int64_t at = (static_cast<int64_t>(unit) * values.groups + g) * kTile * 2;
        for (int i = 0; i < kTile; i += N) {
            hn::StoreU(LoadHalfs(values.data + values.scales + at + 2 * i), d, scale + unit * kTile + i);
            hn::StoreU(LoadHalfs(values.data + values.mins + at + 2 * i), d, min + unit * kTile + i);
        }
    }
    for (int t = from; t < begin; ++t) scale[t] = min[t] = 0;
    for (int t = end; t < to; ++t) scale[t] = min[t] = 0;
    for (int r = 0; r < rows; ++r) {
        const float* pr = p + r * kPageTokens;
        float folded[kPageTokens];
        VF top = hn::Zero(d);
        VF mins[kLanes / N];
        float* kept = acc[r] + acc_mins + g * kLanes;
        for (int i = 0; i < kLanes / N; ++i) mins[i] = hn::LoadU(d, kept + i * N);
        for (int t = from; t < to; t += kLanes) {
            for (int i = 0; i < kLanes / N; ++i) {
                const VF weight = hn::LoadU(d, pr + t + i * N);
                const VF x = hn::Mul(weight, hn::LoadU(d, scale + t + i * N));
                hn::StoreU(x, d, folded + t + i * N);
                top = hn::Max(x, top);
                mins[i] = hn::MulAdd(weight, hn::LoadU(d, min + t + i * N), mins[i]);
            }
        }
        for (int i = 0; i < kLanes / N; ++i) hn::StoreU(mins[i], d, kept + i * N);
        step[r] = MaxLanes(top) / kTop;
        const VF inverse = hn::Set(d, step[r] > 0 ? 1.0f / step[r] : 0.0f);
        for (int t = from; t < to; t += 2 * N) {
            StorePairs(hn::Mul(hn::LoadU(d, folded + t), inverse), hn::Mul(hn::LoadU(d, folded + t + N), inverse),
                       operand + r * stride + t / 2);
        }
    }
}

// V vectors of channels from `channel` on, R query rows, units of tokens first .. last - 1.
template <int kBits, bool kVnni, int V, int R>
HWY_INLINE void MixCodes(const CodeLines<kBits>& lines, int channel, int first, int last,
                         const int32_t* HWY_RESTRICT operand, int stride, const float* HWY_RESTRICT step,
                         float* const* acc) {
    V32 sum[V][R];
    for (auto& of_vector : sum) {
        for (V32& a : of_vector) a = hn::Zero(D32());
    }
    for (int unit = first; unit < last; ++unit) {
        Codes<kBits> codes[V];
        for (int v = 0; v < V; ++v) codes[v] = lines(unit, (channel + v * N) / kTile, (channel + v * N) % kTile);
        const int32_t* pairs = operand + PairBase(unit);
        HWY_UNROLL(8) for (int t = 0; t < kPairs; ++t) {
            V16 pair[V];
            HWY_UNROLL(2) for (int v = 0; v < V; ++v) pair[v] = codes[v].Next(t);
            HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
                const V16 factor = Broadcast(pairs + r * stride + PairAt(t));
                HWY_UNROLL(2) for (int v = 0; v < V; ++v) sum[v][r] = Dot<kVnni>(sum[v][r], pair[v], factor);
            }
        }
    }
    const DF d;
    for (int r = 0; r < R; ++r) {
        const VF vstep = hn::Set(d, step[r]);
        for (int v = 0; v < V; ++v) {
            float* to = acc[r] + channel + v * N;
            hn::StoreU(hn::MulAdd(hn::ConvertTo(d, sum[v][r]), vstep, hn::LoadU(d, to)), d, to);
        }
    }
}

template <int kBits, bool kVnni, int V>
HWY_INLINE void MixCodesOfRows(const CodeLines<kBits>& lines, int channel, int first, int last,
                               const int32_t* HWY_RESTRICT operand, int stride, const float* HWY_RESTRICT step,
                               int rows, float* const* acc) {
    for (int r = 0; r < rows; r += kRowsAtOnce) {
        const int32_t* at = operand + r * stride;
        switch (std::min(kRowsAtOnce, rows - r)) {
            case 1: MixCodes<kBits, kVnni, V, 1>(lines, channel, first, last, at, stride, step + r, acc + r); break;
            case 2: MixCodes<kBits, kVnni, V, 2>(lines, channel, first, last, at, stride, step + r, acc + r); break;
            case 3: MixCodes<kBits, kVnni, V, 3>(lines, channel, first, last, at, stride, step + r, acc + r); break;
            default: MixCodes<kBits, kVnni, V, 4>(lines, channel, first, last, at, stride, step + r, acc + r); break;
        }
    }
}

template <int kBits, bool kVnni>
void MixPacked(const PackedPart& values, int begin, int end, const float* p, int rows, float* const* acc, int acc_mins,
               const PackedScratch& scratch, Ahead& ahead) {
    const int from = begin / kPackedStep * kPackedStep, to = (end + kPackedStep - 1) / kPackedStep * kPackedStep;
    const int first = from / kTile, last = to / kTile;
    const int stride = OperandStride(kPageTokens);
    const CodeLines<kBits> lines(values);
    const int param_lines = (to - from) * 2 * 2 / kLineBytes;
    const int code_lines = 2 * N * (to - from) * kBits / 8 / kLineBytes;
    for (int g = 0; g < values.groups; ++g) {
        float step[kBlockRows];
        ahead.step(param_lines);
        FoldValues(values, g, begin, end, from, to, p, rows, acc, acc_mins, scratch, scratch.operand, stride, step);
        const int stop = std::min(values.dim, (g + 1) * values.group);
        int c = g * values.group;
        for (; c + 2 * N <= stop; c += 2 * N) {
            ahead.step(code_lines);
            MixCodesOfRows<kBits, kVnni, 2>(lines, c, first, last, scratch.operand, stride, step, rows, acc);
        }
        for (; c < stop; c += N) {
            ahead.step(code_lines / 2);
            MixCodesOfRows<kBits, kVnni, 1>(lines, c, first, last, scratch.operand, stride, step, rows, acc);
        }
    }
}

}  // namespace kivi::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_SCALAR

#endif  // include guard of this instruction set
