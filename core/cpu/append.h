// Append and flush of one tensor (K or V) and one sequence.
#pragma once
#include <cstdint>

#include "backend/backend.h"
#include "cpu/storage.h"
#include "format/feedback.h"

namespace kivi::cpu {

// How to do it: `plain` keeps to the scalar definitions. `scratch` is memory of one thread, of
// append_scratch_floats values.
struct AppendMeans {
    bool plain = false;
    float* scratch = nullptr;
};
int64_t append_scratch_floats(const kivi_layer& layer);

// Packs what moves behind the border (row.before -> row.after), from the tail and from the new tokens, then
// stores the new tokens that stay: in the sink window or in the tail. `input` empty: flush, no new tokens.
// `feedback`: tables of all heads, or NULL for nearest rounding.
// Returns the number of rows that saturated.
int64_t append_heads(const TensorStore& store, const Feedback* feedback, const Row& row, int head_begin, int head_end,
                     const View& input, const AppendMeans& means);

}  // namespace kivi::cpu
