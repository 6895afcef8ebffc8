// Decode attention over pages in the fragment order and 16-bit windows: one launch, lengths read on the device, no
// block waits for another.
//
// All work is a line of visits in (batch row, KV head) order; a segment is the part of one row and head: sink
// window, tail, pages. Places on the line are weights (bytes in small numbers). Blocks own equal contiguous pieces
// of the line, warps equal pieces of their block's piece; a visit belongs to the piece in which it begins.
//
//   line     | row 0 head 0: sink, tail, pages ... | row 0 head 1: ... | ... | row 1 head 0: ...
//   blocks   |------ block 0 ------|------ block 1 ------|------ block 2 ------| ...
//   warps    |--|--|--|--|--|--|--|--|--|--|--| ...
//
// Each warp has a ring of visits in shared memory, filled by bulk copies, and a softmax of its own. What warps of a
// block leave of one segment is merged in the block; what blocks leave of one segment is merged by the last of them
// to arrive (see Tickets).
//
// Codes are operands of the tensor cores as they stand (fragment_order.h): key scales are multiplied into q, value
// scales into p, mins are products of their own.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/fragment_order.h"
#include "cuda/launch.h"

namespace kivi::cuda::fast {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr float kSmallest = 1.0f / 16777216.0f;  // 2^-24: the unit of codes read as fp16
constexpr float kLn2 = 0.69314718056f;

// Elements from one batch row, query token and query head to the next.
struct Strides {
    int64_t row, token, head;
    bool ragged;  // rows are found by their token offset
};

// Counts the blocks that have left their part of a segment; see Tickets.
struct alignas(16) Ticket {
    unsigned long long word;
};

// What the kernel reads, close together: the first access to each line of the parameters costs a trip to memory.
struct DecodeArgs {
    const Span* spans;     // [sequence]
    const int32_t* table;  // [sequence][table_stride]
    const int32_t *sequences, *counts;  // of device batches, each may be NULL
    const int64_t* offsets;
    int32_t batch_rows, first_row, kv_heads, group, tokens;  // group: query heads of a KV head; tokens of each row
    int32_t query_rows;                                       // group * tokens
    int32_t sink, tail_rows;                                  // rows of the windows
    int32_t table_stride, page_bytes, value_offset;
    float scale_log2;
    bool on_device, rotated_keys, rotated_values;
    const uint8_t* pages;
    const uint8_t *sink_keys, *sink_values, *tail_keys, *tail_values;
    const void* q;
    Strides q_strides;
    // Partials of blocks, what warps leave on their way, and how many have arrived; cut from the caller's workspace.
    Ticket* tickets;  // [block]
    float* partials;  // [block][2]
    float* spills;    // [block][warp]
    void* out;
    float* lse;  // or NULL
    Strides out_strides, lse_strides;
    // Of host batches. sequence -1: a row to be skipped.
    int32_t sequence[kRowsAtOnce], index[kRowsAtOnce], offset[kRowsAtOnce];
};

// ---- Instructions ----

template <bool BF16 = false>
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
    if constexpr (BF16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}
__device__ __forceinline__ uint32_t mul_half2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
template <bool BF16 = false>
__device__ __forceinline__ uint32_t to_pair(float low, float high) {
    uint32_t r;
    if constexpr (BF16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    }
    return r;
}
template <bool BF16 = false>
__device__ __forceinline__ float2 from_pair(uint32_t x) {
    if constexpr (BF16) return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000u));
    return __half22float2(*reinterpret_cast<const __half2*>(&x));
}
// 8x8 transposition across the warp: (row r, columns 2t and 2t+1) in, (column r, rows 2t and 2t+1) out.
__device__ __forceinline__ uint32_t transpose8x8(uint32_t a) {
    uint32_t r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
    return r;
}
__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(uint32_t bar) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra READY;\nbra AGAIN;\nREADY:\n}" ::"r"(bar),
        "r"(parity)
        : "memory");
}
// Pages are read once: they leave L2 first, and what is used again stays.
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
    asm volatile(
        "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], policy;\n}" ::"r"(
            to),
        "l"(from), "r"(bytes), "r"(bar)
        : "memory");
}
// Shared memory that threads have written and the copy engine writes next.
__device__ __forceinline__ void hand_to_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
}
__device__ __forceinline__ uint4 load16(const uint8_t* p) { return *reinterpret_cast<const uint4*>(p); }

// ---- Codes as operands ----

constexpr int high_shift(int bits) { return bits == 3 ? 9 : 8; }
template <int BITS>
__device__ __forceinline__ uint4 shift_high(uint4 w) {
    constexpr int kBy = high_shift(BITS);
    return make_uint4(w.x >> kBy, w.y >> kBy, w.z >> kBy, w.w >> kBy);
}
// The fp16 pair of codes in `field` of a word; `shifted` is word >> high_shift.
template <int BITS>
__device__ __forceinline__ uint32_t code_pair(uint32_t word, uint32_t shifted, int field) {
    constexpr int kInPlace = BITS == 3 ? 3 : 8 / BITS;
    constexpr uint32_t kMask = ((1u << BITS) - 1) * 0x00010001u;
    return (field < kInPlace ? word : shifted) & (kMask << (BITS * (field % kInPlace)));
}
// The pair in the spare bits of three 3-bit words, at bits 6 to 8.
__device__ __forceinline__ uint32_t spare_pair(uint32_t shifted0, uint32_t word1, uint32_t word2) {
    return (shifted0 & 0x00400040u) | (word1 >> 8 & 0x00800080u) | (word2 >> 7 & 0x01000100u);
}
// Operand `number` of a block whose vectors are w.
template <int BITS, int VECTORS>
__device__ __forceinline__ uint4 operand(const uint4 (&w)[VECTORS], const uint4 (&x)[VECTORS], int number) {
    if constexpr (BITS == 3) {
        if (number == kSpareOperand) {
            return make_uint4(spare_pair(x[0].x, w[1].x, w[2].x), spare_pair(x[0].y, w[1].y, w[2].y),
                              spare_pair(x[0].z, w[1].z, w[2].z), spare_pair(x[0].w, w[1].w, w[2].w));
        }
    }
    const int v = vector_of(BITS, number), f = field_of(BITS, number);
    return make_uint4(code_pair<BITS>(w[v].x, x[v].x, f), code_pair<BITS>(w[v].y, x[v].y, f),
                      code_pair<BITS>(w[v].z, x[v].z, f), code_pair<BITS>(w[v].w, x[v].w, f));
}

// ---- Configuration ----

constexpr int greatest_divisor(int a, int b) { return b != 0 ? greatest_divisor(b, a % b) : a; }

template <bool BF16, int DIM, int KEY_BITS, int VALUE_BITS, int KEY_GROUP, int VALUE_GROUP, int WARPS,
          int VISIT_BLOCKS, int STEP_BLOCKS>
struct Config {
    static constexpr bool kBf16 = BF16;  // q, out and the windows; scales and mins are fp16
    static constexpr int kDim = DIM, kKeyBits = KEY_BITS, kValueBits = VALUE_BITS;
    static constexpr int kKeyGroup = KEY_GROUP, kValueGroups = DIM / VALUE_GROUP;
    static constexpr int kSteps = DIM / 16, kPairs = kSteps / 2;
    static constexpr int kRows = 8;        // query tokens x query heads of one KV head: the columns of an mma
    static constexpr int kThreadRows = 2;  // rows whose scores a thread holds
    static constexpr int kWarps = WARPS, kThreads = 32 * WARPS;
    static constexpr int kStages = 2;  // visits in a ring
    static constexpr int kVisitBlocks = VISIT_BLOCKS, kStepBlocks = STEP_BLOCKS;
    static constexpr int kVisitTokens = VISIT_BLOCKS * kBlockTokens;
    static_assert(DIM == 64 || DIM == 128);
    static_assert(KEY_BITS != 3 || DIM == 128, "sixteen operands share three vectors");
    static_assert(kValueGroups <= 4, "mins of four groups and the sum of p share eight rows");
    static_assert(WARPS % 4 == 0 && WARPS <= 16, "whole rounds of the four schedulers; deposits[] has 16 places");
    static_assert(VISIT_BLOCKS % STEP_BLOCKS == 0 && kPageTokens % kVisitTokens == 0);

    // A page in memory.
    static constexpr int kKeyParams = 4 * DIM, kKeyCodes = 4 * DIM * KEY_BITS;
    static constexpr int kGroupBlocks = KEY_GROUP / kBlockTokens;
    static constexpr int kGroupBytes = kKeyParams + kGroupBlocks * kKeyCodes;
    static constexpr int kValueCodes = 4 * DIM * VALUE_BITS, kValueBlock = kValueCodes + 128 * kValueGroups;

    // A visit to it, in a slot: keys, then values. Where a key group is longer than a visit, its parameters come
    // in front of each visit's codes.
    static constexpr bool kSharedParams = KEY_GROUP > kVisitTokens;
    static constexpr int kVisitGroups = kSharedParams ? 1 : kVisitTokens / KEY_GROUP;
    static constexpr int kKeyBytes =
        kSharedParams ? kKeyParams + VISIT_BLOCKS * kKeyCodes : kVisitGroups * kGroupBytes;
    static constexpr int kValueBytes = VISIT_BLOCKS * kValueBlock, kVisitBytes = kKeyBytes + kValueBytes;
    __host__ __device__ static constexpr int key_codes(int block) {
        return kSharedParams ? kKeyParams + block * kKeyCodes
                             : block / kGroupBlocks * kGroupBytes + kKeyParams + block % kGroupBlocks * kKeyCodes;
    }
    static constexpr int kKeyStride = VISIT_BLOCKS > 1 ? key_codes(1) - key_codes(0) : 0;
    static_assert(VISIT_BLOCKS <= 2 || KEY_GROUP == 32, "blocks of a visit equally far apart");

    // A visit to a window: 16 tokens, keys then values.
    static constexpr int kWindowTokens = 16, kRowBytes = 2 * DIM;
    static constexpr int kWindowHalf = kWindowTokens * kRowBytes;
    static constexpr int kSlotBytes = ((2 * kWindowHalf > kVisitBytes ? 2 * kWindowHalf : kVisitBytes) + 127) / 128 * 128;

    static constexpr int kWindowKilo = (2 * kWindowHalf + 512) / 1024, kVisitKilo = (kVisitBytes + 512) / 1024;
    static constexpr int kUnit = greatest_divisor(kWindowKilo, kVisitKilo);
    static constexpr unsigned kWindowWeight = kWindowKilo / kUnit, kVisitWeight = kVisitKilo / kUnit;
    static constexpr unsigned kMaxWeight = kWindowWeight > kVisitWeight ? kWindowWeight : kVisitWeight;

    // One unnormalised result: for each row its channels, the reference exponent and the sum of p; padded against
    // bank conflicts.
    static constexpr int kPartialRow = DIM + 4, kPartialExponent = DIM;
    static constexpr int kPartialFloats = kRows * kPartialRow;
    static_assert(kPartialFloats * 4 <= kStages * kSlotBytes, "a warp leaves its partial in its ring");

    static size_t workspace(int blocks) {
        return size_t(blocks) * (sizeof(Ticket) + (2 + WARPS) * kPartialFloats * sizeof(float));
    }
};

// ---- The line ----

// a / b without the dozens of instructions of the general division.
__device__ __forceinline__ unsigned divide(unsigned a, unsigned b) {
    if (a >> 24) return a / b;
    unsigned q = __float2uint_rz(__uint2float_rn(a) * __frcp_rn(__uint2float_rn(b)));  // off by one at most
    if (q * b > a) --q;
    if (a - q * b >= b) ++q;
    return q;
}

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

template <class C>
struct SharedStorage {
    alignas(128) uint8_t ring[C::kWarps][C::kStages][C::kSlotBytes];
    alignas(128) uint32_t queries[C::kWarps][C::kPairs][32][4];
    // Operand rows 4..7 of the product with the value mins: their "mins" are 1, which makes them sums of p.
    alignas(128) uint32_t ones[16];
    uint64_t full[C::kWarps][C::kStages];
    Visit plan[C::kWarps][32];  // visit i of the warp at [i % 32]
    // What is not needed in the main loop waits here; registers are scarce there.
    BlockPiece block;
    Slice slices[C::kWarps];
    Seen seen[C::kWarps];            // what the warp is working on
    int from_start[C::kWarps];       // the warp began with the segment's first visit
    unsigned next_begin[C::kWarps];  // where the warp's next segment begins on the line
    Seen deposits[32];               // [0..15] last segment of warp i, [16..31] first segment of warp i
    unsigned complete;               // bit i: all blocks have left their part of the segment of deposit i
};

// ---- Rows of q and out ----

// Where query row r of a segment lies.
struct QueryRow {
    int row;  // of the batch
    int token, head;
    __device__ QueryRow(const DecodeArgs& p, int segment, int r) {
        row = divide(segment, p.kv_heads);
        token = p.tokens == 1 ? 0 : divide(r, p.group);
        head = (segment - row * p.kv_heads) * p.group + r - token * p.group;
    }
    __device__ int64_t in(const DecodeArgs& p, const Strides& strides) const {
        int64_t origin;
        if (!p.on_device) {
            origin = strides.ragged ? p.offset[row] * strides.token : p.index[row] * strides.row;
        } else {
            const int position = p.first_row + row;
            int64_t offset = int64_t{position} * p.tokens;
            if (p.offsets != nullptr) {
                offset = p.offsets[position];
            } else if (p.counts != nullptr && strides.ragged) {
                offset = 0;
                for (int i = 0; i < position; ++i) offset += p.counts[i];
            }
            origin = strides.ragged ? offset * strides.token : position * strides.row;
        }
        return origin + token * strides.token + head * strides.head;
    }
};

__device__ __forceinline__ void butterfly(float& a, float& b) {
    const float left = a, right = b;
    a = left + right;
    b = left - right;
}
__device__ __forceinline__ void butterfly(float4& x) {
    butterfly(x.x, x.y);
    butterfly(x.z, x.w);
    butterfly(x.x, x.z);
    butterfly(x.y, x.w);
}
__device__ __forceinline__ float across(float x, int step, int lane) {
    const float other = __shfl_xor_sync(kAll, x, step);
    return (lane & step) != 0 ? other - x : x + other;
}
__device__ __forceinline__ void across(float4& x, int step, int lane) {
    x.x = across(x.x, step, lane);
    x.y = across(x.y, step, lane);
    x.z = across(x.z, step, lane);
    x.w = across(x.w, step, lane);
}
template <class C>
__device__ __forceinline__ float hadamard_norm() {
    return C::kDim == 128 ? 0.08838834764f : 0.125f;
}

// ---- A warp's state ----

// Queries of one KV head wait in shared memory as B operands. Thread (row, column) = (lane / 4, lane % 4) holds rows
// 2 * column + 0, 1 of everything accumulated.
template <class C>
struct HeadState {
    float factor[C::kThreadRows];     // scale_log2 * 2^exponent * 2^24
    float reference[C::kThreadRows];  // exponents that p is relative to; every p is <= 1
    uint32_t unset;                   // bit h: reference h not yet known, because no visible token has been seen
    float out[C::kSteps][4];          // [channel tile]: values * p, in units of 2^step_power * 2^-24
    // Sums with the value mins and of p: even units in rows 0..7 of `even` (elements 0, 1), odd units in rows 8..15
    // of `odd` (elements 2, 3); row g < 4: mins of group g * p; rows 4..7: sum of p.
    float even[4], odd[4];
};

// p is formed relative to (largest score + kHeadroom), in powers of two: a later score may exceed the largest one by
// this much before anything has to be rescaled, and p * value scale cannot overflow fp16. Not a whole number: where
// all scores are nearly equal, p would sit just below a power of two and always be rounded the same way.
constexpr float kHeadroom = 1.5f;

template <class C>
struct RawQueries {
    uint4 v[C::kPairs];
};
template <class C>
__device__ __forceinline__ RawQueries<C> fetch_queries(const DecodeArgs& p, int segment, int lane) {
    const int row = lane >> 2, column = lane & 3;
    RawQueries<C> raw;
    const bool used = row < p.query_rows;
    const QueryRow at(p, segment, used ? row : 0);
    const uint4* const from = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.q) +
                                                             2 * at.in(p, p.q_strides) + column * 16);
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) raw.v[i] = used ? from[i * 4] : make_uint4(0, 0, 0, 0);
    return raw;
}

// Channels 32 i + 8 column + 0..7 of row lane / 4.
template <class C>
__device__ __forceinline__ void rotate(float (&x)[C::kPairs][8], int lane) {
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
        for (int step = 1; step < 8; step *= 2) {
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                if ((k & step) == 0) butterfly(x[i][k], x[i][k + step]);
            }
        }
#pragma unroll
        for (int k = 0; k < 8; ++k) x[i][k] = across(across(x[i][k], 1, lane), 2, lane);
    }
#pragma unroll
    for (int step = 1; step < C::kPairs; step *= 2) {
#pragma unroll
        for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                if ((i & step) == 0) butterfly(x[i][k], x[i + step][k]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
        for (int k = 0; k < 8; ++k) x[i][k] *= hadamard_norm<C>();
    }
}

// Leaves q * 2^-exponent * 2^-step_power as B operands in `to`; returns 2^(exponent + 24), of row lane / 4. A function
// of its own, so that its instructions are in the cache when a later segment begins: fetched behind pages they would
// take microseconds.
template <class C>
__device__ __noinline__ float prepare_queries(RawQueries<C> raw, bool rotated, uint32_t (*to)[32][4], int lane) {
    float x[C::kPairs][8];
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
        const uint32_t w[4] = {raw.v[i].x, raw.v[i].y, raw.v[i].z, raw.v[i].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float2 pair = from_pair<C::kBf16>(w[k]);
            x[i][2 * k] = pair.x, x[i][2 * k + 1] = pair.y;
        }
    }
    if (rotated) rotate<C>(x, lane);
    float largest = 0;
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
#pragma unroll
        for (int k = 0; k < 8; ++k) largest = fmaxf(largest, fabsf(x[i][k]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 2));
    // largest < 2^exponent, so |q * 2^-exponent| < 1 and q * key scale stays below the largest fp16 scale.
    const int exponent = min(max(int(__float_as_uint(largest) >> 23) - 126, -90), 90);
    const float down = __uint_as_float(unsigned(127 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
        uint32_t q[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {  // word k: k-step 2i + k % 2, half k / 2 of the depth
            const float power = down / float(1 << step_power(C::kKeyBits, 2 * i + k % 2));
            q[k % 2 * 2 + k / 2] = to_pair(x[i][2 * k] * power, x[i][2 * k + 1] * power);
        }
        *reinterpret_cast<uint4*>(to[i][lane]) = make_uint4(q[0], q[1], q[2], q[3]);
    }
    __syncwarp();
    return __uint_as_float(unsigned(127 + 24 + exponent) << 23);
}

// `unit` is what prepare_queries gave.
template <class C>
__device__ __forceinline__ void start_segment(HeadState<C>& s, float unit, float scale_log2, int lane) {
#pragma unroll
    for (int h = 0; h < C::kThreadRows; ++h) {
        s.factor[h] = scale_log2 * __shfl_sync(kAll, unit, (lane & 3) * 8 + 4 * h);  // of row 2 * column + h
        s.reference[h] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < C::kSteps; ++j) s.out[j][0] = s.out[j][1] = s.out[j][2] = s.out[j][3] = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) s.even[j] = s.odd[j] = 0.0f;
    s.unset = (1u << C::kThreadRows) - 1;
}

// Both halves of k-steps 2i and 2i + 1.
template <class C>
__device__ __forceinline__ uint4 query_vector(const SharedStorage<C>& shared, int i, int warp, int lane) {
    return *reinterpret_cast<const uint4*>(shared.queries[warp][i][lane]);
}

// ---- Softmax ----

// Makes sure that no score exceeds the reference exponents, that is, that all relative scores are <= 0; if not,
// moves the references and rescales what has been summed. In the common case this costs an AND of sign bits and a
// vote. score[score tile][upper or lower eight rows][query row]
template <class C, int COUNT>
__device__ __forceinline__ void update_references(HeadState<C>& s, float (&score)[COUNT][2][C::kThreadRows]) {
    constexpr int kRows = C::kThreadRows;
    uint32_t negative = s.unset ? 0u : kAll;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll
        for (int h = 0; h < kRows; ++h) {
            negative &= __float_as_uint(score[i][0][h]) & __float_as_uint(score[i][1][h]);
        }
    }
    if (!__any_sync(kAll, int(negative) >= 0)) return;
    float down[kRows];
#pragma unroll
    for (int h = 0; h < kRows; ++h) {
        float m = -INFINITY;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) m = fmaxf(m, fmaxf(score[i][0][h], score[i][1][h]));
#pragma unroll
        for (int d = 4; d < 32; d *= 2) m = fmaxf(m, __shfl_xor_sync(kAll, m, d));
        const bool unset = s.unset >> h & 1;
        // A row that has seen no visible token keeps its reference of 0 and p of 0, and stays unset.
        const float up = (unset ? m > -INFINITY : m > 0.0f) ? m + kHeadroom : 0.0f;
        if (m > -INFINITY) s.unset &= ~(1u << h);
        s.reference[h] += up;
        down[h] = exp2_fast(fminf(-up, 0.0f));  // (if it was unset, all sums are 0)
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            score[i][0][h] -= up;
            score[i][1][h] -= up;
        }
    }
#pragma unroll
    for (int j = 0; j < C::kSteps; ++j) {
        s.out[j][0] *= down[0];
        s.out[j][1] *= down[1];
        s.out[j][2] *= down[0];
        s.out[j][3] *= down[1];
    }
    s.even[0] *= down[0];
    s.even[1] *= down[1];
    s.odd[2] *= down[0];
    s.odd[3] *= down[1];
    s.even[2] = s.even[3] = s.odd[0] = s.odd[1] = 0.0f;  // not used, but must stay finite
}

// p of a score tile as B operand, rounded once.
template <class C, bool BF16>
__device__ __forceinline__ void probabilities(const float (&score)[2][C::kThreadRows], uint32_t (&p)[2]) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
        p[upper] = transpose8x8(to_pair<BF16>(exp2_fast(score[upper][0]), exp2_fast(score[upper][1])));
    }
}

// How many tokens of a visit a row may see. Query token j of n sees all but the last n - 1 - j tokens.
__device__ __forceinline__ int visible(const DecodeArgs& p, int info, int row) {
    const int token = p.tokens == 1 ? 0 : int(divide(row, p.group));
    return min(info_valid(info), info_left(info) - max(p.tokens - 1 - token, 0));
}
// How many all rows see.
__device__ __forceinline__ int open_tokens(const DecodeArgs& p, int info) {
    return min(info_valid(info), info_left(info) - (p.tokens - 1));
}

// ---- Pages ----

// q . mins for every key group of the visit, in powers of two; the result of group g ends up in the threads with
// row % groups == g. A vector of mins is an A operand as it stands: rows 0..7 are the even k-step of the pair, rows
// 8..15 the odd one, each valid for its own B operand only.
template <class C>
__device__ __forceinline__ void key_min_terms(const HeadState<C>& s, const SharedStorage<C>& shared,
                                              const uint8_t* slot, int warp, int lane,
                                              float (&term)[C::kThreadRows]) {
    const int row = lane >> 2, column = lane & 3;
    const uint8_t* const mins = slot + (row % C::kVisitGroups) * C::kGroupBytes + C::kDim * 2 + column * 16;
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
        const uint4 v = load16(mins + i * 64), q = query_vector<C>(shared, i, warp, lane);
        float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
        mma(even, v.x, v.y, v.z, v.w, q.x, q.y);
        mma(odd, v.x, v.y, v.z, v.w, q.z, q.w);
        const float e = float(1 << step_power(C::kKeyBits, 2 * i)), o = float(1 << step_power(C::kKeyBits, 2 * i + 1));
#pragma unroll
        for (int h = 0; h < C::kThreadRows; ++h) {
            term[h] = i == 0 ? even[h] * e : fmaf(even[h], e, term[h]);
            term[h] = fmaf(odd[2 + h], o, term[h]);
        }
    }
#pragma unroll
    for (int h = 0; h < C::kThreadRows; ++h) term[h] *= s.factor[h] * kSmallest;
}

// q * key scale of one group.
template <class C>
struct ScaledQueries {
    uint32_t at[2 * C::kSteps];
};
template <class C>
__device__ __forceinline__ void scale_queries(const SharedStorage<C>& shared, const uint8_t* slot, int group, int warp,
                                              int lane, ScaledQueries<C>& scaled) {
    const uint8_t* const scales = slot + group * C::kGroupBytes + (lane & 3) * 16;
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
        const uint4 v = load16(scales + i * 64), q = query_vector<C>(shared, i, warp, lane);
        scaled.at[4 * i] = mul_half2(q.x, v.x);
        scaled.at[4 * i + 1] = mul_half2(q.y, v.z);
        scaled.at[4 * i + 2] = mul_half2(q.z, v.y);
        scaled.at[4 * i + 3] = mul_half2(q.w, v.w);
    }
}

// Whether an operand is the first of its vector, in the order in which keys are multiplied.
constexpr bool __host__ __device__ opens_vector(int bits, int number) {
    return bits == 3 ? number == 0 || number == 8 || number == 10 : field_of(bits, number) == 0;
}

// Products of keys and queries for the blocks first .. first + kStepBlocks - 1 of the visit: c[2 * block + unit]. All
// units go forward together, for more independent mma.
template <class C, int SCALED>
__device__ __forceinline__ void key_products(const uint8_t* slot, int first, int lane,
                                             const ScaledQueries<C> (&scaled)[SCALED],
                                             float (&c)[2 * C::kStepBlocks][4]) {
    constexpr int kVectors = C::kKeyCodes / kVectorBytes;
    const uint8_t* const codes = slot + C::key_codes(0) + C::kKeyStride * first + lane * 16;
    uint4 w[C::kStepBlocks][kVectors], x[C::kStepBlocks][kVectors];
#pragma unroll
    for (int u = 0; u < 2 * C::kStepBlocks; ++u) c[u][0] = c[u][1] = c[u][2] = c[u][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < C::kSteps; ++k) {
#pragma unroll
        for (int b = 0; b < C::kStepBlocks; ++b) {
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                const int number = u * C::kSteps + k;
                if (opens_vector(C::kKeyBits, number)) {
                    const int v = vector_of(C::kKeyBits, number);
                    w[b][v] = load16(codes + C::kKeyStride * b + v * kVectorBytes);
                    x[b][v] = shift_high<C::kKeyBits>(w[b][v]);
                }
                const uint4 a = operand<C::kKeyBits>(w[b], x[b], number);
                mma(c[2 * b + u], a.x, a.y, a.z, a.w, scaled[b % SCALED].at[2 * k], scaled[b % SCALED].at[2 * k + 1]);
            }
        }
    }
}

// Token (of the block's 32) in row (lane / 4) + 8 * upper of the score tile of `unit`.
__device__ __forceinline__ int token_of_row(int unit, int row, int upper) {
    return 8 * (row / 2) + 4 * upper + 2 * unit + row % 2;
}

// Adds p * value of one block. p is rounded to fp16 once; the denominator sums the rounded numbers. `mins` points to
// the lane's mins (rows 0..3) or ones.
template <class C>
__device__ __forceinline__ void value_products(HeadState<C>& s, const uint8_t* block, const uint8_t* mins, int lane,
                                               const float (&score0)[2][C::kThreadRows],
                                               const float (&score1)[2][C::kThreadRows]) {
    constexpr int kGroups = C::kValueGroups, kVectors = C::kValueCodes / kVectorBytes;
    const uint8_t* const scales = block + C::kValueCodes + (lane & 3) * 16;
    const uint4 m = load16(mins);
    uint32_t p[2][2];  // B operand: [unit][half of the depth]
    probabilities<C, false>(score0, p[0]);
    probabilities<C, false>(score1, p[1]);
    mma(s.even, m.x, m.y, m.z, m.w, p[0][0], p[0][1]);
    mma(s.odd, m.x, m.y, m.z, m.w, p[1][0], p[1][1]);
    const uint8_t* const codes = block + lane * 16;
    uint4 scale[kGroups], w[kVectors], x[kVectors];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) scale[g] = load16(scales + g * 64);
    // All tiles of one unit before those of the other: an accumulator rests in between.
#pragma unroll
    for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const uint32_t b0 = mul_half2(p[u][0], u ? scale[g].y : scale[g].x);
            const uint32_t b1 = mul_half2(p[u][1], u ? scale[g].w : scale[g].z);
#pragma unroll
            for (int j = g * (C::kSteps / kGroups); j < (g + 1) * (C::kSteps / kGroups); ++j) {
                const int number = u * C::kSteps + j;
                if (field_of(C::kValueBits, number) == 0) {
                    const int v = vector_of(C::kValueBits, number);
                    w[v] = load16(codes + v * kVectorBytes);
                    x[v] = shift_high<C::kValueBits>(w[v]);
                }
                const uint4 a = operand<C::kValueBits>(w, x, number);
                mma(s.out[j], a.x, a.y, a.z, a.w, b0, b1);
            }
        }
    }
}

// A visit that is not full: parameters past its end may be anything, NaN included. Makes them zero.
template <class C>
__device__ __noinline__ void clear_unused_parameters(uint8_t* slot, int valid, int lane) {
    for (int g = (valid + C::kKeyGroup - 1) / C::kKeyGroup; g < C::kVisitGroups; ++g) {
        for (int i = lane; i < C::kKeyParams / 16; i += 32) {
            reinterpret_cast<uint4*>(slot + g * C::kGroupBytes)[i] = make_uint4(0, 0, 0, 0);
        }
    }
    for (int b = valid / kBlockTokens; b < C::kVisitBlocks; ++b) {
        uint8_t* const params = slot + C::kKeyBytes + b * C::kValueBlock + C::kValueCodes;
        for (int i = 0; i < 2 * C::kValueGroups; ++i) reinterpret_cast<uint16_t*>(params + i * 64)[lane] = 0;
    }
    hand_to_copies();
}

// What the key parameters and the queries give together, for one visit, or for all visits to a key group.
template <class C>
struct KeyContext {
    static constexpr bool kPerStep = C::kKeyGroup == kBlockTokens;  // then scaled queries are made in the step
    float term[C::kThreadRows];                                     // see key_min_terms
    ScaledQueries<C> scaled[1];
};

// One visit to a page. `follows`: its key group is that of the visit before.
template <class C>
__device__ __forceinline__ void visit_page(HeadState<C>& s, KeyContext<C>& key, SharedStorage<C>& shared,
                                           const DecodeArgs& p, uint8_t* slot, int info, bool follows, int warp,
                                           int lane) {
    constexpr int kRows = C::kThreadRows;
    const int row = lane >> 2, column = lane & 3;
    const int valid = info_valid(info), open = open_tokens(p, info);
    if (valid < C::kVisitTokens) clear_unused_parameters<C>(slot, valid, lane);
    if (!(C::kSharedParams && follows)) {
        key_min_terms<C>(s, shared, slot, warp, lane, key.term);
        if (!KeyContext<C>::kPerStep) scale_queries<C>(shared, slot, 0, warp, lane, key.scaled[0]);
    }
    const uint8_t* const values = slot + C::kKeyBytes;
    const bool has_mins = row < 4;
    const uint8_t* const mins =
        has_mins ? values + C::kValueCodes + (C::kValueGroups + row % C::kValueGroups) * 64 + column * 16
                 : reinterpret_cast<const uint8_t*>(shared.ones) + column * 16;
    const int mins_stride = has_mins ? C::kValueBlock : 0;
#pragma unroll 1
    for (int first = 0; first < C::kVisitBlocks; first += C::kStepBlocks) {
        float score[2 * C::kStepBlocks][2][kRows];
        {
            float c[2 * C::kStepBlocks][4], bias[C::kStepBlocks][kRows];
#pragma unroll
            for (int b = 0; b < C::kStepBlocks; ++b) {
#pragma unroll
                for (int h = 0; h < kRows; ++h) {
                    bias[b][h] = C::kVisitGroups > 1
                                     ? __shfl_sync(kAll, key.term[h], (first + b) / C::kGroupBlocks * 4 + column)
                                     : key.term[h];
                    bias[b][h] -= s.reference[h];
                }
            }
            if constexpr (KeyContext<C>::kPerStep) {
                ScaledQueries<C> scaled[C::kStepBlocks];
#pragma unroll
                for (int b = 0; b < C::kStepBlocks; ++b) scale_queries<C>(shared, slot, first + b, warp, lane, scaled[b]);
                key_products<C>(slot, first, lane, scaled, c);
            } else {
                key_products<C>(slot, first, lane, key.scaled, c);
            }
#pragma unroll
            for (int u = 0; u < 2 * C::kStepBlocks; ++u) {
#pragma unroll
                for (int upper = 0; upper < 2; ++upper) {
#pragma unroll
                    for (int h = 0; h < kRows; ++h) {
                        score[u][upper][h] = fmaf(c[u][2 * upper + h], s.factor[h], bias[u / 2][h]);
                    }
                }
            }
        }
        if (open < kBlockTokens * (first + C::kStepBlocks)) {
#pragma unroll
            for (int h = 0; h < kRows; ++h) {
                const int limit = visible(p, info, 2 * column + h);
#pragma unroll
                for (int u = 0; u < 2 * C::kStepBlocks; ++u) {
#pragma unroll
                    for (int upper = 0; upper < 2; ++upper) {
                        if (kBlockTokens * (first + u / 2) + token_of_row(u % 2, row, upper) >= limit) {
                            score[u][upper][h] = -INFINITY;
                        }
                    }
                }
            }
        }
        update_references<C>(s, score);
#pragma unroll
        for (int b = 0; b < C::kStepBlocks; ++b) {
            value_products<C>(s, values + (first + b) * C::kValueBlock, mins + (first + b) * mins_stride, lane,
                              score[2 * b], score[2 * b + 1]);
        }
    }
}

// ---- 16-bit windows ----

// One visit to a window: up to 16 tokens, keys at `slot`, values behind them. Tokens are the rows of the scores, in
// their own order; 16 bytes of a key row are four operand registers as they stand. Values arrive token-major, but a
// register wants two tokens of one channel: one PRMT each. Their products get accumulators of their own, since out[]
// is in units of 2^step_power * 2^-24.
template <class C>
__device__ __forceinline__ void visit_window(HeadState<C>& s, const SharedStorage<C>& shared, const DecodeArgs& p,
                                             uint8_t* slot, int info, int warp, int lane) {
    // What follows from the lane is computed here again each time: kept ready, it would cost the page loop its
    // registers.
    asm volatile("" : "+r"(lane), "+r"(warp));
    constexpr bool kB = C::kBf16;
    const int row = lane >> 2, column = lane & 3;
    const int valid = info_valid(info), open = open_tokens(p, info);
    if (valid < C::kWindowTokens) {  // p is 0 there, but 0 * NaN is not
        for (int i = valid * (C::kRowBytes / 16) + lane; i < C::kWindowTokens * (C::kRowBytes / 16); i += 32) {
            reinterpret_cast<uint4*>(slot + C::kWindowHalf)[i] = make_uint4(0, 0, 0, 0);
        }
        hand_to_copies();
    }
    float c[2][4];
#pragma unroll
    for (int e = 0; e < 2; ++e) c[e][0] = c[e][1] = c[e][2] = c[e][3] = 0.0f;
    const uint8_t* const keys = slot + row * C::kRowBytes + column * 16;
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
        const uint4 a = load16(keys + i * 64), b = load16(keys + i * 64 + 8 * C::kRowBytes);
        const uint4 v = query_vector<C>(shared, i, warp, lane);
        const auto plain = [&](uint32_t x, int step) {  // q * 2^-exponent
            const float up = float(1 << step_power(C::kKeyBits, step));
            if constexpr (kB) {
                const float2 f = from_pair(x);
                return to_pair<true>(f.x * up, f.y * up);
            } else {
                return mul_half2(x, to_pair(up, up));
            }
        };
        mma<kB>(c[0], a.x, b.x, a.z, b.z, plain(v.x, 2 * i), plain(v.y, 2 * i));
        mma<kB>(c[1], a.y, b.y, a.w, b.w, plain(v.z, 2 * i + 1), plain(v.w, 2 * i + 1));
    }
    float score[1][2][C::kThreadRows];
#pragma unroll
    for (int h = 0; h < C::kThreadRows; ++h) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
            const int e = 2 * upper + h;
            score[0][upper][h] = fmaf(c[0][e] + c[1][e], s.factor[h] * kSmallest, -s.reference[h]);
        }
    }
    if (open < C::kWindowTokens) {
#pragma unroll
        for (int h = 0; h < C::kThreadRows; ++h) {
            const int limit = visible(p, info, 2 * column + h);
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                if (row + 8 * upper >= limit) score[0][upper][h] = -INFINITY;
            }
        }
    }
    update_references<C>(s, score);
    uint32_t prob[2];
    probabilities<C, kB>(score[0], prob);
    const uint32_t ones = row < 4 ? 0u : (kB ? 0x3F803F80u : 0x3C003C00u);  // rows of the sum of p, see HeadState
    mma<kB>(s.even, ones, 0, ones, 0, prob[0], prob[1]);
    const uint8_t* const values = slot + C::kWindowHalf + 2 * column * C::kRowBytes + row * 8;
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
        const auto load = [&](int token) {
            return *reinterpret_cast<const uint2*>(values + token * C::kRowBytes + i * 64);
        };
        const uint2 v0 = load(0), v1 = load(1), v2 = load(8), v3 = load(9);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const uint32_t x0 = k ? v0.y : v0.x, x1 = k ? v1.y : v1.x, x2 = k ? v2.y : v2.x, x3 = k ? v3.y : v3.x;
            const uint32_t a0 = __byte_perm(x0, x1, 0x5410), a1 = __byte_perm(x0, x1, 0x7632);
            const uint32_t a2 = __byte_perm(x2, x3, 0x5410), a3 = __byte_perm(x2, x3, 0x7632);
            const int j = 2 * i + k;
            const float unit = float(1 << step_power(C::kValueBits, j)) * kSmallest;
            float d[4] = {0, 0, 0, 0};
            mma<kB>(d, a0, a1, a2, a3, prob[0], prob[1]);
#pragma unroll
            for (int e = 0; e < 4; ++e) s.out[j][e] = fmaf(d[e], unit, s.out[j][e]);
        }
    }
}

// ---- Leaving a segment ----

// What is needed beside out[] for the result of a segment in plain numbers.
template <class C>
struct Sums {
    float mins[C::kThreadRows];  // in lane 4 * group + column: value mins of the group * p
    float sum[C::kThreadRows];   // of p
};
template <class C>
__device__ __forceinline__ Sums<C> finish_sums(const HeadState<C>& s, int lane) {
    Sums<C> r;
#pragma unroll
    for (int h = 0; h < C::kThreadRows; ++h) {
        r.mins[h] = s.even[h] + s.odd[2 + h];
        r.sum[h] = __shfl_sync(kAll, r.mins[h], 16 + (lane & 3));
    }
    return r;
}
// Channels 32 * c + 4 * (lane / 4) + 0..3 of the thread's row h: removes 2^step_power * 2^-24 and adds the mins. By
// the whole warp.
template <class C>
__device__ __forceinline__ float4 channels(const HeadState<C>& s, const Sums<C>& r, int c, int h, int lane) {
    const float m = __shfl_sync(kAll, r.mins[h], 32 * c / (C::kDim / C::kValueGroups) * 4 + (lane & 3));
    const float k0 = 1.0f / kSmallest / float(1 << step_power(C::kValueBits, 2 * c));
    const float k1 = 1.0f / kSmallest / float(1 << step_power(C::kValueBits, 2 * c + 1));
    const auto& x = s.out[2 * c];
    const auto& y = s.out[2 * c + 1];
    return make_float4(fmaf(x[h], k0, m), fmaf(x[2 + h], k0, m), fmaf(y[h], k1, m), fmaf(y[2 + h], k1, m));
}
__device__ __forceinline__ float inverse_of(float sum) { return sum > 0.0f ? 1.0f / sum : 0.0f; }
__device__ __forceinline__ float lse_of(float reference, float sum) { return (reference + log2f(sum)) * kLn2; }
template <class C>
__device__ __forceinline__ uint2 to_output(const float4& v, float factor) {
    return make_uint2(to_pair<C::kBf16>(v.x * factor, v.y * factor), to_pair<C::kBf16>(v.z * factor, v.w * factor));
}
__device__ __forceinline__ void write_lse(const DecodeArgs& p, const QueryRow& row, float lse) {
    if (p.lse != nullptr) p.lse[row.in(p, p.lse_strides)] = lse;
}

// Leaves the (unnormalised) result in `to`, shared or global memory, for a later merge.
template <class C>
__device__ __forceinline__ void deposit(const HeadState<C>& s, float* to, int rows, int lane) {
    const int row = lane >> 2, column = lane & 3;
    const Sums<C> r = finish_sums<C>(s, lane);
#pragma unroll
    for (int h = 0; h < C::kThreadRows; ++h) {
        const int query = 2 * column + h;
        float* const at = to + query * C::kPartialRow;
#pragma unroll
        for (int c = 0; c < C::kPairs; ++c) {
            const float4 v = channels<C>(s, r, c, h, lane);
            if (query < rows) *reinterpret_cast<float4*>(at + 32 * c + 4 * row) = v;
        }
        if (row == 0 && query < rows) {
            *reinterpret_cast<float2*>(at + C::kPartialExponent) =
                make_float2(s.unset >> h & 1 ? -INFINITY : s.reference[h], r.sum[h]);
        }
    }
}

// Writes the final result of a segment that this warp has seen whole.
template <class C>
__device__ __forceinline__ void write_output(const HeadState<C>& s, const DecodeArgs& p, int segment, int lane) {
    const int row = lane >> 2, column = lane & 3;
    const Sums<C> r = finish_sums<C>(s, lane);
    const bool rotated = p.rotated_values;
#pragma unroll
    for (int h = 0; h < C::kThreadRows; ++h) {
        const int query = 2 * column + h;
        const bool used = query < p.query_rows;
        const QueryRow to(p, segment, used ? query : 0);
        float4 v[C::kPairs];
#pragma unroll
        for (int c = 0; c < C::kPairs; ++c) v[c] = channels<C>(s, r, c, h, lane);
        if (rotated) {
#pragma unroll
            for (int c = 0; c < C::kPairs; ++c) {
                butterfly(v[c]);
#pragma unroll
                for (int step = 4; step < 32; step *= 2) across(v[c], step, lane);
            }
#pragma unroll
            for (int step = 1; step < C::kPairs; step *= 2) {
#pragma unroll
                for (int c = 0; c < C::kPairs; ++c) {
                    if ((c & step) != 0) continue;
                    butterfly(v[c].x, v[c + step].x);
                    butterfly(v[c].y, v[c + step].y);
                    butterfly(v[c].z, v[c + step].z);
                    butterfly(v[c].w, v[c + step].w);
                }
            }
        }
        const float factor = inverse_of(r.sum[h]) * (rotated ? hadamard_norm<C>() : 1.0f);
        uint8_t* const out = static_cast<uint8_t*>(p.out) + 2 * to.in(p, p.out_strides) + 8 * row;
#pragma unroll
        for (int c = 0; c < C::kPairs; ++c) {
            if (used) *reinterpret_cast<uint2*>(out + 64 * c) = to_output<C>(v[c], factor);
        }
        if (row == 0 && used) write_lse(p, to, lse_of(s.reference[h], r.sum[h]));
    }
}

// ---- Merging ----

// A row while it is merged: every lane holds four channels (at 64, lanes 16.. the same as lanes 0..), all lanes know
// exponent and sum.
struct Row {
    float reference = -INFINITY, sum = 0.0f;
    float4 value = make_float4(0, 0, 0, 0);
    __device__ __forceinline__ void add(float weight, float more, const float4& v) {
        sum = fmaf(weight, more, sum);
        value.x = fmaf(weight, v.x, value.x);
        value.y = fmaf(weight, v.y, value.y);
        value.z = fmaf(weight, v.z, value.z);
        value.w = fmaf(weight, v.w, value.w);
    }
    // Adds partials relative to `largest`, the greatest exponent among them and this row's.
    __device__ __forceinline__ void move_to(float largest) {
        const float old = exp2_fast(reference - largest);
        reference = largest;
        sum *= old;
        value = make_float4(value.x * old, value.y * old, value.z * old, value.w * old);
    }
};
constexpr float kNoExponent = -1e30f;  // instead of -inf, for rows that see nothing

template <class C>
__device__ __forceinline__ int lane_channel(int lane) { return 4 * (lane % (C::kDim / 4)); }

template <class C>
__device__ __forceinline__ void write_row(const DecodeArgs& p, int segment, int row, int lane, Row r) {
    const QueryRow to(p, segment, row);
    float factor = inverse_of(r.sum);
    if (p.rotated_values) {
        butterfly(r.value);
#pragma unroll
        for (int step = 1; step < C::kDim / 4; step *= 2) across(r.value, step, lane);
        factor *= hadamard_norm<C>();
    }
    if (lane < C::kDim / 4) {
        *reinterpret_cast<uint2*>(static_cast<uint8_t*>(p.out) +
                                  2 * (to.in(p, p.out_strides) + lane_channel<C>(lane))) = to_output<C>(r.value, factor);
    }
    if (lane == 0) write_lse(p, to, lse_of(r.reference, r.sum));
}

// Merges a row over what the warps of this block left: `members` has bit i for the last segment of warp i (in its
// ring), bit 16 + i for its first segment (among the spills; at most one warp leaves a segment on its way).
template <class C>
__device__ __forceinline__ Row merge_warps(const DecodeArgs& p, const SharedStorage<C>& shared, unsigned members,
                                           int row, int lane) {
    Row r;
    r.reference = kNoExponent;
    // Every lane looks at all exponents itself: shuffles would take longer.
    float2 e[C::kWarps];
    float4 v[C::kWarps];
#pragma unroll
    for (int i = 0; i < C::kWarps; ++i) {
        const float* const from = reinterpret_cast<const float*>(shared.ring[i]) + row * C::kPartialRow;
        const bool is = members >> i & 1;
        e[i] = is ? *reinterpret_cast<const float2*>(from + C::kPartialExponent) : make_float2(-INFINITY, 0.0f);
        v[i] = is ? *reinterpret_cast<const float4*>(from + lane_channel<C>(lane)) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < C::kWarps; ++i) r.reference = fmaxf(r.reference, e[i].x);
#pragma unroll
    for (int i = 0; i < C::kWarps; ++i) r.add(exp2_fast(e[i].x - r.reference), e[i].y, v[i]);
    if (members >> 16) {
        const int w = __ffs(members >> 16) - 1;
        const float* const from =
            p.spills + (size_t(blockIdx.x) * C::kWarps + w) * C::kPartialFloats + row * C::kPartialRow;
        const float2 other = *reinterpret_cast<const float2*>(from + C::kPartialExponent);
        r.move_to(fmaxf(r.reference, other.x));
        r.add(exp2_fast(other.x - r.reference), other.y, *reinterpret_cast<const float4*>(from + lane_channel<C>(lane)));
    }
    return r;
}

// Where a block leaves its part of a segment that is not its own alone: in its second place if the segment begins in
// this block (it is then the block's last one), in its first place otherwise.
__device__ __forceinline__ size_t place_of(unsigned block, bool begins_here) { return size_t(block) * 2 + begins_here; }

// Tickets: a block writes its part and takes a ticket of the segment; who takes the last one merges, and puts the
// ticket back to kFresh for the next launch, replayed graphs too. A segment's ticket is that of the block in which it
// begins. The workspace may hold anything before: every block that will take a ticket looks at it early, and makes it
// kFresh if its upper bits do not say that it is a ticket.
constexpr unsigned long long kFresh = 0x6B697669'5EEDull << 16;
__device__ __forceinline__ unsigned long long look_at_ticket(const DecodeArgs& p, unsigned block) {
    return __ldcg(&p.tickets[block].word);
}
__device__ __forceinline__ void make_ticket(const DecodeArgs& p, unsigned block, unsigned long long seen) {
    if (seen >> 16 != kFresh >> 16) atomicCAS(&p.tickets[block].word, seen, kFresh);
}
// How many were taken before. What was written before by those is visible from now on.
__device__ __forceinline__ unsigned take_ticket(const DecodeArgs& p, unsigned block) {
    unsigned long long word;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;" : "=l"(word) : "l"(&p.tickets[block].word) : "memory");
    return static_cast<unsigned>(word & 0xFFFF);
}

// Adds a row's partials of blocks first .. last, in their order.
template <class C>
__device__ __forceinline__ Row merge_blocks(const DecodeArgs& p, unsigned first, unsigned last, int row, int lane) {
    constexpr int kAtOnce = 18, kStride = 2 * C::kPartialFloats;
    Row r;
    r.reference = kNoExponent;
    const float* from = p.partials + size_t(first) * kStride + row * C::kPartialRow;
#pragma unroll 1
    for (unsigned b = first; b <= last; b += kAtOnce, from += kAtOnce * kStride) {
        const int count = min(unsigned(kAtOnce), last - b + 1);
        float2 e[kAtOnce];
        float4 v[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (i >= count) continue;
            const float* const at = from + i * kStride + (i == 0 && b == first ? C::kPartialFloats : 0);
            e[i] = __ldcg(reinterpret_cast<const float2*>(at + C::kPartialExponent));
            v[i] = __ldcg(reinterpret_cast<const float4*>(at + lane_channel<C>(lane)));
        }
        float largest = r.reference;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (i < count) largest = fmaxf(largest, e[i].x);
        }
        r.move_to(largest);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (i < count) r.add(exp2_fast(e[i].x - largest), e[i].y, v[i]);
        }
    }
    return r;
}

// ---- The kernel ----

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) decode_kernel(const __grid_constant__ DecodeArgs p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) uint8_t raw_shared[];
    SharedStorage<C>& shared = *reinterpret_cast<SharedStorage<C>*>(raw_shared);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int kv_heads = p.kv_heads, batch_rows = p.batch_rows;

    // Every warp finds the weight of the line and its own place on it; lane i looks at `chunk` batch rows.
    const auto weight_of = [&](int r) {
        const Extent<C> e(lengths_of(p, r));
        return e.place(e.visits) * kv_heads;
    };
    const int chunk = (batch_rows + 31) / 32;
    unsigned upto = 0;
    for (int i = 0, r = lane * chunk; i < chunk && r < batch_rows; ++i, ++r) upto += weight_of(r);

    const uint32_t full = shared_address(shared.full[warp]);
    if (lane == 0) {
        for (int i = 0; i < C::kStages; ++i) barrier_init(full + 8 * i);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (lane < 2) shared.deposits[warp + 16 * lane].segment = -1;
    if (C::kWarps < 16 && warp == 0 && (lane & 15) >= C::kWarps) shared.deposits[lane].segment = -1;
    if (threadIdx.x < 16) shared.ones[threadIdx.x] = 0x3C003C00u;

    const unsigned own = upto;
    for (int d = 1; d < 32 && d < batch_rows; d *= 2) {
        const unsigned below = __shfl_up_sync(kAll, upto, d);
        if (lane >= d) upto += below;
    }
    const unsigned total = __shfl_sync(kAll, upto, min(31, batch_rows - 1));
    const unsigned blocks = blocks_for<C>(total, batch_rows * kv_heads, gridDim.x);
    const Partition partition(total, max(blocks, 1u));
    const unsigned block_begin = partition.begin(blockIdx.x);
    const unsigned block_weight =
        blockIdx.x < blocks ? partition.quotient + (blockIdx.x < partition.remainder) : 0;
    // Warps 0, 4, 8 share a scheduler: they take neighbouring slices, so that where slices are unequal (or empty) the
    // four schedulers still get equal shares.
    const unsigned order = warp % 4 * (C::kWarps / 4) + warp / 4;
    const unsigned slice_begin = block_begin + block_weight * order / C::kWarps;
    Slice slice;
    slice.end = block_begin + block_weight * (order + 1) / C::kWarps;

    // Plans visits `from` .. `from` + `count` - 1, one a lane: which segment, which part, where it lies in memory.
    // `l`: lengths of the slice's first row. `reach`: of the lane's segment.
    const auto plan = [&](const Slice& s, Lengths l, unsigned from, int count, Reach* reach) {
        int lane = threadIdx.x & 31;
        asm volatile("" : "+r"(lane));  // (as in visit_window)
        unsigned i = s.first + from + lane, head = s.head, r = s.row, begin = s.row_begin;
        Extent<C> e(l);
        while (i >= e.visits) {  // not in this head
            if (e.visits) {
                // In long segments one step forward is enough; a division costs 150 clocks.
                const unsigned heads = i < 2 * e.visits ? 1 : divide(i, e.visits);
                i -= heads * e.visits;
                head += heads;
                if (head < unsigned(kv_heads)) break;
                i += (head - kv_heads) * e.visits;
                head = 0;
                begin += e.place(e.visits) * kv_heads;
            }
            if (++r >= unsigned(batch_rows)) break;
            l = lengths_of(p, r);
            e = Extent<C>(l);
        }
        begin += head * e.place(e.visits);
        Visit v;
        v.source = nullptr;
        v.segment = -1;
        v.info = 0;
        if (lane < count && r < unsigned(batch_rows) && begin + e.place(i) < s.end) {
            v.segment = r * kv_heads + head;
            const int sequence = sequence_of(p, r);
            const int flags = (i == 0) << 20 | (i == e.visits - 1) << 21;
            if (i < e.windows) {
                const bool tail = i >= e.sinks;
                const int token = (i - (tail ? e.sinks : 0)) * C::kWindowTokens;  // in the window
                const int valid = min(C::kWindowTokens, (tail ? l.tail : l.sink) - token);
                const int left = min(255, (tail ? l.tail : l.total()) - token);
                const int capacity = tail ? p.tail_rows : p.sink;
                const int place = tail ? (l.packed + token) % capacity : token;
                const int straight = min(valid, capacity - place);
                v.source = (tail ? p.tail_keys : p.sink_keys) +
                           ((int64_t{sequence} * kv_heads + head) * capacity + place) * C::kRowBytes;
                v.info = valid | left << 8 | (tail ? kTail : kSink) << 16 | straight << 22 | flags;
            } else {
                const int token = (i - e.windows) * C::kVisitTokens;
                const int page = p.table[int64_t{sequence} * p.table_stride + token / kPageTokens];
                v.source = p.pages + (int64_t{page} * kv_heads + head) * p.page_bytes;
                v.info = min(C::kVisitTokens, l.packed - token) | min(255, l.packed + l.tail - token) << 8 | kPage << 16 |
                         token % kPageTokens / kBlockTokens << 18 | flags;
            }
        }
        if (reach) *reach = Reach(begin, e);
        if (lane < count) shared.plan[warp][(from + lane) % 32] = v;
        return v;
    };
    // By one lane. A visit that follows one to the same key group does not need its parameters again.
    const auto fetch = [&](const Visit& v, int stage, bool follows) {
        const uint32_t to = shared_address(shared.ring[warp][stage]), bar = full + 8 * stage;
        if (info_kind(v.info) != kPage) {
            const bool tail = info_kind(v.info) == kTail;
            const uint8_t* const values =
                (tail ? p.tail_values : p.sink_values) + (v.source - (tail ? p.tail_keys : p.sink_keys));
            const uint32_t straight = info_straight(v.info) * C::kRowBytes;
            const uint32_t rest = info_valid(v.info) * C::kRowBytes - straight;
            barrier_expect(bar, 2 * (straight + rest));
            bulk_copy(to, v.source, straight, bar);
            bulk_copy(to + C::kWindowHalf, values, straight, bar);
            if (rest > 0) {  // the ring goes on at its beginning
                const int64_t back = int64_t{p.tail_rows} * C::kRowBytes - straight;
                bulk_copy(to + straight, v.source - back, rest, bar);
                bulk_copy(to + C::kWindowHalf + straight, values - back, rest, bar);
            }
            return;
        }
        const int block = info_block(v.info), part = info_part<C>(v.info);
        const uint8_t* const group = v.source + block / C::kGroupBlocks * C::kGroupBytes;
        const bool skip = part > 0 && follows;
        barrier_expect(bar, skip ? C::kVisitBytes - C::kKeyParams : C::kVisitBytes);
        if (part == 0) {
            bulk_copy(to, group, C::kKeyBytes, bar);
        } else {
            if (!skip) bulk_copy(to, group, C::kKeyParams, bar);
            bulk_copy(to + C::kKeyParams, group + C::kKeyParams + part * C::kVisitBlocks * C::kKeyCodes,
                      C::kKeyBytes - C::kKeyParams, bar);
        }
        bulk_copy(to + C::kKeyBytes, v.source + p.value_offset + block * C::kValueBlock, C::kValueBytes, bar);
    };

    const auto prepare = [&](const RawQueries<C>& queries) {
        return prepare_queries<C>(queries, p.rotated_keys, shared.queries[warp], lane);
    };
    // What the warp will see of a segment; by one lane.
    const auto note = [&](int segment, const Reach& reach, int info) {
        shared.from_start[warp] = info_first(info);
        shared.seen[warp] = {segment, reach.begin, reach.last, partition.owner(reach.begin)};
        shared.next_begin[warp] = reach.end;
    };
    float unit = 0;
    unsigned long long ticket = kFresh;
    unsigned ticket_at = 0;
    if (slice_begin < slice.end) {
        const int owner = __ffs(__ballot_sync(kAll, slice_begin >= upto - own && slice_begin < upto)) - 1;
        slice.row = owner * chunk;
        slice.row_begin = __shfl_sync(kAll, upto - own, owner);
        Lengths l;
        for (;; ++slice.row) {  // (lane `owner` knows only where its first row begins)
            l = lengths_of(p, slice.row);
            const Extent<C> e(l);
            const unsigned weight = e.place(e.visits), rest = slice_begin - slice.row_begin;
            if (rest < weight * kv_heads) {
                slice.head = divide(rest, weight);
                slice.first = e.visit_at(rest - slice.head * weight);
                if (slice.first == e.visits) {  // the slice begins inside the head's last visit, which is not its own
                    slice.first = 0;
                    if (++slice.head == unsigned(kv_heads)) {
                        slice.head = 0;
                        slice.row_begin += weight * kv_heads;
                        ++slice.row;
                        l = slice.row < unsigned(batch_rows) ? lengths_of(p, slice.row) : Lengths{0, 0, 0};
                    }
                }
                break;
            }
            slice.row_begin += weight * kv_heads;
        }
        // The first queries before the first pages: behind those of the block's other warps they would wait for
        // megabytes. (Rows without tokens may lie between: then these are not the first queries, see below.)
        const int expected = slice.row < unsigned(batch_rows) ? slice.row * kv_heads + slice.head : 0;
        RawQueries<C> queries = fetch_queries<C>(p, expected, lane);
        if (lane == 0) shared.slices[warp] = slice;
        Reach reach;
        const Visit v = plan(slice, l, 0, 32, &reach);
        const int first_segment = __shfl_sync(kAll, v.segment, 0);
        if (first_segment >= 0 && first_segment != expected) queries = fetch_queries<C>(p, first_segment, lane);
        unit = prepare(queries);
        if (lane == 0 && first_segment >= 0) {
            fetch(v, 0, false);
            note(first_segment, reach, v.info);
            ticket_at = shared.seen[warp].block;
            ticket = look_at_ticket(p, ticket_at);
        }
    } else if (lane == 0) {
        shared.plan[warp][0].segment = -1;
    }
    if (threadIdx.x == 0) shared.block = {partition, block_begin, block_weight};

    // Rows without tokens: one warp of one block writes their zeros while the first visit's data is on its way.
    for (int r = blockIdx.x + gridDim.x * warp; r < batch_rows; r += gridDim.x * C::kWarps) {
        if (sequence_of(p, r) < 0 || lengths_of(p, r).total() > 0) continue;
        for (int i = 0; i < kv_heads * p.query_rows; ++i) {
            write_row<C>(p, r * kv_heads + divide(i, p.query_rows), i % p.query_rows, lane, Row{});
        }
    }
    __syncthreads();  // shared.ones, shared.block
    // All warps' first visits before anyone's second.
    if (slice_begin < slice.end && lane > 0 && lane < C::kStages) {
        const Visit& v = shared.plan[warp][lane];
        if (v.segment >= 0) fetch(v, lane, true);
    }
    if (block_weight == 0) return;
    make_ticket(p, ticket_at, ticket);

    HeadState<C> state;
    KeyContext<C> key;
    int segment = -1;
    const int rows = p.query_rows;
    for (unsigned visit = 0;; ++visit) {
        const int stage = visit % C::kStages, parity = visit / C::kStages % 2;
        const int next_segment = shared.plan[warp][visit % 32].segment, info = shared.plan[warp][visit % 32].info;
        if (next_segment != segment || next_segment < 0) {
            if (segment >= 0) {  // leave the old segment
                if (shared.from_start[warp] && info_last(shared.plan[warp][(visit - 1) % 32].info)) {
                    write_output<C>(state, p, segment, lane);
                } else {
                    const bool last = next_segment < 0;
                    deposit<C>(state,
                               last ? reinterpret_cast<float*>(shared.ring[warp])
                                    : p.spills + (size_t(blockIdx.x) * C::kWarps + warp) * C::kPartialFloats,
                               rows, lane);
                    if (lane == 0) shared.deposits[warp + (last ? 0 : 16)] = shared.seen[warp];
                }
            }
            if (next_segment < 0) break;
            if (segment >= 0) {
                unit = prepare(fetch_queries<C>(p, next_segment, lane));
                if (lane == 0) {
                    const Extent<C> e(lengths_of(p, divide(next_segment, kv_heads)));
                    note(next_segment, Reach(shared.next_begin[warp], e), info);
                    const unsigned at = shared.seen[warp].block;
                    make_ticket(p, at, look_at_ticket(p, at));
                }
            }
            segment = next_segment;
            start_segment<C>(state, unit, p.scale_log2, lane);
            __syncwarp();
        }

        barrier_wait(full + 8 * stage, parity);
        if (info_kind(info) != kPage) {
            visit_window<C>(state, shared, p, shared.ring[warp][stage], info, warp, lane);
        } else {
            visit_page<C>(state, key, shared, p, shared.ring[warp][stage], info, visit > 0 && info_part<C>(info) > 0,
                          warp, lane);
        }
        __syncwarp();  // all lanes have read the slot

        // The plan holds 32 visits; now and then 16 new ones replace those that were visited long ago.
        const unsigned wanted = visit + C::kStages;
        if (wanted % 16 == 0 && wanted >= 32) {
            plan(shared.slices[warp], lengths_of(p, shared.slices[warp].row), wanted, 16, nullptr);
            __syncwarp();
        }
        if (lane == 0) {
            const Visit& v = shared.plan[warp][wanted % 32];
            if (v.segment >= 0) fetch(v, stage, true);
        }
    }

    // Merge inside the block; what is shared with other blocks is left in the workspace.
    __syncthreads();
    const BlockPiece piece = shared.block;
    const Seen mine = shared.deposits[lane];
    const unsigned mates = __match_any_sync(kAll, mine.segment);  // lanes with deposits of the same segment
    const bool speaks = mine.segment >= 0 && __ffs(mates) - 1 == lane;
    const bool is_shared = mine.last >= piece.begin + piece.weight || mine.begin < piece.begin;
    const unsigned speakers = __ballot_sync(kAll, speaks);
    const unsigned sharing = __ballot_sync(kAll, speaks && is_shared);
    // The number-th speaker of a mask.
    const auto speaker_of = [](unsigned mask, int number) {
        for (; number > 0; --number) mask &= mask - 1;
        return __ffs(mask) - 1;
    };
#pragma unroll 1
    for (int task = warp; task < __popc(speakers) * rows; task += C::kWarps) {
        const int number = divide(task, rows), row = task - number * rows, speaker = speaker_of(speakers, number);
        const Row r = merge_warps<C>(p, shared, __shfl_sync(kAll, mates, speaker), row, lane);
        if ((sharing >> speaker & 1) == 0) {
            write_row<C>(p, __shfl_sync(kAll, mine.segment, speaker), row, lane, r);
            continue;
        }
        const bool begins_here = __shfl_sync(kAll, mine.block, speaker) == blockIdx.x;
        float* const to = p.partials + place_of(blockIdx.x, begins_here) * C::kPartialFloats + row * C::kPartialRow;
        if (lane < C::kDim / 4) *reinterpret_cast<float4*>(to + lane_channel<C>(lane)) = r.value;
        if (lane == 0) *reinterpret_cast<float2*>(to + C::kPartialExponent) = make_float2(r.reference, r.sum);
    }
    if (sharing == 0) return;

    // The last to arrive merges over blocks. A warp for each of the (one or two) segments takes its ticket.
    if (threadIdx.x == 0) shared.complete = 0;
    __syncthreads();
    if (warp < __popc(sharing)) {
        const int speaker = speaker_of(sharing, warp);
        const unsigned first = __shfl_sync(kAll, mine.block, speaker);
        const unsigned last = piece.partition.owner(__shfl_sync(kAll, mine.last, speaker));
        if (lane == 0 && take_ticket(p, first) == last - first) atomicOr(&shared.complete, 1u << speaker);
    }
    __syncthreads();
    const unsigned complete = shared.complete;
#pragma unroll 1
    for (int task = warp; task < __popc(complete) * rows; task += C::kWarps) {
        const int number = divide(task, rows), row = task - number * rows, speaker = speaker_of(complete, number);
        const unsigned first = __shfl_sync(kAll, mine.block, speaker);
        const unsigned last = piece.partition.owner(__shfl_sync(kAll, mine.last, speaker));
        const Row r = merge_blocks<C>(p, first, last, row, lane);
        write_row<C>(p, __shfl_sync(kAll, mine.segment, speaker), row, lane, r);
        if (row == 0 && lane == 0) p.tickets[first].word = kFresh;
    }
#endif
}

}  // namespace kivi::cuda::fast
