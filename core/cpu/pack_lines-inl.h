// Codes to their place in a page: lines of the lanes order (page_order.cpp), bit streams of the canonical one.
#if defined(KIVI_CPU_PACK_LINES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_PACK_LINES_INL_H_
#undef KIVI_CPU_PACK_LINES_INL_H_
#else
#define KIVI_CPU_PACK_LINES_INL_H_
#endif

#include <cstring>

#include "cpu/pack_codes-inl.h"
#include "format/layout.h"

#if HWY_TARGET != HWY_SCALAR  // see write_kernels.h: processors without vectors take the plain path
HWY_BEFORE_NAMESPACE();
namespace kivi::cpu::HWY_NAMESPACE {
namespace {

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
        const int tiles = dim / kTile;
        first_ = part + static_cast<int64_t>(unit) * tiles * (kBits == 4 ? 2 : 1) * kLineBytes;
        if constexpr (kBits == 4) second_ = first_ + kLineBytes;
        if constexpr (kBits == 3) second_ = part + (kPageTokens / kTile + unit / 2) * tiles * kLineBytes;
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
                if constexpr (kBits == 3) {
                    second_mask_ |= 1u << (half + 4 * (t / 2) + t % 2 + (even_ ? 2 : 0));
                }
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

// ---- canonical order ----

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
            for (int64_t t = 0; t < tokens; ++t) put_code(stream, bits, t, codes[t * dim + c]);
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

// Codes of one row as bytes.
template <class CodesAt>
void put_bytes(int dim, uint8_t* HWY_RESTRICT to, CodesAt codes_at) {
    const hn::Rebind<uint8_t, F32> d8;
    for (int c = 0; c < dim; c += kLanes) {
        hn::StoreU(hn::U8FromU32(hn::ShiftRight<kFractionBits>(codes_at(c))), d8, to + c);
    }
}

}  // namespace
}  // namespace kivi::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_SCALAR

#endif  // include guard of this instruction set
