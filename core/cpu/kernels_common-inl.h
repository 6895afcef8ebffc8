// Vector types and small helpers of the kernels. Compiled once for each instruction set.
#if defined(KIVI_CPU_KERNELS_COMMON_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_KERNELS_COMMON_INL_H_
#undef KIVI_CPU_KERNELS_COMMON_INL_H_
#else
#define KIVI_CPU_KERNELS_COMMON_INL_H_
#endif

#include <type_traits>

#include "cpu/kernels.h"
#include "cpu/page_order.h"
#include "hwy/highway.h"

#if HWY_TARGET != HWY_SCALAR  // see kernels.h: processors without vectors take the plain path
HWY_BEFORE_NAMESPACE();
namespace kivi::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using D32 = hn::RebindToSigned<DF>;
using D16 = hn::Repartition<int16_t, DF>;
using VF = hn::Vec<DF>;
using V32 = hn::Vec<D32>;
using V16 = hn::Vec<D16>;

constexpr int N = static_cast<int>(hn::MaxLanes(DF()));  // floats of a vector: 4, 8 or 16
static_assert(N == 4 || N == 8 || N == 16, "kernels are written for vectors of 128, 256 and 512 bits");

constexpr int kPackedStep = 32;  // packed kernels work on whole steps of tokens; p is 0 where no token is seen

template <int k>
using Int = std::integral_constant<int, k>;  // a template argument passed to a lambda

// Nearest integer; what leaves the range of int32 gives any number.
HWY_INLINE V32 ToInt(VF x) {
#if HWY_TARGET == HWY_AVX3
    return V32{_mm512_cvtps_epi32(x.raw)};
#elif HWY_TARGET == HWY_AVX2
    return V32{_mm256_cvtps_epi32(x.raw)};
#elif HWY_TARGET == HWY_SSE4
    return V32{_mm_cvtps_epi32(x.raw)};
#else
    return hn::NearestInt(x);
#endif
}

// 2^x for x < 127, relative error about 2e-7; 2^-126 for x below -126.
HWY_INLINE VF Exp2(VF x) {
    const DF d;
    x = hn::Max(x, hn::Set(d, -126.0f));
    const VF n = hn::Round(x);
    const VF f = hn::Sub(x, n);
    VF y = hn::Set(d, 1.338130254e-3f);
    y = hn::MulAdd(y, f, hn::Set(d, 9.666368515e-3f));
    y = hn::MulAdd(y, f, hn::Set(d, 5.550381014e-2f));
    y = hn::MulAdd(y, f, hn::Set(d, 2.402234904e-1f));
    y = hn::MulAdd(y, f, hn::Set(d, 6.931471806e-1f));
    y = hn::MulAdd(y, f, hn::Set(d, 1.0f));
    return hn::BitCast(d, hn::Add(hn::BitCast(D32(), y), hn::ShiftLeft<23>(ToInt(n))));
}

HWY_INLINE float SumLanes(VF x) { return hn::GetLane(hn::SumOfLanes(DF(), x)); }
HWY_INLINE float MaxLanes(VF x) { return hn::GetLane(hn::MaxOfLanes(DF(), x)); }

struct AddLanes {
    template <class V>
    HWY_INLINE V operator()(V a, V b) const {
        return hn::Add(a, b);
    }
};
struct MaxOfTwo {
    template <class V>
    HWY_INLINE V operator()(V a, V b) const {
        return hn::Max(a, b);
    }
};

// to[0 .. 3] = the lanes of a, of b, of c and of d, joined into one number each.
template <class Join>
HWY_INLINE void Reduce4(Join join, VF a, VF b, VF c, VF d, float* HWY_RESTRICT to) {
    const DF df;
    const hn::Repartition<uint64_t, DF> d64;
    const auto ab = hn::BitCast(d64, join(hn::InterleaveLower(df, a, b), hn::InterleaveUpper(df, a, b)));
    const auto cd = hn::BitCast(d64, join(hn::InterleaveLower(df, c, d), hn::InterleaveUpper(df, c, d)));
    // Each 128-bit block now holds one partial result of a, b, c, d.
    const VF blocks = join(hn::BitCast(df, hn::InterleaveLower(d64, ab, cd)),
                           hn::BitCast(df, hn::InterleaveUpper(d64, ab, cd)));
#if HWY_TARGET == HWY_AVX3
    const hn::Half<DF> dh;
    const hn::Half<decltype(dh)> dq;
    const auto half = join(hn::LowerHalf(dh, blocks), hn::UpperHalf(dh, blocks));
    hn::StoreU(join(hn::LowerHalf(dq, half), hn::UpperHalf(dq, half)), dq, to);
#elif HWY_TARGET == HWY_AVX2
    const hn::Half<DF> dh;
    hn::StoreU(join(hn::LowerHalf(dh, blocks), hn::UpperHalf(dh, blocks)), dh, to);
#else
    hn::StoreU(blocks, df, to);
#endif
}

// Calls body(r, Int<R>()) for rows 0 .. rows - 1 in blocks of R = 4, 2 and 1 rows.
template <int kMost = 4, class Body>
HWY_INLINE void ForRowBlocks(int rows, const Body& body) {
    int r = 0;
    if constexpr (kMost == 4) {
        for (; rows - r >= 4; r += 4) body(r, Int<4>());
    }
    for (; rows - r >= 2; r += 2) body(r, Int<2>());
    if (rows > r) body(r, Int<1>());
}

HWY_INLINE VF LoadHalfs(const uint8_t* HWY_RESTRICT from) {
    const DF d;
#if HWY_TARGET == HWY_SSE4
    // No conversion instruction. Rescaling makes subnormals right; infinities and NaN get their exponent back.
    const hn::RebindToUnsigned<DF> du;
    const auto h = hn::PromoteTo(du, hn::LoadU(hn::Rebind<uint16_t, DF>(), reinterpret_cast<const uint16_t*>(from)));
    const auto magnitude = hn::ShiftLeft<13>(hn::And(h, hn::Set(du, 0x7fff)));
    const auto finite = hn::BitCast(du, hn::Mul(hn::BitCast(d, magnitude), hn::Set(d, 0x1p112f)));
    const V32 is_special = hn::BitCast(D32(), hn::VecFromMask(D32(), hn::Gt(hn::BitCast(D32(), magnitude),
                                                                           hn::Set(D32(), 0x0f7fffff))));
    const auto special = hn::And(hn::BitCast(du, is_special), hn::Set(du, 0x7f800000));
    const auto sign = hn::ShiftLeft<16>(hn::And(h, hn::Set(du, 0x8000)));
    return hn::BitCast(d, hn::Or(hn::Or(finite, special), sign));
#else
    const hn::Rebind<hwy::float16_t, DF> dh;
    return hn::PromoteTo(d, hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(from)));
#endif
}

// One vector of channels c .. c + N - 1 of a row.
struct LoadF32 {
    HWY_INLINE VF operator()(const uint8_t* HWY_RESTRICT row, int c) const {
        return hn::LoadU(DF(), reinterpret_cast<const float*>(row) + c);
    }
};
struct LoadF16 {
    HWY_INLINE VF operator()(const uint8_t* HWY_RESTRICT row, int c) const { return LoadHalfs(row + 2 * c); }
};
struct LoadBF16 {
    HWY_INLINE VF operator()(const uint8_t* HWY_RESTRICT row, int c) const {
        const hn::Rebind<uint16_t, DF> dh;
        const auto bits = hn::LoadU(dh, reinterpret_cast<const uint16_t*>(row) + c);
        return hn::BitCast(DF(), hn::ShiftLeft<16>(hn::PromoteTo(hn::RebindToUnsigned<DF>(), bits)));
    }
};

}  // namespace kivi::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_SCALAR

#endif  // include guard of this instruction set
