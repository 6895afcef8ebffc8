// Borders as pure functions of the length, in absolute positions.
#include "format/policy.h"

#include <algorithm>

namespace kivi {

int64_t floor_div(int64_t a, int64_t b) {
    const int64_t q = a / b;
    return q * b > a ? q - 1 : q;
}

namespace {

// The border moves to `target` if that packs anything, and never back.
int64_t advance(const Windows& windows, int64_t border, int64_t target) {
    return target > windows.sink ? std::max(border, target) : border;
}

int64_t last_multiple(int64_t of, int64_t position) { return of * floor_div(position, of); }

}  // namespace

Span after_append(const Windows& windows, const Span& before, int64_t length) {
    Span after = before;
    after.length = length;
    int64_t key_target, value_target;
    if (windows.schedule == KIVI_SCHEDULE_PUBLISHED) {
        key_target = last_multiple(windows.recent, length - 1);
        value_target = length - 1 - windows.recent;
    } else {
        key_target = value_target = last_multiple(windows.flush, length - windows.recent);
    }
    after.key_border = advance(windows, before.key_border, key_target);
    after.value_border = advance(windows, before.value_border, value_target);
    return after;
}

Span after_flush(const Windows& windows, const Span& before) {
    const int64_t target = last_multiple(windows.unit, before.length);
    Span after = before;
    after.key_border = advance(windows, before.key_border, target);
    after.value_border = advance(windows, before.value_border, target);
    return after;
}

int64_t tail_capacity(const Windows& windows, Part part) {
    if (windows.schedule == KIVI_SCHEDULE_PUBLISHED) {
        return windows.recent + (part == Part::key ? 1 : 2);
    }
    return windows.recent + windows.flush;
}

int64_t blocks_of(const Windows& windows, const Span& span) {
    const int64_t packed = std::max(span.key_border, span.value_border) - windows.sink;
    return packed > 0 ? (packed + kPageTokens - 1) / kPageTokens : 0;
}

}  // namespace kivi
