// When tokens are packed: pure functions of the length, shared by every backend and every test.
#pragma once
#include <cstdint>

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

    int64_t border(Part part) const { return part == Part::key ? key_border : value_border; }
};

// Span after an append that brings the sequence to `length` >= before.length.
Span after_append(const Windows& windows, const Span& before, int64_t length);
// Span after flush_residual: the border moves to the last multiple of the unit.
Span after_flush(const Windows& windows, const Span& before);

// Rows of the ring that holds one tail: slot = (position - S) mod capacity. One more than a tail holds
// between calls (rolling: R + F - 1; published: R keys, R + 1 values), so that a single new row can be stored
// before the rows that it pushes out are packed.
int64_t tail_capacity(const Windows& windows, Part part);

// First position of the tail; positions below S live in the sink window.
inline int64_t tail_begin(const Windows& windows, const Span& span, Part part) {
    const int64_t border = span.border(part);
    return border > windows.sink ? border : windows.sink;
}

// Page blocks that a span occupies.
int64_t blocks_of(const Windows& windows, const Span& span);

// floor(a / b) for b > 0 and any a.
int64_t floor_div(int64_t a, int64_t b);

}  // namespace kivi
