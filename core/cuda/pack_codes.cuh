// How codes are made, without a division and without a branch, and their places in the words of the fragment order.
//
// By ratio (any row type and bits). A code is the nearest integer, ties to even, of the fp32 quotient
// (y - min) / scale. Scales are f16, so a tie (k + 1/2) * scale has at most 15 significant bits and is an fp32 number.
// A difference y - min that is not equal to it is an fp32 number beside it, at least 2^-24 of itself away: its quotient
// stays on its side of the tie when rounded to fp32, and so does anything nearer to the quotient than that. The
// reciprocal as a sum of two fp32 numbers gives it within 2^-46, and a tie exactly. In units of 2^-24 the quotient is
// rounded by its conversion to f16: subnormal numbers of that type are the integers themselves, two in a word.
//
// By steps (two bits). Codes grow with y, so the least number of each code decides: a pair of rows' numbers is compared
// with three of f16 and added up, or with two of bf16, which has no room for sums, and never converted.
#pragma once
#include <type_traits>

#include "cuda/pack_groups.cuh"

namespace kivi::cuda {

__host__ __device__ constexpr float power_of_two(int exponent) {
    float x = 1;
    for (; exponent > 0; --exponent) x *= 2;
    for (; exponent < 0; ++exponent) x /= 2;
    return x;
}

// 1 / scale as a sum of two numbers, in units of `unit`, a power of two; 0 where every code is 0.
struct Inverse {
    float high = 0, low = 0;
    Inverse() = default;
    // `reciprocal`: of the scale, rounded; or 0.
    __device__ __forceinline__ Inverse(float scale, float reciprocal, float unit) {
        high = reciprocal * unit, low = __fmaf_rn(-scale, reciprocal, 1.0f) * high;
    }
    // Of a difference y - min; from 0 to 1, NaN gives 0.
    __device__ __forceinline__ float ratio(float distance) const { return fma_clamped(distance, high, distance * low); }
};

// Vectors that a lane makes together (fragment_order.h): one, or the three that share spare bits. A block of 32 tokens
// is made in turns, in the order of its operands; a step is one operand, and two are a run of 32 channels.
template <int BITS, int DIM>
struct Turn {
    static constexpr int kWords = vector_words(BITS, DIM);
    static constexpr int kVectors = BITS == 3 ? 3 : 1, kBytes = kVectors * kWords * 128;
    static constexpr int kOperands = (kVectors * fields_of(BITS) + (BITS == 3 ? 1 : 0)) * kWords / 4;
    static constexpr int kRuns = kOperands / 2;
    static constexpr int kSteps = DIM / 16, kTurns = 2 * kSteps / kOperands;
    static constexpr int kUnitRuns = kRuns < kSteps / 2 ? kRuns : kSteps / 2;  // of one unit
    // Run r of a turn is in unit first_unit + unit(r), and begins with channel 32 * (first_run + run(r)). The former
    // depend on the turn alone, and the latter are constants in unrolled loops.
    static __device__ __forceinline__ int first_unit(int turn) { return turn * kRuns / (kSteps / 2); }
    static __device__ __forceinline__ int first_run(int turn) { return turn * kRuns % (kSteps / 2); }
    static __device__ __forceinline__ constexpr int unit(int r) { return r / (kSteps / 2); }
    static __device__ __forceinline__ constexpr int run(int r) { return r % (kSteps / 2); }

    uint32_t word[kVectors][kWords];

    __device__ __forceinline__ Turn() {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
            for (int w = 0; w < kWords; ++w) word[v][w] = 0;
        }
    }

    // Adds the codes of two half words of operand `number` of the turn to register `at`. Both numbers are constants.
    __device__ __forceinline__ void add(int number, int at, uint32_t codes) {
        if constexpr (kWords == 2) number = 2 * number + at / 2, at %= 2;
        if (is_spare(BITS, number)) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) word[v][at] += (codes >> v & 0x00010001u) << kSpareBit;
        } else {
            word[vector_of(BITS, number)][at] += codes << field_bit(BITS, field_of(BITS, number));
        }
    }

    // Sets bit `bit` of codes where `mask` has half words of ones.
    __device__ __forceinline__ void set(int number, int at, int bit, uint32_t mask) {
        if constexpr (kWords == 2) number = 2 * number + at / 2, at %= 2;
        word[vector_of(BITS, number)][at] |= mask & 0x00010001u << (field_bit(BITS, field_of(BITS, number)) + bit);
    }

    // Halves of words 2 w and 2 w + 1 were even and odd channels of an even and of an odd token; now the other way
    // round.
    __device__ __forceinline__ void transpose() {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
            for (int w = 0; w < 4; w += 2) {
                const uint32_t even = word[v][w], odd = word[v][w + 1];
                word[v][w] = __byte_perm(even, odd, 0x5410), word[v][w + 1] = __byte_perm(even, odd, 0x7632);
            }
        }
    }

    // The bits of other words; those that `mask` has none of stay.
    __device__ __forceinline__ void merge(const uint8_t* block, int turn, int lane, const Turn& mask) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const auto old = reinterpret_cast<const Words<kWords>*>(block + turn * kBytes)[v * kWarp + lane];
#pragma unroll
            for (int w = 0; w < kWords; ++w) {
                word[v][w] = (word[v][w] & mask.word[v][w]) | (old.word[w] & ~mask.word[v][w]);
            }
        }
    }

    __device__ __forceinline__ void store(uint8_t* block, int turn, int lane) const {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            Words<kWords> vector;
#pragma unroll
            for (int w = 0; w < kWords; ++w) vector.word[w] = word[v][w];
            reinterpret_cast<Words<kWords>*>(block + turn * kBytes)[v * kWarp + lane] = vector;
        }
    }
};

// A coder has
//   Group            what it needs to know of a group, from its parameters
//   Pair             of the two groups of a pair of numbers
//   Keys, Values     groups of a warp's rows in shared memory
//   Codes            of a turn: add(operand, register, pair, groups), and finish

// Place of token 8 * eight + t: those that are eight apart stand in different banks. XOR with a step changes t by it.
__device__ __forceinline__ int value_place(int eight, int t) { return 9 * eight ^ t; }

// ---- By ratio ----

struct RatioGroup {
    float min = 0;
    Inverse inverse;
};
__device__ __forceinline__ RatioGroup ratio_group(const GroupParams& params, float unit) {
    RatioGroup group;
    if (params.scale > 0.0f) {
        group.min = params.min;
        group.inverse = Inverse(params.scale, __frcp_rn(params.scale), unit);
    }
    return group;
}

template <class P, int BITS>
struct RatioCoder {
    using Group = RatioGroup;
    struct Pair {
        Group low, high;
    };
    static __device__ __forceinline__ Group group_of(const GroupParams& params) {
        return ratio_group(params, power_of_two(-24));
    }

    template <int DIM>
    struct Keys {
        float min[DIM], high[DIM], low[DIM];

        __device__ __forceinline__ void set(int channel, const Group& a, const Group& b) {
            *reinterpret_cast<float2*>(min + channel) = make_float2(a.min, b.min);
            *reinterpret_cast<float2*>(high + channel) = make_float2(a.inverse.high, b.inverse.high);
            *reinterpret_cast<float2*>(low + channel) = make_float2(a.inverse.low, b.inverse.low);
        }
        // Of eight channels.
        __device__ __forceinline__ void get(int channel, Pair (&pairs)[4]) const {
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const float4 m = *reinterpret_cast<const float4*>(min + channel + 2 * i);
                const float4 h = *reinterpret_cast<const float4*>(high + channel + 2 * i);
                const float4 l = *reinterpret_cast<const float4*>(low + channel + 2 * i);
                pairs[i] = {of(m.x, h.x, l.x), of(m.y, h.y, l.y)},
                pairs[i + 1] = {of(m.z, h.z, l.z), of(m.w, h.w, l.w)};
            }
        }
    };

    template <int GROUPS>
    struct Values {
        float4 groups[GROUPS][kBlockTokens];

        __device__ __forceinline__ void set(int group, int token, const Group& x) {
            groups[group][value_place(token / 8, token % 8)] = make_float4(x.min, x.inverse.high, x.inverse.low, 0.0f);
        }
        __device__ __forceinline__ Pair get(int group, int place) const {
            const float4 x = groups[group][place];
            return {of(x.x, x.y, x.z), of(x.x, x.y, x.z)};
        }
    };

    template <int DIM>
    struct Codes {
        Turn<BITS, DIM> words;
        __device__ __forceinline__ void add(int number, int at, uint32_t pair, const Pair& groups) {
            constexpr uint32_t kLevels = ((1u << BITS) - 1) * 0x10001u;
            const uint32_t codes = Pairs<false>::of(ratio(P::low(pair), groups.low), ratio(P::high(pair), groups.high));
            words.add(number, at, Pairs<false>::least(codes, kLevels));
        }
        __device__ __forceinline__ Turn<BITS, DIM>& finish() { return words; }
    };

  private:
    static __device__ __forceinline__ Group of(float min, float high, float low) {
        Group group;
        group.min = min, group.inverse.high = high, group.inverse.low = low;
        return group;
    }
    // Rows and mins are so small that the difference is finite, and 2^-24 / scale is 1 at most.
    static __device__ __forceinline__ float ratio(float y, const Group& group) {
        return group.inverse.ratio(y - group.min);
    }
};

// ---- By steps ----

template <class P>
struct StepCoder {
    // The least numbers of codes 1, 2 and 3; NaN where every code is 0. In both half words of Pair if of values.
    struct Group {
        uint32_t step[3];
    };
    using Pair = Group;

    // y is coded k or more if fl(y - min) exceeds the tie (k - 1/2) * scale, or equals it and k is even: in exact
    // numbers, if y - min is beyond half of the way to the fp32 number before or after the tie. That is rounded upwards
    // to the number that decides, which two roundings in one direction do as one. Numbers that can be told from the tie
    // are on its side unless min cancels it out or is tiny beside it.
    static __device__ __forceinline__ Group group_of(const GroupParams& params) {
        const float scale = params.scale > 0.0f ? params.scale : float_of(kNanF32), min = params.min;
        float first = __fmaf_rd(scale, 0.5f, min), second = __fmaf_ru(scale, 1.5f, min);
        float third = __fmaf_rd(scale, 2.5f, min);
        const float tiny = scale * 0.00031f,
                    least = fminf(fminf(fabsf(first), fabsf(second)), fabsf(third));  // 2.5 * 2^-13
        // min, and numbers of f16, are multiples of 2^-24: differences of them below 1 are exact.
        const bool cancels = least < tiny && (P::kType != KIVI_F16 || scale >= 0.25f);
        if (cancels || (fabsf(min) < tiny && min != 0.0f && scale >= 0.25f)) {
            first = exact(scale, min, 0), second = exact(scale, min, 1), third = exact(scale, min, 2);
        } else {
            first = above(first), third = above(third);
        }
        return {{P::ceil(first), P::ceil(second), P::ceil(third)}};
    }

    template <int DIM>
    struct Keys {
        uint16_t step[3][DIM];

        __device__ __forceinline__ void set(int channel, const Group& a, const Group& b) {
#pragma unroll
            for (int k = 0; k < 3; ++k) {
                *reinterpret_cast<uint32_t*>(step[k] + channel) = __byte_perm(a.step[k], b.step[k], 0x5410);
            }
        }
        __device__ __forceinline__ void get(int channel, Pair (&pairs)[4]) const {
#pragma unroll
            for (int k = 0; k < 3; ++k) {
                const uint4 x = *reinterpret_cast<const uint4*>(step[k] + channel);
                pairs[0].step[k] = x.x, pairs[1].step[k] = x.y, pairs[2].step[k] = x.z, pairs[3].step[k] = x.w;
            }
        }
    };

    template <int GROUPS>
    struct Values {
        uint4 groups[GROUPS][kBlockTokens];

        __device__ __forceinline__ void set(int group, int token, const Group& x) {
            groups[group][value_place(token / 8, token % 8)] =
                make_uint4(twice(x.step[0]), twice(x.step[1]), twice(x.step[2]), 0);
        }
        __device__ __forceinline__ Pair get(int group, int place) const {
            const uint4 x = groups[group][place];
            return {{x.x, x.y, x.z}};
        }

      private:
        static __device__ __forceinline__ uint32_t twice(uint32_t x) { return __byte_perm(x, x, 0x1010); }
    };

    // Sums of codes times powers of four are f16 numbers, 1024 and more, whose lowest eight bits are four codes.
    template <int DIM>
    struct SummedCodes {
        uint32_t sum[2][4];
        Turn<2, DIM> words;

        __device__ __forceinline__ SummedCodes() {
#pragma unroll
            for (int at = 0; at < 4; ++at) sum[0][at] = sum[1][at] = 0x64006400u;
        }
        __device__ __forceinline__ void add(int number, int at, uint32_t pair, const Pair& groups) {
            const uint32_t weight = (0x3C00u + (number % 4 << 11)) * 0x10001u;  // 4^(number % 4)
#pragma unroll
            for (int k = 0; k < 3; ++k) {
                uint32_t reached;  // 1 or 0 each
                uint32_t& to = sum[number / 4][at];
                asm("set.ge.f16x2.f16x2 %0, %1, %2;" : "=r"(reached) : "r"(pair), "r"(groups.step[k]));
                asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(to) : "r"(reached), "r"(weight));
            }
        }
        __device__ __forceinline__ Turn<2, DIM>& finish() {
#pragma unroll
            for (int at = 0; at < 4; ++at) words.word[0][at] = __byte_perm(sum[0][at], sum[1][at], 0x6240);
            return words;
        }
    };
    // The upper bit by the second step, the lower one by the first or the third.
    template <int DIM>
    struct MaskedCodes {
        Turn<2, DIM> words;

        __device__ __forceinline__ void add(int number, int at, uint32_t pair, const Pair& groups) {
            const auto reached = [&](uint32_t step) {  // half words of ones or zeros
                uint32_t mask;
                asm("set.ge.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(pair), "r"(step));
                return mask;
            };
            const uint32_t upper = reached(groups.step[1]);
            words.set(number, at, 1, upper);
            words.set(number, at, 0, reached((groups.step[2] & upper) | (groups.step[0] & ~upper)));
        }
        __device__ __forceinline__ Turn<2, DIM>& finish() { return words; }
    };
    template <int DIM>
    using Codes = std::conditional_t<P::kType == KIVI_F16, SummedCodes<DIM>, MaskedCodes<DIM>>;

  private:
    static __device__ __forceinline__ float above(float x) { return __fadd_ru(x, __uint_as_float(1)); }  // the next
    // The least fp32 number that is coded k + 1 or more.
    static __device__ __noinline__ float exact(float scale, float min, int k) {
        const float tie = scale * (k + 0.5f), beside = __uint_as_float(__float_as_uint(tie) + (k == 1 ? -1 : 1));
        const double from = 0.5 * (static_cast<double>(tie) + beside) + min;
        return k == 1 ? __double2float_ru(from) : above(__double2float_rd(from));
    }
};

template <class P, int BITS>
using CoderOf = std::conditional_t<BITS == 2, StepCoder<P>, RatioCoder<P, BITS>>;

}  // namespace kivi::cuda
