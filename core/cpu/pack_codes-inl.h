// The numbers of packing, vectorised: parameters of a group from its extremes, and codes. The formulas of
// format/quantize.h with whole vectors: the same fp32 operations in the same order, IEEE division and ties to
// even, so the bytes are the same.
#if defined(KIVI_CPU_PACK_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_PACK_CODES_INL_H_
#undef KIVI_CPU_PACK_CODES_INL_H_
#else
#define KIVI_CPU_PACK_CODES_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "cpu/page_order.h"
#include "cpu/write_kernels.h"
#include "format/half.h"
#include "format/quantize.h"
#include "hwy/highway.h"

#if HWY_TARGET != HWY_SCALAR  // see write_kernels.h: processors without vectors take the plain path
HWY_BEFORE_NAMESPACE();
namespace kivi::cpu::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using U8 = hn::CappedTag<uint8_t, 64>;
using VF = hn::Vec<F32>;
using VU = hn::Vec<U32>;
using VU8 = hn::Vec<U8>;

constexpr int kMaxBlocks = kMaxDim / 32;  // groups of a token
constexpr int kLanes =
    static_cast<int>(HWY_MAX_BYTES / sizeof(float) < kTile ? HWY_MAX_BYTES / sizeof(float) : kTile);
// Lines fetched ahead beside a tile: half a tile of 16-bit elements; the row kernels fetch the other half.
constexpr int kLinesATile = 4;

// Steps of the largest code.
VF levels_of(int bits) { return hn::Set(F32(), static_cast<float>((1 << bits) - 1)); }

// ---- parameters ----

struct Params {
    VF scale, min;
};

VF clamp_to(VF x, float limit) {
    const F32 d;
    return hn::Min(hn::Max(x, hn::Set(d, -limit)), hn::Set(d, limit));
}

VF round_params(VF x, int32_t param_dtype) {
    const F32 d;
    if (param_dtype == KIVI_F16) {
        x = clamp_to(x, dtype_max(KIVI_F16));
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX2  // no conversion to f16
        HWY_ALIGN float lanes[kLanes];
        hn::Store(x, d, lanes);
        for (float& value : lanes) value = f16_to_f32(f32_to_f16(value));
        x = hn::Load(d, lanes);
#else
        const hn::Rebind<hwy::float16_t, F32> d16;
        x = hn::PromoteTo(d, hn::DemoteTo(d16, x));
#endif
    }
    return hn::Add(x, hn::Zero(d));  // -0 becomes +0
}

Params params_of(const kivi_spec& spec, VF low, VF high) {
    const F32 d;
    low = clamp_to(low, kLargestExtreme);
    high = clamp_to(high, kLargestExtreme);
    VF range = hn::Sub(high, low);
    if (spec.range == KIVI_RANGE_RATIO) {
        const VF kept = hn::Mul(range, hn::Set(d, spec.range_ratio));
        low = hn::Add(low, hn::Mul(hn::Set(d, 0.5f), hn::Sub(range, kept)));
        range = kept;
    }
    return {round_params(hn::Div(range, levels_of(spec.bits)), spec.param_dtype), round_params(low, spec.param_dtype)};
}

// Values that the parameter type holds exactly, `stride` bytes apart.
void store_params(const float* x, int32_t param_dtype, int count, int64_t stride, uint8_t* to) {
    if (param_dtype == KIVI_F32) {
        for (int i = 0; i < count; ++i) std::memcpy(to + i * stride, x + i, sizeof(float));
        return;
    }
#if !HWY_ARCH_X86 || HWY_TARGET <= HWY_AVX2  // there is a conversion to f16
    if (stride == 2 && count % kLanes == 0) {
        const F32 d;
        const hn::Rebind<hwy::float16_t, F32> d16;
        hwy::float16_t* half = reinterpret_cast<hwy::float16_t*>(to);
        for (int i = 0; i < count; i += kLanes) {
            hn::StoreU(hn::DemoteTo(d16, hn::Load(d, x + i)), d16, half + i);
        }
        return;
    }
#endif
    for (int i = 0; i < count; ++i) {
        const uint16_t half = f32_to_f16(x[i]);
        std::memcpy(to + i * stride, &half, sizeof half);
    }
}

// ---- codes ----
//
// Codes travel as fixed-point numbers: sixteen bits of fraction, the code above them, and above that what the
// conversion leaves (0x4300, the exponent of 128).
//
//   31       23      16               0
//   | 0x43 .. | code | steps + 1/2, mod 1 |

constexpr int kFractionBits = 16;
constexpr uint32_t code_bits(int bits) { return ((1u << bits) - 1) << kFractionBits; }
// No steps: a number whose unit in the last place is 2^-16, and 1/2 for rounding.
constexpr float kZeroSteps = 128.5f;

using U16 = hn::Repartition<uint16_t, F32>;
using VU16 = hn::Vec<U16>;

// Codes by multiplication with the inverse. Product and quotient, rounded to fp32 or not, differ by less than
// 2^-18 for up to 15 steps, and the sum is rounded by at most 2^-17. One unit of 2^-16 is added, so a quotient
// that is a tie, or on the other side of one than the product, has a fraction of 0 or 1 units (no_near_tie).
VU quick_codes(VF y, VF inverse, VF min) {
    const F32 d;
    return hn::BitCast(U32(), hn::MulAdd(hn::Sub(y, min), inverse, hn::Set(d, kZeroSteps + 0x1p-16f)));
}

// The smallest fraction among codes, in the lower half word of each lane; the upper ones are 0x4300 and more.
VU16 all_fractions() { return hn::Set(U16(), 0xFFFF); }
void collect_fractions(VU codes, VU16& smallest) { smallest = hn::Min(smallest, hn::BitCast(U16(), codes)); }
bool no_near_tie(VU16 smallest) { return hn::AllTrue(U16(), hn::Gt(smallest, hn::Set(U16(), 1))); }

// Codes by the definition: IEEE division, then round half to even: where the unit in the last place is 1,
// addition rounds so. A scale of 0 has infinity for a divisor, which makes every code 0; NaN (only from
// infinity over infinity) gives 0 too.
VU exact_codes(VF y, VF scale, VF min, VF levels) {
    const F32 d;
    const U32 du;
    const VF divisor = hn::IfThenElse(hn::Gt(scale, hn::Zero(d)), scale, hn::Inf(d));
    const VF steps = hn::Div(hn::Sub(y, min), divisor);
    const VF positive = hn::IfThenElseZero(hn::Gt(steps, hn::Zero(d)), steps);
    return hn::ShiftLeft<kFractionBits>(
        hn::BitCast(du, hn::Add(hn::Min(positive, levels), hn::Set(d, 0x1p23f))));
}

VF inverse_of(VF scale) {
    const F32 d;
    return hn::IfThenElseZero(hn::Gt(scale, hn::Zero(d)), hn::Div(hn::Set(d, 1.0f), scale));
}

// Whether the inverses are normal numbers, or 0 for 0.
bool have_inverses(VF scale) {
    const F32 d;
    return hn::AllTrue(d, hn::Or(hn::Ge(scale, hn::Set(d, 0x1p-100f)), hn::Eq(scale, hn::Zero(d))));
}

// Whether quick_codes serve all values from low to high: steps that round into 0 .. levels without a clamp.
bool quick_codes_serve(VF low, VF high, VF scale, VF inverse, VF min, VF levels) {
    const F32 d;
    const VF first = hn::Mul(hn::Sub(low, min), inverse), last = hn::Mul(hn::Sub(high, min), inverse);
    const auto inside =
        hn::And(hn::Ge(first, hn::Set(d, -0.25f)), hn::Le(last, hn::Add(levels, hn::Set(d, 0.25f))));
    return have_inverses(scale) && hn::AllTrue(d, inside);
}

}  // namespace
}  // namespace kivi::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_SCALAR

#endif  // include guard of this instruction set
