// Assembles the table of kernels for every instruction set.
#include "cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels.cc"
#include "hwy/foreach_target.h"

#include "cpu/kernels_convert-inl.h"
#include "cpu/kernels_packed-inl.h"
#include "cpu/kernels_rows-inl.h"
#include "cpu/kernels_softmax-inl.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace kivi::cpu::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR
const Kernels* TableOf() { return nullptr; }
#else
template <bool kVnni>
constexpr Kernels kTable = {
    ScoreRows,
    MixRows,
    {ScorePacked<2, kVnni>, ScorePacked<3, kVnni>, ScorePacked<4, kVnni>},
    {MixPacked<2, kVnni>, MixPacked<3, kVnni>, MixPacked<4, kVnni>},
    Softmax,
    LoadRow,
    StoreRow,
    Hadamard,
};

const Kernels* TableOf() {
#if HWY_TARGET == HWY_AVX3
    if (simd::target() == simd::Target::avx512_vnni) return &kTable<true>;
#endif
    return &kTable<false>;
}
#endif

}  // namespace kivi::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kivi::cpu {

void Ahead::start(const Range* ranges, int count) {
    at_ = end_ = nullptr;
    ranges_ = ranges;
    count_ = count;
    next_ = 0;
    for (int i = 0; i < kFirstLines; ++i) fetch(1);
    behind_ = kCatchUpLines;
}

void Ahead::catch_up(int lines) {
    fetch(lines);
    behind_ -= lines;
}

const Kernels* kernels() { return simd::choose(KIVI_SIMD_TARGETS(TableOf))(); }

}  // namespace kivi::cpu
#endif
