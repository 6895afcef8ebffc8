// Where codes and parameters stand inside one tensor's part of a page on the GPU: pure functions of both sides.
//
// canonical   the order of export (format/layout.h): serves every spec
//
// Packers write through an order's `write`: the codes of some tokens are cut into pieces that belong to these
// tokens alone (words, or bytes where a row ends inside a word), and any thread can write any piece.
#pragma once
#include <cstdint>

#include "format/layout.h"
#include "format/quantize.h"

namespace kivi::cuda {

enum class Order : int32_t { canonical = 0 };

struct PageOrder {
    Order order = Order::canonical;
    int32_t dim = 0;
    kivi_spec spec{};
};

// Which order a tensor's pages have is decided here alone.
inline PageOrder page_order(const kivi_spec& spec, int32_t dim) { return {Order::canonical, dim, spec}; }
// Changes with the bytes of any order above; 0 is the canonical order of blobs.
constexpr uint64_t kLayoutVersion = 0;

KIVI_HOST_DEVICE inline int param_bytes(const kivi_spec& spec) { return spec.param_dtype == KIVI_F32 ? 4 : 2; }

constexpr int kSlabTokens = 32;  // packers write at most so many tokens at a time

// Bits first .. first + count - 1 of the bit stream of codes code(0), code(1), ... of BITS bits.
template <int BITS, class Code>
KIVI_HOST_DEVICE inline uint32_t stream_bits(int first, int count, const Code& code) {
    uint32_t word = 0;
    int index = first / BITS;
    for (int at = index * BITS - first; at < count; at += BITS, ++index) {
        const uint32_t c = static_cast<uint32_t>(code(index));
        word |= at < 0 ? c >> -at : c << at;
    }
    return word;
}

template <class Code>
KIVI_HOST_DEVICE inline uint32_t stream_bits(int bits, int first, int count, const Code& code) {
    switch (bits) {
        case 2: return stream_bits<2>(first, count, code);
        case 3: return stream_bits<3>(first, count, code);
        case 4: return stream_bits<4>(first, count, code);
        default: return stream_bits<8>(first, count, code);
    }
}

// Pieces are words wherever a row of codes is a whole number of them.
struct CanonicalOrder {
    // Pieces of `tokens` tokens: a slab of 32 on the channel axis, 1 to 32 on the token axis.
    KIVI_HOST_DEVICE static int pieces(const PageOrder& order, int tokens) {
        const int bits = order.dim * order.spec.bits * tokens;
        return words(order) ? bits / 32 : bits / 8;
    }

    // Piece i of the tokens first .. of a page; code(t, c) is that of token first + t, channel c.
    template <class Code>
    KIVI_HOST_DEVICE static void write(const PageOrder& order, uint8_t* part, int first, int i, const Code& code) {
        const int bits = order.spec.bits;
        if (order.spec.axis == KIVI_AXIS_CHANNEL) {
            // A slab holds `bits` words of every channel's stream.
            const int channel = i / bits, word = i % bits;
            const CanonicalPlace place = canonical_place(order.spec, order.dim, first, channel);
            const auto of_token = [&](int t) { return code(t, channel); };
            *reinterpret_cast<uint32_t*>(part + place.stream + place.index * bits / 8 + 4 * word) =
                stream_bits(bits, 32 * word, 32, of_token);
            return;
        }
        const int row_bits = order.dim * bits;
        if (words(order)) {
            const int a_row = row_bits / 32, token = i / a_row, word = i % a_row;
            const auto of_channel = [&](int c) { return code(token, c); };
            *reinterpret_cast<uint32_t*>(part + static_cast<int64_t>(first + token) * (row_bits / 8) + 4 * word) =
                stream_bits(bits, 32 * word, 32, of_channel);
        } else {
            const int a_row = row_bits / 8, token = i / a_row, byte = i % a_row;
            const auto of_channel = [&](int c) { return code(token, c); };
            part[static_cast<int64_t>(first + token) * a_row + byte] =
                static_cast<uint8_t>(stream_bits(bits, 8 * byte, 8, of_channel));
        }
    }

    KIVI_HOST_DEVICE static int code(const PageOrder& order, const uint8_t* part, int token, int channel) {
        const CanonicalPlace place = canonical_place(order.spec, order.dim, token, channel);
        return get_code(part + place.stream, order.spec.bits, place.index);
    }

    // Byte offsets of the parameters of the group that holds the element.
    KIVI_HOST_DEVICE static int64_t scale(const PageOrder& order, int token, int channel) {
        return canonical_code_bytes(order.spec, order.dim) +
               canonical_place(order.spec, order.dim, token, channel).group * param_bytes(order.spec);
    }
    KIVI_HOST_DEVICE static int64_t min(const PageOrder& order, int token, int channel) {
        return scale(order, token, channel) + group_shape(order.spec, order.dim).groups * param_bytes(order.spec);
    }

  private:
    KIVI_HOST_DEVICE static bool words(const PageOrder& order) {
        return order.spec.axis == KIVI_AXIS_CHANNEL || order.dim * order.spec.bits % 32 == 0;
    }
};

// Calls visit with the order's functions, whichever it is.
template <class Visit>
KIVI_HOST_DEVICE inline auto with_order(const PageOrder&, const Visit& visit) {
    return visit(CanonicalOrder{});
}

}  // namespace kivi::cuda
