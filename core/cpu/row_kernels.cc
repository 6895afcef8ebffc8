// Rows on their way in, vectorised: conversion, Hadamard, rounding to the window dtype.
#include "cpu/write_kernels.h"

#include <cmath>
#include <type_traits>

#include "cpu/simd.h"
#include "format/hadamard.h"
#include "format/half.h"

#include "cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/row_kernels.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace kivi::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

const RowKernels* row_kernels_of_target() { return nullptr; }

#else

namespace {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using VF = hn::Vec<F32>;
using VI = hn::Vec<I32>;

constexpr int kSafePeakBits = (127 + 118) << 23;  // 2^118: no stage of a Hadamard overflows below it

// Bits of |x|, ordered as the magnitudes are, NaN above everything.
VI magnitude(VF x) {
    const I32 di;
    return hn::And(hn::BitCast(di, x), hn::Set(di, 0x7FFFFFFF));
}

bool any_at_least(VI peak, int bits) {
    const I32 di;
    return !hn::AllFalse(di, hn::Gt(peak, hn::Set(di, bits - 1)));
}

// Conversions of one vector. Where the instruction set has none for f16, the scalar ones serve.
constexpr bool kHardwareF16 = !HWY_ARCH_X86 || HWY_TARGET <= HWY_AVX2;

struct Float32 {
    static VF load(const void* data, int64_t at) {
        return hn::LoadU(F32(), static_cast<const float*>(data) + at);
    }
    static void store(VF x, void* to, int64_t at) { hn::StoreU(x, F32(), static_cast<float*>(to) + at); }
};

struct BFloat16 {
    static VF load(const void* data, int64_t at) {
        const hn::Rebind<uint16_t, F32> d16;
        const U32 du;
        const auto wide = hn::PromoteTo(du, hn::LoadU(d16, static_cast<const uint16_t*>(data) + at));
        return hn::BitCast(F32(), hn::ShiftLeft<16>(wide));
    }
    // Round to nearest, ties to even. Of a NaN some bits could carry out of the exponent, and make a number.
    static void store(VF x, void* to, int64_t at) {
        const hn::Rebind<uint16_t, F32> d16;
        const U32 du;
        const auto u = hn::BitCast(du, hn::IfThenElse(hn::IsNaN(x), hn::Set(F32(), float_of(kNanF32)), x));
        const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(du, 1));
        const auto rounded = hn::ShiftRight<16>(hn::Add(u, hn::Add(odd, hn::Set(du, 0x7FFF))));
        const hn::RebindToSigned<U32> di;
        hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, rounded)), d16, static_cast<uint16_t*>(to) + at);
    }
};

struct Float16 {
    static VF load(const void* data, int64_t at) {
        const F32 d;
        const uint16_t* from = static_cast<const uint16_t*>(data) + at;
        if constexpr (kHardwareF16) {
            const hn::Rebind<hwy::float16_t, F32> d16;
            return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(from)));
        } else {
            HWY_ALIGN float x[HWY_MAX_BYTES / sizeof(float)];
            for (size_t i = 0; i < hn::Lanes(d); ++i) x[i] = f16_to_f32(from[i]);
            return hn::Load(d, x);
        }
    }
    static void store(VF x, void* to, int64_t at) {
        const F32 d;
        uint16_t* out = static_cast<uint16_t*>(to) + at;
        if constexpr (kHardwareF16) {
            const hn::Rebind<hwy::float16_t, F32> d16;
            hn::StoreU(hn::DemoteTo(d16, x), d16, reinterpret_cast<hwy::float16_t*>(out));
        } else {
            HWY_ALIGN float lanes[HWY_MAX_BYTES / sizeof(float)];
            hn::Store(x, d, lanes);
            for (size_t i = 0; i < hn::Lanes(d); ++i) out[i] = f32_to_f16(lanes[i]);
        }
    }
};

// Rounds to the type and back.
template <class Type>
HWY_INLINE VF round_through(VF x) {
    if constexpr (std::is_same_v<Type, Float32>) return x;
#if !HWY_ARCH_X86 || HWY_TARGET <= HWY_AVX2
    if constexpr (std::is_same_v<Type, Float16>) {
        const hn::Rebind<hwy::float16_t, F32> d16;
        return hn::PromoteTo(F32(), hn::DemoteTo(d16, x));
    }
#endif
    HWY_ALIGN uint16_t memory[HWY_MAX_BYTES / sizeof(float)];
    Type::store(x, memory, 0);
    return Type::load(memory, 0);
}

// ---- Hadamard: the stages of format/hadamard.cpp in the same order ----

// One stage inside a vector: partners stand 2^kLog2Distance lanes apart. The right partner is multiplied by -1,
// which is exact, so that the addition is the subtraction left - right.
template <int kLog2Distance>
HWY_INLINE VF stage_in_vector(VF x) {
    const F32 d;
    const U32 du;
    constexpr int kDistance = 1 << kLog2Distance;
    const auto right = hn::ShiftLeft<31 - kLog2Distance>(hn::And(hn::Iota(du, 0), hn::Set(du, kDistance)));
    const VF sign = hn::BitCast(d, hn::Or(right, hn::BitCast(du, hn::Set(d, 1.0f))));
    VF partner = x;
    if constexpr (kDistance == 1) partner = hn::Shuffle2301(x);
    if constexpr (kDistance == 2) partner = hn::Shuffle1032(x);
#if HWY_TARGET <= HWY_AVX2
    if constexpr (kDistance == 4) partner = hn::SwapAdjacentBlocks(x);
    if constexpr (kDistance == 8) partner = hn::ConcatLowerUpper(d, x, x);
#endif
    return hn::MulAdd(x, sign, partner);
}

constexpr int kLanes = HWY_MAX_BYTES / sizeof(float);

// The stages inside each of kVectors vectors, stage by stage: the vectors' chains of operations are independent,
// and side by side in the instruction stream they overlap.
template <int kVectors>
HWY_INLINE void stages_in_vectors(VF* v) {
    const auto stage = [v](auto log2_distance) HWY_ATTR {
        HWY_UNROLL(8)
        for (int i = 0; i < kVectors; ++i) v[i] = stage_in_vector<decltype(log2_distance)::value>(v[i]);
    };
    stage(std::integral_constant<int, 0>());
    stage(std::integral_constant<int, 1>());
    if constexpr (kLanes >= 8) stage(std::integral_constant<int, 2>());
    if constexpr (kLanes >= 16) stage(std::integral_constant<int, 3>());
}

VF norm_of(int block) {
    return hn::Set(F32(), static_cast<float>(1.0 / std::sqrt(static_cast<double>(block))));
}

// One block of any size, in memory.
void transform_block(float* HWY_RESTRICT x, int block) {
    const F32 d;
    for (int i = 0; i < block; i += kLanes) {
        VF v = hn::LoadU(d, x + i);
        stages_in_vectors<1>(&v);
        hn::StoreU(v, d, x + i);
    }
    for (int h = kLanes; h < block; h *= 2) {
        for (int i = 0; i < block; i += 2 * h) {
            for (int j = i; j < i + h; j += kLanes) {
                const VF left = hn::LoadU(d, x + j), right = hn::LoadU(d, x + j + h);
                hn::StoreU(hn::Add(left, right), d, x + j);
                hn::StoreU(hn::Sub(left, right), d, x + j + h);
            }
        }
    }
    const VF norm = norm_of(block);
    for (int i = 0; i < block; i += kLanes) hn::StoreU(hn::Mul(hn::LoadU(d, x + i), norm), d, x + i);
}

// ---- the three kernels ----

// Whether all values seen are finite: x * 0 is 0 for those, and NaN for others.
class Finite {
  public:
    HWY_INLINE Finite() { sum_[0] = sum_[1] = sum_[2] = sum_[3] = hn::Zero(F32()); }
    // `i`: values of a few neighbouring numbers add to sums of their own, which do not wait for each other.
    HWY_INLINE void see(VF x, int i) { sum_[i % 4] = hn::MulAdd(x, hn::Zero(F32()), sum_[i % 4]); }
    HWY_INLINE bool all() const {
        const F32 d;
        const VF sum = hn::Add(hn::Add(sum_[0], sum_[1]), hn::Add(sum_[2], sum_[3]));
        return hn::AllTrue(d, hn::Eq(sum, hn::Zero(d)));
    }

  private:
    VF sum_[4];
};

// Calls work(count, i) for all vectors of a row, several at a time where it has them.
template <class Work>
HWY_INLINE void for_vectors(int dim, Work work) {
    int i = 0;
    for (; i + 8 * kLanes <= dim; i += 8 * kLanes) work(std::integral_constant<int, 8>(), i);
    for (; i < dim; i += kLanes) work(std::integral_constant<int, 1>(), i);
}

// A row as it is.
template <class From, class Window>
HWY_INLINE void take_row(const void* data, int64_t at, int dim, float* HWY_RESTRICT x, Finite& finite) {
    for_vectors(dim, [&](auto vectors, int begin) HWY_ATTR {
        constexpr int kVectors = decltype(vectors)::value;
        const F32 d;
        VF v[kVectors];
        HWY_UNROLL(8)
        for (int i = 0; i < kVectors; ++i) {
            v[i] = From::load(data, at + begin + i * kLanes);
            if constexpr (!std::is_same_v<From, Window>) v[i] = round_through<Window>(v[i]);
            hn::StoreU(v[i], d, x + begin + i * kLanes);
        }
        HWY_UNROLL(8)
        for (int i = 0; i < kVectors; ++i) finite.see(v[i], i);
    });
}

// Values beyond kSafePeakBits. Infinities and NaN of other types show in what is stored.
template <class Type>
constexpr bool kCanBeHuge = !std::is_same_v<Type, Float16>;

// One Hadamard block of kVectors vectors, in registers. `peak` collects the largest magnitude on the way in.
template <int kVectors, class From>
HWY_INLINE void rotate_vectors(const void* data, int64_t at, float* HWY_RESTRICT x, VI& peak) {
    const F32 d;
    VF v[kVectors];
    HWY_UNROLL(8)
    for (int i = 0; i < kVectors; ++i) {
        v[i] = From::load(data, at + i * kLanes);
        if constexpr (kCanBeHuge<From>) peak = hn::Max(peak, magnitude(v[i]));
    }
    stages_in_vectors<kVectors>(v);
    HWY_UNROLL(3)
    for (int h = 1; h < kVectors; h *= 2) {
        HWY_UNROLL(8)
        for (int i = 0; i < kVectors; ++i) {
            if (i & h) continue;
            const VF left = v[i], right = v[i + h];
            v[i] = hn::Add(left, right);
            v[i + h] = hn::Sub(left, right);
        }
    }
    const VF norm = norm_of(kVectors * kLanes);
    HWY_UNROLL(8)
    for (int i = 0; i < kVectors; ++i) hn::StoreU(hn::Mul(v[i], norm), d, x + i * kLanes);
}

// One block of any size, in memory.
template <class From>
void rotate_block(const void* data, int64_t at, int block, float* HWY_RESTRICT x, VI& peak) {
    const F32 d;
    for (int i = 0; i < block; i += kLanes) {
        const VF v = From::load(data, at + i);
        if constexpr (kCanBeHuge<From>) peak = hn::Max(peak, magnitude(v));
        hn::StoreU(v, d, x + i);
    }
    transform_block(x, block);
}

template <class From>
HWY_INLINE void rotate_row(const void* data, int64_t at, int dim, int block, float* HWY_RESTRICT x,
                           VI& peak) {
    for (int i = 0; i < dim; i += block) {
        switch (block / kLanes) {
            case 4: rotate_vectors<4, From>(data, at + i, x + i, peak); break;
            case 8: rotate_vectors<8, From>(data, at + i, x + i, peak); break;
            default: rotate_block<From>(data, at + i, block, x + i, peak);
        }
    }
}

// Rotated rows to the window's type and back. A pass of its own, because behind the transform the conversions
// would lengthen a chain of operations of which the processor overlaps too few rows already.
template <class Window>
HWY_INLINE void round_rows(int count, int dim, float* HWY_RESTRICT x, Finite& finite) {
    for_vectors(count * dim, [&](auto vectors, int begin) HWY_ATTR {
        const F32 d;
        HWY_UNROLL(8)
        for (int i = 0; i < decltype(vectors)::value; ++i) {
            const VF v = round_through<Window>(hn::LoadU(d, x + begin + i * kLanes));
            hn::StoreU(v, d, x + begin + i * kLanes);
            finite.see(v, i);
        }
    });
}

template <class From, class Window, bool kRotate>
bool take_rows(const InputRows& input, int count, int dim, float* HWY_RESTRICT rows, RowsAhead& ahead,
               int lines_a_row) {
    const void* data = input.data;
    const int block = kRotate ? hadamard_block(dim) : 0;
    int64_t at = input.at;
    float* x = rows;
    Finite finite;
    VI peak = hn::Zero(I32());
    for (int t = 0; t < count; ++t, at += input.stride, x += dim) {
        ahead.fetch(lines_a_row);
        if constexpr (kRotate) {
            rotate_row<From>(data, at, dim, block, x, peak);
        } else {
            take_row<From, Window>(data, at, dim, x, finite);
        }
    }
    if constexpr (kRotate) round_rows<Window>(count, dim, rows, finite);
    return finite.all() && !any_at_least(peak, kSafePeakBits);
}

template <class From, bool kRotate>
bool take_from(const InputRows& input, int count, int dim, int32_t window_dtype, float* x, RowsAhead& ahead,
               int lines_a_row) {
    switch (window_dtype) {
        case KIVI_F16: return take_rows<From, Float16, kRotate>(input, count, dim, x, ahead, lines_a_row);
        case KIVI_BF16: return take_rows<From, BFloat16, kRotate>(input, count, dim, x, ahead, lines_a_row);
        default: return take_rows<From, Float32, kRotate>(input, count, dim, x, ahead, lines_a_row);
    }
}

template <bool kRotate>
bool take_any(const InputRows& input, int count, int dim, int32_t window_dtype, float* x, RowsAhead& ahead,
              int lines_a_row) {
    switch (input.dtype) {
        case KIVI_F16:
            return take_from<Float16, kRotate>(input, count, dim, window_dtype, x, ahead, lines_a_row);
        case KIVI_BF16:
            return take_from<BFloat16, kRotate>(input, count, dim, window_dtype, x, ahead, lines_a_row);
        default: return take_from<Float32, kRotate>(input, count, dim, window_dtype, x, ahead, lines_a_row);
    }
}

bool take(const InputRows& input, int count, int dim, int32_t transform, int32_t window_dtype, float* x,
          RowsAhead& ahead, int lines_a_row) {
    return transform == KIVI_TRANSFORM_HADAMARD
               ? take_any<true>(input, count, dim, window_dtype, x, ahead, lines_a_row)
               : take_any<false>(input, count, dim, window_dtype, x, ahead, lines_a_row);
}

template <class Window>
bool load_row(const uint8_t* from, int dim, float* HWY_RESTRICT x) {
    Finite finite;
    take_row<Window, Window>(from, 0, dim, x, finite);
    return finite.all();
}

bool load(const uint8_t* from, int32_t window_dtype, int dim, float* x) {
    switch (window_dtype) {
        case KIVI_F16: return load_row<Float16>(from, dim, x);
        case KIVI_BF16: return load_row<BFloat16>(from, dim, x);
        default: return load_row<Float32>(from, dim, x);
    }
}

template <class Window>
void store_row(const float* x, int dim, uint8_t* to) {
    const F32 d;
    for (int i = 0; i < dim; i += static_cast<int>(hn::Lanes(d))) Window::store(hn::LoadU(d, x + i), to, i);
}

void store(const float* x, int32_t window_dtype, int dim, uint8_t* to) {
    switch (window_dtype) {
        case KIVI_F16: return store_row<Float16>(x, dim, to);
        case KIVI_BF16: return store_row<BFloat16>(x, dim, to);
        default: return store_row<Float32>(x, dim, to);
    }
}

}  // namespace

const RowKernels* row_kernels_of_target() {
    static const RowKernels kernels{take, load, store};
    return &kernels;
}

#endif  // HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace kivi::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kivi::cpu {

HWY_EXPORT(row_kernels_of_target);

const RowKernels* row_kernels() { return simd::choose(KIVI_SIMD_TARGETS(row_kernels_of_target))(); }

}  // namespace kivi::cpu
#endif
