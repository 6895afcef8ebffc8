// Where the code and the parameters of an element stand inside one tensor's part of a page.
//
// canonical (format/layout.h), here for a channel-axis tensor with groups of 32 tokens:
//
//   codes   [token block 0: channel 0 | channel 1 | ... | channel dim-1] [token block 1: ...] ...
//           each cell: bits * 32 / 8 bytes, the bit stream of one group
//   scales  [token block][channel]      mins  [token block][channel]
//
// lanes: the order of the SIMD kernels. A page is cut into tiles of 16 tokens x 16 channels. Kernels hold one
// tile line of 64 bytes in a register as sixteen 32-bit lanes and multiply 16-bit halves of lanes; so the axis
// that is summed over runs inside a lane, the other one over the lanes:
//
//   channel axis (keys)    lane = token,    inner i = channel      q . k sums over channels
//   token axis (values)    lane = channel,  inner i = token        p . v sums over tokens
//
//   codes   [unit of 16 tokens][block of 16 channels]: tiles
//           one lane of a tile; half word w holds the inner elements i = 2t + w
//
//           2 bits   | 14 12 .. 3 2 1 0 | <- i/2 = t, 2 bits each, w = 1 in the upper half word, w = 0 in the lower
//           4 bits   line 0: t = 6 4 2 0, line 1: t = 7 5 3 1, one nibble each
//           3 bits   the lower two bits of all codes as at 2 bits; after them the third bits, one line for two
//                    units (even, odd): nibble t/2 of a half word = even t+1, even t, odd t+1, odd t
//   scales  channel axis [token block][channel]; token axis [unit][channel block][token in unit]
//   mins    likewise
#include "cpu/page_order.h"

#include "format/half.h"
#include "format/quantize.h"

namespace kivi::cpu {
namespace {

int64_t param_bytes(const kivi_spec& spec) { return spec.param_dtype == KIVI_F32 ? 4 : 2; }

// ---- lanes ----

// Lane and inner element of a code in its tile, and which tile that is.
struct LanePlace {
    int64_t unit, tiles_a_unit, tile;
    int lane, half, t;
};

LanePlace lane_place(const PageOrder& order, int token, int channel) {
    const int row = token % kTile, column = channel % kTile;
    const bool keys = order.spec.axis == KIVI_AXIS_CHANNEL;
    const int inner = keys ? column : row;
    LanePlace place;
    place.unit = token / kTile;
    place.tiles_a_unit = order.dim / kTile;
    place.tile = place.unit * place.tiles_a_unit + channel / kTile;
    place.lane = keys ? row : column;
    place.half = inner % 2;
    place.t = inner / 2;
    return place;
}

// Some bits of a code: `count` bits from bit `shift` of byte `byte`, to stand at bit `to` of the code.
struct Piece {
    int64_t byte;
    int shift, count, to;
};

Piece piece(int64_t line, const LanePlace& place, int bit, int count, int to) {
    const int in_lane = 16 * place.half + bit;
    return {line * kLineBytes + place.lane * 4 + in_lane / 8, in_lane % 8, count, to};
}

// Pieces of one code; the number of them is returned (2 at 3 bits, else 1).
int lane_pieces(const PageOrder& order, int token, int channel, Piece pieces[2]) {
    const LanePlace at = lane_place(order, token, channel);
    const int bits = order.spec.bits;
    if (bits == 4) {
        pieces[0] = piece(2 * at.tile + at.t % 2, at, 4 * (at.t / 2), 4, 0);
        return 1;
    }
    pieces[0] = piece(at.tile, at, 2 * at.t, 2, 0);
    if (bits == 2) return 1;
    const int64_t low_lines = kPageTokens / kTile * at.tiles_a_unit;
    const int64_t line = low_lines + at.unit / 2 * at.tiles_a_unit + at.tile % at.tiles_a_unit;
    pieces[1] = piece(line, at, 4 * (at.t / 2) + (at.unit % 2 == 0 ? 2 : 0) + at.t % 2, 1, 2);
    return 2;
}

// Number of the element's scale among the scales of the part.
int64_t lane_param(const PageOrder& order, int token, int channel) {
    const GroupShape shape = group_shape(order.spec, order.dim);
    if (order.spec.axis == KIVI_AXIS_CHANNEL) return static_cast<int64_t>(token / shape.tokens) * order.dim + channel;
    return (static_cast<int64_t>(token / kTile) * shape.blocks_a_row + channel / shape.channels) * kTile +
           token % kTile;
}

bool suits_lanes(const kivi_spec& spec, int dim) {
    return spec.bits >= 2 && spec.bits <= 4 && spec.param_dtype != KIVI_F32 && dim % kTile == 0;
}

}  // namespace

PageOrder page_order(const kivi_spec& spec, int dim) {
    PageOrder order;
    order.order = suits_lanes(spec, dim) ? Order::lanes : Order::canonical;
    order.spec = spec;
    order.dim = dim;
    return order;
}

int code_get(const PageOrder& order, const uint8_t* part, int token, int channel) {
    if (order.order == Order::lanes) {
        Piece pieces[2];
        const int count = lane_pieces(order, token, channel, pieces);
        int code = 0;
        for (int i = 0; i < count; ++i) {
            code |= (part[pieces[i].byte] >> pieces[i].shift & ((1 << pieces[i].count) - 1)) << pieces[i].to;
        }
        return code;
    }
    const CanonicalPlace place = canonical_place(order.spec, order.dim, token, channel);
    return get_code(part + place.stream, order.spec.bits, place.index);
}

void code_put(const PageOrder& order, uint8_t* part, int token, int channel, int code) {
    if (order.order == Order::lanes) {
        Piece pieces[2];
        const int count = lane_pieces(order, token, channel, pieces);
        for (int i = 0; i < count; ++i) {
            const int mask = (1 << pieces[i].count) - 1;
            uint8_t& byte = part[pieces[i].byte];
            byte = static_cast<uint8_t>((byte & ~(mask << pieces[i].shift)) |
                                        (code >> pieces[i].to & mask) << pieces[i].shift);
        }
        return;
    }
    const CanonicalPlace place = canonical_place(order.spec, order.dim, token, channel);
    const int bits = order.spec.bits;
    const int64_t first = static_cast<int64_t>(place.index) * bits;
    for (int64_t bit = first; bit < first + bits; ++bit) {
        uint8_t& byte = part[place.stream + bit / 8];
        byte = static_cast<uint8_t>(byte & ~(1u << (bit % 8)));
    }
    put_code(part + place.stream, bits, place.index, code);
}

int64_t scale_offset(const PageOrder& order, int token, int channel) {
    if (order.order == Order::lanes) {
        const int64_t code_bytes = static_cast<int64_t>(kPageTokens) * order.dim * order.spec.bits / 8;
        return code_bytes + lane_param(order, token, channel) * 2;
    }
    const CanonicalPlace place = canonical_place(order.spec, order.dim, token, channel);
    return canonical_code_bytes(order.spec, order.dim) + place.group * param_bytes(order.spec);
}

int64_t min_offset(const PageOrder& order, int token, int channel) {
    const GroupShape shape = group_shape(order.spec, order.dim);
    return scale_offset(order, token, channel) + shape.groups * param_bytes(order.spec);
}

}  // namespace kivi::cpu
