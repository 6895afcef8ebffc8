// Packers, vectorised. The formulas of format/quantize.cpp with whole vectors: the same fp32 operations in
// the same order, IEEE division and ties to even, so the bytes are the same.
//
// Work goes by units of 16 tokens, the tiles' height in the lanes order (page_order.cpp).
//
//   channel axis   lanes = channels: parameters are vectors; codes go through a unit of bytes [token][channel]
//   token axis     parameters: lanes = the unit's tokens; codes: lanes = channels, built up in the tile's line
//   query-aware    lanes = the unit's tokens, channels one after the other
#include "cpu/write_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/simd.h"
#include "format/half.h"
#include "format/quantize.h"

#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/pack_kernels.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace kivi::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

const PackKernels* pack_kernels_of_target() { return nullptr; }

#else

namespace {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using U8 = hn::CappedTag<uint8_t, 64>;
using VF = hn::Vec<F32>;
using VU = hn::Vec<U32>;
using VU8 = hn::Vec<U8>;

constexpr int kUnit = 16;  // tokens of a unit, channels of a tile, lanes of a line
constexpr int kMaxDim = 512;
constexpr int kMaxBlocks = kMaxDim / 32;  // groups of a token
constexpr int kLanes = static_cast<int>(HWY_MAX_BYTES / sizeof(float) < kUnit ? HWY_MAX_BYTES / sizeof(float) : kUnit);
constexpr int kLineBytes = 64;
constexpr int kLinesATile = 4;  // fetched ahead: half a tile of 16-bit elements; row kernels fetch the other half

// ---- parameters ----

struct Params {
    VF scale, min;
};

VF clamp_to(VF x, float limit) {
    const F32 d;
    return hn::Min(hn::Max(x, hn::Set(d, -limit)), hn::Set(d, limit));
}

VF round_params(VF x, int32_t param_dtype) {
    const F32 d;
    if (param_dtype == KIVI_F16) {
        x = clamp_to(x, 65504.0f);
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX2  // no conversion to f16
        HWY_ALIGN float lanes[kLanes];
        hn::Store(x, d, lanes);
        for (float& value : lanes) value = f16_to_f32(f32_to_f16(value));
        x = hn::Load(d, lanes);
#else
        const hn::Rebind<hwy::float16_t, F32> d16;
        x = hn::PromoteTo(d, hn::DemoteTo(d16, x));
#endif
    }
    return hn::Add(x, hn::Zero(d));  // -0 becomes +0
}

Params params_of(const kivi_spec& spec, VF low, VF high) {
    const F32 d;
    constexpr float kLargestExtreme = 0x1p126f;
    low = clamp_to(low, kLargestExtreme);
    high = clamp_to(high, kLargestExtreme);
    VF range = hn::Sub(high, low);
    if (spec.range == KIVI_RANGE_RATIO) {
        const VF kept = hn::Mul(range, hn::Set(d, spec.range_ratio));
        low = hn::Add(low, hn::Mul(hn::Set(d, 0.5f), hn::Sub(range, kept)));
        range = kept;
    }
    const VF levels = hn::Set(d, static_cast<float>((1 << spec.bits) - 1));
    return {round_params(hn::Div(range, levels), spec.param_dtype), round_params(low, spec.param_dtype)};
}

// Values that the parameter type holds exactly, `stride` bytes apart.
void store_params(const float* x, int32_t param_dtype, int count, int64_t stride, uint8_t* to) {
    if (param_dtype == KIVI_F32) {
        for (int i = 0; i < count; ++i) std::memcpy(to + i * stride, x + i, sizeof(float));
        return;
    }
#if !HWY_ARCH_X86 || HWY_TARGET <= HWY_AVX2  // there is a conversion to f16
    if (stride == 2 && count % kLanes == 0) {
        const F32 d;
        const hn::Rebind<hwy::float16_t, F32> d16;
        hwy::float16_t* half = reinterpret_cast<hwy::float16_t*>(to);
        for (int i = 0; i < count; i += kLanes) hn::StoreU(hn::DemoteTo(d16, hn::Load(d, x + i)), d16, half + i);
        return;
    }
#endif
    for (int i = 0; i < count; ++i) {
        const uint16_t half = f32_to_f16(x[i]);
        std::memcpy(to + i * stride, &half, sizeof half);
    }
}

// ---- codes ----
//
// Codes travel as fixed-point numbers: sixteen bits of fraction, the code above them, and above that what the
// conversion leaves (0x4300, the exponent of 128).
//
//   31       23      16               0
//   | 0x43 .. | code | steps + 1/2, mod 1 |

constexpr int kFractionBits = 16;
constexpr uint32_t code_bits(int bits) { return ((1u << bits) - 1) << kFractionBits; }
constexpr float kZeroSteps = 128.5f;  // no steps: its unit in the last place is 2^-16, and 1/2 is added for rounding

using U16 = hn::Repartition<uint16_t, F32>;
using VU16 = hn::Vec<U16>;

// Codes by multiplication with the inverse. Product and quotient, rounded to fp32 or not, differ by less than
// 2^-18 for up to 15 steps, and the sum is rounded by at most 2^-17. One unit of 2^-16 is added, so a quotient
// that is a tie, or on the other side of one than the product, has a fraction of 0 or 1 units (no_near_tie).
VU quick_codes(VF y, VF inverse, VF min) {
    const F32 d;
    return hn::BitCast(U32(), hn::MulAdd(hn::Sub(y, min), inverse, hn::Set(d, kZeroSteps + 0x1p-16f)));
}

// The smallest fraction among codes, in the lower half word of each lane; the upper ones are 0x4300 and more.
VU16 all_fractions() { return hn::Set(U16(), 0xFFFF); }
void collect_fractions(VU codes, VU16& smallest) { smallest = hn::Min(smallest, hn::BitCast(U16(), codes)); }
bool no_near_tie(VU16 smallest) { return hn::AllTrue(U16(), hn::Gt(smallest, hn::Set(U16(), 1))); }

// Codes by the definition: IEEE division, then round half to even: where the unit in the last place is 1,
// addition rounds so. A scale of 0 has infinity for a divisor, which makes every code 0; NaN (only from
// infinity over infinity) gives 0 too.
VU exact_codes(VF y, VF scale, VF min, VF levels) {
    const F32 d;
    const U32 du;
    const VF divisor = hn::IfThenElse(hn::Gt(scale, hn::Zero(d)), scale, hn::Inf(d));
    const VF steps = hn::Div(hn::Sub(y, min), divisor);
    const VF positive = hn::IfThenElseZero(hn::Gt(steps, hn::Zero(d)), steps);
    return hn::ShiftLeft<kFractionBits>(hn::BitCast(du, hn::Add(hn::Min(positive, levels), hn::Set(d, 0x1p23f))));
}

VF levels_of(int bits) { return hn::Set(F32(), static_cast<float>((1 << bits) - 1)); }

VF inverse_of(VF scale) {
    const F32 d;
    return hn::IfThenElseZero(hn::Gt(scale, hn::Zero(d)), hn::Div(hn::Set(d, 1.0f), scale));
}

// Whether the inverses are normal numbers, or 0 for 0.
bool have_inverses(VF scale) {
    const F32 d;
    return hn::AllTrue(d, hn::Or(hn::Ge(scale, hn::Set(d, 0x1p-100f)), hn::Eq(scale, hn::Zero(d))));
}

// Whether quick_codes serve all values from low to high: steps that round into 0 .. levels without a clamp.
bool quick_codes_serve(VF low, VF high, VF scale, VF inverse, VF min, VF levels) {
    const F32 d;
    const VF first = hn::Mul(hn::Sub(low, min), inverse), last = hn::Mul(hn::Sub(high, min), inverse);
    const auto inside = hn::And(hn::Ge(first, hn::Set(d, -0.25f)), hn::Le(last, hn::Add(levels, hn::Set(d, 0.25f))));
    return have_inverses(scale) && hn::AllTrue(d, inside);
}

// ---- codes of a unit of bytes to the page ----

// Bit by bit along each group's stream: any order, any width. Codes [token][channel] of `tokens` tokens.
void put_canonical(const TensorStore& store, const uint8_t* codes, int first, int tokens, uint8_t* part) {
    const int dim = store.dim, bits = store.spec.bits;
    const bool by_channel = store.spec.axis == KIVI_AXIS_CHANNEL;
    const GroupShape shape = group_shape(store.spec, dim);
    // A stream runs over the tokens of a channel, or over the channels of a token's block; both start at a
    // whole byte here, because 16 codes of any width fill whole bytes.
    const int64_t full = group_code_bytes(store.spec, shape.tokens * shape.channels);
    if (by_channel) {
        const int64_t block = first / shape.tokens, offset = first % shape.tokens;
        for (int c = 0; c < dim; ++c) {
            uint8_t* stream = part + (block * dim + c) * full + offset * bits / 8;
            std::memset(stream, 0, static_cast<size_t>(tokens) * bits / 8);
            for (int t = 0; t < tokens; ++t) put_code(stream, bits, t, codes[static_cast<int64_t>(t) * dim + c]);
        }
        return;
    }
    const int64_t row_bytes = static_cast<int64_t>(dim) * bits / 8;
    for (int t = 0; t < tokens; ++t) {
        uint8_t* stream = part + (first + t) * row_bytes;
        if (bits == 8) {
            std::memcpy(stream, codes + static_cast<int64_t>(t) * dim, dim);
            continue;
        }
        std::memset(stream, 0, static_cast<size_t>(row_bytes));
        for (int c = 0; c < dim; ++c) put_code(stream, bits, c, codes[static_cast<int64_t>(t) * dim + c]);
    }
}

// ---- tile lines ----

// The lanes of one tile line, or two: at 3 bits the second holds the third bits as an even unit has them.
struct Lines {
    VU first, second;
};

// The lanes of a tile's lines when one vector holds an inner element of every lane. codes_at(i): those of inner
// element i. Each half word is built in the upper half of a vector, where codes have their bits, from its highest
// field down.
template <int kBits, class CodesAt>
HWY_INLINE Lines build_lines(CodesAt codes_at) {
    const U32 d;
    VU first[2], second[2];  // [half word]
    HWY_UNROLL(2)
    for (int half = 0; half < 2; ++half) {
        first[half] = second[half] = hn::Zero(d);
        HWY_UNROLL(8)
        for (int t = 7; t >= 0; --t) {
            const VU code = codes_at(2 * t + half);
            const bool odd = t % 2 == 1;
            if constexpr (kBits == 4) {
                VU& line = odd ? second[half] : first[half];
                line = hn::OrAnd(hn::ShiftLeft<4>(line), code, hn::Set(d, code_bits(4)));
            } else {
                first[half] = hn::OrAnd(hn::ShiftLeft<2>(first[half]), code, hn::Set(d, code_bits(2)));
            }
            if constexpr (kBits == 3) {
                const VU room = odd ? hn::ShiftLeft<3>(second[half]) : hn::ShiftLeft<1>(second[half]);
                second[half] = hn::OrAnd(room, code, hn::Set(d, 4u << kFractionBits));
            }
        }
    }
    const auto halves = [](const VU* x) { return hn::Or(x[1], hn::ShiftRight<16>(x[0])); };
    return {halves(first), halves(second)};
}

// Where a tile's lines stand and which of their bits belong to what is written now.
template <int kBits>
class TileLines {
  public:
    TileLines(int dim, int unit, uint8_t* part) : even_(unit % 2 == 0) {
        const int tiles = dim / kUnit;
        first_ = part + static_cast<int64_t>(unit) * tiles * (kBits == 4 ? 2 : 1) * kLineBytes;
        if constexpr (kBits == 4) second_ = first_ + kLineBytes;
        if constexpr (kBits == 3) second_ = part + (kPageTokens / kUnit + unit / 2) * tiles * kLineBytes;
        if constexpr (kBits == 3) second_mask_ = even_ ? 0xCCCCCCCCu : 0x33333333u;
    }

    // Only the fields of inner elements begin .. end - 1 are written (token axis, part of a unit).
    void narrow(int begin, int end) {
        first_mask_ = second_mask_ = 0;
        for (int inner = begin; inner < end; ++inner) {
            const int half = 16 * (inner % 2), t = inner / 2;
            if constexpr (kBits == 4) {
                (t % 2 == 0 ? first_mask_ : second_mask_) |= 0xFu << (half + 4 * (t / 2));
            } else {
                first_mask_ |= 3u << (half + 2 * t);
                if constexpr (kBits == 3) second_mask_ |= 1u << (half + 4 * (t / 2) + t % 2 + (even_ ? 2 : 0));
            }
        }
    }

    void put(int tile, int lane, const Lines& lines) const {
        const int64_t at = static_cast<int64_t>(tile) * (kBits == 4 ? 2 : 1) * kLineBytes + lane * 4;
        write(first_ + at, lines.first, first_mask_);
        if constexpr (kBits == 4) write(second_ + at, lines.second, second_mask_);
        if constexpr (kBits == 3) {
            write(second_ + at, even_ ? lines.second : hn::ShiftRight<2>(lines.second), second_mask_);
        }
    }

  private:
    static void write(uint8_t* to, VU v, uint32_t mask) {
        const U32 d;
        uint32_t* words = reinterpret_cast<uint32_t*>(to);
        if (mask != ~0u) {
            const VU ours = hn::Set(d, mask);
            v = hn::Or(hn::AndNot(ours, hn::LoadU(d, words)), hn::And(ours, v));
        }
        hn::StoreU(v, d, words);
    }

    uint8_t* first_ = nullptr;
    uint8_t* second_ = nullptr;
    uint32_t first_mask_ = ~0u, second_mask_ = ~0u;
    bool even_;
};

// ---- channel axis ----

// Parameters of the channels of one group of tokens.
struct ChannelParams {
    HWY_ALIGN float scale[kMaxDim];
    HWY_ALIGN float inverse[kMaxDim];
    HWY_ALIGN float min[kMaxDim];
    bool inverses;                // every scale has one
    bool quick[kMaxDim / kUnit];  // for the channels of a tile quick_codes serve
};

// Computed from the group's rows, and stored in the page.
void channel_params(const TensorStore& store, const float* HWY_RESTRICT rows, int first, uint8_t* part,
                    ChannelParams* params) {
    const F32 d;
    const int dim = store.dim;
    const VF levels = levels_of(store.spec.bits);
    params->inverses = true;
    std::fill_n(params->quick, dim / kUnit, true);
    HWY_ALIGN float lows[kMaxDim], highs[kMaxDim];
    for (int c = 0; c < dim; c += kLanes) {
        VF low = hn::LoadU(d, rows + c), high = low;
        for (int t = 1; t < store.spec.group; ++t) {
            const VF x = hn::LoadU(d, rows + static_cast<int64_t>(t) * dim + c);
            low = hn::Min(low, x);
            high = hn::Max(high, x);
        }
        hn::Store(low, d, lows + c);
        hn::Store(high, d, highs + c);
    }
    for (int c = 0; c < dim; c += kLanes) {
        const VF low = hn::Load(d, lows + c), high = hn::Load(d, highs + c);
        const Params of = params_of(store.spec, low, high);
        const VF inverse = inverse_of(of.scale);
        params->inverses &= have_inverses(of.scale);
        params->quick[c / kUnit] &= quick_codes_serve(low, high, of.scale, inverse, of.min, levels);
        hn::Store(of.scale, d, params->scale + c);
        hn::Store(inverse, d, params->inverse + c);
        hn::Store(of.min, d, params->min + c);
    }
    const int32_t dtype = store.spec.param_dtype;
    const int64_t bytes = dtype == KIVI_F32 ? 4 : 2;
    store_params(params->scale, dtype, dim, bytes, part + scale_offset(store.order, first, 0));
    store_params(params->min, dtype, dim, bytes, part + min_offset(store.order, first, 0));
}

// Codes of four tokens, one channel a lane, become lines of four lanes, one token a lane, in each 16 bytes: with
// the fields of four channels, 4j .. 4j + 3, in their places. Other channels' fields are 0.
//
//   lane = channel c       byte k = token k             blend four vectors
//   lane = token k         bytes  c0 c2 c1 c3           shuffle inside 16 bytes
//   lane = token k         .. c3 c1 | .. c2 c0          fold; two half words
//                          shifted by 4j
template <int kBits>
HWY_INLINE Lines four_token_lines(const VU* codes, int channel) {
    const U32 d;
    const U8 d8;
    const auto bytes = [&](VU x) { return hn::BitCast(d8, x); };
    const VU8 tokens01 = hn::OddEven(bytes(hn::ShiftRight<8>(codes[1])), bytes(hn::ShiftRight<16>(codes[0])));
    const VU8 tokens23 = hn::OddEven(bytes(hn::ShiftLeft<8>(codes[3])), bytes(codes[2]));
    const U16 d16;
    const VU16 tokens = hn::OddEven(hn::BitCast(d16, tokens23), hn::BitCast(d16, tokens01));
    HWY_ALIGN static constexpr uint8_t kTurn[16] = {0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15};
    const VU turned = hn::BitCast(d, hn::TableLookupBytes(hn::BitCast(d8, tokens), hn::LoadDup128(d8, kTurn)));
    // Four channels a 16 bytes, so block j of the tile is shifted by the lane number without its lowest bits.
    const VU place = hn::And(hn::Iota(d, static_cast<uint32_t>(channel % kUnit)), hn::Set(d, ~3u));
    const auto field = [&](VU x, uint32_t mask) { return hn::Shl(hn::And(x, hn::Set(d, mask)), place); };
    if constexpr (kBits == 4) return {field(turned, 0x000F000F), field(hn::ShiftRight<8>(turned), 0x000F000F)};
    const VU two = kBits == 2 ? turned : hn::And(turned, hn::Set(d, 0x03030303));
    const VU third = hn::And(turned, hn::Set(d, 0x04040404));
    return {field(hn::Or(two, hn::ShiftRight<6>(two)), 0x000F000F),
            field(hn::Or(third, hn::ShiftRight<7>(third)), 0x000C000C)};
}

// blocks[i] = all blocks of 16 bytes of x[i] together.
HWY_INLINE void merge_blocks(const VU* x, VU* merged) {
#if HWY_TARGET <= HWY_AVX2
    const auto pair = [](VU a, VU b) {
        return hn::Or(hn::OddEvenBlocks(b, a), hn::SwapAdjacentBlocks(hn::OddEvenBlocks(a, b)));
    };
    if constexpr (kLanes >= 8) {
        const VU low = pair(x[0], x[1]), high = pair(x[2], x[3]);
        if constexpr (kLanes == 8) {
            merged[0] = low;
            merged[1] = high;
        } else {
            const U32 d;
            merged[0] = hn::Or(hn::ConcatLowerLower(d, high, low), hn::ConcatUpperUpper(d, high, low));
        }
        return;
    }
#endif
    for (int i = 0; i < 4; ++i) merged[i] = x[i];
}

// One tile's lines on the channel axis. codes_at(x, c): codes of channels c .. of one token.
template <int kBits, class CodesAt>
HWY_INLINE void channel_tile(const float* HWY_RESTRICT rows, int dim, int tile, const TileLines<kBits>& lines,
                             CodesAt codes_at) {
    VU first[4], second[4];
    for (int c = tile * kUnit; c < (tile + 1) * kUnit; c += kLanes) {
        HWY_UNROLL(4)
        for (int i = 0; i < 4; ++i) {
            VU codes[4];
            HWY_UNROLL(4)
            for (int t = 0; t < 4; ++t) {
                codes[t] = codes_at(hn::LoadU(F32(), rows + static_cast<int64_t>(4 * i + t) * dim + c), c);
            }
            const Lines four = four_token_lines<kBits>(codes, c);
            const bool more = c % kUnit != 0;
            first[i] = more ? hn::Or(first[i], four.first) : four.first;
            second[i] = more ? hn::Or(second[i], four.second) : four.second;
        }
    }
    VU merged_first[4], merged_second[4];
    merge_blocks(first, merged_first);
    if constexpr (kBits > 2) merge_blocks(second, merged_second);
    for (int i = 0; i < kUnit / kLanes; ++i) {
        lines.put(tile, i * kLanes, {merged_first[i], kBits > 2 ? merged_second[i] : merged_first[i]});
    }
}

template <int kBits>
void put_channel_tiles(const TensorStore& store, const float* HWY_RESTRICT rows, const ChannelParams& params, int unit,
                       uint8_t* part, Ahead& ahead) {
    const F32 d;
    const int dim = store.dim;
    const TileLines<kBits> lines(dim, unit, part);
    for (int tile = 0; tile < dim / kUnit; ++tile) {
        ahead.fetch(kLinesATile);
        VU16 fractions = all_fractions();
        channel_tile<kBits>(rows, dim, tile, lines, [&](VF y, int c) {
            const VU codes = quick_codes(y, hn::Load(d, params.inverse + c), hn::Load(d, params.min + c));
            collect_fractions(codes, fractions);
            return codes;
        });
        if (HWY_LIKELY(params.quick[tile] && no_near_tie(fractions))) continue;
        channel_tile<kBits>(rows, dim, tile, lines, [&](VF y, int c) {
            return exact_codes(y, hn::Load(d, params.scale + c), hn::Load(d, params.min + c), levels_of(kBits));
        });
    }
}

// Codes of one row as bytes.
template <class CodesAt>
void put_bytes(int dim, uint8_t* HWY_RESTRICT to, CodesAt codes_at) {
    const hn::Rebind<uint8_t, F32> d8;
    for (int c = 0; c < dim; c += kLanes) hn::StoreU(hn::U8FromU32(hn::ShiftRight<kFractionBits>(codes_at(c))), d8, to + c);
}

void put_channel_bytes(const TensorStore& store, const float* HWY_RESTRICT rows, const ChannelParams& params, int first,
                       uint8_t* part) {
    const F32 d;
    const int dim = store.dim;
    HWY_ALIGN uint8_t codes[kUnit * kMaxDim];
    for (int64_t t = 0; t < kUnit; ++t) {
        put_bytes(dim, codes + t * dim, [&](int c) {
            const VF y = hn::LoadU(d, rows + t * dim + c);
            return exact_codes(y, hn::Load(d, params.scale + c), hn::Load(d, params.min + c), levels_of(store.spec.bits));
        });
    }
    put_canonical(store, codes, first, kUnit, part);
}

void nearest_channel_group(const TensorStore& store, const float* HWY_RESTRICT rows, int first, uint8_t* part,
                           Ahead& ahead) {
    ChannelParams params;
    channel_params(store, rows, first, part, &params);
    for (int t = 0; t < store.spec.group; t += kUnit) {
        const float* x = rows + static_cast<int64_t>(t) * store.dim;
        const int unit = (first + t) / kUnit;
        if (store.order.order == Order::canonical) {
            put_channel_bytes(store, x, params, first + t, part);
            continue;
        }
        switch (store.spec.bits) {
            case 2: put_channel_tiles<2>(store, x, params, unit, part, ahead); break;
            case 3: put_channel_tiles<3>(store, x, params, unit, part, ahead); break;
            default: put_channel_tiles<4>(store, x, params, unit, part, ahead);
        }
    }
}

// ---- token axis ----

// Lane i of every 128-bit block = op over all lanes of the i-th of four vectors.
template <class Op>
HWY_INLINE VF reduce_four(VF x0, VF x1, VF x2, VF x3, Op op) {
    const F32 d;
    const hn::Repartition<uint64_t, F32> d64;
    const auto pair = [&](VF a, VF b) { return op(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)); };
    const auto ab = hn::BitCast(d64, pair(x0, x1)), cd = hn::BitCast(d64, pair(x2, x3));
    VF r = op(hn::BitCast(d, hn::InterleaveLower(d64, ab, cd)), hn::BitCast(d, hn::InterleaveUpper(d64, ab, cd)));
#if HWY_TARGET <= HWY_AVX2
    if constexpr (kLanes >= 8) r = op(r, hn::SwapAdjacentBlocks(r));
    if constexpr (kLanes >= 16) r = op(r, hn::ConcatLowerUpper(d, r, r));
#endif
    return r;
}

struct Extremes {
    VF low, high;
};

// Of one block of channels, for tokens t .. t + 3, in every 128-bit block; tokens from `tokens` on repeat the last.
HWY_INLINE Extremes four_extremes(const float* HWY_RESTRICT rows, int dim, int channels, int t, int tokens) {
    const F32 d;
    const auto row = [&](int i) { return rows + static_cast<int64_t>(std::min(t + i, tokens - 1)) * dim; };
    const float *a = row(0), *b = row(1), *e = row(2), *f = row(3);
    VF low0 = hn::LoadU(d, a), low1 = hn::LoadU(d, b), low2 = hn::LoadU(d, e), low3 = hn::LoadU(d, f);
    VF high0 = low0, high1 = low1, high2 = low2, high3 = low3;
    for (int c = kLanes; c < channels; c += kLanes) {
        const VF x0 = hn::LoadU(d, a + c), x1 = hn::LoadU(d, b + c);
        const VF x2 = hn::LoadU(d, e + c), x3 = hn::LoadU(d, f + c);
        low0 = hn::Min(low0, x0), high0 = hn::Max(high0, x0);
        low1 = hn::Min(low1, x1), high1 = hn::Max(high1, x1);
        low2 = hn::Min(low2, x2), high2 = hn::Max(high2, x2);
        low3 = hn::Min(low3, x3), high3 = hn::Max(high3, x3);
    }
    return {reduce_four(low0, low1, low2, low3, [](VF x, VF y) { return hn::Min(x, y); }),
            reduce_four(high0, high1, high2, high3, [](VF x, VF y) { return hn::Max(x, y); })};
}

// Block i of the result = block i of the i-th of kLanes / 4 vectors.
HWY_INLINE VF join_blocks(const VF* x) {
#if HWY_TARGET <= HWY_AVX2
    const F32 d;
    if constexpr (kLanes == 8) return hn::OddEvenBlocks(x[1], x[0]);
    if constexpr (kLanes == 16) {
        return hn::ConcatUpperLower(d, hn::OddEvenBlocks(x[3], x[2]), hn::OddEvenBlocks(x[1], x[0]));
    }
#endif
    return x[0];
}

// Of one block of channels, one token a lane from token t on.
HWY_INLINE Extremes token_extremes(const float* HWY_RESTRICT rows, int dim, int channels, int t, int tokens) {
    VF low[kLanes / 4], high[kLanes / 4];
    HWY_UNROLL(4)
    for (int i = 0; i < kLanes / 4; ++i) {
        const Extremes four = four_extremes(rows, dim, channels, t + 4 * i, tokens);
        low[i] = four.low;
        high[i] = four.high;
    }
    return {join_blocks(low), join_blocks(high)};
}

// Tokens begin .. end - 1 of the unit that starts at page token 16 * unit.
struct UnitPart {
    int unit, begin, end;

    int first() const { return unit * kUnit + begin; }
    int tokens() const { return end - begin; }
    bool whole() const { return tokens() == kUnit; }
};

// Parameters of the tokens of a UnitPart, counted from its begin; one row for each block of channels.
struct TokenParams {
    HWY_ALIGN float scale[kMaxBlocks][kUnit];
    HWY_ALIGN float inverse[kMaxBlocks][kUnit];
    HWY_ALIGN float min[kMaxBlocks][kUnit];
    bool quick[kMaxBlocks];  // quick_codes serve
};

void token_params(const TensorStore& store, const float* rows, const UnitPart& at, uint8_t* part,
                  TokenParams* params) {
    const F32 d;
    const kivi_spec& spec = store.spec;
    const GroupShape shape = group_shape(spec, store.dim);
    const VF levels = levels_of(spec.bits);
    HWY_ALIGN float low[kMaxBlocks][kUnit], high[kMaxBlocks][kUnit];
    for (int block = 0; block < shape.blocks_a_row; ++block) {
        const int channels = group_channels(shape, store.dim, block);
        for (int t = 0; t < kUnit; t += kLanes) {
            const Extremes extremes =
                token_extremes(rows + block * shape.channels, store.dim, channels, t, at.tokens());
            hn::Store(extremes.low, d, low[block] + t);
            hn::Store(extremes.high, d, high[block] + t);
        }
    }
    for (int block = 0; block < shape.blocks_a_row; ++block) {
        params->quick[block] = true;
        for (int t = 0; t < kUnit; t += kLanes) {
            const VF least = hn::Load(d, low[block] + t), most = hn::Load(d, high[block] + t);
            const Params of = params_of(spec, least, most);
            const VF inverse = inverse_of(of.scale);
            params->quick[block] &= quick_codes_serve(least, most, of.scale, inverse, of.min, levels);
            hn::Store(of.scale, d, params->scale[block] + t);
            hn::Store(inverse, d, params->inverse[block] + t);
            hn::Store(of.min, d, params->min[block] + t);
        }
    }
    const int64_t bytes = spec.param_dtype == KIVI_F32 ? 4 : 2;
    const bool lanes = store.order.order == Order::lanes;
    const int64_t token_stride = lanes ? bytes : bytes * shape.blocks_a_row;
    const int64_t block_stride = lanes ? bytes * kUnit : bytes;
    uint8_t* scales = part + scale_offset(store.order, at.first(), 0);
    uint8_t* mins = part + min_offset(store.order, at.first(), 0);
    for (int block = 0; block < shape.blocks_a_row; ++block) {
        store_params(params->scale[block], spec.param_dtype, at.tokens(), token_stride, scales + block * block_stride);
        store_params(params->min[block], spec.param_dtype, at.tokens(), token_stride, mins + block * block_stride);
    }
}

// A tile's lines on the token axis: x, and parameters, of the first token that is there. Not inlined: parameters
// are then operands in memory, and do not fight for registers with those of other tiles.
template <int kBits, bool kWhole, class CodesAt>
HWY_INLINE Lines token_tile(const float* HWY_RESTRICT x, int dim, int begin, int tokens, CodesAt codes_at) {
    return build_lines<kBits>([&](int token) {
        const int t = kWhole ? token : token - begin;
        if (!kWhole && (t < 0 || t >= tokens)) return hn::Zero(U32());
        return codes_at(hn::LoadU(F32(), x + static_cast<int64_t>(t) * dim), t);
    });
}

template <int kBits, bool kWhole>
HWY_NOINLINE Lines quick_tile(const float* HWY_RESTRICT x, int dim, const UnitPart& at,
                              const float* HWY_RESTRICT inverse, const float* HWY_RESTRICT min, VU16& fractions) {
    const F32 d;
    VU16 smallest = all_fractions();
    const Lines lines = token_tile<kBits, kWhole>(x, dim, at.begin, at.tokens(), [&](VF y, int t) {
        const VU codes = quick_codes(y, hn::Set(d, inverse[t]), hn::Set(d, min[t]));
        collect_fractions(codes, smallest);
        return codes;
    });
    fractions = smallest;
    return lines;
}

template <int kBits, bool kWhole>
HWY_NOINLINE Lines exact_tile(const float* HWY_RESTRICT x, int dim, const UnitPart& at,
                              const float* HWY_RESTRICT scale, const float* HWY_RESTRICT min) {
    const F32 d;
    return token_tile<kBits, kWhole>(x, dim, at.begin, at.tokens(), [&](VF y, int t) {
        return exact_codes(y, hn::Set(d, scale[t]), hn::Set(d, min[t]), levels_of(kBits));
    });
}

template <int kBits, bool kWhole>
void put_token_tiles(const TensorStore& store, const float* HWY_RESTRICT rows, const UnitPart& at,
                     const TokenParams& params, uint8_t* part, Ahead& ahead) {
    const int dim = store.dim;
    const int channels = group_shape(store.spec, dim).channels;
    TileLines<kBits> lines(dim, at.unit, part);
    if constexpr (!kWhole) lines.narrow(at.begin, at.end);
    for (int block = 0, c = 0; c < dim; ++block) {
        for (const int end = std::min(c + channels, dim); c < end; c += kLanes) {
            ahead.fetch(kLinesATile * kLanes / kUnit);
            VU16 fractions;
            Lines tile =
                quick_tile<kBits, kWhole>(rows + c, dim, at, params.inverse[block], params.min[block], fractions);
            if (!params.quick[block] || !no_near_tie(fractions)) {
                tile = exact_tile<kBits, kWhole>(rows + c, dim, at, params.scale[block], params.min[block]);
            }
            lines.put(c / kUnit, c % kUnit, tile);
        }
    }
}

template <int kBits>
void put_token_tiles(const TensorStore& store, const float* rows, const UnitPart& at, const TokenParams& params,
                     uint8_t* part, Ahead& ahead) {
    if (at.whole()) {
        put_token_tiles<kBits, true>(store, rows, at, params, part, ahead);
    } else {
        put_token_tiles<kBits, false>(store, rows, at, params, part, ahead);
    }
}

void put_token_codes(const TensorStore& store, const float* HWY_RESTRICT rows, const UnitPart& at,
                     const TokenParams& params, uint8_t* part, Ahead& ahead) {
    if (store.order.order == Order::lanes) {
        switch (store.spec.bits) {
            case 2: return put_token_tiles<2>(store, rows, at, params, part, ahead);
            case 3: return put_token_tiles<3>(store, rows, at, params, part, ahead);
            default: return put_token_tiles<4>(store, rows, at, params, part, ahead);
        }
    }
    const F32 d;
    const int dim = store.dim;
    const int channels = group_shape(store.spec, dim).channels;
    HWY_ALIGN uint8_t codes[kUnit * kMaxDim];
    for (int64_t t = 0; t < at.tokens(); ++t) {
        put_bytes(dim, codes + t * dim, [&](int c) {
            const VF scale = hn::Set(d, params.scale[c / channels][t]), min = hn::Set(d, params.min[c / channels][t]);
            return exact_codes(hn::LoadU(d, rows + t * dim + c), scale, min, levels_of(store.spec.bits));
        });
    }
    put_canonical(store, codes, at.first(), at.tokens(), part);
}

void nearest(const TensorStore& store, const float* rows, int first, int count, uint8_t* part, Ahead& ahead) {
    if (store.spec.axis == KIVI_AXIS_CHANNEL) {
        for (int t = 0; t < count; t += store.spec.group) {
            nearest_channel_group(store, rows + static_cast<int64_t>(t) * store.dim, first + t, part, ahead);
        }
        return;
    }
    TokenParams params;
    for (int t = first; t < first + count;) {
        UnitPart at{t / kUnit, t % kUnit, 0};
        at.end = std::min(kUnit, at.begin + first + count - t);
        const float* x = rows + static_cast<int64_t>(t - first) * store.dim;
        token_params(store, x, at, part, &params);
        put_token_codes(store, x, at, params, part, ahead);
        t += at.tokens();
    }
}

// ---- query-aware ----

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
    const auto ab0 = hn::BitCast(d64, hn::InterleaveLower(d, a, b)), ab1 = hn::BitCast(d64, hn::InterleaveUpper(d, a, b));
    const auto ef0 = hn::BitCast(d64, hn::InterleaveLower(d, e, f)), ef1 = hn::BitCast(d64, hn::InterleaveUpper(d, e, f));
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
            for (int j = 0; j < kBlocks; ++j) turn_four(rows + static_cast<int64_t>(t + 4 * j) * dim + c, dim, four[j]);
            HWY_UNROLL(4)
            for (int i = 0; i < 4; ++i) {
                VF in[kBlocks], out[kBlocks];
                for (int j = 0; j < kBlocks; ++j) in[j] = four[j][i];
                turn_blocks(in, out);
                for (int b = 0; b < kBlocks; ++b) hn::Store(out[b], d, turned + static_cast<int64_t>(c + 4 * b + i) * kTokens + t);
            }
        }
    }
}

// The recursion of format/feedback.cpp for one pass. `y` [channel][tokens of the pass] is replaced by codes.
// Errors of a few channels in coding order are passed on together; each later channel still gets one
// fused multiply-add for each of them, in that order. params[v]: of the group that vector v belongs to.
template <int kVectors>
void encode_turned(const Feedback& feedback, int bits, const ChannelParams* const* params, float* HWY_RESTRICT y,
                   Ahead& ahead) {
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
        ahead.fetch(kTokens * kTogether / kUnit * kLinesATile / kUnit);
        VF error[kTogether][kVectors];
        const float* weight[kTogether];  // weight[k][c]: from channel j0 + k to channel c, both in coding order
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
                const VU steps =
                    quick_codes(x[v], hn::Set(d, params[v]->inverse[channel]), hn::Set(d, params[v]->min[channel]));
                // Fed errors lead out of the group's range. NaN becomes no steps, or stays one and is a near tie.
                const VF inside = hn::Min(hn::Max(hn::BitCast(d, steps), no_steps), all_steps);
                codes[v] = hn::BitCast(U32(), inside);
                collect_fractions(codes[v], fractions);
                const VU whole = hn::And(codes[v], hn::Set(U32(), ~0u << kFractionBits));
                value[v] = hn::Sub(hn::BitCast(d, whole), hn::Set(d, 128.0f));
            }
            if (HWY_UNLIKELY(!quick || !no_near_tie(fractions))) {
                for (int v = 0; v < kVectors; ++v) {
                    const VF scale = hn::Set(d, params[v]->scale[channel]), min = hn::Set(d, params[v]->min[channel]);
                    codes[v] = exact_codes(x[v], scale, min, levels);
                    value[v] = hn::ConvertTo(d, hn::BitCast(I32(), hn::ShiftRight<kFractionBits>(codes[v])));
                }
            }
            HWY_UNROLL(4)
            for (int v = 0; v < kVectors; ++v) {
                const VF scale = hn::Set(d, params[v]->scale[channel]), min = hn::Set(d, params[v]->min[channel]);
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
    for (int tile = 0; tile < dim / kUnit; ++tile) {
        for (int lane = 0; lane < kUnit; lane += kLanes) {
            const uint32_t* at = codes + static_cast<int64_t>(tile) * kUnit * tokens + lane;
            lines.put(tile, lane, build_lines<kBits>([&](int c) { return hn::Load(d, at + c * tokens); }));
        }
    }
}

void put_turned(const TensorStore& store, const uint32_t* HWY_RESTRICT codes, int tokens, int first, uint8_t* part) {
    const int dim = store.dim, unit = first / kUnit;
    if (store.order.order == Order::lanes) {
        switch (store.spec.bits) {
            case 2: return put_turned_tiles<2>(dim, codes, tokens, unit, part);
            case 3: return put_turned_tiles<3>(dim, codes, tokens, unit, part);
            default: return put_turned_tiles<4>(dim, codes, tokens, unit, part);
        }
    }
    HWY_ALIGN uint8_t bytes[kUnit * kMaxDim];
    for (int t = 0; t < kUnit; ++t) {
        for (int c = 0; c < dim; ++c) bytes[t * dim + c] = static_cast<uint8_t>(codes[c * tokens + t] >> kFractionBits);
    }
    put_canonical(store, bytes, first, kUnit, part);
}

// Tokens first .. of one pass; groups[i] are the parameters of its i-th group.
template <int kVectors>
void query_aware_pass(const TensorStore& store, const Feedback& feedback, const ChannelParams* groups,
                      const float* rows, int first, float* HWY_RESTRICT y, uint8_t* part, Ahead& ahead) {
    constexpr int kTokens = kVectors * kLanes;
    const ChannelParams* params[kVectors];
    for (int v = 0; v < kVectors; ++v) params[v] = groups + v * kLanes / store.spec.group;
    turn<kTokens>(rows, store.dim, y);
    encode_turned<kVectors>(feedback, store.spec.bits, params, y, ahead);
    for (int unit = 0; unit < kTokens; unit += kUnit) {
        put_turned(store, reinterpret_cast<const uint32_t*>(y) + unit, kTokens, first + unit, part);
    }
}

void query_aware(const TensorStore& store, const Feedback& feedback, const float* rows, int first, int count,
                 uint8_t* part, Ahead& ahead) {
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

const PackKernels* pack_kernels_of_target() {
#if HWY_NATIVE_FMA
    static const PackKernels kernels{nearest, query_aware};
#else
    static const PackKernels kernels{nearest, nullptr};
#endif
    return &kernels;
}

#endif  // HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace kivi::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kivi::cpu {

HWY_EXPORT(pack_kernels_of_target);

const PackKernels* pack_kernels() { return simd::choose(KIVI_SIMD_TARGETS(pack_kernels_of_target))(); }

}  // namespace kivi::cpu
#endif
