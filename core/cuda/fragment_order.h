// The order of codes in which tensor cores want them: a warp reads its operands of mma.m16n8k16 as whole 16-byte
// vectors, and one AND (and a shift for some) makes an operand of two codes. Pure functions of both sides.
//
//   K part   per key group:  2 dim bytes scales | 2 dim bytes mins | blocks of 32 tokens: codes
//   V part   blocks of 32 tokens:  codes | per value group 32 scales | per value group 32 mins
//
// A block of 32 tokens is two units of 16; a unit has dim / 16 operands of 16 rows ("steps": k-steps of the keys,
// row tiles of the values). A 32-bit word of a lane's vector is one register of several operands: each operand has
// one field in both half words. A field in place is the fp16 (subnormal) number code * 2^(field's bit) * 2^-24.
//
//   2 bits   15 14 | 13 12 | 11 10 |  9  8 |  7  6 |  5  4 |  3  2 |  1  0       4 bits  15..12 | 11..8 | 7..4 | 3..0
//   field        7 |     6 |     5 |     4 |     3 |     2 |     1 |     0                    3 |     2 |    1 |    0
//   power        6 |     4 |     2 |     0 |     6 |     4 |     2 |     0   (log2)           4 |     0 |    4 |    0
//            after >> 8                    |                                     after >> 8     |
//
//   3 bits   15 | 14 13 12 | 11 10 9 | 8 7 6 | 5 4 3 | 2 1 0       three half words hold sixteen codes of a lane:
//   field     x |        4 |       3 |     2 |     1 |     0       five each, and one in the three bits x
//   power     6 |        3 |       0 |     6 |     3 |     0
//                      after >> 9    |
//
// A step has the same power in both units, so that it can be divided out of the query once. At 3 bits and head dim 64 a
// block has eight operands only: there a lane's vectors have two words, each a register of both halves of the depth,
// which have powers of their own.
#pragma once
#include <cstdint>

#include "format/layout.h"
#include "format/quantize.h"

// Kernels for layers in this order are for GPUs with bulk copies and 227 KB of shared memory a block, from 9.0 to below
// 12.0 (kFirstCapability in decode.cu): elsewhere nothing is in this order, and their bodies are left out.
#if !defined(__CUDA_ARCH__)
#define KIVI_FRAGMENT_KERNELS 1
#else
#define KIVI_FRAGMENT_KERNELS (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)
#endif

namespace kivi::cuda {

constexpr int kBlockTokens = 32;
constexpr int kVectorBytes = 512;  // 16 bytes a lane, where it has four words
KIVI_HOST_DEVICE constexpr int vector_words(int bits, int dim) { return bits == 3 && dim == 64 ? 2 : 4; }

KIVI_HOST_DEVICE constexpr int fields_of(int bits) { return bits == 3 ? 5 : 16 / bits; }

// Operands of a block are numbered unit * steps + step; where vectors have two words, halves of operands: (unit * steps
// + step) * 2 + half of the depth. At 3 bits each sixteen share three vectors, and the last of the sixteen is the one in
// the bits x.
constexpr int kSpareBit = 15, kSparePower = 6;
KIVI_HOST_DEVICE constexpr bool is_spare(int bits, int number) { return bits == 3 && number % 16 == 15; }
KIVI_HOST_DEVICE constexpr int first_vector(int bits, int number) {  // of those that share a bit x
    return bits == 3 ? number / 16 * 3 : 0;
}
// Which one stands in a field of a vector.
KIVI_HOST_DEVICE constexpr int operand_of(int bits, int vector, int field) {
    if (bits != 3) return fields_of(bits) * vector + field;
    const int slot = fields_of(bits) * (vector % 3) + field, sixteen = vector / 3 * 16;
    if (slot < 10 || slot > 12) return sixteen + slot;
    return sixteen + (slot == 12 ? 10 : slot + 1);
}
KIVI_HOST_DEVICE constexpr int field_bit(int bits, int field) { return bits * field; }

// Vector and field of an operand; the inverse of operand_of.
KIVI_HOST_DEVICE constexpr int slot_of(int bits, int number) {
    const int n = bits == 3 ? number % 16 : number;
    if (bits != 3 || n < 10 || n > 12) return n;
    return n == 10 ? 12 : n - 1;
}
KIVI_HOST_DEVICE constexpr int vector_of(int bits, int number) {
    return first_vector(bits, number) + slot_of(bits, number) / fields_of(bits);
}
KIVI_HOST_DEVICE constexpr int field_of(int bits, int number) { return slot_of(bits, number) % fields_of(bits); }

// log2 of the power of two that the codes of a number carry as operands.
KIVI_HOST_DEVICE constexpr int number_power(int bits, int number) {
    if (is_spare(bits, number)) return kSparePower;
    const int in_place = bits == 3 ? 3 : 8 / bits;
    return bits * (field_of(bits, number) % in_place);
}
// Those of a step and half of its depth, in either unit. 16-bit numbers carry none.
KIVI_HOST_DEVICE constexpr int step_power(int bits, int dim, int step, int half) {
    if (bits == 16) return 0;
    return number_power(bits, vector_words(bits, dim) == 2 ? 2 * step + half : step);
}

// Where a code is: the operand (unit and step) and its place in it. lane = 4 * row + column; `word` is the register
// of the operand, `half` the half word.
struct Fragment {
    int unit, step, lane, word, half;
};

// Keys are rows of the operand, channels its depth. A lane reads eight consecutive channels of q, scales, mins and
// 16-bit keys as one vector.
//   token   = 8 * (row / 2) + 4 * (word % 2) + 2 * unit + row % 2        (of 32)
//   channel = 32 * (step / 2) + 8 * column + 4 * (word / 2) + 2 * (step % 2) + half
// Values: channels are rows, tokens the depth.
//   token   = 8 * column + 4 * (word / 2) + 2 * unit + half
//   channel = 32 * (step / 2) + 4 * row + 2 * (step % 2) + word % 2
KIVI_HOST_DEVICE inline Fragment fragment_at(bool keys, int token, int channel) {
    Fragment at;
    at.unit = token / 2 % 2;
    at.step = 2 * (channel / 32) + channel / 2 % 2;
    if (keys) {
        at.lane = 4 * (2 * (token / 8 % 4) + token % 2) + channel / 8 % 4;
        at.word = token / 4 % 2 + 2 * (channel / 4 % 2);
        at.half = channel % 2;
    } else {
        at.lane = 4 * (channel / 4 % 8) + token / 8 % 4;
        at.word = channel % 2 + 2 * (token / 4 % 2);
        at.half = token % 2;
    }
    return at;
}
KIVI_HOST_DEVICE inline int token_at(bool keys, const Fragment& at) {
    const int row = at.lane / 4, column = at.lane % 4;
    return keys ? 8 * (row / 2) + 4 * (at.word % 2) + 2 * at.unit + row % 2
                : 8 * column + 4 * (at.word / 2) + 2 * at.unit + at.half;
}
KIVI_HOST_DEVICE inline int channel_at(bool keys, const Fragment& at) {
    const int row = at.lane / 4, column = at.lane % 4;
    return keys ? 32 * (at.step / 2) + 8 * column + 4 * (at.word / 2) + 2 * (at.step % 2) + at.half
                : 32 * (at.step / 2) + 4 * row + 2 * (at.step % 2) + at.word % 2;
}

// What a block's word i holds: a register of some operands.
struct WordPlace {
    int words, vector, lane, word, steps;
    KIVI_HOST_DEVICE WordPlace(int bits, int dim, int i)
        : words(vector_words(bits, dim)),
          vector(i / (32 * words)),
          lane(i / words % 32),
          word(i % words),
          steps(dim / 16) {}
    KIVI_HOST_DEVICE Fragment fragment(int number, int half) const {
        const int operand = words == 2 ? number / 2 : number, unit = operand >= steps;
        return {unit, operand - unit * steps, lane, words == 2 ? word + number % 2 * 2 : word, half};
    }
};

// Sizes of one tensor's part.
struct FragmentSizes {
    int code_bytes;    // of a block
    int param_bytes;   // of a key group, or of a block of values
    int group_blocks;  // blocks that share parameters: of a key group; 1
    int value_groups;  // side by side
    KIVI_HOST_DEVICE constexpr FragmentSizes(const kivi_spec& spec, int dim)
        : code_bytes(kBlockTokens * dim * spec.bits / 8),
          param_bytes(spec.axis == KIVI_AXIS_CHANNEL
                          ? 4 * dim
                          : 4 * kBlockTokens * (spec.group == KIVI_GROUP_HEAD ? 1 : dim / spec.group)),
          group_blocks(spec.axis == KIVI_AXIS_CHANNEL ? spec.group / kBlockTokens : 1),
          value_groups(spec.axis == KIVI_AXIS_CHANNEL ? 0 : param_bytes / (4 * kBlockTokens)) {}
    KIVI_HOST_DEVICE constexpr int group_bytes() const { return param_bytes + group_blocks * code_bytes; }
    // Of the block's codes, in the part.
    KIVI_HOST_DEVICE constexpr int codes(bool keys, int block) const {
        return block / group_blocks * group_bytes() + (keys ? param_bytes : 0) + block % group_blocks * code_bytes;
    }
};

// Specs that have this order: see decode_instances.h, but for those of 16 bits. PageOrder and the functions are those of
// page_order.h.
template <class PageOrder>
struct FragmentOrderOf {
    // Whole blocks of 32 tokens; or, of values, some of one block.
    KIVI_HOST_DEVICE static int pieces(const PageOrder& order, int tokens) {
        const int bytes = FragmentSizes(order.spec, order.dim).code_bytes;
        return tokens % kBlockTokens != 0 ? bytes / kBlockTokens * tokens : bytes / 4 * (tokens / kBlockTokens);
    }

    // One word: of vectors of four, register i % 4 of lane i / 4 % 32 of all operands of vector i / 128.
    template <int BITS, class Code>
    KIVI_HOST_DEVICE static void write(const PageOrder& order, uint8_t* part, int first, int count, int i,
                                       const Code& code) {
        if constexpr (BITS == 2 || BITS == 4) {
            if (count % kBlockTokens != 0) return write_some<BITS>(order, part, first, i, code);
        }
        const bool keys = is_keys(order);
        const FragmentSizes sizes(order.spec, order.dim);
        const int words = sizes.code_bytes / 4, block = i / words, in_block = i % words;
        const WordPlace place(BITS, order.dim, in_block);
        const int vector = place.vector;
        const auto of = [&](int number, int half) {
            const Fragment at = place.fragment(number, half);
            return static_cast<uint32_t>(code(block * kBlockTokens + token_at(keys, at), channel_at(keys, at)));
        };
        uint32_t word = 0;
        for (int half = 0; half < 2; ++half) {
            for (int field = 0; field < fields_of(BITS); ++field) {
                word |= of(operand_of(BITS, vector, field), half) << (field_bit(BITS, field) + 16 * half);
            }
            if (BITS == 3) word |= (of(vector / 3 * 16 + 15, half) >> vector % 3 & 1) << (kSpareBit + 16 * half);
        }
        *reinterpret_cast<uint32_t*>(part + sizes.codes(keys, first / kBlockTokens + block) + 4 * in_block) = word;
    }

    // The same word read: take(token, channel, code) for each of its codes, tokens counted from `first`. The code in the
    // bits x comes with the first of its three words.
    template <int BITS, class Take>
    KIVI_HOST_DEVICE static void read(const PageOrder& order, const uint8_t* part, int first, int i, const Take& take) {
        const bool keys = is_keys(order);
        const FragmentSizes sizes(order.spec, order.dim);
        const int words = sizes.code_bytes / 4, block = i / words, in_block = i % words;
        const WordPlace place(BITS, order.dim, in_block);
        const int vector = place.vector;
        const uint32_t* const from =
            reinterpret_cast<const uint32_t*>(part + sizes.codes(keys, first / kBlockTokens + block)) + in_block;
        const auto give = [&](int number, int half, uint32_t code) {
            const Fragment at = place.fragment(number, half);
            take(block * kBlockTokens + token_at(keys, at), channel_at(keys, at), static_cast<int>(code));
        };
        const uint32_t word = *from;
        const bool with_spare = BITS == 3 && vector % 3 == 0;
        const uint32_t second = with_spare ? from[32 * place.words] : 0,
                       third = with_spare ? from[64 * place.words] : 0;
        for (int half = 0; half < 2; ++half) {
            for (int field = 0; field < fields_of(BITS); ++field) {
                give(operand_of(BITS, vector, field), half,
                     word >> (field_bit(BITS, field) + 16 * half) & ((1u << BITS) - 1));
            }
            const int spare = kSpareBit + 16 * half;
            if (with_spare) {
                give(vector / 3 * 16 + 15, half,
                     (word >> spare & 1) | (second >> spare & 1) << 1 | (third >> spare & 1) << 2);
            }
        }
    }

    KIVI_HOST_DEVICE static int code(const PageOrder& order, const uint8_t* part, int token, int channel) {
        const bool keys = is_keys(order);
        const int bits = order.spec.bits, words = vector_words(bits, order.dim);
        const Fragment at = fragment_at(keys, token % kBlockTokens, channel);
        const uint8_t* const half = part + FragmentSizes(order.spec, order.dim).codes(keys, token / kBlockTokens) +
                                    at.lane * (4 * words) + at.word % words * 4 + at.half * 2;
        const auto word = [&](int vector) {
            return static_cast<unsigned>(*reinterpret_cast<const uint16_t*>(half + vector * (128 * words)));
        };
        const int operand = at.unit * (order.dim / 16) + at.step;
        const int number = words == 2 ? 2 * operand + at.word / 2 : operand;
        if (is_spare(bits, number)) {
            const int first = first_vector(bits, number);
            return static_cast<int>(word(first) >> kSpareBit | word(first + 1) >> kSpareBit << 1 |
                                    word(first + 2) >> kSpareBit << 2);
        }
        const unsigned mask = (1u << bits) - 1;
        return static_cast<int>(word(vector_of(bits, number)) >> field_bit(bits, field_of(bits, number)) & mask);
    }

    // Byte offsets, in a part, of the parameters of one block's elements.
    struct BlockParams {
        int scales, mins, token_bytes, channel_bytes, channel_shift;
        KIVI_HOST_DEVICE BlockParams(const PageOrder& order, int block) {
            const FragmentSizes sizes(order.spec, order.dim);
            if (is_keys(order)) {
                scales = block / sizes.group_blocks * sizes.group_bytes();
                mins = scales + 2 * order.dim;
                token_bytes = 0, channel_bytes = 2, channel_shift = 0;
            } else {
                scales = sizes.codes(false, block) + sizes.code_bytes;
                mins = scales + sizes.value_groups * 2 * kBlockTokens;
                token_bytes = 2, channel_bytes = 2 * kBlockTokens, channel_shift = 5;
                while (sizes.value_groups << channel_shift < order.dim) ++channel_shift;
            }
        }
        // From the scale or min of the block's first element to those of another.
        KIVI_HOST_DEVICE int offset(int token, int channel) const {
            return token * token_bytes + (channel >> channel_shift) * channel_bytes;
        }
    };
    KIVI_HOST_DEVICE static int64_t scale(const PageOrder& order, int token, int channel) {
        const BlockParams params(order, token / kBlockTokens);
        return params.scales + params.offset(token % kBlockTokens, channel);
    }
    KIVI_HOST_DEVICE static int64_t min(const PageOrder& order, int token, int channel) {
        const BlockParams params(order, token / kBlockTokens);
        return params.mins + params.offset(token % kBlockTokens, channel);
    }

  private:
    KIVI_HOST_DEVICE static bool is_keys(const PageOrder& order) { return order.spec.axis == KIVI_AXIS_CHANNEL; }

    // The same of some values of a block, by bytes: those of 2 and of 4 bits are one token's.
    template <int BITS, class Code>
    KIVI_HOST_DEVICE static void write_some(const PageOrder& order, uint8_t* part, int first, int i, const Code& code) {
        constexpr int kCodes = 8 / BITS;
        const int bytes = order.dim / kCodes, chunks = bytes / 16, in_token = i % bytes;
        const int token = i / bytes, chunk = in_token % chunks;
        const int odd = in_token / chunks % 2, row = in_token / chunks / 2;
        Fragment at = fragment_at(false, (first + token) % kBlockTokens, 4 * row + odd);
        const int number = at.unit * (order.dim / 16) + kCodes * chunk;
        uint32_t byte = 0;
        for (int k = 0; k < kCodes; ++k) {
            at.step = kCodes * chunk + k;
            byte |= static_cast<uint32_t>(code(token, channel_at(false, at))) << (BITS * k);
        }
        part[FragmentSizes(order.spec, order.dim).codes(false, first / kBlockTokens) +
             vector_of(BITS, number) * kVectorBytes + at.lane * 16 + at.word * 4 + at.half * 2 +
             field_of(BITS, number) / kCodes] = static_cast<uint8_t>(byte);
    }
};

}  // namespace kivi::cuda
