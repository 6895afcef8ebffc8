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

// Codes as integers, and the same numbers in fp32.
struct Codes {
    VU code;
    VF value;
};

// Round half to even of numbers from 0 to 255: where the unit in the last place is 1, addition rounds so.
Codes round_steps(VF steps) {
    const F32 d;
    const U32 du;
    const VF ones = hn::Set(d, 0x1p23f);
    const VF sum = hn::Add(steps, ones);
    return {hn::Xor(hn::BitCast(du, sum), hn::BitCast(du, ones)), hn::Sub(sum, ones)};
}

// Codes by the definition: IEEE division. A scale of 0 has infinity for a divisor, which makes every code 0;
// NaN (only from infinity over infinity) gives 0 too.
Codes exact_codes(VF y, VF scale, VF min, VF levels) {
    const F32 d;
    const VF divisor = hn::IfThenElse(hn::Gt(scale, hn::Zero(d)), scale, hn::Inf(d));
    const VF steps = hn::Div(hn::Sub(y, min), divisor);
    const VF positive = hn::IfThenElseZero(hn::Gt(steps, hn::Zero(d)), steps);
    return round_steps(hn::Min(positive, levels));
}

// Codes by multiplication with the inverse. Product and quotient differ by less than 3 units in the last place,
// so they round to the same code unless they come that near to a tie. `farthest` collects the largest distance
// from a code (NaN counts as 0 steps where Max drops it, as it should); beyond nearest_tie exact codes are needed.
Codes quick_codes(VF y, VF inverse, VF min, VF levels, VF& farthest) {
    const F32 d;
    const VF steps = hn::Mul(hn::Sub(y, min), inverse);
    const VF inside = hn::Min(hn::Max(steps, hn::Zero(d)), levels);
    const Codes codes = round_steps(inside);
    farthest = hn::Max(farthest, hn::Abs(hn::Sub(inside, codes.value)));
    return codes;
}

// Four units in the last place of `levels` steps away from the tie.
VF nearest_tie(VF levels) {
    const F32 d;
    return hn::Sub(hn::Set(d, 0.5f), hn::Mul(levels, hn::Set(d, 0x1p-22f)));
}

bool no_near_tie(VF farthest, VF levels) {
    return hn::AllTrue(F32(), hn::Le(farthest, nearest_tie(levels)));
}

VF inverse_of(VF scale) {
    const F32 d;
    return hn::IfThenElseZero(hn::Gt(scale, hn::Zero(d)), hn::Div(hn::Set(d, 1.0f), scale));
}

// Scales whose inverse is a normal number, or 0.
bool have_inverses(VF scale) {
    const F32 d;
    return hn::AllTrue(d, hn::Or(hn::Ge(scale, hn::Set(d, 0x1p-100f)), hn::Eq(scale, hn::Zero(d))));
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

// Sixteen codes, one a byte, become the 32-bit lane of one line: half word w, field t = code 2t + w. Both
// folds leave their result in the lowest two bytes of eight; the look-up gathers them.
//
//   bytes   c0 c1 c2 c3 c4 c5 c6 c7 | c8 ...      fold 32: c0+c2 c1+c3 ..   c4+c6 c5+c7 ..
//                                                 fold 64: c0+c2+c4+c6  c1+c3+c5+c7
template <int kFold32, int kFold64>
VU8 fold(VU8 codes) {
    const U8 d8;
    VU8 v = codes;
    if constexpr (kFold32 > 0) {
        const auto wide = hn::BitCast(hn::Repartition<uint32_t, U8>(), v);
        v = hn::BitCast(d8, hn::Or(wide, hn::ShiftRight<kFold32>(wide)));
    }
    const auto wide = hn::BitCast(hn::Repartition<uint64_t, U8>(), v);
    return hn::BitCast(d8, hn::Or(wide, hn::ShiftRight<kFold64>(wide)));
}

// The lanes of four tokens side by side in each 16 bytes: bytes kByte, kByte + 8, kByte + 1, kByte + 9 of each.
template <int kByte>
VU8 four_lanes(const VU8* folded) {
    const U8 d8;
    VU8 lanes = hn::Zero(d8);
    for (int token = 0; token < 4; ++token) {
        HWY_ALIGN uint8_t from[16];
        for (int i = 0; i < 16; ++i) {
            from[i] = i / 4 == token ? static_cast<uint8_t>(kByte + i % 4 / 2 + i % 2 * 8) : uint8_t{0x80};
        }
        lanes = hn::Or(lanes, hn::TableLookupBytesOr0(folded[token], hn::LoadDup128(d8, from)));
    }
    return lanes;
}

// Each 16 bytes to the line of a tile; bits outside `mask` stay.
void put_lanes(VU8 lanes, int tiles, int64_t stride, uint32_t mask, uint8_t* to) {
    const U8 d8;
    const hn::CappedTag<uint32_t, 4> d4;
    HWY_ALIGN uint8_t blocks[64];
    hn::Store(lanes, d8, blocks);
    for (int tile = 0; tile < tiles; ++tile, to += stride) {
        auto v = hn::Load(d4, reinterpret_cast<const uint32_t*>(blocks + 16 * tile));
        uint32_t* at = reinterpret_cast<uint32_t*>(to);
        if (mask != ~0u) v = hn::Or(v, hn::AndNot(hn::Set(d4, mask), hn::LoadU(d4, at)));
        hn::StoreU(v, d4, at);
    }
}

// Channel axis, lanes order: codes [16][dim] of one unit.
template <int kBits>
void put_lanes_unit(int dim, const uint8_t* HWY_RESTRICT codes, int unit, uint8_t* part) {
    const U8 d8;
    const int bytes = static_cast<int>(hn::Lanes(d8));
    const int tiles = dim / kUnit;
    constexpr int64_t kTileBytes = (kBits == 4 ? 2 : 1) * kLineBytes;
    uint8_t* lines = part + unit * tiles * kTileBytes;
    uint8_t* thirds = part + (static_cast<int64_t>(kPageTokens / kUnit) + unit / 2) * tiles * kLineBytes;
    for (int t = 0; t < kUnit; t += 4) {
        for (int c = 0; c < dim; c += bytes) {
            const int here = std::min(bytes, dim - c) / kUnit;
            uint8_t* line = lines + c / kUnit * kTileBytes + t * 4;
            VU8 folded[4], third[4];
            for (int i = 0; i < 4; ++i) {
                const VU8 v = hn::LoadU(d8, codes + static_cast<int64_t>(t + i) * dim + c);  // slack behind the unit
                if constexpr (kBits == 4) folded[i] = fold<0, 28>(v);
                if constexpr (kBits < 4) folded[i] = fold<14, 28>(hn::And(v, hn::Set(d8, 3)));
                if constexpr (kBits == 3) {
                    const auto pairs = hn::BitCast(hn::Repartition<uint16_t, U8>(), v);
                    third[i] = fold<15, 28>(hn::And(hn::BitCast(d8, hn::ShiftRight<2>(pairs)), hn::Set(d8, 1)));
                }
            }
            put_lanes(four_lanes<0>(folded), here, kTileBytes, ~0u, line);
            if constexpr (kBits == 4) put_lanes(four_lanes<2>(folded), here, kTileBytes, ~0u, line + kLineBytes);
            if constexpr (kBits == 3) {
                const hn::Repartition<uint32_t, U8> d32;
                VU8 lanes = four_lanes<0>(third);
                const bool even = unit % 2 == 0;
                if (even) lanes = hn::BitCast(d8, hn::ShiftLeft<2>(hn::BitCast(d32, lanes)));
                put_lanes(lanes, here, kLineBytes, even ? 0xCCCCCCCCu : 0x33333333u,
                          thirds + c / kUnit * kLineBytes + t * 4);
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
            const VF step = hn::Load(d, scale + c), low = hn::Load(d, min + c), inverse = inverse_of(step);
            const float* x = rows + static_cast<int64_t>(unit) * dim + c;
            VF farthest = hn::Zero(d);
            for (int t = 0; t < kUnit; ++t) {
                const VU code = quick_codes(hn::LoadU(d, x + static_cast<int64_t>(t) * dim), inverse, low, levels, farthest).code;
                hn::StoreU(hn::U8FromU32(code), d8, codes + static_cast<int64_t>(t) * dim + c);
            }
            if (have_inverses(step) && no_near_tie(farthest, levels)) continue;
            for (int t = 0; t < kUnit; ++t) {
                const VU code = exact_codes(hn::LoadU(d, x + static_cast<int64_t>(t) * dim), step, low, levels).code;
                hn::StoreU(hn::U8FromU32(code), d8, codes + static_cast<int64_t>(t) * dim + c);
            }
        }
        put_unit(store, codes, first + unit, kUnit, part);
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
    bool inverses[kMaxBlocks];  // every scale has one
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
        float* scale = params->scale[block];
        float* min = params->min[block];
        const int channels = group_channels(shape, store.dim, block);
        params->inverses[block] = true;
        for (int t = 0; t < kUnit; t += kLanes) {
            const Extremes extremes = token_extremes(rows + channel, store.dim, channels, t, at.tokens());
            const Params of = params_of(spec, extremes.low, extremes.high);
            hn::Store(of.scale, d, scale + t);
            hn::Store(of.min, d, min + t);
            hn::Store(inverse_of(of.scale), d, params->inverse[block] + t);
            params->inverses[block] = params->inverses[block] && have_inverses(of.scale);
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
                              const float* HWY_RESTRICT inverse, const float* HWY_RESTRICT min, VF& farthest) {
    const F32 d;
    const VF levels = hn::Set(d, static_cast<float>((1 << kBits) - 1));
    VF far = hn::Zero(d);
    const Lines lines = token_tile<kBits, kWhole>(x, dim, at.begin, at.tokens(), [&](VF y, int t) {
        return quick_codes(y, hn::Set(d, inverse[t]), hn::Set(d, min[t]), levels, far).code;
    });
    farthest = far;
    return lines;
}

template <int kBits, bool kWhole>
HWY_NOINLINE Lines exact_tile(const float* HWY_RESTRICT x, int dim, const UnitPart& at,
                              const float* HWY_RESTRICT scale, const float* HWY_RESTRICT min) {
    const F32 d;
    const VF levels = hn::Set(d, static_cast<float>((1 << kBits) - 1));
    return token_tile<kBits, kWhole>(x, dim, at.begin, at.tokens(), [&](VF y, int t) {
        return exact_codes(y, hn::Set(d, scale[t]), hn::Set(d, min[t]), levels).code;
    });
}

template <int kBits, bool kWhole>
void put_token_tiles(const TensorStore& store, const float* HWY_RESTRICT rows, const UnitPart& at,
                     const TokenParams& params, uint8_t* part) {
    const int dim = store.dim;
    const int channels = group_shape(store.spec, dim).channels;
    const VF levels = hn::Set(F32(), static_cast<float>((1 << kBits) - 1));
    TileLines<kBits> lines(dim, at.unit, part);
    if constexpr (!kWhole) lines.narrow(at.begin, at.end);
    for (int block = 0, c = 0; c < dim; ++block) {
        for (const int end = std::min(c + channels, dim); c < end; c += kLanes) {
            VF farthest;
            Lines tile =
                quick_tile<kBits, kWhole>(rows + c, dim, at, params.inverse[block], params.min[block], farthest);
            if (!params.inverses[block] || !no_near_tie(farthest, levels)) {
                tile = exact_tile<kBits, kWhole>(rows + c, dim, at, params.scale[block], params.min[block]);
            }
            lines.put(c / kUnit, c % kUnit, tile);
        }
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
            const VF scale = hn::Set(d, params.scale[c / channels][t]);
            const VF min = hn::Set(d, params.min[c / channels][t]);
            hn::StoreU(hn::U8FromU32(exact_codes(hn::LoadU(d, rows + i), scale, min, levels).code), d8, codes + i);
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

// A pass takes kVectors vectors of tokens together, and passes the errors of kChannels channels on together:
// as much as the registers hold.
constexpr int kShortPass = kLanes == 4 ? 4 : 2;  // vectors
constexpr int kLongPass = kLanes == 16 ? 4 : kShortPass;
constexpr int kMaxTurned = kMaxDim * kShortPass * kLanes;
template <int kVectors>
constexpr int kChannels = kLanes == 16 && kVectors == 2 ? 8 : 4;

// turned[channel][token] = rows[token][channel], four by four.
template <int kTokens>
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

// Parameters of a group's channels.
struct ChannelParams {
    HWY_ALIGN float scale[kMaxDim];
    HWY_ALIGN float inverse[kMaxDim];
    HWY_ALIGN float min[kMaxDim];
    bool inverses;  // every scale has one

    void invert(int dim) {
        const F32 d;
        inverses = true;
        for (int c = 0; c < dim; c += kLanes) {
            const VF step = hn::Load(d, scale + c);
            hn::Store(inverse_of(step), d, inverse + c);
            inverses = inverses && have_inverses(step);
        }
    }
};

// The recursion of format/feedback.cpp for one pass. `y` [channel][tokens of the pass] is replaced by codes (as
// integers). Errors of a few channels in coding order are passed on together; each later channel still gets one
// fused multiply-add for each of them, in that order. params[v]: of the group that vector v belongs to.
template <int kVectors>
void encode_turned(const Feedback& feedback, int bits, const ChannelParams* const* params, float* HWY_RESTRICT y) {
    const F32 d;
    constexpr int kTogether = kChannels<kVectors>;
    constexpr int kTokens = kVectors * kLanes;
    const int dim = feedback.dim;
    const uint16_t* order = feedback.order.data();
    const VF levels = hn::Set(d, static_cast<float>((1 << bits) - 1));
    bool inverses = true;
    for (int v = 0; v < kVectors; ++v) inverses = inverses && params[v]->inverses;
    for (int j0 = 0; j0 < dim; j0 += kTogether) {
        VF error[kTogether][kVectors];
        const float* weight[kTogether];  // weight[k][c]: from channel j0 + k to channel c, both in coding order
        HWY_UNROLL(8)
        for (int k = 0; k < kTogether; ++k) {
            const int j = j0 + k, channel = order[j];
            weight[k] = feedback.weights.data() + feedback_row(dim, j) - (j + 1);
            HWY_UNROLL(4)
            for (int v = 0; v < kVectors; ++v) {
                const VF scale = hn::Set(d, params[v]->scale[channel]), min = hn::Set(d, params[v]->min[channel]);
                float* at = y + static_cast<int64_t>(channel) * kTokens + v * kLanes;
                VF x = hn::Load(d, at);
                HWY_UNROLL(8)
                for (int i = 0; i < k; ++i) x = hn::NegMulAdd(error[i][v], hn::Set(d, weight[i][j]), x);
                VF farthest = hn::Zero(d);
                Codes codes = quick_codes(x, hn::Set(d, params[v]->inverse[channel]), min, levels, farthest);
                if (HWY_UNLIKELY(!inverses || !no_near_tie(farthest, levels))) {
                    codes = exact_codes(x, scale, min, levels);
                }
                error[k][v] = hn::Sub(x, hn::MulAdd(codes.value, scale, min));
                hn::Store(hn::BitCast(d, codes.code), d, at);
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
        for (int c = 0; c < dim; ++c) bytes[t * dim + c] = static_cast<uint8_t>(codes[c * tokens + t]);
    }
    put_canonical(store, bytes, first, kUnit, part);
}

// Tokens first .. of one pass; groups[i] are the parameters of its i-th group.
template <int kVectors>
void query_aware_pass(const TensorStore& store, const Feedback& feedback, const ChannelParams* groups,
                      const float* rows, int first, float* HWY_RESTRICT y, uint8_t* part) {
    constexpr int kTokens = kVectors * kLanes;
    const ChannelParams* params[kVectors];
    for (int v = 0; v < kVectors; ++v) params[v] = groups + v * kLanes / store.spec.group;
    turn<kTokens>(rows, store.dim, y);
    encode_turned<kVectors>(feedback, store.spec.bits, params, y);
    for (int unit = 0; unit < kTokens; unit += kUnit) {
        put_turned(store, reinterpret_cast<const uint32_t*>(y) + unit, kTokens, first + unit, part);
    }
}

void query_aware(const TensorStore& store, const Feedback& feedback, const float* rows, int first, int count,
                 uint8_t* part) {
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
            channel_params(store, x + static_cast<int64_t>(begin) * dim, first + t + begin, part, at.scale, at.min);
            at.invert(dim);
        }
        if (is_long) {
            query_aware_pass<kLongPass>(store, feedback, groups, x, first + t, y, part);
        } else {
            query_aware_pass<kShortPass>(store, feedback, groups, x, first + t, y, part);
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
