// A layer that the decode kernel serves, as kernels that append to it are compiled for it.
#pragma once
#include "cuda/decode_instances.h"
#include "cuda/launch.h"
#include "cuda/pack_pairs.cuh"

namespace kivi::cuda {

template <bool BF16, int DIM, int KEY_BITS, int VALUE_BITS, int KEY_GROUP, int VALUE_GROUP>
struct FastLayer {
    using P = Pairs<BF16>;
    [[maybe_unused]] static constexpr int kDim = DIM, kKeyBits = KEY_BITS, kValueBits = VALUE_BITS;
    [[maybe_unused]] static constexpr int kKeyGroup = KEY_GROUP, kValueGroups = DIM / VALUE_GROUP;
    [[maybe_unused]] static constexpr bool kPlain = KEY_BITS == 16;
};

// visit(FastLayer) for a layer's tensors; false if it is none.
template <class Visit>
bool with_fast_layer(const TensorStore& key, const TensorStore& value, const Visit& visit) {
    const kivi_spec& k = key.spec();
    const kivi_spec& v = value.spec();
    const int dim = key.dim, group = value.group();
    const bool bf16 = key.window_dtype == KIVI_BF16;
#define KIVI_VISIT_LAYER(BF16, DIM, KEY_BITS, VALUE_BITS, KEY_GROUP, VALUE_GROUP, ...) \
    if (bf16 == BF16 && dim == DIM && k.bits == KEY_BITS && v.bits == VALUE_BITS &&    \
        (KEY_BITS == 16 || (k.group == KEY_GROUP && group == VALUE_GROUP))) {          \
        visit(FastLayer<BF16, DIM, KEY_BITS, VALUE_BITS, KEY_GROUP, VALUE_GROUP>{});   \
        return true;                                                                   \
    }
    KIVI_DECODE_INSTANCES(KIVI_VISIT_LAYER)
#undef KIVI_VISIT_LAYER
    return false;
}

}  // namespace kivi::cuda
