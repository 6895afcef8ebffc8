// The inner loops of attention on the CPU, one table of functions for each instruction set.
//
// A visit is up to 128 tokens of one KV head that all query rows of the call see in the same way:
//
//   score_*   s[r][t] = q_r . k_t                        from rows or from packed keys
//   softmax   s -> exp2(s - max), running max and sum, accumulators rescaled where the max has grown much
//   mix_*     acc_r += sum over t of p[r][t] * v_t       from rows or from packed values
//
// Rows are the query rows of one KV head, up to kBlockRows. Scores are kept in log2 units: the caller has
// folded scale * log2(e) into q. Dims are multiples of 16 here; callers pad what is not.
#pragma once
#include <cstdint>

#include "format/model.h"

namespace kivi::cpu {

constexpr int kBlockRows = 8;
constexpr int kLanes = 16;  // dims are padded to this; partial sums over tokens have this many lanes

// Memory that will be read soon, in the order in which it will be read. Kernels call step() for the cache lines that
// they use up, a few at a time, so that prefetching into the first-level cache stays a fixed distance ahead: hardware
// prefetchers do not keep up with pages, and bursts overrun the line-fill buffers.
class Ahead {
  public:
    struct Range {
        const uint8_t* data;
        int64_t bytes;
    };

    // Prefetching begins close to the reader, who would wait for a long burst, and gains on it at first.
    void start(const Range* ranges, int count);
    // `count` more ranges stand behind those of start.
    void extend(int count) { count_ += count; }

    // always_inline: the compiler takes a function that only prefetches for one without effects.
    __attribute__((always_inline)) void step(int lines) {
        if (__builtin_expect(behind_ > 0, 0)) catch_up(lines);
        fetch(lines);
    }

  private:
    // Cache lines. In the end prefetching is 160 ahead: 10 KiB, nearly a page of 2-bit codes, which outlasts the latency
    // of a busy memory and leaves room for operands and scores. 128 lines make `kivi2-sink` slower by 3 % (cold, T 4096),
    // 224 make `f16` slower by 7 %. A second cursor, farther ahead into the second-level cache, brought nothing, and
    // cost 14 % where all is in the third-level cache.
    static constexpr int kFirstLines = 32;
    static constexpr int kCatchUpLines = 128;

    void catch_up(int lines);

    __attribute__((always_inline)) void fetch(int lines) {
        if (at_ >= end_) {
            if (next_ == count_) return;
            at_ = ranges_[next_].data;
            end_ = at_ + ranges_[next_].bytes;
            ++next_;
        }
        for (int i = 0; i < lines; ++i) __builtin_prefetch(at_ + 64 * i, 0, 3);
        at_ += 64 * lines;
    }

    const uint8_t* at_ = nullptr;
    const uint8_t* end_ = nullptr;
    const Range* ranges_ = nullptr;
    int count_ = 0, next_ = 0;
    int behind_ = 0;  // lines of the reader during which prefetching still gains on it
};

// Plain rows: windows, 16-bit pages, fresh tokens, decoded tiles.
struct RowRun {
    const uint8_t* data;
    int64_t stride;  // bytes from row to row
    int32_t dtype;
    int dim;
};

// One tensor of a page in the lanes order of page_order.cpp.
struct PackedPart {
    const uint8_t* data;
    int dim;
    int group;        // tokens (keys) or channels (values) that share parameters
    int groups;       // keys: along the page; values: along a row
    int64_t scales;   // byte offsets in the part
    int64_t mins;
};

// What softmax and mix keep for query rows. acc[r]: [dim] sums, then whatever else is rescaled with them; for
// packed values [groups][kLanes] sums of p * min that are not yet added over lanes.
struct RowState {
    float* const* acc;
    float* max;  // at least the largest score so far, at most 8 more; -infinity: none
    float* sum;  // of exp2(score - max)
};

// Working memory of one thread for packed visits.
struct PackedScratch {
    int32_t* operand;  // [kOperandPairs] folded q or p, pairs of int16
    float* values;     // [kBlockRows * kMaxDim] scaled queries; scales and mins of the groups of values
};
// Pairs of a row of folded q, and all of them: [groups of a page][rows][pairs]. Not a power of two, so that rows do
// not share cache sets.
constexpr int kKeyPairs = kMaxDim / 2 + 16;
constexpr int kOperandPairs = kPageTokens / 32 * kBlockRows * kKeyPairs;
static_assert(kOperandPairs >= kMaxDim / 32 * kBlockRows * kPageTokens / 2, "operands of values fit as well");
static_assert(kBlockRows * kMaxDim >= kMaxDim / 32 * 2 * kPageTokens, "parameters of values fit as well");

struct Kernels {
    // q [rows][q_stride]; s [rows][kPageTokens]; tokens 0 .. count - 1 of the run.
    void (*score_rows)(const RowRun& run, int count, const float* q, int q_stride, int rows, float* s, Ahead& ahead);
    void (*mix_rows)(const RowRun& run, int count, const float* p, int rows, float* const* acc, Ahead& ahead);

    // By bits - 2: 2, 3 and 4. Tokens begin .. end - 1 of the page, s and p indexed by token of the page.
    void (*score_packed[3])(const PackedPart& keys, int begin, int end, const float* q, int q_stride, int rows,
                            float* s, const PackedScratch& scratch, Ahead& ahead);
    // acc as in RowState; the sums of p * min start at acc[r] + acc_mins.
    void (*mix_packed[3])(const PackedPart& values, int begin, int end, const float* p, int rows, float* const* acc,
                          int acc_mins, const PackedScratch& scratch, Ahead& ahead);

    // s[r][begin .. end - 1] -> probabilities. `acc_size` floats of each accumulator are rescaled. cap > 0:
    // s <- cap * tanh(s) first. A score that is not finite makes the row's sum NaN.
    void (*softmax)(float* s, int begin, int end, int rows, float cap, int acc_size, const RowState& state);

    // One row of `dim` elements, any dim: to = from * scale, and to = from with ties to even.
    void (*load_row)(const uint8_t* from, int32_t dtype, int dim, float scale, float* to);
    void (*store_row)(const float* from, int dim, int32_t dtype, uint8_t* to);
    // x <- H x for every diagonal block, like format/hadamard.h up to the order of additions. dim % 16 == 0.
    void (*hadamard)(float* x, int dim);
};

// For simd::target(). Null on processors without SSE4.2 or NEON: there the plain code of reference_attend runs.
const Kernels* kernels();

}  // namespace kivi::cpu
