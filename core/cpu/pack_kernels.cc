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

// Values that the parameter type holds exactly.
void store_params(const float* x, int32_t param_dtype, int count, int64_t stride, uint8_t* to) {
    if (param_dtype == KIVI_F32) {
        for (int i = 0; i < count; ++i) std::memcpy(to + i * stride, x + i, sizeof(float));
        return;
    }
    HWY_ALIGN uint16_t half[kMaxDim];
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX2  // no conversion to f16
    for (int i = 0; i < count; ++i) half[i] = f32_to_f16(x[i]);
#else
    const F32 d;
    const hn::Rebind<hwy::float16_t, F32> d16;
    for (int i = 0; i < count; i += kLanes) {  // whole vectors: x has room for them
        hn::Store(hn::DemoteTo(d16, hn::LoadU(d, x + i)), d16, reinterpret_cast<hwy::float16_t*>(half + i));
    }
#endif
    if (stride == 2) {
        std::memcpy(to, half, static_cast<size_t>(count) * 2);
    } else {
        for (int i = 0; i < count; ++i) std::memcpy(to + i * stride, half + i, 2);
    }
}

// What to divide by: a group without a scale has infinity, which makes every code 0.
VF divisor_of(VF scale) {
    const F32 d;
    return hn::IfThenElse(hn::Gt(scale, hn::Zero(d)), scale, hn::Inf(d));
}

// Codes of finite y; NaN (only from infinity over infinity) gives 0.
VU codes_of(VF y, VF divisor, VF min, VF levels) {
    const F32 d;
    const VF steps = hn::Div(hn::Sub(y, min), divisor);
    const VF positive = hn::IfThenElseZero(hn::Gt(steps, hn::Zero(d)), steps);
    return hn::BitCast(U32(), hn::NearestInt(hn::Min(positive, levels)));
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

// v | v >> bits, over lanes of two or four bytes... of the width of D.
template <int kBits, class D>
VU8 fold(D d, VU8 v) {
    const auto wide = hn::BitCast(d, v);
    return hn::BitCast(U8(), hn::Or(wide, hn::ShiftRight<kBits>(wide)));
}

// Sixteen codes, one a byte, become the 32-bit lane of one line: half word w, field t = code 2t + w. Both
// folds leave their result in the lowest two bytes of eight; the last step gathers them.
//
//   bytes   c0 c1 c2 c3 c4 c5 c6 c7 | c8 ...      fold 32: c0+c2 c1+c3 ..   c4+c6 c5+c7 ..
//                                                 fold 64: c0+c2+c4+c6  c1+c3+c5+c7
template <int kFold32, int kFold64>
VU8 gather_lane(VU8 codes) {
    const hn::Repartition<uint32_t, U8> d32;
    const hn::Repartition<uint64_t, U8> d64;
    VU8 v = codes;
    if constexpr (kFold32 > 0) v = fold<kFold32>(d32, v);
    v = fold<kFold64>(d64, v);
    HWY_ALIGN static constexpr uint8_t kGather[16] = {0, 8, 1, 9, 2, 10, 3, 11, 0, 8, 1, 9, 2, 10, 3, 11};
    return hn::TableLookupBytes(v, hn::LoadDup128(U8(), kGather));
}

// Channel axis, lanes order: codes [16][dim] of one unit.
template <int kBits>
void put_lanes_unit(int dim, const uint8_t* HWY_RESTRICT codes, int unit, uint8_t* part) {
    const U8 d8;
    const int bytes = static_cast<int>(hn::Lanes(d8));
    const int tiles = dim / kUnit;
    constexpr int kLines = kBits == 4 ? 2 : 1;
    uint8_t* lines = part + static_cast<int64_t>(unit) * tiles * kLines * kLineBytes;
    uint8_t* thirds = part + (static_cast<int64_t>(kPageTokens / kUnit) + unit / 2) * tiles * kLineBytes;
    const int even = unit % 2 == 0;
    HWY_ALIGN uint8_t words[64];
    for (int t = 0; t < kUnit; ++t) {
        for (int c = 0; c < dim; c += bytes) {
            const VU8 v = hn::LoadU(d8, codes + static_cast<int64_t>(t) * dim + c);  // the unit has slack behind
            const int here = std::min(bytes, dim - c) / kUnit;
            uint8_t* line = lines + static_cast<int64_t>(c / kUnit) * kLines * kLineBytes + t * 4;
            if constexpr (kBits == 4) {
                hn::Store(gather_lane<0, 28>(v), d8, words);
                for (int b = 0; b < 2 * here; ++b) std::memcpy(line + b * kLineBytes, words + 16 * (b / 2) + 4 * (b % 2), 4);
            } else {
                hn::Store(gather_lane<14, 28>(hn::And(v, hn::Set(d8, 3))), d8, words);
                for (int b = 0; b < here; ++b) std::memcpy(line + b * kLineBytes, words + 16 * b, 4);
            }
            if constexpr (kBits == 3) {
                const hn::Repartition<uint16_t, U8> d16;
                const VU8 third = hn::And(hn::BitCast(d8, hn::ShiftRight<2>(hn::BitCast(d16, v))), hn::Set(d8, 1));
                hn::Store(gather_lane<15, 28>(third), d8, words);
                uint8_t* at = thirds + static_cast<int64_t>(c / kUnit) * kLineBytes + t * 4;
                for (int b = 0; b < here; ++b) {
                    uint32_t word, old;
                    std::memcpy(&word, words + 16 * b, 4);
                    std::memcpy(&old, at + b * kLineBytes, 4);
                    word = even ? (old & 0x33333333u) | word << 2 : (old & 0xCCCCCCCCu) | word;
                    std::memcpy(at + b * kLineBytes, &word, 4);
                }
            }
        }
    }
}

void put_unit(const TensorStore& store, const uint8_t* codes, int first, int tokens, uint8_t* part) {
    if (store.order.order == Order::canonical) return put_canonical(store, codes, first, tokens, part);
    switch (store.spec.bits) {
        case 2: return put_lanes_unit<2>(store.dim, codes, first / kUnit, part);
        case 3: return put_lanes_unit<3>(store.dim, codes, first / kUnit, part);
        default: return put_lanes_unit<4>(store.dim, codes, first / kUnit, part);
    }
}

// ---- channel axis ----

// Scale and min of every channel of one group of tokens, also stored in the page.
void channel_params(const TensorStore& store, const float* HWY_RESTRICT rows, int first, uint8_t* part,
                    float* HWY_RESTRICT scale, float* HWY_RESTRICT min) {
    const F32 d;
    const int dim = store.dim;
    for (int c = 0; c < dim; c += kLanes) {
        VF low = hn::LoadU(d, rows + c), high = low;
        for (int t = 1; t < store.spec.group; ++t) {
            const VF x = hn::LoadU(d, rows + static_cast<int64_t>(t) * dim + c);
            low = hn::Min(low, x);
            high = hn::Max(high, x);
        }
        const Params params = params_of(store.spec, low, high);
        hn::Store(params.scale, d, scale + c);
        hn::Store(params.min, d, min + c);
    }
    const int64_t bytes = store.spec.param_dtype == KIVI_F32 ? 4 : 2;
    store_params(scale, store.spec.param_dtype, dim, bytes, part + scale_offset(store.order, first, 0));
    store_params(min, store.spec.param_dtype, dim, bytes, part + min_offset(store.order, first, 0));
}

void nearest_channel_group(const TensorStore& store, const float* HWY_RESTRICT rows, int first, uint8_t* part) {
    const F32 d;
    const int dim = store.dim;
    HWY_ALIGN float scale[kMaxDim], min[kMaxDim];
    HWY_ALIGN uint8_t codes[kUnit * kMaxDim + kLineBytes];
    channel_params(store, rows, first, part, scale, min);
    const VF levels = hn::Set(d, static_cast<float>((1 << store.spec.bits) - 1));
    const hn::Rebind<uint8_t, F32> d8;
    for (int unit = 0; unit < store.spec.group; unit += kUnit) {
        for (int c = 0; c < dim; c += kLanes) {
            const VF divisor = divisor_of(hn::Load(d, scale + c)), low = hn::Load(d, min + c);
            for (int t = 0; t < kUnit; ++t) {
                const VF x = hn::LoadU(d, rows + static_cast<int64_t>(unit + t) * dim + c);
                hn::StoreU(hn::U8FromU32(codes_of(x, divisor, low, levels)), d8,
                           codes + static_cast<int64_t>(t) * dim + c);
            }
        }
        put_unit(store, codes, first + unit, kUnit, part);
    }
}

// ---- token axis ----

// Lane i of each 128-bit block = op over that block of x[i].
template <class Op>
VF reduce_blocks(const VF* x, Op op) {
    const F32 d;
    const hn::Repartition<uint64_t, F32> d64;
    const auto pair = [&](VF a, VF b) { return op(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)); };
    const auto ab = hn::BitCast(d64, pair(x[0], x[1])), cd = hn::BitCast(d64, pair(x[2], x[3]));
    VF r = op(hn::BitCast(d, hn::InterleaveLower(d64, ab, cd)), hn::BitCast(d, hn::InterleaveUpper(d64, ab, cd)));
#if HWY_TARGET <= HWY_AVX2
    if constexpr (kLanes >= 8) r = op(r, hn::SwapAdjacentBlocks(r));
    if constexpr (kLanes >= 16) r = op(r, hn::ConcatLowerUpper(d, r, r));
#endif
    return r;
}

// Extremes of one block of channels for `tokens` tokens. low and high have room for 16 tokens and a vector.
void token_extremes(const float* HWY_RESTRICT rows, int dim, int channel, int channels, int tokens,
                    float* HWY_RESTRICT low, float* HWY_RESTRICT high) {
    const F32 d;
    for (int t = 0; t < tokens; t += 4) {
        VF lows[4], highs[4];
        for (int i = 0; i < 4; ++i) {
            const float* x = rows + static_cast<int64_t>(std::min(t + i, tokens - 1)) * dim + channel;
            lows[i] = highs[i] = hn::LoadU(d, x);
            for (int c = kLanes; c < channels; c += kLanes) {
                const VF v = hn::LoadU(d, x + c);
                lows[i] = hn::Min(lows[i], v);
                highs[i] = hn::Max(highs[i], v);
            }
        }
        hn::StoreU(reduce_blocks(lows, [](VF a, VF b) { return hn::Min(a, b); }), d, low + t);
        hn::StoreU(reduce_blocks(highs, [](VF a, VF b) { return hn::Max(a, b); }), d, high + t);
    }
}

// Tokens begin .. end - 1 of the unit that starts at page token 16 * unit.
struct UnitPart {
    int unit, begin, end;

    int first() const { return unit * kUnit + begin; }
    int tokens() const { return end - begin; }
    bool whole() const { return tokens() == kUnit; }
};

// Divisors and mins of the tokens of a UnitPart, counted from its begin; one row for each block of channels.
struct TokenParams {
    HWY_ALIGN float divisor[kMaxBlocks][2 * kUnit];
    HWY_ALIGN float min[kMaxBlocks][2 * kUnit];
};

void token_params(const TensorStore& store, const float* rows, const UnitPart& at, uint8_t* part,
                  TokenParams* params) {
    const F32 d;
    const kivi_spec& spec = store.spec;
    const GroupShape shape = group_shape(spec, store.dim);
    const int64_t bytes = spec.param_dtype == KIVI_F32 ? 4 : 2;
    const int64_t stride = store.order.order == Order::lanes ? bytes : bytes * shape.blocks_a_row;
    for (int block = 0; block < shape.blocks_a_row; ++block) {
        const int channel = block * shape.channels;
        HWY_ALIGN float low[2 * kUnit] = {}, high[2 * kUnit] = {}, scale[2 * kUnit], min[2 * kUnit];
        token_extremes(rows, store.dim, channel, group_channels(shape, store.dim, block), at.tokens(), low, high);
        for (int t = 0; t < kUnit; t += kLanes) {
            const Params of = params_of(spec, hn::Load(d, low + t), hn::Load(d, high + t));
            hn::Store(of.scale, d, scale + t);
            hn::Store(of.min, d, min + t);
            hn::StoreU(divisor_of(of.scale), d, params->divisor[block] + t);
            hn::StoreU(of.min, d, params->min[block] + t);
        }
        store_params(scale, spec.param_dtype, at.tokens(), stride,
                     part + scale_offset(store.order, at.first(), channel));
        store_params(min, spec.param_dtype, at.tokens(), stride, part + min_offset(store.order, at.first(), channel));
    }
}

// One lane of a tile is built from its highest field down: half word 1, then half word 0, t = 7 .. 0.
constexpr int inner_of_step(int step) { return step < 8 ? 15 - 2 * step : 14 - 2 * (step - 8); }

// The lanes of one tile line, or two: at 3 bits the second holds the third bits as an odd unit has them.
struct Lines {
    VU first, second;
};

// code_at(i): codes of inner element i, one a lane.
template <int kBits, class CodeAt>
HWY_INLINE Lines build_lines(CodeAt code_at) {
    const U32 d;
    Lines lines{hn::Zero(d), hn::Zero(d)};
    HWY_UNROLL(16)
    for (int step = 0; step < kUnit; ++step) {
        const int inner = inner_of_step(step);
        const bool odd = inner / 2 % 2 == 1;
        const VU code = code_at(inner);
        if constexpr (kBits == 4) {
            VU& line = odd ? lines.second : lines.first;
            line = hn::Or(hn::ShiftLeft<4>(line), code);
        } else if constexpr (kBits == 2) {
            lines.first = hn::Or(hn::ShiftLeft<2>(lines.first), code);
        } else {
            lines.first = hn::Or(hn::ShiftLeft<2>(lines.first), hn::And(code, hn::Set(d, 3)));
            const VU room = odd ? hn::ShiftLeft<3>(lines.second) : hn::ShiftLeft<1>(lines.second);
            lines.second = hn::Or(room, hn::ShiftRight<2>(code));
        }
    }
    return lines;
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
            write(second_ + at, even_ ? hn::ShiftLeft<2>(lines.second) : lines.second, second_mask_);
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

template <int kBits, bool kWhole>
void put_token_tiles(const TensorStore& store, const float* HWY_RESTRICT rows, const UnitPart& at,
                     const TokenParams& params, uint8_t* part) {
    const F32 d;
    const int dim = store.dim;
    const int channels = group_shape(store.spec, dim).channels;
    const VF levels = hn::Set(d, static_cast<float>((1 << kBits) - 1));
    TileLines<kBits> lines(dim, at.unit, part);
    if constexpr (!kWhole) lines.narrow(at.begin, at.end);
    for (int c = 0; c < dim; c += kLanes) {
        const float* divisor = params.divisor[c / channels];
        const float* min = params.min[c / channels];
        lines.put(c / kUnit, c % kUnit, build_lines<kBits>([&](int token) {
            const int t = kWhole ? token : token - at.begin;
            if (!kWhole && (t < 0 || t >= at.tokens())) return hn::Zero(U32());
            const VF x = hn::LoadU(d, rows + static_cast<int64_t>(t) * dim + c);
            return codes_of(x, hn::Set(d, divisor[t]), hn::Set(d, min[t]), levels);
        }));
    }
}

template <int kBits>
void put_token_tiles(const TensorStore& store, const float* rows, const UnitPart& at, const TokenParams& params,
                     uint8_t* part) {
    if (at.whole()) {
        put_token_tiles<kBits, true>(store, rows, at, params, part);
    } else {
        put_token_tiles<kBits, false>(store, rows, at, params, part);
    }
}

void put_token_codes(const TensorStore& store, const float* HWY_RESTRICT rows, const UnitPart& at,
                     const TokenParams& params, uint8_t* part) {
    if (store.order.order == Order::lanes) {
        switch (store.spec.bits) {
            case 2: return put_token_tiles<2>(store, rows, at, params, part);
            case 3: return put_token_tiles<3>(store, rows, at, params, part);
            default: return put_token_tiles<4>(store, rows, at, params, part);
        }
    }
    const F32 d;
    const hn::Rebind<uint8_t, F32> d8;
    const int dim = store.dim;
    const int channels = group_shape(store.spec, dim).channels;
    const VF levels = hn::Set(d, static_cast<float>((1 << store.spec.bits) - 1));
    HWY_ALIGN uint8_t codes[kUnit * kMaxDim];
    for (int t = 0; t < at.tokens(); ++t) {
        for (int c = 0; c < dim; c += kLanes) {
            const int64_t i = static_cast<int64_t>(t) * dim + c;
            const VF divisor = hn::Set(d, params.divisor[c / channels][t]);
            const VF min = hn::Set(d, params.min[c / channels][t]);
            hn::StoreU(hn::U8FromU32(codes_of(hn::LoadU(d, rows + i), divisor, min, levels)), d8, codes + i);
        }
    }
    put_canonical(store, codes, at.first(), at.tokens(), part);
}

void nearest(const TensorStore& store, const float* rows, int first, int count, uint8_t* part) {
    if (store.spec.axis == KIVI_AXIS_CHANNEL) {
        for (int t = 0; t < count; t += store.spec.group) {
            nearest_channel_group(store, rows + static_cast<int64_t>(t) * store.dim, first + t, part);
        }
        return;
    }
    TokenParams params;
    for (int t = first; t < first + count;) {
        UnitPart at{t / kUnit, t % kUnit, 0};
        at.end = std::min(kUnit, at.begin + first + count - t);
        const float* x = rows + static_cast<int64_t>(t - first) * store.dim;
        token_params(store, x, at, part, &params);
        put_token_codes(store, x, at, params, part);
        t += at.tokens();
    }
}

// ---- query-aware ----

#if HWY_NATIVE_FMA

constexpr int kVectors = 2;                // of tokens that share every weight
constexpr int kTokens = kVectors * kLanes < kUnit ? kUnit : kVectors * kLanes;
constexpr int kChannels = kLanes == 16 ? 8 : 4;  // whose errors are passed on together

// turned[channel][token] = rows[token][channel], four by four.
void turn(const float* HWY_RESTRICT rows, int dim, float* HWY_RESTRICT turned) {
    const F32 d;
    const hn::Repartition<uint64_t, F32> d64;
    HWY_ALIGN float out[4][kLanes];
    for (int t = 0; t < kTokens; t += 4) {
        for (int c = 0; c < dim; c += kLanes) {
            const float* x = rows + static_cast<int64_t>(t) * dim + c;
            const VF a = hn::LoadU(d, x), b = hn::LoadU(d, x + dim);
            const VF e = hn::LoadU(d, x + 2 * dim), f = hn::LoadU(d, x + 3 * dim);
            const auto ab0 = hn::BitCast(d64, hn::InterleaveLower(d, a, b));
            const auto ab1 = hn::BitCast(d64, hn::InterleaveUpper(d, a, b));
            const auto ef0 = hn::BitCast(d64, hn::InterleaveLower(d, e, f));
            const auto ef1 = hn::BitCast(d64, hn::InterleaveUpper(d, e, f));
            hn::Store(hn::BitCast(d, hn::InterleaveLower(d64, ab0, ef0)), d, out[0]);
            hn::Store(hn::BitCast(d, hn::InterleaveUpper(d64, ab0, ef0)), d, out[1]);
            hn::Store(hn::BitCast(d, hn::InterleaveLower(d64, ab1, ef1)), d, out[2]);
            hn::Store(hn::BitCast(d, hn::InterleaveUpper(d64, ab1, ef1)), d, out[3]);
            for (int i = 0; i < kLanes; ++i) {  // four tokens of channel c + i
                std::memcpy(turned + static_cast<int64_t>(c + i) * kTokens + t, out[i % 4] + i / 4 * 4, 16);
            }
        }
    }
}

// The recursion of format/feedback.cpp for kVectors vectors of tokens. `y` [channel][kTokens] is replaced by
// codes (as integers). Errors of a few channels in coding order are passed on together; each later channel
// still gets one fused multiply-add for each of them, in that order.
void encode_turned(const Feedback& feedback, int bits, const float* HWY_RESTRICT scale,
                   const float* HWY_RESTRICT min, float* HWY_RESTRICT y) {
    const F32 d;
    const I32 di;
    const int dim = feedback.dim;
    const uint16_t* order = feedback.order.data();
    const VF levels = hn::Set(d, static_cast<float>((1 << bits) - 1));
    for (int j0 = 0; j0 < dim; j0 += kChannels) {
        VF error[kChannels][kVectors];
        const float* weight[kChannels];  // weight[k][c]: from channel j0 + k to channel c, both in coding order
        for (int k = 0; k < kChannels; ++k) {
            const int j = j0 + k, channel = order[j];
            weight[k] = feedback.weights.data() + feedback_row(dim, j) - (j + 1);
            const VF step = hn::Set(d, scale[channel]), low = hn::Set(d, min[channel]);
            const VF divisor = divisor_of(step);
            for (int v = 0; v < kVectors; ++v) {
                float* at = y + static_cast<int64_t>(channel) * kTokens + v * kLanes;
                VF x = hn::Load(d, at);
                for (int i = 0; i < k; ++i) x = hn::NegMulAdd(error[i][v], hn::Set(d, weight[i][j]), x);
                const VU code = codes_of(x, divisor, low, levels);
                const VF value = hn::MulAdd(hn::ConvertTo(d, hn::BitCast(di, code)), step, low);
                error[k][v] = hn::Sub(x, value);
                hn::Store(hn::BitCast(d, code), d, at);
            }
        }
        for (int c = j0 + kChannels; c < dim; ++c) {
            float* at = y + static_cast<int64_t>(order[c]) * kTokens;
            VF x[kVectors];
            for (int v = 0; v < kVectors; ++v) x[v] = hn::Load(d, at + v * kLanes);
            for (int k = 0; k < kChannels; ++k) {
                const VF w = hn::Set(d, weight[k][c]);
                for (int v = 0; v < kVectors; ++v) x[v] = hn::NegMulAdd(error[k][v], w, x[v]);
            }
            for (int v = 0; v < kVectors; ++v) hn::Store(x[v], d, at + v * kLanes);
        }
    }
}

template <int kBits>
void put_turned_tiles(int dim, const uint32_t* HWY_RESTRICT codes, int unit, uint8_t* part) {
    const U32 d;
    const TileLines<kBits> lines(dim, unit, part);
    for (int tile = 0; tile < dim / kUnit; ++tile) {
        for (int lane = 0; lane < kUnit; lane += kLanes) {
            const uint32_t* at = codes + static_cast<int64_t>(tile) * kUnit * kTokens + lane;
            lines.put(tile, lane, build_lines<kBits>([&](int c) { return hn::Load(d, at + c * kTokens); }));
        }
    }
}

// Codes [channel][kTokens], of which one unit is put.
void put_turned(const TensorStore& store, const uint32_t* HWY_RESTRICT codes, int first, uint8_t* part) {
    const int dim = store.dim, unit = first / kUnit;
    if (store.order.order == Order::lanes) {
        switch (store.spec.bits) {
            case 2: return put_turned_tiles<2>(dim, codes, unit, part);
            case 3: return put_turned_tiles<3>(dim, codes, unit, part);
            default: return put_turned_tiles<4>(dim, codes, unit, part);
        }
    }
    HWY_ALIGN uint8_t bytes[kUnit * kMaxDim];
    for (int t = 0; t < kUnit; ++t) {
        for (int c = 0; c < dim; ++c) {
            bytes[static_cast<int64_t>(t) * dim + c] = static_cast<uint8_t>(codes[static_cast<int64_t>(c) * kTokens + t]);
        }
    }
    put_canonical(store, bytes, first, kUnit, part);
}

void query_aware(const TensorStore& store, const Feedback& feedback, const float* rows, int first, int count,
                 uint8_t* part) {
    const int dim = store.dim, group = store.spec.group;
    HWY_ALIGN float scale[kMaxDim], min[kMaxDim];
    HWY_ALIGN float y[kMaxDim * kTokens];
    for (int begin = 0; begin < count; begin += group) {
        channel_params(store, rows + static_cast<int64_t>(begin) * dim, first + begin, part, scale, min);
        for (int t = begin; t < begin + group; t += kTokens) {
            turn(rows + static_cast<int64_t>(t) * dim, dim, y);
            for (int v = 0; v < kTokens; v += kVectors * kLanes) {
                encode_turned(feedback, store.spec.bits, scale, min, y + v);
            }
            for (int unit = 0; unit < kTokens; unit += kUnit) {
                put_turned(store, reinterpret_cast<const uint32_t*>(y) + unit, first + t + unit, part);
            }
        }
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
