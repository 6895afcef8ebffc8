// Packing by one warp in few registers, straight from rows in memory: two channels of keys a lane, or two tokens of
// values at a time. Codes meet in shared memory, word by word in the fragment order.
#pragma once
#include "cuda/fragment_order.h"
#include "cuda/pack_codes.cuh"
#include "cuda/pack_groups.cuh"
#include "cuda/warp_row.cuh"

namespace kivi::cuda {

// What another multiprocessor may have written is not in this one's L1.
__device__ __forceinline__ uint32_t load_word(const uint8_t* at) {
    return __ldcg(reinterpret_cast<const uint32_t*>(at));
}
__device__ __forceinline__ uint2 load_two_words(const uint8_t* at) {
    return __ldcg(reinterpret_cast<const uint2*>(at));
}

// Codes are made by ratio (pack_codes.cuh), one at a time: a number from 0 to 1 in units of 2^-BITS plus 2^(23 - BITS)
// is rounded to such units.
template <int BITS>
__device__ __forceinline__ RatioGroup coding_of(const GroupParams& params) {
    return ratio_group(params, power_of_two(-BITS));
}
template <class P, int BITS>
__device__ __forceinline__ uint32_t code_of(float y, const RatioGroup& group) {
    constexpr float kFar = power_of_two(60);  // beyond it products would overflow, and codes are the same
    float distance = y - group.min;
    if (P::kType != KIVI_F16) distance = fminf(fmaxf(distance, -kFar), kFar);
    const float steps = fminf(group.inverse.ratio(distance), 1.0f - power_of_two(-BITS)) + power_of_two(23 - BITS);
    return __float_as_uint(steps) - (static_cast<uint32_t>(127 + 23 - BITS) << 23);
}

// The codes of a block of 32 tokens on their way.
template <int BITS, int DIM>
struct alignas(16) CodeWords {
    static constexpr int kWords = DIM * BITS, kOfVector = vector_words(BITS, DIM);
    uint32_t words[kWords];

    __device__ __forceinline__ void clear(int lane) {
#pragma unroll 1
        for (int i = 4 * lane; i < kWords; i += 4 * kWarp) {
            *reinterpret_cast<uint4*>(words + i) = make_uint4(0, 0, 0, 0);
        }
    }
    // Codes of a register of an operand: one in each half of a pair.
    __device__ __forceinline__ void add(int unit, int step, int place, int word, uint32_t pair) {
        const int operand = unit * (DIM / 16) + step, number = kOfVector == 2 ? 2 * operand + word / 2 : operand;
        uint32_t* const at = words + place * kOfVector + word % kOfVector;
        constexpr int kStride = kWarp * kOfVector;
        if (is_spare(BITS, number)) {
#pragma unroll
            for (int v = 0; v < 3; ++v) {
                atomicOr(at + (first_vector(BITS, number) + v) * kStride, (pair >> v & 0x00010001u) << kSpareBit);
            }
        } else {
            atomicOr(at + vector_of(BITS, number) * kStride, pair << field_bit(BITS, field_of(BITS, number)));
        }
    }
    __device__ __forceinline__ void store(uint8_t* block, int lane) const {
#pragma unroll 1
        for (int i = 4 * lane; i < kWords; i += 4 * kWarp) {
            *reinterpret_cast<uint4*>(block + 4 * i) = *reinterpret_cast<const uint4*>(words + i);
        }
    }
};

// A key group whose first token is in block `block` of the page. row_at(t): its rows, AT_ONCE of which are asked for
// together: each time is a trip to the L2.
template <class P, int BITS, int DIM, int GROUP, int AT_ONCE, class RowAt>
__device__ __forceinline__ void pack_key_group(CodeWords<BITS, DIM>& words, const RowAt& row_at, uint8_t* part,
                                               int block) {
    constexpr FragmentSizes kSizes(key_spec<BITS, GROUP>(), DIM);
    const int lane = kivi::cuda::lane();
    uint8_t* const group = part + block / (GROUP / kBlockTokens) * kSizes.group_bytes();
#pragma unroll 1
    for (int channel = 2 * lane; channel < DIM; channel += 2 * kWarp) {
        uint32_t least = load_word(row_at(0) + 2 * channel), most = least;
#pragma unroll 1
        for (int t = 0; t < GROUP; t += AT_ONCE) {
            uint32_t x[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) x[i] = load_word(row_at(t + i) + 2 * channel);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) least = P::least(least, x[i]), most = P::most(most, x[i]);
        }
        const ParamPair params = params_of<P, BITS>(least, most);
        *reinterpret_cast<uint32_t*>(group + 2 * channel) = params.scales;
        *reinterpret_cast<uint32_t*>(group + 2 * DIM + 2 * channel) = params.mins;
    }
#pragma unroll 1
    for (int first = 0; first < GROUP; first += kBlockTokens) {
        words.clear(lane);
        __syncwarp();
#pragma unroll 1
        for (int channel = 2 * lane; channel < DIM; channel += 2 * kWarp) {
            const uint32_t scales = *reinterpret_cast<const uint32_t*>(group + 2 * channel);
            const uint32_t mins = *reinterpret_cast<const uint32_t*>(group + 2 * DIM + 2 * channel);
            const auto coding = [&](int shift) {
                return coding_of<BITS>({f16_to_f32(static_cast<uint16_t>(scales >> shift)),
                                        f16_to_f32(static_cast<uint16_t>(mins >> shift))});
            };
            const RatioGroup low = coding(0), high = coding(16);
            const int step = 2 * (channel / 32) + channel / 2 % 2, column = channel / 8 % 4,
                      word = 2 * (channel / 4 % 2);
#pragma unroll 1
            for (int t = 0; t < kBlockTokens; t += AT_ONCE) {
                uint32_t x[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) x[i] = load_word(row_at(first + t + i) + 2 * channel);
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    const uint32_t pair =
                        code_of<P, BITS>(P::low(x[i]), low) | code_of<P, BITS>(P::high(x[i]), high) << 16;
                    const int token = t + i;
                    words.add(i / 2 % 2, step, 4 * (2 * (token / 8) + i % 2) + column, token / 4 % 2 + word, pair);
                }
            }
        }
        __syncwarp();
        words.store(group + kSizes.param_bytes + first / kBlockTokens * kSizes.code_bytes, lane);
        __syncwarp();
    }
}

// Extremes over the lanes of a group, LANES neighbours, in either half of a pair.
template <class P, int LANES>
__device__ __forceinline__ void share_extremes(uint32_t& least, uint32_t& most) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        least = P::least(least, __shfl_xor_sync(kAllLanes, least, step));
        most = P::most(most, __shfl_xor_sync(kAllLanes, most, step));
    }
}

// Values of block `number` of the page.
template <class P, int BITS, int DIM, int GROUPS, int AT_ONCE, class RowAt>
__device__ __forceinline__ void pack_value_block(CodeWords<BITS, DIM>& words, const RowAt& row_at, uint8_t* part,
                                                 int number) {
    static_assert(BITS == 2 || BITS == 4, "neighbouring fields of a vector");
    constexpr int kGroup = DIM / GROUPS;
    constexpr FragmentSizes kSizes(value_spec<BITS, kGroup>(), DIM);
    const int lane = kivi::cuda::lane();
    uint8_t* const block = part + kSizes.codes(false, number);
    words.clear(lane);
    __syncwarp();
#pragma unroll 1
    for (int stripe = 0; stripe < DIM; stripe += kStripe) {
        const int channel = stripe + kLaneChannels * lane;
        const bool is = channel < DIM;
#pragma unroll 1
        for (int begin = 0; begin < kBlockTokens; begin += AT_ONCE) {
            uint2 rows[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                rows[i] = is ? load_two_words(row_at(begin + i) + 2 * channel) : make_uint2(0, 0);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i += 2) {
                const uint2 a = rows[i], b = rows[i + 1];
                const int t = begin + i;
                const uint32_t least_a = P::least(a.x, a.y), least_b = P::least(b.x, b.y);
                const uint32_t most_a = P::most(a.x, a.y), most_b = P::most(b.x, b.y);
                uint32_t least = P::least(__byte_perm(least_a, least_b, 0x5410), __byte_perm(least_a, least_b, 0x7632));
                uint32_t most = P::most(__byte_perm(most_a, most_b, 0x5410), __byte_perm(most_a, most_b, 0x7632));
                share_extremes<P, kGroup / kLaneChannels>(least, most);
                const ParamPair params = params_of<P, BITS>(least, most);
                if (!is) continue;
                if (channel % kGroup == 0) {
                    uint8_t* const at = block + kSizes.code_bytes + 2 * (channel / kGroup * kBlockTokens + t);
                    *reinterpret_cast<uint32_t*>(at) = params.scales;
                    *reinterpret_cast<uint32_t*>(at + 2 * GROUPS * kBlockTokens) = params.mins;
                }
                const RatioGroup of_a = coding_of<BITS>(params.low), of_b = coding_of<BITS>(params.high);
#pragma unroll
                for (int parity = 0; parity < 2; ++parity) {  // of channels
                    const auto pair = [&](uint32_t x, uint32_t y) {
                        const float of_x = parity == 0 ? P::low(x) : P::high(x);
                        const float of_y = parity == 0 ? P::low(y) : P::high(y);
                        return code_of<P, BITS>(of_x, of_a) | code_of<P, BITS>(of_y, of_b) << 16;
                    };
                    words.add(t / 2 % 2, 2 * (channel / 32), 4 * (channel / kLaneChannels % 8) + t / 8,
                              parity + 2 * (t / 4 % 2), pair(a.x, b.x) | pair(a.y, b.y) << BITS);
                }
            }
        }
    }
    __syncwarp();
    words.store(block, lane);
    __syncwarp();
}

// Values of one token of a page. A byte of codes is of one token alone, in each of two words:
//
//   lane's channels 4 l + {0, 2} and {1, 3}: two fields each of words 0 and 1 of vectors that are the row's
//   BITS 4   a byte a lane and word
//   BITS 2   a byte of lanes l and l + 8
template <class P, int BITS, int DIM, int GROUPS>
__device__ __forceinline__ void pack_value_row(const uint2 (&row)[stripes(DIM)], int token, uint8_t* part) {
    static_assert(BITS == 2 || BITS == 4);
    constexpr int kGroup = DIM / GROUPS;
    constexpr FragmentSizes kSizes(value_spec<BITS, kGroup>(), DIM);
    uint8_t* const block = part + kSizes.codes(false, token / kBlockTokens);
    const int in_block = token % kBlockTokens, unit = in_block / 2 % 2;
#pragma unroll
    for (int j = 0; j < stripes(DIM); ++j) {
        const int channel = j * kStripe + kLaneChannels * lane();
        const uint2 x = row[j];
        uint32_t least = P::least(x.x, x.y), most = P::most(x.x, x.y);
        least = P::least(least, least >> 16 | least << 16), most = P::most(most, most >> 16 | most << 16);
        share_extremes<P, kGroup / kLaneChannels>(least, most);
        const ParamPair params = params_of<P, BITS>(least, most);
        const RatioGroup group = coding_of<BITS>(params.low);
        uint32_t codes[2] = {code_of<P, BITS>(P::low(x.x), group) | code_of<P, BITS>(P::low(x.y), group) << BITS,
                             code_of<P, BITS>(P::high(x.x), group) | code_of<P, BITS>(P::high(x.y), group) << BITS};
        const int run = channel / 32, number = unit * (DIM / 16) + 2 * run;  // of the first operand
        if constexpr (BITS == 2) {
#pragma unroll
            for (int w = 0; w < 2; ++w) codes[w] |= __shfl_down_sync(kAllLanes, codes[w], 8) << 4;
        }
        if (channel >= DIM) continue;
        if (channel % kGroup == 0) {
            auto* const scales = reinterpret_cast<uint16_t*>(block + kSizes.code_bytes);
            const int at = channel / kGroup * kBlockTokens + in_block;
            scales[at] = static_cast<uint16_t>(params.scales);
            scales[at + GROUPS * kBlockTokens] = static_cast<uint16_t>(params.mins);
        }
        if (BITS == 2 && run % 2 != 0) continue;
        const int lane = 4 * (channel / kLaneChannels % 8) + in_block / 8, word = in_block / 4 % 2 * 2;
        uint8_t* const to = block + number / fields_of(BITS) * kVectorBytes + lane * 16 + word * 4 + in_block % 2 * 2 +
                            field_bit(BITS, number % fields_of(BITS)) / 8;
        to[0] = static_cast<uint8_t>(codes[0]), to[4] = static_cast<uint8_t>(codes[1]);
    }
}

}  // namespace kivi::cuda
