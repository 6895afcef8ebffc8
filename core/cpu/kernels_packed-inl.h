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

constexpr int kPairs = kTile / 2;  // inner elements of a tile, two at a time
constexpr int kMaxGroups = kPageTokens / kPackedStep;
constexpr int kValuePairs = kPageTokens / 2;
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
    acc = hn::ReorderWidenMulAccumulate(D32(), a, b, acc, unused);
    asm("" : "+v"(acc.raw));  // else GCC reorders the additions and spills every product
    return acc;
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

// Sums of one lane vector and query row that are kept apart: vpdpwssd takes longer than eight of them are many.
template <bool kVnni>
constexpr int kChains = kVnni ? 2 : 1;

// Where the pair of inner elements 16 i + 2t, 16 i + 2t + 1 stands in an operand row. ReorderDemote2To joins two
// vectors of N elements; on x86 it alternates between them in steps of two pairs.
HWY_INLINE constexpr unsigned PairBase(unsigned i) { return N == 16 ? i / 2 * 16 + i % 2 * 2 : i * kPairs; }
HWY_INLINE constexpr int PairAt(int t) {
    if (N == 16) return t / 2 * 4 + t % 2;
    if (N == 8) return t < 4 ? t / 2 * 4 + t % 2 : 2 + (t - 4) / 2 * 4 + t % 2;
    return t;
}

// The codes of N lanes of one tile, handed out pair by pair: t = 0 .. 7 in this order.
template <int kBits>
struct Codes {
    V16 a, b;

    // Written out: an implicit constructor is not compiled for the target of this namespace.
    HWY_INLINE Codes() {}
    HWY_INLINE Codes(V16 first, V16 second) : a(first), b(second) {}

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

// The operand pairs of tile i: a pointer that the compiler must not take apart, so that every pair is one constant
// away from it. (GCC keeps an address register for each of them else.)
HWY_INLINE const int32_t* PairsOf(const int32_t* operand, int i) {
    const int32_t* pairs = operand + PairBase(i);
    asm("" : "+r"(pairs));
    return pairs;
}

HWY_INLINE V16 Broadcast(const int32_t* HWY_RESTRICT pair) { return hn::BitCast(D16(), hn::Set(D32(), *pair)); }

HWY_INLINE void StorePairs(VF x, VF y, int32_t* HWY_RESTRICT to) {
    hn::StoreU(hn::BitCast(D32(), hn::ReorderDemote2To(D16(), ToInt(x), ToInt(y))), D32(), to);
}

// Cache lines of codes that V vectors of lanes use up in one tile each.
template <int kBits, int V>
constexpr int kCodeLines = (V * N * kBits + 31) / 32;

template <bool kVnni>
HWY_INLINE VF Joined(const V32* chains) {
    if constexpr (kChains<kVnni> == 2) return hn::ConvertTo(DF(), hn::Add(chains[0], chains[1]));
    return hn::ConvertTo(DF(), chains[0]);
}

// ---- keys ----

// What folding the scales of the keys' groups first .. last into q leaves beside the operand rows.
struct FoldedKeys {
    float step[kBlockRows];
    float bias[kMaxGroups][kBlockRows];  // q . min
    bool exact[kBlockRows];              // 16 bits are not enough for this row
};

HWY_INLINE const uint8_t* KeyParams(const PackedPart& keys, int64_t at, int group, int channel) {
    return keys.data + at + (static_cast<int64_t>(group) * keys.dim + channel) * 2;
}

// Steps of R rows from their largest |q * scale|; `scaled` becomes q / step.
template <int R>
HWY_INLINE void ChooseSteps(const PackedPart& keys, int bits, int first, int last, const float* HWY_RESTRICT q,
                            int q_stride, float* HWY_RESTRICT scaled, float* HWY_RESTRICT step, bool* exact) {
    const DF d;
    VF top[4];
    HWY_UNROLL(4) for (int r = 0; r < 4; ++r) top[r] = hn::Zero(d);
    for (int c = 0; c < keys.dim; c += N) {
        VF scale = LoadHalfs(KeyParams(keys, keys.scales, first, c));
        for (int g = first + 1; g <= last; ++g) {
            scale = hn::Max(scale, LoadHalfs(KeyParams(keys, keys.scales, g, c)));
        }
        HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
            top[r] = hn::Max(hn::Abs(hn::Mul(hn::LoadU(d, q + r * q_stride + c), scale)), top[r]);
        }
    }
    float tops[4];
    Reduce4(MaxOfTwo(), top[0], top[1], top[2], top[3], tops);
    // Rounding errors of a score: step / sqrt(12) for each channel, times the code, adding up like noise.
    const float noise = 0.29f * static_cast<float>((1 << bits) - 1) * std::sqrt(static_cast<float>(keys.dim));
    constexpr float kMaxNoise = 1.0f / 1024;  // in log2 units: 7e-4 of a weight
    VF inverse[R];
    HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
        step[r] = tops[r] * (1 / kTop);
        exact[r] = !(step[r] * noise <= kMaxNoise);
        inverse[r] = hn::Set(d, tops[r] > 0 ? kTop / tops[r] : 0.0f);
    }
    for (int c = 0; c < keys.dim; c += N) {
        HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
            hn::StoreU(hn::Mul(hn::LoadU(d, q + r * q_stride + c), inverse[r]), d, scaled + r * keys.dim + c);
        }
    }
}

// Operand rows and biases of R query rows for one group.
template <int R>
HWY_INLINE void FoldKeys(const PackedPart& keys, int group, const float* HWY_RESTRICT q, int q_stride,
                         const float* HWY_RESTRICT scaled, int32_t* HWY_RESTRICT operand, float* HWY_RESTRICT bias,
                         bool lead, Ahead& ahead) {
    const DF d;
    VF sums[4];
    HWY_UNROLL(4) for (int r = 0; r < 4; ++r) sums[r] = hn::Zero(d);
    const auto fold = [&](int c, bool both) HWY_ATTR {
        const int c1 = both ? c + N : c;  // of a half block, the upper vector repeats the lower one and is not used
        const VF scale0 = LoadHalfs(KeyParams(keys, keys.scales, group, c));
        const VF scale1 = LoadHalfs(KeyParams(keys, keys.scales, group, c1));
        const VF min0 = LoadHalfs(KeyParams(keys, keys.mins, group, c));
        const VF min1 = both ? LoadHalfs(KeyParams(keys, keys.mins, group, c1)) : hn::Zero(d);
        HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
            const float* qr = q + r * q_stride;
            const float* sr = scaled + r * keys.dim;
            sums[r] = hn::MulAdd(min0, hn::LoadU(d, qr + c), sums[r]);
            sums[r] = hn::MulAdd(min1, hn::LoadU(d, qr + c1), sums[r]);
            StorePairs(hn::Mul(scale0, hn::LoadU(d, sr + c)), hn::Mul(scale1, hn::LoadU(d, sr + c1)),
                       operand + r * kKeyPairs + c / 2);
        }
    };
    if (lead) ahead.step(keys.dim / 16);
    int c = 0;
    for (; c + 2 * N <= keys.dim; c += 2 * N) fold(c, true);
    if (c < keys.dim) fold(c, false);
    float biases[4];
    Reduce4(AddLanes(), sums[0], sums[1], sums[2], sums[3], biases);
    for (int r = 0; r < R; ++r) bias[r] = biases[r];
}

// V vectors of tokens from `token` on, R query rows.
template <int kBits, bool kVnni, int V, int R>
HWY_INLINE void ScoreCodes(const CodeLines<kBits>& lines, int token, const int32_t* HWY_RESTRICT operand,
                           const float* HWY_RESTRICT step, const float* HWY_RESTRICT bias, float* HWY_RESTRICT s,
                           bool lead, Ahead& ahead) {
    V32 acc[V][R][kChains<kVnni>];
    HWY_UNROLL(2) for (int v = 0; v < V; ++v) {
        HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
            HWY_UNROLL(2) for (V32& chain : acc[v][r]) chain = hn::Zero(D32());
        }
    }
    for (int block = 0; block < lines.tiles_a_unit; ++block) {
        if (lead) ahead.step(kCodeLines<kBits, V>);
        Codes<kBits> codes[V];
        HWY_UNROLL(2) for (int v = 0; v < V; ++v) {
            codes[v] = lines((token + v * N) / kTile, block, (token + v * N) % kTile);
        }
        const int32_t* pairs = PairsOf(operand, block);
        HWY_UNROLL(8) for (int t = 0; t < kPairs; ++t) {
            V16 pair[V];
            HWY_UNROLL(2) for (int v = 0; v < V; ++v) pair[v] = codes[v].Next(t);
            HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
                const V16 factor = Broadcast(pairs + r * kKeyPairs + PairAt(t));
                HWY_UNROLL(2) for (int v = 0; v < V; ++v) {
                    V32& chain = acc[v][r][t % kChains<kVnni>];
                    chain = Dot<kVnni>(chain, pair[v], factor);
                }
            }
        }
    }
    const DF d;
    HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
        const VF vstep = hn::Set(d, step[r]), vbias = hn::Set(d, bias[r]);
        HWY_UNROLL(2) for (int v = 0; v < V; ++v) {
            hn::StoreU(hn::MulAdd(Joined<kVnni>(acc[v][r]), vstep, vbias), d, s + r * kPageTokens + token + v * N);
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

// The scores of one row again, in fp32.
template <int kBits>
HWY_NOINLINE void ScoreRowExactly(const PackedPart& keys, int first, int last, int from, int to,
                                  const float* HWY_RESTRICT q, const FoldedKeys& folded, int row,
                                  float* HWY_RESTRICT factors, float* HWY_RESTRICT s) {
    const DF d;
    const CodeLines<kBits> lines(keys);
    for (int g = first; g <= last; ++g) {
        for (int c = 0; c < keys.dim; c += N) {
            const VF scale = LoadHalfs(KeyParams(keys, keys.scales, g, c));
            hn::StoreU(hn::Mul(hn::LoadU(d, q + c), scale), d, factors + c);
        }
        const int stop = std::min(to, (g + 1) * keys.group);
        for (int token = std::max(from, g * keys.group); token < stop; token += N) {
            ScoreExactly<kBits>(lines, token, factors, folded.bias[g][row], s);
        }
    }
}

template <int kBits, bool kVnni>
void ScorePacked(const PackedPart& keys, int begin, int end, const float* q, int q_stride, int rows, float* s,
                 const PackedScratch& scratch, Ahead& ahead) {
    constexpr int kVectors = 2;
    const int first = begin / keys.group, last = (end - 1) / keys.group;
    const int from = begin / kPackedStep * kPackedStep;
    const int to = (end + kPackedStep - 1) / kPackedStep * kPackedStep;
    const CodeLines<kBits> lines(keys);
    FoldedKeys folded;
    ForRowBlocks(rows, [&](int r, auto block) HWY_ATTR {
        const float* qr = q + r * q_stride;
        float* scaled = scratch.values + r * keys.dim;
        ChooseSteps<block>(keys, kBits, first, last, qr, q_stride, scaled, folded.step + r, folded.exact + r);
        for (int g = first; g <= last; ++g) {
            FoldKeys<block>(keys, g, qr, q_stride, scaled, scratch.operand + (g * kBlockRows + r) * kKeyPairs,
                            folded.bias[g] + r, r == 0, ahead);
        }
    });
    for (int token = from; token < to; token += kVectors * N) {
        const int g = token / keys.group;
        ForRowBlocks(rows, [&](int r, auto block) HWY_ATTR {
            ScoreCodes<kBits, kVnni, kVectors, block>(lines, token, scratch.operand + (g * kBlockRows + r) * kKeyPairs,
                                                      folded.step + r, folded.bias[g] + r, s + r * kPageTokens, r == 0,
                                                      ahead);
        });
    }
    for (int r = 0; r < rows; ++r) {
        if (!folded.exact[r]) continue;
        ScoreRowExactly<kBits>(keys, first, last, from, to, q + r * q_stride, folded, r, scratch.values,
                               s + r * kPageTokens);
    }
}

// ---- values ----

// Scales and mins of values as fp32, [groups][2][kPageTokens]; 0 for tokens outside begin .. end - 1, whose bytes may
// be anything.
HWY_INLINE void LoadValueParams(const PackedPart& values, int begin, int end, int from, int to,
                                float* HWY_RESTRICT params, Ahead& ahead) {
    const DF d;
    const uint8_t* at = values.data + values.scales + static_cast<int64_t>(from / kTile) * values.groups * kTile * 2;
    const int64_t mins = values.mins - values.scales;
    for (int t = from; t < to; t += kTile) {
        ahead.step(values.groups);
        float* to_scale = params + t;
        for (int g = 0; g < values.groups; ++g, at += kTile * 2, to_scale += 2 * kPageTokens) {
            for (int i = 0; i < kTile; i += N) {
                hn::StoreU(LoadHalfs(at + 2 * i), d, to_scale + i);
                hn::StoreU(LoadHalfs(at + mins + 2 * i), d, to_scale + kPageTokens + i);
            }
        }
    }
    if (begin == from && end == to) return;
    for (int g = 0; g < values.groups; ++g) {
        float* scale = params + g * 2 * kPageTokens;
        float* min = scale + kPageTokens;
        for (int t = from; t < begin; ++t) scale[t] = min[t] = 0;
        for (int t = end; t < to; ++t) scale[t] = min[t] = 0;
    }
}

// Largest p * scale of R query rows in one group; p * min joins the running sums.
template <int R>
HWY_INLINE void SumMins(const float* HWY_RESTRICT params, int from, int to, const float* HWY_RESTRICT p,
                        float* const* acc, int at, float* HWY_RESTRICT tops) {
    constexpr int kVectors = kLanes / N;
    const DF d;
    const float* min = params + kPageTokens;
    VF top[4];
    HWY_UNROLL(4) for (int r = 0; r < 4; ++r) top[r] = hn::Zero(d);
    VF sums[R][kVectors];
    HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
        HWY_UNROLL(4) for (int i = 0; i < kVectors; ++i) sums[r][i] = hn::LoadU(d, acc[r] + at + i * N);
    }
    for (int t = from; t < to; t += kLanes) {
        HWY_UNROLL(4) for (int i = 0; i < kVectors; ++i) {
            const VF scale = hn::LoadU(d, params + t + i * N), low = hn::LoadU(d, min + t + i * N);
            HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
                const VF weight = hn::LoadU(d, p + r * kPageTokens + t + i * N);
                top[r] = hn::Max(hn::Mul(weight, scale), top[r]);
                sums[r][i] = hn::MulAdd(weight, low, sums[r][i]);
            }
        }
    }
    HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
        HWY_UNROLL(4) for (int i = 0; i < kVectors; ++i) hn::StoreU(sums[r][i], d, acc[r] + at + i * N);
    }
    Reduce4(MaxOfTwo(), top[0], top[1], top[2], top[3], tops);
}

// Operand rows of R query rows in one group.
template <int R>
HWY_INLINE void FoldValues(const float* HWY_RESTRICT scales, int from, int to, const float* HWY_RESTRICT p,
                           const float* HWY_RESTRICT tops, int32_t* HWY_RESTRICT operand) {
    const DF d;
    VF inverse[R];
    HWY_UNROLL(4) for (int r = 0; r < R; ++r) inverse[r] = hn::Set(d, tops[r] > 0 ? kTop / tops[r] : 0.0f);
    for (int t = from; t < to; t += 2 * N) {
        const VF scale0 = hn::LoadU(d, scales + t), scale1 = hn::LoadU(d, scales + t + N);
        HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
            const float* pr = p + r * kPageTokens + t;
            StorePairs(hn::Mul(hn::Mul(scale0, inverse[r]), hn::LoadU(d, pr)),
                       hn::Mul(hn::Mul(scale1, inverse[r]), hn::LoadU(d, pr + N)), operand + r * kValuePairs + t / 2);
        }
    }
}

// V vectors of channels from `channel` on, R query rows, units of tokens first .. last - 1.
template <int kBits, bool kVnni, int V, int R>
HWY_INLINE void MixCodes(const CodeLines<kBits>& lines, int channel, int first, int last,
                         const int32_t* HWY_RESTRICT operand, const float* HWY_RESTRICT step, float* const* acc,
                         bool lead, Ahead& ahead) {
    V32 sum[V][R][kChains<kVnni>];
    HWY_UNROLL(2) for (int v = 0; v < V; ++v) {
        HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
            HWY_UNROLL(2) for (V32& chain : sum[v][r]) chain = hn::Zero(D32());
        }
    }
    for (int unit = first; unit < last; ++unit) {
        if (lead) ahead.step(kCodeLines<kBits, V>);
        Codes<kBits> codes[V];
        HWY_UNROLL(2) for (int v = 0; v < V; ++v) {
            codes[v] = lines(unit, (channel + v * N) / kTile, (channel + v * N) % kTile);
        }
        const int32_t* pairs = PairsOf(operand, unit);
        HWY_UNROLL(8) for (int t = 0; t < kPairs; ++t) {
            V16 pair[V];
            HWY_UNROLL(2) for (int v = 0; v < V; ++v) pair[v] = codes[v].Next(t);
            HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
                const V16 factor = Broadcast(pairs + r * kValuePairs + PairAt(t));
                HWY_UNROLL(2) for (int v = 0; v < V; ++v) {
                    V32& chain = sum[v][r][t % kChains<kVnni>];
                    chain = Dot<kVnni>(chain, pair[v], factor);
                }
            }
        }
    }
    const DF d;
    HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
        const VF vstep = hn::Set(d, step[r]);
        HWY_UNROLL(2) for (int v = 0; v < V; ++v) {
            float* to = acc[r] + channel + v * N;
            hn::StoreU(hn::MulAdd(Joined<kVnni>(sum[v][r]), vstep, hn::LoadU(d, to)), d, to);
        }
    }
}

template <int kBits, bool kVnni>
void MixPacked(const PackedPart& values, int begin, int end, const float* p, int rows, float* const* acc, int acc_mins,
               const PackedScratch& scratch, Ahead& ahead) {
    const int from = begin / kPackedStep * kPackedStep;
    const int to = (end + kPackedStep - 1) / kPackedStep * kPackedStep;
    const int first = from / kTile, last = to / kTile;
    const CodeLines<kBits> lines(values);
    // Every group is folded before the first code is read: short dependent steps that can run side by side.
    float tops[kMaxDim / 32][kBlockRows];
    const auto params = [&](int g) { return scratch.values + g * 2 * kPageTokens; };
    const auto operand = [&](int g, int r) { return scratch.operand + (g * kBlockRows + r) * kValuePairs; };
    LoadValueParams(values, begin, end, from, to, scratch.values, ahead);
    ForRowBlocks(rows, [&](int r, auto block) HWY_ATTR {
        const float* pr = p + r * kPageTokens;
        for (int g = 0; g < values.groups; ++g) {
            float peaks[4];
            SumMins<block>(params(g), from, to, pr, acc + r, acc_mins + g * kLanes, peaks);
            for (int i = 0; i < block; ++i) tops[g][r + i] = peaks[i];
        }
        for (int g = 0; g < values.groups; ++g) FoldValues<block>(params(g), from, to, pr, tops[g] + r, operand(g, r));
    });
    for (int g = 0; g < values.groups; ++g) {
        float step[kBlockRows];
        for (int r = 0; r < rows; ++r) step[r] = tops[g][r] * (1 / kTop);
        const int stop = std::min(values.dim, (g + 1) * values.group);
        const auto mix = [&](int c, auto vectors) HWY_ATTR {
            ForRowBlocks(rows, [&](int r, auto block) HWY_ATTR {
                MixCodes<kBits, kVnni, vectors, block>(lines, c, first, last, operand(g, r), step + r, acc + r, r == 0,
                                                       ahead);
            });
        };
        int c = g * values.group;
        for (; c + 2 * N <= stop; c += 2 * N) mix(c, Int<2>());
        if constexpr (2 * N > kTile) {
            if (c < stop) mix(c, Int<1>());
        }
    }
}

}  // namespace kivi::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_SCALAR

#endif  // include guard of this instruction set
