// Queries in and outputs out: conversion between the caller's dtype and fp32, and the Hadamard transform.
#if defined(KIVI_CPU_KERNELS_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_KERNELS_CONVERT_INL_H_
#undef KIVI_CPU_KERNELS_CONVERT_INL_H_
#else
#define KIVI_CPU_KERNELS_CONVERT_INL_H_
#endif

#include <cmath>

#include "cpu/kernels_common-inl.h"
#include "format/hadamard.h"
#include "format/half.h"

#if HWY_TARGET != HWY_SCALAR  // see kernels.h: processors without vectors take the plain path
HWY_BEFORE_NAMESPACE();
namespace kivi::cpu::HWY_NAMESPACE {

void LoadRow(const uint8_t* HWY_RESTRICT from, int32_t dtype, int dim, float scale, float* HWY_RESTRICT to) {
    const DF d;
    const VF vscale = hn::Set(d, scale);
    int c = 0;
    for (; c + N <= dim; c += N) {
        const VF x = dtype == KIVI_F32   ? LoadF32()(from, c)
                     : dtype == KIVI_F16 ? LoadF16()(from, c)
                                         : LoadBF16()(from, c);
        hn::StoreU(hn::Mul(x, vscale), d, to + c);
    }
    for (; c < dim; ++c) to[c] = load_element(from, dtype, c) * scale;
}

void StoreRow(const float* HWY_RESTRICT from, int dim, int32_t dtype, uint8_t* HWY_RESTRICT to) {
    const DF d;
    int c = 0;
    for (; c + N <= dim; c += N) {
        const VF x = hn::LoadU(d, from + c);
        if (dtype == KIVI_F32) {
            hn::StoreU(x, d, reinterpret_cast<float*>(to) + c);
        } else if (dtype == KIVI_F16 && HWY_TARGET != HWY_SSE4) {  // SSE4 has no conversion instruction
            const hn::Rebind<hwy::float16_t, DF> dh;
            hn::StoreU(hn::DemoteTo(dh, x), dh, reinterpret_cast<hwy::float16_t*>(to) + c);
        } else {
            break;
        }
    }
    for (; c < dim; ++c) store_element(to, dtype, c, from[c]);
}

// x + sign * swapped, where sign is 1 in lanes whose partner stands above and -1 where it stands below.
HWY_INLINE VF Butterfly(VF x, VF swapped, VF sign) { return hn::MulAdd(x, sign, swapped); }

void Hadamard(float* x, int dim) {
    const DF d;
    const hn::Repartition<uint64_t, DF> d64;
    const int block = hadamard_block(dim);
    const VF scale = hn::Set(d, 1.0f / std::sqrt(static_cast<float>(block)));
    const VF plus = hn::Set(d, 1.0f), minus = hn::Set(d, -1.0f);
    const VF sign1 = hn::OddEven(minus, plus);
    const VF sign2 = hn::BitCast(d, hn::OddEven(hn::BitCast(d64, minus), hn::BitCast(d64, plus)));
    for (float* at = x; at < x + dim; at += block) {
        for (int h = block / 2; h >= N; h /= 2) {  // partners in different vectors
            for (int i = 0; i < block; i += 2 * h) {
                for (int k = i; k < i + h; k += N) {
                    const VF a = hn::LoadU(d, at + k), b = hn::LoadU(d, at + k + h);
                    hn::StoreU(hn::Add(a, b), d, at + k);
                    hn::StoreU(hn::Sub(a, b), d, at + k + h);
                }
            }
        }
        for (int i = 0; i < block; i += N) {  // partners in one vector
            VF y = hn::Mul(hn::LoadU(d, at + i), scale);
            y = Butterfly(y, hn::Shuffle2301(y), sign1);
            y = Butterfly(y, hn::Shuffle1032(y), sign2);
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
            y = Butterfly(y, hn::SwapAdjacentBlocks(y), hn::OddEvenBlocks(minus, plus));
#endif
#if HWY_TARGET == HWY_AVX3
            y = Butterfly(y, hn::ConcatLowerUpper(d, y, y), hn::ConcatUpperLower(d, minus, plus));
#endif
            hn::StoreU(y, d, at + i);
        }
    }
}

}  // namespace kivi::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_SCALAR

#endif  // include guard of this instruction set
