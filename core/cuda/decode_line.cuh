// The line of work: what a batch holds, and which block and warp does which part of it.
//
// All work is a line of visits in (batch row, KV head) order; a segment is the part of one row and head: sink
// window, tail, pages. Places on the line are weights (bytes in small numbers). Blocks own equal contiguous pieces
// of the line, warps equal pieces of their block's piece; a visit belongs to the piece in which it begins.
//
//   line     | row 0 head 0: sink, tail, pages ... | row 0 head 1: ... | ... | row 1 head 0: ...
//   blocks   |------ block 0 ------|------ block 1 ------|------ block 2 ------| ...
//   warps    |--|--|--|--|--|--|--|--|--|--|--| ...
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_args.h"
#include "cuda/decode_instructions.cuh"

namespace kivi::cuda::fast {

// The cache's sequence of a batch row; -1 if the row is to be skipped.
__device__ __forceinline__ int sequence_of(const DecodeArgs& p, int r) {
    if (!p.on_device) return p.sequence[r];
    const int index = p.first_row + r;
    if (p.counts != nullptr && p.counts[index] != p.tokens) return -1;
    return p.sequences != nullptr ? p.sequences[index] : index;
}

// Tokens of a row's sequence; all 0 if the row is to be skipped.
struct Lengths {
    int sink, packed, tail;
    __device__ __forceinline__ int total() const { return sink + packed + tail; }
};
__device__ __forceinline__ Lengths lengths_of(const DecodeArgs& p, int r) {
    const int sequence = sequence_of(p, r);
    if (sequence < 0) return {0, 0, 0};
    const int length = static_cast<int>(p.spans[sequence].length);
    const int border = static_cast<int>(p.spans[sequence].key_border);
    Lengths l;
    l.sink = min(length, p.sink);
    l.packed = max(border - p.sink, 0);
    l.tail = length - l.sink - l.packed;
    return l;
}

template <class C>
struct Extent {
    unsigned sinks, windows, visits;  // visits to the sink window; to it and the tail; to everything
    __device__ explicit Extent(const Lengths& l) {
        sinks = unsigned(l.sink + C::kWindowTokens - 1) / C::kWindowTokens;
        windows = sinks + unsigned(l.tail + C::kWindowTokens - 1) / C::kWindowTokens;
        visits = windows + unsigned(l.packed + C::kVisitTokens - 1) / C::kVisitTokens;
    }
    // Place on the line, from the segment's beginning; place(visits) is the weight of all.
    __device__ unsigned place(unsigned visit) const {
        return visit < windows ? visit * C::kWindowWeight
                               : windows * C::kWindowWeight + (visit - windows) * C::kVisitWeight;
    }
    __device__ unsigned visit_at(unsigned x) const {  // first visit whose place is >= x
        const unsigned w = windows * C::kWindowWeight;
        return x <= w ? (x + C::kWindowWeight - 1) / C::kWindowWeight
                      : windows + (x - w + C::kVisitWeight - 1) / C::kVisitWeight;
    }
};

struct Partition {
    unsigned quotient, remainder;  // of total weight / blocks
    Partition() = default;
    __device__ Partition(unsigned total, unsigned blocks) {
        quotient = divide(total, blocks);
        remainder = total - quotient * blocks;
    }
    __device__ unsigned begin(unsigned block) const { return block * quotient + min(block, remainder); }
    __device__ unsigned owner(unsigned place) const {
        const unsigned wide = remainder * (quotient + 1);
        return place < wide ? divide(place, quotient + 1) : remainder + divide(place - wide, quotient);
    }
};

// How many blocks share the work. A block's piece is at least as long as the heaviest visit, so at least one visit
// begins in it. Where there is little work the merge over blocks counts: then blocks begin where segments of equal
// length do, so that each has a part of one segment only, and segments of up to two visits a warp stay whole.
template <class C>
__device__ __forceinline__ unsigned blocks_for(unsigned total, unsigned segments, unsigned grid) {
    if (total == 0) return 0;
    constexpr unsigned kWhole = 2 * C::kWarps * C::kVisitWeight;
    const unsigned blocks = max(1u, min(grid, total / C::kMaxWeight));
    if (segments > grid || total >= 2 * kWhole * grid) return blocks;
    if (total <= segments * kWhole) return min(blocks, segments);
    const unsigned equal = divide(blocks, segments) * segments;
    return 10 * equal >= 9 * blocks ? equal : blocks;
}

// Where a segment begins, its last visit begins, and it ends on the line.
struct Reach {
    unsigned begin, last, end;
    template <class C>
    __device__ Reach(unsigned place, const Extent<C>& e)
        : begin(place), last(place + e.place(e.visits - 1)), end(place + e.place(e.visits)) {}
    Reach() = default;
};

// A warp's piece of the line.
struct alignas(16) Slice {
    unsigned end;
    unsigned row, row_begin;  // a batch row at or before the first visit, and its place on the line
    unsigned head, first;     // the first visit is number `first`, counted from the beginning of that head
};

// A block's piece.
struct alignas(16) BlockPiece {
    Partition partition;
    unsigned begin, weight;
};

// One visit of a warp.
struct alignas(16) Visit {
    const uint8_t* source;  // of keys: the page, or the window row
    int segment;            // batch row * kv_heads + head; -1: no more visits
    int info;               // see below
};
enum Kind { kPage, kSink, kTail };
__device__ __forceinline__ int info_valid(int i) { return i & 255; }         // tokens that exist
__device__ __forceinline__ int info_left(int i) { return i >> 8 & 255; }     // to the sequence's end, at most 255
__device__ __forceinline__ int info_kind(int i) { return i >> 16 & 3; }
__device__ __forceinline__ int info_block(int i) { return i >> 18 & 3; }     // first block, in the page
__device__ __forceinline__ bool info_first(int i) { return i >> 20 & 1; }    // of its segment
__device__ __forceinline__ bool info_last(int i) { return i >> 21 & 1; }
__device__ __forceinline__ int info_straight(int i) { return i >> 22 & 31; }  // tokens before the ring's end
// Number of the visit in its key group, where that is longer.
template <class C>
__device__ __forceinline__ int info_part(int i) {
    return C::kSharedParams ? info_block(i) % C::kGroupBlocks / C::kVisitBlocks : 0;
}

// What a warp has seen of a segment.
struct alignas(16) Seen {
    int segment;     // -1: nothing
    unsigned begin;  // of the segment on the line
    unsigned last;   // where its last visit is
    unsigned block;  // where it begins
};

}  // namespace kivi::cuda::fast
