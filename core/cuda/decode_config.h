// One instance of the decode kernel: shapes of pages, visits and shared memory that follow from its parameters.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cuda/decode_args.h"
#include "cuda/fragment_order.h"

namespace kivi::cuda::fast {

constexpr int greatest_divisor(int a, int b) { return b != 0 ? greatest_divisor(b, a % b) : a; }

template <bool BF16, int DIM, int KEY_BITS, int VALUE_BITS, int KEY_GROUP, int VALUE_GROUP, int ROWS, int WARPS,
          int VISIT_BLOCKS, int STEP_BLOCKS, bool PUBLISHED = false>
struct Config {
    static constexpr bool kBf16 = BF16;  // q, out and the windows; scales and mins are fp16
    static constexpr int kDim = DIM, kKeyBits = KEY_BITS, kValueBits = VALUE_BITS;
    static constexpr int kKeyGroup = KEY_GROUP, kValueGroups = DIM / VALUE_GROUP;
    static constexpr int kSteps = DIM / 16, kPairs = kSteps / 2;
    // Rows are the query tokens x query heads of one KV head.
    //   8    a column of the mma for every row
    //   16   two tiles of columns, which share the decoded operands
    //   4    two columns for every row, one for the tokens of a score tile's upper eight rows, one for the lower eight:
    //        half as much softmax arithmetic; the two are added at the end
    static constexpr int kRows = ROWS, kTiles = ROWS == 16 ? 2 : 1;
    static constexpr int kTileRows = ROWS == 4 ? 1 : 2;         // of a tile, whose scores a thread holds
    static constexpr int kThreadRows = kTiles * kTileRows;
    static constexpr int kQueryLanes = ROWS == 4 ? 16 : 32;     // with queries of their own
    static_assert(ROWS == 4 || ROWS == 8 || ROWS == 16);
    static constexpr int kWarps = WARPS, kThreads = 32 * WARPS;
    static constexpr int kStages = 2;  // visits in a ring
    static constexpr int kVisitBlocks = VISIT_BLOCKS, kStepBlocks = STEP_BLOCKS;
    // A visit to a window: 16 tokens, keys then values; 8 where 16 would make the slots too large. Pages of 16 bits hold
    // rows like those of windows, and are visited as these are: what follows about codes is not for them.
    static constexpr bool kPlain = KEY_BITS == 16;
    static constexpr bool kPublished = PUBLISHED;  // the schedule of decode_middle.cuh
    static constexpr int kWindowTokens = DIM > 128 ? 8 : 16, kRowBytes = 2 * DIM;
    static constexpr int kWindowHalf = kWindowTokens * kRowBytes;
    static constexpr int kVisitTokens = kPlain ? kWindowTokens : VISIT_BLOCKS * kBlockTokens;
    static_assert(kPlain == (VALUE_BITS == 16) && !(kPlain && PUBLISHED));
    static_assert(DIM == 64 || DIM == 128 || DIM == 256);
    static_assert(kValueGroups <= 8, "a row of the operand for each group's mins");
    static_assert(WARPS % 4 == 0 && WARPS <= 16, "whole rounds of the four schedulers; deposits[] has 16 places");
    static_assert(VISIT_BLOCKS % STEP_BLOCKS == 0 && kPageTokens % kVisitTokens == 0);

    // What q is divided by, and what value products stand in units of: log2, see step_power.
    __host__ __device__ static constexpr int key_power(int step, int half) {
        return step_power(KEY_BITS, DIM, step, half);
    }
    __host__ __device__ static constexpr int value_power(int step) { return step_power(VALUE_BITS, DIM, step, 0); }
    static constexpr bool kHalfPowers = !kPlain && vector_words(KEY_BITS, DIM) == 2;  // of keys: halves have their own
    static_assert(kPlain || vector_words(VALUE_BITS, DIM) == 4);

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
    static constexpr int kValueBytes = VISIT_BLOCKS * kValueBlock;
    static constexpr int kVisitBytes = kPlain ? 2 * kWindowHalf : kKeyBytes + kValueBytes;
    __host__ __device__ static constexpr int key_codes(int block) {
        return kSharedParams ? kKeyParams + block * kKeyCodes
                             : block / kGroupBlocks * kGroupBytes + kKeyParams + block % kGroupBlocks * kKeyCodes;
    }
    // Where the keys of a visit that begins with this block stand in the page: its group, or its codes there.
    __host__ __device__ static constexpr int key_place(int block) {
        const int in_group = block % kGroupBlocks;
        return block / kGroupBlocks * kGroupBytes +
               (kSharedParams && in_group > 0 ? kKeyParams + in_group * kKeyCodes : 0);
    }
    static constexpr int kKeyStride = VISIT_BLOCKS > 1 ? key_codes(1) - key_codes(0) : 0;
    // Longer groups, of which a visit has several: a step each.
    static constexpr bool kStepGroups = VISIT_BLOCKS > 2 && KEY_GROUP > kBlockTokens;
    static_assert(!kStepGroups || STEP_BLOCKS == kGroupBlocks, "blocks of a step equally far apart");
    __host__ __device__ static constexpr int step_codes(int block) {
        return kKeyParams + (kStepGroups ? block / kGroupBlocks * kGroupBytes : kKeyStride * block);
    }
    static_assert(!PUBLISHED || kKeyParams + kKeyCodes <= kWindowHalf, "in place of keys of 16 bits");

    static constexpr int kSlotBytes =
        ((2 * kWindowHalf > kVisitBytes ? 2 * kWindowHalf : kVisitBytes) + 127) / 128 * 128;

    static constexpr int kWindowKilo = (2 * kWindowHalf + 512) / 1024, kVisitKilo = (kVisitBytes + 512) / 1024;
    static constexpr int kUnit = greatest_divisor(kWindowKilo, kVisitKilo);
    static constexpr unsigned kWindowWeight = kWindowKilo / kUnit, kVisitWeight = kVisitKilo / kUnit;
    static constexpr unsigned kMaxWeight = kWindowWeight > kVisitWeight ? kWindowWeight : kVisitWeight;

    // One unnormalised result: for each row its channels, the reference exponent and the sum of p; padded against
    // bank conflicts.
    static constexpr int kPartialRow = DIM + 4, kPartialExponent = DIM;
    static constexpr int kPartialFloats = kRows * kPartialRow;
    static constexpr int kRowVectors = DIM > 128 ? DIM / 128 : 1;  // of four channels a lane
    static_assert(kPartialFloats * 4 <= kStages * kSlotBytes, "a warp leaves its partial in its ring");

    // Runs (decode_runs.cuh): visits of one, longer where its result is large beside them or visits are short; bytes in
    // the workspace, with tickets.
    static constexpr unsigned kRunVisits = kRows == 16 || kPlain ? 8 : 4;
    static constexpr size_t kRunBytes = kPartialFloats * sizeof(float) + 2 * kRows * sizeof(unsigned long long);
    static size_t workspace(int blocks) {
        return size_t(blocks) * (kRows * sizeof(unsigned long long) + (2 + 2 * WARPS) * kPartialFloats * sizeof(float));
    }
};

}  // namespace kivi::cuda::fast
