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

namespace {
// Cache lines that the cursors are ahead: 8 KiB, a quarter of the smallest first-level cache, beside operands and
// scores; and 24 KiB, two pages of 2-bit codes, which the second level holds with ease and which outlast the latency
// of a busy memory. Half or twice as much of either changes nothing measurable (T 4096, cold); 32 and 64 lines make
// `kivi2-sink` and `k3v2` slower by 30 %, no lines at all by 80 %.
constexpr int kNearLines = 128;
constexpr int kFarLines = 384;
}  // namespace

void Ahead::start(const Range* ranges, int count) {
    ranges_ = ranges;
    count_ = count;
    near_ = far_ = Cursor();
    for (int i = 0; i < kNearLines; ++i) near_.fetch<3>(*this, 1);
    for (int i = 0; i < kFarLines; ++i) far_.fetch<2>(*this, 1);
}

const Kernels* kernels() { return simd::choose(KIVI_SIMD_TARGETS(TableOf))(); }

}  // namespace kivi::cpu
#endif
