// Sizes of the kernel for many query rows, its arguments, and what a block walks over.
#pragma once
#include <cstdint>

#include "cuda/decode_instructions.cuh"
#include "cuda/fragment_order.h"
#include "cuda/launch.h"

namespace kivi::cuda::prompt {

constexpr int kPieceBlocks = 2;  // of a packed piece, whose first is block 0 or 2 of its page
constexpr int kPieceTokens = kPieceBlocks * kBlockTokens;

// p is formed relative to (largest score + kHeadroom), in powers of two: a later score may exceed the largest one by
// this much before anything has to be rescaled. Not a whole number: where all scores are nearly equal, p would sit just
// below a power of two and always be rounded the same way.
constexpr float kHeadroom = 1.5f;

// Packed elements are dequantised times 2^-down, so that min + code * scale stays finite in fp16: up to 2^17 with fp16
// windows, up to 2^bits times the largest parameter with bf16 windows.
constexpr int down_of(bool bf16) { return bf16 ? 4 : 2; }

// A block serves ROW_WARPS * ROW_TILES * 16 query rows (query tokens x query heads of one KV head). A warp has
// 16 * ROW_TILES of them and one of TOKEN_WARPS parts of the tokens, with a softmax of its own.
template <bool BF16, int DIM, int ROW_WARPS, int ROW_TILES, int TOKEN_WARPS, int BLOCKS, int STAGES,
          bool PUBLISHED = false>
struct Config {
    static constexpr bool kPublished = PUBLISHED;  // schedule: there are pieces of the middle
    static constexpr bool kBf16 = BF16;  // q, windows, and keys and values of the call
    static constexpr int kDim = DIM, kSteps = DIM / 16, kPairs = kSteps / 2;
    static constexpr int kRowWarps = ROW_WARPS, kRowTiles = ROW_TILES, kTokenWarps = TOKEN_WARPS;
    static constexpr int kWarps = ROW_WARPS * TOKEN_WARPS, kThreads = 32 * kWarps;
    static constexpr int kBlocks = BLOCKS;  // that share a multiprocessor
    static constexpr int kStages = STAGES;  // pieces on their way from memory
    static constexpr int kWarpRows = 16 * ROW_TILES, kRows = kWarpRows * ROW_WARPS;
    static constexpr int kTokens = kPieceTokens;                                        // of a piece
    static constexpr int kPieceUnits = kTokens / 16, kUnits = kPieceUnits / TOKEN_WARPS;  // of all warps, of one
    static constexpr int kRowBytes = 2 * DIM;
    static constexpr int kDown = down_of(BF16);
};

// Packed pieces in bytes: offsets that kernels would have to divide for.
struct PackedPiece {
    // Copies, in a part of a page, by first block / 2. Key parameters and codes come together, or apart (codes_bytes
    // is not 0) where a key group is longer than a piece.
    int32_t keys_from[2], keys_bytes, codes_from[2], codes_bytes, values_from[2], values_bytes;
    // Blocks of the piece, in the stage. Value parameters follow their codes.
    int32_t key_params[kPieceBlocks], key_codes[kPieceBlocks], value_codes[kPieceBlocks], value_params;
    int32_t value_groups;
    uint32_t thousand = 0x64006400;  // 1024 in fp16, twice: see code_numbers

    PackedPiece(const FragmentSizes& key, const FragmentSizes& value) {
        const bool apart = key.group_blocks > kPieceBlocks;
        keys_bytes = apart ? key.param_bytes : kPieceBlocks / key.group_blocks * key.group_bytes();
        codes_bytes = apart ? kPieceBlocks * key.code_bytes : 0;
        values_bytes = kPieceBlocks * value.group_bytes();
        for (int i = 0; i < 2; ++i) {
            keys_from[i] = key.codes(true, kPieceBlocks * i) - key.param_bytes;
            if (apart) keys_from[i] = 0;
            codes_from[i] = key.codes(true, kPieceBlocks * i);
            values_from[i] = value.codes(false, kPieceBlocks * i);
        }
        for (int b = 0; b < kPieceBlocks; ++b) {
            key_params[b] = b / key.group_blocks * key.group_bytes();
            key_codes[b] = key.codes(true, b);
            value_codes[b] = value.codes(false, b);
        }
        value_params = value.code_bytes;
        value_groups = value.value_groups;
    }
};

// What both kernels take.
struct Args {
    AttendArgs attend;
    int32_t first_tile, tiles;  // of the query rows of a sequence and KV head, those of this launch
    int32_t parts;              // blocks that share a tile's tokens
    PackedPiece packed;
    // What prefill_pages.cuh does first, 0 if nothing: blocks that share a tile, and where they leave results.
    int32_t page_parts;
    float* page_workspace;
};

// Under the published schedule keys are packed further than values: those of the middle are in a page, and its values in
// the tail.
enum class Kind { sink, page, tail, fresh, middle };

// Consecutive positions that are stored alike, at most kTokens.
struct Piece {
    Kind kind;
    int position, count;
};

template <class C>
__device__ __forceinline__ bool packed_keys(const Piece& piece) {
    return piece.kind == Kind::page || (C::kPublished && piece.kind == Kind::middle);
}

// Tokens of a sequence that prefill_pages.cuh has multiplied with a tile's rows before: from the beginning of the pages,
// and of the keys and values of the call; whole pieces.
struct Done {
    int packed, fresh;
};

// Tokens of the middle; other schedules have none.
template <bool PUBLISHED>
struct Middle {
    int middle;
};
template <>
struct Middle<false> {
    static constexpr int middle = 0;
};

// A sequence as pieces, in the order of positions: sink window, pages, tail, keys and values of the call; without what
// has been done.
template <class C>
struct Walk : Middle<C::kPublished> {
    using Middle<C::kPublished>::middle;
    Done done;
    int sink, packed, tail, fresh;  // tokens

    __device__ Walk(const AttendArgs& args, const RowArg& row, const Span& span, Done done) : done(done) {
        const int length = static_cast<int>(span.length), s = static_cast<int>(args.layer.key.windows.sink);
        sink = min(length, s);
        if constexpr (C::kPublished) {
            packed = static_cast<int>(span.value_border) - done.packed;
            middle = static_cast<int>(span.key_border) - done.packed - packed;
        } else {
            packed = max(static_cast<int>(span.key_border) - s, 0) - done.packed;
        }
        tail = length - sink - done.packed - packed - middle;
        fresh = args.k ? row.count - done.fresh : 0;
    }
    __device__ int length() const { return sink + done.packed + packed + middle + tail; }
    __device__ static int pieces(int tokens) { return (tokens + C::kTokens - 1) / C::kTokens; }
    // A middle begins where a piece of the page does: with tokens of the last piece before it.
    __device__ int hidden() const { return packed % C::kTokens; }
    __device__ int hidden(const Piece& piece) const {
        return piece.kind == Kind::middle ? max(sink + done.packed + packed - piece.position, 0) : 0;
    }
    __device__ int middle_pieces() const { return C::kPublished && middle > 0 ? pieces(hidden() + middle) : 0; }

    // The piece that holds a position, or the last before it.
    __device__ int number_of(int position) const {
        if (position < sink) return position / C::kTokens;
        position -= sink + done.packed;
        if (position < 0) return pieces(sink) - 1;
        if (position < packed) return pieces(sink) + position / C::kTokens;
        position -= packed;
        if constexpr (C::kPublished) {
            if (position < middle) return pieces(sink) + pieces(packed) + (hidden() + position) / C::kTokens;
            position -= middle;
        }
        if (position < tail) return pieces(sink) + pieces(packed) + middle_pieces() + position / C::kTokens;
        position -= tail + done.fresh;
        return position < 0 ? fresh_begin() - 1 : fresh_begin() + position / C::kTokens;
    }
    // The first piece of keys and values of the call.
    __device__ int fresh_begin() const { return pieces(sink) + pieces(packed) + middle_pieces() + pieces(tail); }
    __device__ Piece operator[](int number) const {
        int first = 0;
        if (number < pieces(sink)) return piece(Kind::sink, first, number, sink);
        number -= pieces(sink), first += sink + done.packed;
        if (number < pieces(packed)) return piece(Kind::page, first, number, packed);
        number -= pieces(packed), first += packed;
        if constexpr (C::kPublished) {
            if (number < middle_pieces()) return piece(Kind::middle, first - hidden(), number, hidden() + middle);
            number -= middle_pieces(), first += middle;
        }
        if (number < pieces(tail)) return piece(Kind::tail, first, number, tail);
        number -= pieces(tail), first += tail + done.fresh;
        return piece(Kind::fresh, first, number, fresh);
    }

  private:
    __device__ static Piece piece(Kind kind, int first, int number, int tokens) {
        return {kind, first + number * C::kTokens, min(C::kTokens, tokens - number * C::kTokens)};
    }
};

// What the rows of a block see.
struct Visible {
    int first_row, group;  // the block's first row; query heads of a KV head
    int last;              // position that query token 0 sees last
    int window_left;       // -1: all
    int first_last, last_last;  // positions that the block's first and last rows see last

    Visible() = default;
    __device__ Visible(int first_row, int rows, int group, int last, int64_t window_left)
        : first_row(first_row), group(group), last(last),
          window_left(static_cast<int>(min(window_left, int64_t{1} << 30))), first_last(last + first_row / group),
          last_last(last + (first_row + rows - 1) / group) {}

    // Tokens begin .. end - 1 of the piece.
    struct Range {
        int begin, end;
        __device__ bool holds(int token) const { return token >= begin && token < end; }
    };
    __device__ Range of(const Piece& piece, int row) const {
        const int newest = last + static_cast<int>(fast::divide(first_row + row, group));
        return {window_left < 0 ? 0 : newest - window_left - piece.position,
                min(piece.count, newest + 1 - piece.position)};
    }
    // Whether all rows see all of a piece of `tokens` tokens.
    __device__ bool whole(const Piece& piece, int tokens) const {
        return piece.count == tokens && piece.position + tokens <= first_last + 1 &&
               (window_left < 0 || piece.position >= last_last - window_left);
    }
};

// Operands of the tensor cores: four registers of each lane.
using Operand = uint32_t[32][4];

// Of one row, as a thread knows it.
struct Softmax {
    float reference;  // exponent that p is relative to; every p is <= 1
    float sum;        // of the p of the thread's columns
};

template <class C>
struct SharedStorage {
    // Pieces as they stand in memory: keys, then values.
    alignas(128) uint8_t stage[C::kStages][2][C::kTokens * C::kRowBytes];
    // One piece as operands, in the order of fragment_order.h: unit, step.
    alignas(128) Operand keys[C::kPieceUnits][C::kSteps];
    alignas(128) Operand values[C::kPieceUnits][C::kSteps];
    alignas(128) Operand queries[C::kRowWarps][C::kRowTiles][C::kSteps];
    // Key mins of each block of the piece; zeros if it is not packed.
    alignas(128) uint16_t mins[kPieceBlocks][C::kDim];
    float unit[C::kRows];  // 2^exponent of each query row, see load_queries
    uint64_t full[C::kStages];
    // What is not needed all the time waits here; registers are scarce.
    Softmax softmax[C::kThreads][C::kRowTiles][2];
    RowArg row;
    Walk<C> walk;
    Visible visible;
    int rows;          // that exist
    bool has_results;  // whether prefill_pages.cuh leaves them to this block
    // Numbers of pieces: of the block's; the first of the call; those, and before them the results, that are in the basis
    // of storage, if that is not the caller's.
    int begin, end, fresh_begin, stored_begin, stored_end;
    int next_block;    // of the next piece to be fetched, if that is of a page; the first thread's
};

// Tokens of the piece that a row sees, and whether all rows see all of it.
template <class C>
__device__ __forceinline__ Visible::Range seen_by(const SharedStorage<C>& shared, const Piece& piece, int row) {
    Visible::Range range = shared.visible.of(piece, row);
    if constexpr (C::kPublished) range.begin = max(range.begin, shared.walk.hidden(piece));
    return range;
}
template <class C>
__device__ __forceinline__ bool seen_by_all(const SharedStorage<C>& shared, const Piece& piece) {
    return !(C::kPublished && piece.kind == Kind::middle) && shared.visible.whole(piece, C::kTokens);
}

// What warps leave at the end, in place of stage and operands.
template <class C>
struct Results {
    float rows[C::kTokenWarps][C::kRows][C::kDim + 4];
    float2 sums[C::kTokenWarps][C::kRows];
};

}  // namespace kivi::cuda::prompt
