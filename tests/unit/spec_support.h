// The spec of one tensor from the fields that tests below the C API vary.
#pragma once
#include "kivi/kivi.h"

namespace kivi_test {

inline kivi_spec make_spec(int bits, int axis, int group, int transform, int32_t param_dtype = KIVI_F16) {
    kivi_spec spec{};
    spec.bits = bits;
    spec.transform = transform;
    if (bits == 16) return spec;
    spec.axis = axis;
    spec.group = group;
    spec.param_dtype = param_dtype;
    return spec;
}

}  // namespace kivi_test
