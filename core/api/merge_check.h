// Arguments of kivi_merge -> MergeCall.
#pragma once
#include "backend/backend.h"
#include "kivi/kivi.h"

namespace kivi {

MergeCall check_merge(int32_t parts, const kivi_tensor* outs, const kivi_tensor* lses,
                      const float* learned_sinks, const kivi_tensor* out, const kivi_tensor* lse);

}  // namespace kivi
