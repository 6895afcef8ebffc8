// Assembles the table of packers for every instruction set. Work goes by units of 16 tokens, the tiles' height in
// the lanes order (page_order.cpp).
#include "cpu/write_kernels.h"

#include "cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/pack_kernels.cc"
#include "hwy/foreach_target.h"

#include "cpu/pack_channel-inl.h"
#include "cpu/pack_query_aware-inl.h"
#include "cpu/pack_token-inl.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace kivi::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

const PackKernels* pack_kernels_of_target() { return nullptr; }

#else

namespace {

void nearest(const TensorStore& store, const float* rows, int first, int count, uint8_t* part,
             RowsAhead& ahead) {
    if (store.spec.axis == KIVI_AXIS_CHANNEL) {
        for (int t = 0; t < count; t += store.spec.group) {
            nearest_channel_group(store, rows + static_cast<int64_t>(t) * store.dim, first + t, part, ahead);
        }
        return;
    }
    TokenParams params;
    for (int t = first; t < first + count;) {
        UnitPart at{t / kTile, t % kTile, 0};
        at.end = std::min(kTile, at.begin + first + count - t);
        const float* x = rows + static_cast<int64_t>(t - first) * store.dim;
        token_params(store, x, at, part, &params);
        put_token_codes(store, x, at, params, part, ahead);
        t += at.tokens();
    }
}

}  // namespace

const PackKernels* pack_kernels_of_target() {
#if HWY_NATIVE_FMA
    static const PackKernels kernels{nearest, query_aware};
#else
    static const PackKernels kernels{nearest, nullptr};
#endif
    return &kernels;
}

#endif  // HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace kivi::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kivi::cpu {

HWY_EXPORT(pack_kernels_of_target);

const PackKernels* pack_kernels() { return simd::choose(KIVI_SIMD_TARGETS(pack_kernels_of_target))(); }

}  // namespace kivi::cpu
#endif
