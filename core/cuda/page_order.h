// Where codes and parameters stand inside one tensor's part of a page on the GPU: pure functions of both sides.
//
// canonical   the order of export (format/layout.h): serves every spec
// fragment    the order of tensor core operands (fragment_order.h): where decode.h has a kernel for 2 to 4 bits
//
// The general packer and import write through an order's `write`: the codes of some tokens are cut into pieces that belong to these
// tokens alone (words, or bytes where a row ends inside a word), and any thread can write any piece.
#pragma once
#include <cstdint>
#include <type_traits>

#include "cuda/fragment_order.h"
#include "format/layout.h"
#include "format/quantize.h"

namespace kivi::cuda {

enum class Order : int32_t { canonical = 0, fragment = 1 };

struct PageOrder {
    Order order = Order::canonical;
    int32_t dim = 0;
    kivi_spec spec{};
};

// Changes with the bytes of the fragment order; 0 is the canonical order of blobs.
constexpr uint64_t kFragmentVersion = 1;

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

// Calls visit with the number of bits as a constant.
template <class Visit>
KIVI_HOST_DEVICE inline void with_bits(int bits, const Visit& visit) {
    switch (bits) {
        case 2: return visit(std::integral_constant<int, 2>{});
        case 3: return visit(std::integral_constant<int, 3>{});
        case 4: return visit(std::integral_constant<int, 4>{});
        default: return visit(std::integral_constant<int, 8>{});
    }
}

// Pieces are words wherever a row of codes is a whole number of them.
struct CanonicalOrder {
    // Pieces of `tokens` tokens: a slab of 32 on the channel axis, 1 to 32 on the token axis.
    KIVI_HOST_DEVICE static int pieces(const PageOrder& order, int tokens) {
        const int bits = order.dim * order.spec.bits * tokens;
        return words(order) ? bits / 32 : bits / 8;
    }

    // Piece i of the tokens first .. first + count - 1 of a page; code(t, c) is that of token first + t, channel c.
    template <int BITS, class Code>
    KIVI_HOST_DEVICE static void write(const PageOrder& order, uint8_t* part, int first, int /*count*/, int i,
                                       const Code& code) {
        if (order.spec.axis == KIVI_AXIS_CHANNEL) {
            // A slab of 32 tokens holds BITS words of every channel's stream; a group is one or more slabs.
            const int channel = i / BITS, word = i % BITS, slabs = order.spec.group / kSlabTokens;
            const int slab = first / kSlabTokens;
            const int at = ((slab / slabs * order.dim + channel) * slabs + slab % slabs) * BITS + word;
            const auto of_token = [&](int t) { return code(t, channel); };
            reinterpret_cast<uint32_t*>(part)[at] = stream_bits<BITS>(32 * word, 32, of_token);
        } else if (words(order)) {
            const int a_row = order.dim * BITS / 32, token = i / a_row, word = i % a_row;
            const auto of_channel = [&](int c) { return code(token, c); };
            reinterpret_cast<uint32_t*>(part)[first * a_row + i] = stream_bits<BITS>(32 * word, 32, of_channel);
        } else {
            const int a_row = order.dim * BITS / 8, token = i / a_row, byte = i % a_row;
            const auto of_channel = [&](int c) { return code(token, c); };
            part[first * a_row + i] = static_cast<uint8_t>(stream_bits<BITS>(8 * byte, 8, of_channel));
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

using FragmentOrder = FragmentOrderOf<PageOrder>;

// Calls visit with the order's functions, whichever it is.
template <class Visit>
KIVI_HOST_DEVICE inline auto with_order(const PageOrder& order, const Visit& visit) {
    return order.order == Order::fragment ? visit(FragmentOrder{}) : visit(CanonicalOrder{});
}

}  // namespace kivi::cuda
