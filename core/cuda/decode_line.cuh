// The line of work: what a batch holds, and which block and warp does which part of it.
//
// All work is a line of visits in (batch row, KV head) order; a segment is the part of one row and head: sink window,
// tail, pages. Places on the line are weights (bytes in small numbers). Blocks own contiguous pieces of the line, equal
// or of whole rounds of visits (the last ones perhaps none), warps equal pieces of their block's piece; a visit belongs
// to the piece in which it begins.
//
//   line     | row 0 head 0: sink, tail, pages ... | row 0 head 1: ... | ... | row 1 head 0: ...
//   blocks   |------ block 0 ------|------ block 1 ------|------ block 2 ------| ...
//   warps    |--|--|--|--|--|--|--|--|--|--|--| ...
//
// Where results must not depend on what else is on the line (DecodeArgs::invariant), places are numbers of runs of
// visits instead, and warps get whole runs: decode_runs.cuh.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/batch.cuh"
#include "cuda/decode_args.h"
#include "cuda/decode_instructions.cuh"

namespace kivi::cuda::fast {

// A row of the batch, read once by one thread and then kept in shared memory.
struct alignas(16) BatchRow {
    int sequence;            // of the cache; -1 if the row is to be skipped
    // Tokens; all 0 in a row that is skipped. The tail has that of the call too, if DecodeCall::in_tail; kPublished:
    // `sink` are those of the middle.
    int sink, packed, tail;
    int index, offset;       // where it lies in tensors: as a row of rank 4, behind so many tokens in rank 3
    unsigned weight;         // of each of its KV heads on the line
    int skip;                // visits to pages that no query sees any more, whole key groups
    __device__ __forceinline__ int total() const { return sink + packed + tail; }
    // Tokens before the pages, and after them.
    template <class C>
    __device__ __forceinline__ int before() const { return C::kPublished ? 0 : sink; }
    template <class C>
    __device__ __forceinline__ int after() const { return C::kPublished ? sink + tail : tail; }
    __device__ __forceinline__ int64_t origin(const Strides& strides) const {
        return strides.ragged ? offset * strides.token : index * strides.row;
    }
    __device__ __forceinline__ int64_t origin(const View& view) const { return view.origin(index, offset); }
};

// The first position that query token 0 sees; the others see as many fewer.
__device__ __forceinline__ int window_begin(const DecodeArgs& p, const BatchRow& row) {
    return row.total() - p.tokens - p.window_left;
}

// kPublished: rows of the values' ring beyond those of the keys' (tail_capacity in format/policy.h).
constexpr int kMoreValueRows = 1;

template <class C>
struct Extent {
    unsigned sinks, windows, visits;  // visits to the sink window, or the middle; to it and the tail; to everything
    bool runs;                        // places are numbers of runs
    __device__ Extent(const DecodeArgs& p, const BatchRow& l) : runs(p.invariant) {
        sinks = C::kPublished
                    ? unsigned(l.packed + l.sink) / C::kWindowTokens - unsigned(l.packed) / C::kWindowTokens
                    : unsigned(l.sink + C::kWindowTokens - 1) / C::kWindowTokens;
        windows = sinks + unsigned(l.tail + C::kWindowTokens - 1) / C::kWindowTokens;
        visits = windows + unsigned(l.packed + C::kVisitTokens - 1) / C::kVisitTokens - l.skip;
    }
    __device__ unsigned weight() const { return runs ? (visits + C::kRunVisits - 1) / C::kRunVisits : place(visits); }
    // Place on the line, from the segment's beginning.
    __device__ unsigned place(unsigned visit) const {
        if (runs) return visit / C::kRunVisits;
        return visit < windows ? visit * C::kWindowWeight
                               : windows * C::kWindowWeight + (visit - windows) * C::kVisitWeight;
    }
    __device__ unsigned visit_at(unsigned x) const {  // first visit whose place is >= x
        if (runs) return x * C::kRunVisits;
        const unsigned w = windows * C::kWindowWeight;
        return x <= w ? (x + C::kWindowWeight - 1) / C::kWindowWeight
                      : windows + (x - w + C::kVisitWeight - 1) / C::kVisitWeight;
    }
};

template <class C>
__device__ __forceinline__ BatchRow read_row(const DecodeArgs& p, int r) {
    BatchRow row{};
    if (!p.on_device) {
        const RowPlace place = p.rows[r];
        row.sequence = place.sequence;
        row.index = place.index;
        if (p.ragged) row.offset = p.offset[r];
    } else {
        const RowArg of_batch = row_at(p.arrays, p.first_row + r);
        row.sequence = of_batch.count == p.tokens ? of_batch.sequence : -1;
        row.index = of_batch.index;
        if (row.sequence >= 0) row.offset = static_cast<int>(of_batch.offset);
    }
    if (row.sequence >= 0) {
        const Span* const span = p.spans + row.sequence;
        const int length = static_cast<int>(load_fresh(&span->length));
        const int border = static_cast<int>(load_fresh(&span->key_border));
        if constexpr (C::kPublished) {  // no sinks; keys are packed further than values
            row.packed = min(static_cast<int>(load_fresh(&span->value_border)), length);
            row.sink = min(max(border - row.packed, 0), length - row.packed);
        } else {
            row.sink = min(length, p.sink);
            row.packed = min(max(border - p.sink, 0), length - row.sink);
        }
        row.tail = length - row.sink - row.packed + (p.in_tail ? 1 : 0);
        if (p.window_left >= 0) {
            constexpr int kTokens = C::kVisitTokens > C::kKeyGroup ? C::kVisitTokens : C::kKeyGroup;
            row.skip = min(max(window_begin(p, row) - row.before<C>(), 0), row.packed) / kTokens *
                       (kTokens / C::kVisitTokens);
        }
        row.weight = Extent<C>(p, row).weight();
    }
    return row;
}

// Pieces of the line for blocks: the first `count` of one length, the others of another; the line's end may cut them.
struct Partition {
    unsigned count, length, other_length;
    __device__ unsigned begin(unsigned block) const {
        return min(block, count) * length + (block - min(block, count)) * other_length;
    }
    __device__ unsigned owner(unsigned place) const {
        const unsigned border = count * length;
        const bool is_first = place < border;
        const unsigned number = divide(is_first ? place : place - border, is_first ? length : other_length);
        return is_first ? number : count + number;
    }
};
__device__ __forceinline__ Partition equal_pieces(unsigned total, unsigned blocks) {
    const unsigned quotient = divide(total, blocks);
    return {total - quotient * blocks, quotient + 1, quotient};
}

// Position with which visit i to the middle begins.
template <class C>
__device__ __forceinline__ int middle_begin(const BatchRow& row, unsigned i) {
    return (row.packed / C::kWindowTokens + static_cast<int>(i)) * C::kWindowTokens;
}

// How blocks share the work. The warp with the most visits decides how long it takes. So they are cut into rounds, a
// visit a warp, and no more blocks get some than as many rounds need: the others are the last ones, which get the
// multiprocessors on which the kernel before ends last. The last blocks with work have a round less, as many as that
// needs. A piece is at least as long as the heaviest visit, so at least one visit begins in it (but for one that the
// line's end cuts). Where there is little work the merge over blocks counts: then blocks begin where segments of equal
// length do, so that each has a part of one segment only, and segments of up to three visits a warp stay whole.
template <class C>
__device__ __forceinline__ Partition partition_of(const DecodeArgs& p, unsigned total) {
    constexpr unsigned kRound = C::kWarps * C::kVisitWeight;
    const unsigned grid = gridDim.x, segments = p.batch_rows * p.kv_heads;
    if (total == 0) return {0, 1, 1};
    if (p.invariant) return equal_pieces(total, min(grid, total));
    const unsigned blocks = max(1u, min(grid, total / C::kMaxWeight));
    if (segments <= grid && total < 4 * kRound * grid) {
        if (total <= 3 * segments * kRound) return equal_pieces(total, min(blocks, segments));
        if (p.segment_blocks > 0) {
            const unsigned weight = divide_up(total, segments), rounds = divide_up(weight, p.segment_blocks * kRound);
            return equal_pieces(total, min(blocks, segments * divide_up(weight, rounds * kRound)));
        }
    }
    if (total < kRound * grid) return equal_pieces(total, blocks);
    const unsigned all = divide_up(total, kRound), rounds = divide_up(all, grid), left = rounds * grid - all;
    const unsigned idle = divide(left, rounds), shorter = left - idle * rounds;  // blocks
    return {grid - idle - shorter, rounds * kRound, (rounds - 1) * kRound};
}

// A warp's piece of the line.
struct alignas(16) Slice {
    unsigned end;
    unsigned row, row_begin;  // batch row of the first visit, and where that begins on the line
    unsigned head, first;     // the first visit is number `first` of that head
};

// A block's piece: of the line; or of its cluster's segment, which is -1 elsewhere.
struct alignas(16) BlockPiece {
    Partition partition;
    unsigned begin, weight;
    int segment;
};

// One visit of a warp.
struct alignas(16) Visit {
    const uint8_t* source;  // of keys: in the page, or the window row. kPublished, but for pages: places
    int segment;            // see below; -1: no more visits
    int info;               // see below
};
// Slots of the two rings; in the middle keys have a page. In the bits of Visit::source: a union there costs registers.
struct Places {
    uint32_t keys, values;
    __device__ __forceinline__ Places(uint32_t keys, uint32_t values) : keys(keys), values(values) {}
    __device__ __forceinline__ explicit Places(const Visit& v)
        : keys(static_cast<uint32_t>(reinterpret_cast<uint64_t>(v.source))),
          values(static_cast<uint32_t>(reinterpret_cast<uint64_t>(v.source) >> 32)) {}
    __device__ __forceinline__ const uint8_t* source() const {
        return reinterpret_cast<const uint8_t*>(uint64_t{values} << 32 | keys);
    }
};
// Visit::segment has the row in its upper half and the head in its lower one. The bits of Visit::info, by kind:
//
//   bits   | 31      27 | 26     22 | 21 | 20  | 19 18 | 17 16 | 15   8 | 7    0 |
//   rows   |    cut     | straight  |last|opens|  new  | kind  |  left  | valid  |
//   middle |    cut     |  hidden   |last|opens| block | kind  |  left  |  part  |
//   bits   | 31 | 30  | 29       22 | 21 | 20  | 19 18 | 17 16 | 15   8 | 7    0 |
//   page   |    |plain|     cut     |last|opens| block | kind  |  left  | valid  |
__device__ __forceinline__ int segment_of(int row, int head) { return row << 16 | head; }
__device__ __forceinline__ int row_of(int segment) { return segment >> 16; }
__device__ __forceinline__ int head_of(int segment) { return segment & 0xFFFF; }
enum Kind { kPage, kSink, kTail, kRows, kMiddle = kSink };  // kRows: a page of 16 bits; kMiddle: decode_middle.cuh
__device__ __forceinline__ int info_valid(int i) { return i & 255; }         // tokens that exist
__device__ __forceinline__ int info_left(int i) { return i >> 8 & 255; }     // to the sequence's end, at most 255
__device__ __forceinline__ int info_kind(int i) { return i >> 16 & 3; }
__device__ __forceinline__ int info_block(int i) { return i >> 18 & 3; }     // first block, in the page
constexpr int kOpens = 1 << 20;  // the warp's first visit to its segment, or of a run; or the end of its visits
__device__ __forceinline__ bool info_opens(int i) { return (i & kOpens) != 0; }
__device__ __forceinline__ bool info_last(int i) { return i >> 21 & 1; }     // of its segment
__device__ __forceinline__ int info_straight(int i) { return i >> 22 & 31; }  // of rows: tokens before the ring's end
// Of the tail: the last token is the call's.
constexpr int kNewRow = 1 << 18;
__device__ __forceinline__ bool info_has_new_row(int i) { return (i & (kNewRow | 3 << 16)) == (kNewRow | kTail << 16); }
// Of the middle: tokens before its first one; which kWindowTokens of the block it has, in place of those that exist.
__device__ __forceinline__ int info_hidden(int i) { return i >> 22 & 31; }
__device__ __forceinline__ int info_part_of_block(int i) { return i & 255; }
// Of a page: all of its tokens exist, all rows see them, and scores have no cap.
__device__ __forceinline__ bool info_plain(int i) { return i >> 30 & 1; }
// How many of the first tokens the last query token does not see any more; at most 255, of rows 31.
__device__ __forceinline__ int info_cut(int i) { return info_kind(i) == kPage ? i >> 22 & 255 : i >> 27 & 31; }
// Number of the visit in its key group, where that is longer.
template <class C>
__device__ __forceinline__ int info_part(int i) {
    return C::kSharedParams ? info_block(i) % C::kGroupBlocks / C::kVisitBlocks : 0;
}

// What a warp has seen of a segment.
struct alignas(16) Seen {
    int segment;     // -1: nothing
    unsigned begin;  // of the segment, on the line
    unsigned last;   // where its last visit begins
    unsigned end;
};

}  // namespace kivi::cuda::fast
