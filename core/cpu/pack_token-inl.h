// Packing along the token axis (values): every token with parameters of its own. For parameters lanes are
// tokens, for codes channels.
#if defined(KIVI_CPU_PACK_TOKEN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_PACK_TOKEN_INL_H_
#undef KIVI_CPU_PACK_TOKEN_INL_H_
#else
#define KIVI_CPU_PACK_TOKEN_INL_H_
#endif

#include <algorithm>

#include "cpu/pack_lines-inl.h"

#if HWY_TARGET != HWY_SCALAR  // see write_kernels.h: processors without vectors take the plain path
HWY_BEFORE_NAMESPACE();
namespace kivi::cpu::HWY_NAMESPACE {
namespace {

// Lane i of every 128-bit block = op over all lanes of the i-th of four vectors.
template <class Op>
HWY_INLINE VF reduce_four(VF x0, VF x1, VF x2, VF x3, Op op) {
    const F32 d;
    const hn::Repartition<uint64_t, F32> d64;
    const auto pair = [&](VF a, VF b) {
        return op(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
    };
    const auto ab = hn::BitCast(d64, pair(x0, x1)), cd = hn::BitCast(d64, pair(x2, x3));
    VF r = op(hn::BitCast(d, hn::InterleaveLower(d64, ab, cd)),
              hn::BitCast(d, hn::InterleaveUpper(d64, ab, cd)));
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

    int first() const { return unit * kTile + begin; }
    int tokens() const { return end - begin; }
    bool whole() const { return tokens() == kTile; }
};

// Parameters of the tokens of a UnitPart, counted from its begin; one row for each block of channels.
struct TokenParams {
    HWY_ALIGN float scale[kMaxBlocks][kTile];
    HWY_ALIGN float inverse[kMaxBlocks][kTile];
    HWY_ALIGN float min[kMaxBlocks][kTile];
    bool quick[kMaxBlocks];  // quick_codes serve
};

void token_params(const TensorStore& store, const float* rows, const UnitPart& at, uint8_t* part,
                  TokenParams* params) {
    const F32 d;
    const kivi_spec& spec = store.spec;
    const GroupShape shape = group_shape(spec, store.dim);
    const VF levels = levels_of(spec.bits);
    HWY_ALIGN float low[kMaxBlocks][kTile], high[kMaxBlocks][kTile];
    for (int block = 0; block < shape.blocks_a_row; ++block) {
        const int channels = group_channels(shape, store.dim, block);
        for (int t = 0; t < kTile; t += kLanes) {
            const Extremes extremes =
                token_extremes(rows + block * shape.channels, store.dim, channels, t, at.tokens());
            hn::Store(extremes.low, d, low[block] + t);
            hn::Store(extremes.high, d, high[block] + t);
        }
    }
    for (int block = 0; block < shape.blocks_a_row; ++block) {
        params->quick[block] = true;
        for (int t = 0; t < kTile; t += kLanes) {
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
    const int64_t block_stride = lanes ? bytes * kTile : bytes;
    uint8_t* scales = part + scale_offset(store.order, at.first(), 0);
    uint8_t* mins = part + min_offset(store.order, at.first(), 0);
    for (int block = 0; block < shape.blocks_a_row; ++block) {
        store_params(params->scale[block], spec.param_dtype, at.tokens(), token_stride,
                     scales + block * block_stride);
        store_params(params->min[block], spec.param_dtype, at.tokens(), token_stride,
                     mins + block * block_stride);
    }
}

// A tile's lines on the token axis; `x` is the row of the first token that is there, codes_at(y, t) the codes of y,
// some channels of token t, counted from there.
template <int kBits, bool kWhole, class CodesAt>
HWY_INLINE Lines token_tile(const float* HWY_RESTRICT x, int dim, int begin, int tokens, CodesAt codes_at) {
    return build_lines<kBits>([&](int token) {
        const int t = kWhole ? token : token - begin;
        if (!kWhole && (t < 0 || t >= tokens)) return hn::Zero(U32());
        return codes_at(hn::LoadU(F32(), x + static_cast<int64_t>(t) * dim), t);
    });
}

// Not inlined, nor exact_tile: parameters are then operands in memory, and do not fight for registers with those of
// other tiles.
template <int kBits, bool kWhole>
HWY_NOINLINE Lines quick_tile(const float* HWY_RESTRICT x, int dim, const UnitPart& at,
                              const float* HWY_RESTRICT inverse, const float* HWY_RESTRICT min,
                              VU16& fractions) {
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
                     const TokenParams& params, uint8_t* part, RowsAhead& ahead) {
    const int dim = store.dim;
    const int channels = group_shape(store.spec, dim).channels;
    TileLines<kBits> lines(dim, at.unit, part);
    if constexpr (!kWhole) lines.narrow(at.begin, at.end);
    for (int block = 0, c = 0; c < dim; ++block) {
        for (const int end = std::min(c + channels, dim); c < end; c += kLanes) {
            ahead.fetch(kLinesATile * kLanes / kTile);
            VU16 fractions;
            Lines tile = quick_tile<kBits, kWhole>(rows + c, dim, at, params.inverse[block],
                                                   params.min[block], fractions);
            if (!params.quick[block] || !no_near_tie(fractions)) {
                tile = exact_tile<kBits, kWhole>(rows + c, dim, at, params.scale[block], params.min[block]);
            }
            lines.put(c / kTile, c % kTile, tile);
        }
    }
}

template <int kBits>
void put_token_tiles(const TensorStore& store, const float* rows, const UnitPart& at,
                     const TokenParams& params, uint8_t* part, RowsAhead& ahead) {
    if (at.whole()) {
        put_token_tiles<kBits, true>(store, rows, at, params, part, ahead);
    } else {
        put_token_tiles<kBits, false>(store, rows, at, params, part, ahead);
    }
}

void put_token_codes(const TensorStore& store, const float* HWY_RESTRICT rows, const UnitPart& at,
                     const TokenParams& params, uint8_t* part, RowsAhead& ahead) {
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
    HWY_ALIGN uint8_t codes[kTile * kMaxDim];
    for (int64_t t = 0; t < at.tokens(); ++t) {
        put_bytes(dim, codes + t * dim, [&](int c) {
            const VF scale = hn::Set(d, params.scale[c / channels][t]),
                     min = hn::Set(d, params.min[c / channels][t]);
            return exact_codes(hn::LoadU(d, rows + t * dim + c), scale, min, levels_of(store.spec.bits));
        });
    }
    put_canonical(store, codes, at.first(), at.tokens(), part);
}

}  // namespace
}  // namespace kivi::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_SCALAR

#endif  // include guard of this instruction set
