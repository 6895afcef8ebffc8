// When tokens are packed: pure functions of the length, shared by every backend and every test.
#pragma once
#include <cstdint>

#include "format/host_device.h"
#include "format/model.h"

namespace kivi {

// Where the packed part of one tensor ends. A sequence of one layer is fully described by its length and
// the two borders.
//
//   0 ........ S ............ border ............ length
//   sink window    packed pages        tail
struct Span {
    int64_t length = 0;
    int64_t key_border = 0;  // 0 while nothing is packed; else in [S, length]
    int64_t value_border = 0;

    KIVI_HOST_DEVICE int64_t border(Part part) const { return part == Part::key ? key_border : value_border; }
};

// floor(a / b) for b > 0 and any a.
KIVI_HOST_DEVICE inline int64_t floor_div(int64_t a, int64_t b) {
    const int64_t q = a / b;
    return q * b > a ? q - 1 : q;
}

// Largest multiple of `of` at or below `position`.
KIVI_HOST_DEVICE inline int64_t last_multiple(int64_t of, int64_t position) {
    return of * floor_div(position, of);
}

// The border moves to `target` if that packs anything, and never back.
KIVI_HOST_DEVICE inline int64_t advance_border(const Windows& windows, int64_t border, int64_t target) {
    return target > windows.sink && target > border ? target : border;
}

// Span after an append that brings the sequence to `length` >= before.length.
KIVI_HOST_DEVICE inline Span after_append(const Windows& windows, const Span& before, int64_t length) {
    int64_t key_target, value_target;
    if (windows.schedule == KIVI_SCHEDULE_PUBLISHED) {
        key_target = last_multiple(windows.recent, length - 1);
        value_target = length - 1 - windows.recent;
    } else {
        key_target = value_target = last_multiple(windows.flush, length - windows.recent);
    }
    Span after = before;
    after.length = length;
    after.key_border = advance_border(windows, before.key_border, key_target);
    after.value_border = advance_border(windows, before.value_border, value_target);
    return after;
}

// Span after flush_residual: the border moves to the last multiple of the unit.
KIVI_HOST_DEVICE inline Span after_flush(const Windows& windows, const Span& before) {
    const int64_t target = last_multiple(windows.unit, before.length);
    Span after = before;
    after.key_border = advance_border(windows, before.key_border, target);
    after.value_border = advance_border(windows, before.value_border, target);
    return after;
}

// Rows of the ring that holds one tail: slot = (position - S) mod capacity. One more than a tail holds
// between calls (rolling: R + F - 1; published: R keys, R + 1 values), so that a single new row can be stored
// before the rows that it pushes out are packed.
KIVI_HOST_DEVICE inline int64_t tail_capacity(const Windows& windows, Part part) {
    if (windows.schedule == KIVI_SCHEDULE_PUBLISHED) return windows.recent + (part == Part::key ? 1 : 2);
    return windows.recent + windows.flush;
}

// First position of the tail; positions below S live in the sink window.
KIVI_HOST_DEVICE inline int64_t tail_begin(const Windows& windows, const Span& span, Part part) {
    const int64_t border = span.border(part);
    return border > windows.sink ? border : windows.sink;
}

// Page blocks that a span occupies.
KIVI_HOST_DEVICE inline int64_t blocks_of(const Windows& windows, const Span& span) {
    const int64_t border = span.key_border > span.value_border ? span.key_border : span.value_border;
    const int64_t packed = border - windows.sink;
    return packed > 0 ? (packed + kPageTokens - 1) / kPageTokens : 0;
}

// Page blocks that a sequence of `length` tokens may come to occupy, by appends and flushes.
KIVI_HOST_DEVICE inline int64_t most_blocks(const Windows& windows, int64_t length) {
    Span full = after_append(windows, Span{}, length);
    if (windows.schedule == KIVI_SCHEDULE_ROLLING) full = after_flush(windows, full);
    return blocks_of(windows, full);
}

}  // namespace kivi
