// Plain values of several calls, each with the sentence of its refusal.
#pragma once
#include <cmath>
#include <cstdint>

#include "cache/refuse.h"

namespace kivi {

inline float checked_finite(const char* name, float value) {
    if (!std::isfinite(value)) refuse_argument(name, " is ", value, "; it must be finite");
    return value;
}

inline float checked_soft_cap(const char* name, float value) {
    if (!(value >= 0) || !std::isfinite(value)) {
        refuse_argument(name, " is ", value, "; it must be finite and not negative, 0 for none");
    }
    return value;
}

inline int64_t checked_window_left(const char* name, int64_t window_left) {
    if (window_left < -1) refuse_argument(name, " is ", window_left, "; it must be -1 (all) or more");
    return window_left;
}

}  // namespace kivi
