// The online softmax of one visit.
#if defined(KIVI_CPU_KERNELS_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_KERNELS_SOFTMAX_INL_H_
#undef KIVI_CPU_KERNELS_SOFTMAX_INL_H_
#else
#define KIVI_CPU_KERNELS_SOFTMAX_INL_H_
#endif

#include <cmath>
#include <limits>

#include "cpu/kernels_common-inl.h"

#if HWY_TARGET != HWY_SCALAR  // see kernels.h: processors without vectors take the plain path
HWY_BEFORE_NAMESPACE();
namespace kivi::cpu::HWY_NAMESPACE {

constexpr float kHidden = std::numeric_limits<float>::lowest();  // score of lanes that belong to no token
constexpr float kLog2E = 1.44269504f;
// Sums are rescaled to a maximum that is this much above the largest score, so that it is rarely necessary. (Weights
// beyond 1 would do too, if values near the end of fp32 did not then overflow.)
constexpr float kHeadroom = 8.0f;

// Lanes of the vectors from first to last that are outside begin .. end - 1.
HWY_INLINE void HideLanes(float* HWY_RESTRICT s, int first, int begin, int end, int last) {
    for (int t = first; t < begin; ++t) s[t] = kHidden;
    for (int t = end; t < last; ++t) s[t] = kHidden;
}

// cap * tanh(x), from exp(-2|x|): no overflow for any x. Near 0, where 1 - exp(-2|x|) has lost its digits, the
// first terms of the series: a large cap leaves small scores as they are.
HWY_INLINE VF CapScore(VF x, VF cap) {
    const DF d;
    const VF one = hn::Set(d, 1.0f), size = hn::Abs(x), x2 = hn::Mul(x, x);
    const VF t = Exp2(hn::Mul(size, hn::Set(d, -2.0f * kLog2E)));
    const VF quotient = hn::CopySign(hn::Div(hn::Sub(one, t), hn::Add(one, t)), x);
    const VF terms = hn::MulAdd(x2, hn::Set(d, 2.0f / 15), hn::Set(d, -1.0f / 3));
    const VF series = hn::MulAdd(hn::Mul(x, x2), terms, x);
    return hn::Mul(cap, hn::IfThenElse(hn::Lt(size, hn::Set(d, 0.0625f)), series, quotient));
}

HWY_INLINE void SoftmaxRow(float* HWY_RESTRICT s, int begin, int end, float cap, int acc_size, float* HWY_RESTRICT acc,
                           float& max, float& sum) {
    const DF d;
    const int first = begin / kPackedStep * kPackedStep;
    const int last = (end + kPackedStep - 1) / kPackedStep * kPackedStep;
    HideLanes(s, first, begin, end, last);
    VF bad = hn::Zero(d);  // NaN if a score is not finite, before a cap can hide it
    if (cap > 0) {
        const VF vcap = hn::Set(d, cap);
        for (int t = first; t < last; t += N) {
            const VF x = hn::LoadU(d, s + t);
            bad = hn::MulAdd(x, hn::Zero(d), bad);
            hn::StoreU(CapScore(x, vcap), d, s + t);
        }
        HideLanes(s, first, begin, end, last);
    }
    VF top = hn::Set(d, kHidden);
    for (int t = first; t < last; t += N) {
        const VF x = hn::LoadU(d, s + t);
        bad = hn::MulAdd(x, hn::Zero(d), bad);
        top = hn::Max(x, top);
    }
    const float peak = MaxLanes(top);
    if (peak > max) {
        const float grown = peak + kHeadroom;
        if (sum != 0) {
            const float shrink = std::exp2(max - grown);
            sum *= shrink;
            const VF vshrink = hn::Set(d, shrink);
            for (int i = 0; i < acc_size; i += N) hn::StoreU(hn::Mul(hn::LoadU(d, acc + i), vshrink), d, acc + i);
        }
        max = grown;
    }
    const VF vmax = hn::Set(d, max);
    VF total = bad;
    for (int t = first; t < last; t += N) {
        const VF p = Exp2(hn::Sub(hn::LoadU(d, s + t), vmax));
        hn::StoreU(p, d, s + t);
        total = hn::Add(total, p);
    }
    sum += SumLanes(total);
}

void Softmax(float* s, int begin, int end, int rows, float cap, int acc_size, const RowState& state) {
    for (int r = 0; r < rows; ++r) {
        SoftmaxRow(s + r * kPageTokens, begin, end, cap, acc_size, state.acc[r], state.max[r], state.sum[r]);
    }
}

}  // namespace kivi::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_SCALAR

#endif  // include guard of this instruction set
