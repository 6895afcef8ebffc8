// Packing along the channel axis (keys): groups of tokens, each channel with parameters of its own. Lanes are
// channels; a tile's codes are turned to lanes of tokens in registers.
#if defined(KIVI_CPU_PACK_CHANNEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_PACK_CHANNEL_INL_H_
#undef KIVI_CPU_PACK_CHANNEL_INL_H_
#else
#define KIVI_CPU_PACK_CHANNEL_INL_H_
#endif

#include <algorithm>

#include "cpu/pack_lines-inl.h"

#if HWY_TARGET != HWY_SCALAR  // see write_kernels.h: processors without vectors take the plain path
HWY_BEFORE_NAMESPACE();
namespace kivi::cpu::HWY_NAMESPACE {
namespace {

// Parameters of the channels of one group of tokens.
struct ChannelParams {
    HWY_ALIGN float scale[kMaxDim];
    HWY_ALIGN float inverse[kMaxDim];
    HWY_ALIGN float min[kMaxDim];
    bool inverses;                // every scale has one
    bool quick[kMaxDim / kTile];  // for the channels of a tile quick_codes serve
};

// Computed from the group's rows, and stored in the page.
void channel_params(const TensorStore& store, const float* HWY_RESTRICT rows, int first, uint8_t* part,
                    ChannelParams* params) {
    const F32 d;
    const int dim = store.dim;
    const VF levels = levels_of(store.spec.bits);
    params->inverses = true;
    std::fill_n(params->quick, dim / kTile, true);
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
        params->quick[c / kTile] &= quick_codes_serve(low, high, of.scale, inverse, of.min, levels);
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
    const VU turned =
        hn::BitCast(d, hn::TableLookupBytes(hn::BitCast(d8, tokens), hn::LoadDup128(d8, kTurn)));
    // Four channels a 16 bytes, so block j of the tile is shifted by the lane number without its lowest bits.
    const VU place = hn::And(hn::Iota(d, static_cast<uint32_t>(channel % kTile)), hn::Set(d, ~3u));
    const auto field = [&](VU x, uint32_t mask) { return hn::Shl(hn::And(x, hn::Set(d, mask)), place); };
    if constexpr (kBits == 4) {
        return {field(turned, 0x000F000F), field(hn::ShiftRight<8>(turned), 0x000F000F)};
    }
    const VU two = kBits == 2 ? turned : hn::And(turned, hn::Set(d, 0x03030303));
    const VU third = hn::And(turned, hn::Set(d, 0x04040404));
    return {field(hn::Or(two, hn::ShiftRight<6>(two)), 0x000F000F),
            field(hn::Or(third, hn::ShiftRight<7>(third)), 0x000C000C)};
}

// merged[i] = all blocks of 16 bytes of x[i] together.
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
    const int begin = tile * kTile;
    const auto lines_of = [&](int token, int c) HWY_ATTR {
        VU codes[4];
        HWY_UNROLL(4)
        for (int t = 0; t < 4; ++t) {
            codes[t] = codes_at(hn::LoadU(F32(), rows + static_cast<int64_t>(token + t) * dim + c), c);
        }
        return four_token_lines<kBits>(codes, c);
    };
    VU first[4], second[4];
    HWY_UNROLL(4)
    for (int i = 0; i < 4; ++i) {
        Lines sum = lines_of(4 * i, begin);
        for (int c = begin + kLanes; c < begin + kTile; c += kLanes) {
            const Lines more = lines_of(4 * i, c);
            sum.first = hn::Or(sum.first, more.first);
            sum.second = hn::Or(sum.second, more.second);
        }
        first[i] = sum.first;
        second[i] = sum.second;
    }
    VU merged_first[4], merged_second[4];
    merge_blocks(first, merged_first);
    if constexpr (kBits > 2) merge_blocks(second, merged_second);
    for (int i = 0; i < kTile / kLanes; ++i) {
        lines.put(tile, i * kLanes, {merged_first[i], kBits > 2 ? merged_second[i] : merged_first[i]});
    }
}

template <int kBits>
void put_channel_tiles(const TensorStore& store, const float* HWY_RESTRICT rows, const ChannelParams& params,
                       int unit, uint8_t* part, RowsAhead& ahead) {
    const F32 d;
    const int dim = store.dim;
    const TileLines<kBits> lines(dim, unit, part);
    for (int tile = 0; tile < dim / kTile; ++tile) {
        ahead.fetch(kLinesATile);
        VU16 fractions = all_fractions();
        channel_tile<kBits>(rows, dim, tile, lines, [&](VF y, int c) {
            const VU codes = quick_codes(y, hn::Load(d, params.inverse + c), hn::Load(d, params.min + c));
            collect_fractions(codes, fractions);
            return codes;
        });
        if (HWY_LIKELY(params.quick[tile] && no_near_tie(fractions))) continue;
        channel_tile<kBits>(rows, dim, tile, lines, [&](VF y, int c) {
            return exact_codes(y, hn::Load(d, params.scale + c), hn::Load(d, params.min + c),
                               levels_of(kBits));
        });
    }
}

void put_channel_bytes(const TensorStore& store, const float* HWY_RESTRICT rows, const ChannelParams& params,
                       int first, uint8_t* part) {
    const F32 d;
    const int dim = store.dim;
    HWY_ALIGN uint8_t codes[kTile * kMaxDim];
    for (int64_t t = 0; t < kTile; ++t) {
        put_bytes(dim, codes + t * dim, [&](int c) {
            const VF y = hn::LoadU(d, rows + t * dim + c);
            return exact_codes(y, hn::Load(d, params.scale + c), hn::Load(d, params.min + c),
                               levels_of(store.spec.bits));
        });
    }
    put_canonical(store, codes, first, kTile, part);
}

void nearest_channel_group(const TensorStore& store, const float* HWY_RESTRICT rows, int first, uint8_t* part,
                           RowsAhead& ahead) {
    ChannelParams params;
    channel_params(store, rows, first, part, &params);
    for (int t = 0; t < store.spec.group; t += kTile) {
        const float* x = rows + static_cast<int64_t>(t) * store.dim;
        const int unit = (first + t) / kTile;
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

}  // namespace
}  // namespace kivi::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_SCALAR

#endif  // include guard of this instruction set
