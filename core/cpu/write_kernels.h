// The SIMD half of the write side: rows on their way in, and packers. One table for each instruction set;
// every function gives the bytes of its plain counterpart (rows.h, pack.h) or declines.
#pragma once
#include <cstdint>

#include "cpu/storage.h"
#include "format/feedback.h"

namespace kivi::cpu {

// Brings rows of the caller into the second-level cache before their turn, in the order [token][head] in which
// they lie in memory. Whoever works on other rows meanwhile asks for a few lines now and then: a processor has
// only so many lines under way, and many at once make it wait.
class RowsAhead {
  public:
    RowsAhead() = default;
    // `rows` rows of `row_bytes` bytes, `heads` a token, the first at `at`; strides in bytes.
    RowsAhead(const uint8_t* at, int64_t token_stride, int64_t head_stride, int heads, int64_t row_bytes,
              int64_t rows)
        : token_(at),
          row_(at),
          token_stride_(token_stride),
          head_stride_(head_stride),
          heads_(heads),
          row_bytes_(row_bytes),
          lines_((row_bytes + kLine - 1) / kLine * rows) {}

    // Inlined by force, because compilers take a function that only prefetches for one without effect.
    __attribute__((always_inline)) void fetch(int64_t lines) {
        lines = lines < lines_ ? lines : lines_;
        lines_ -= lines;
        for (; lines > 0; --lines) {
            __builtin_prefetch(row_ + in_row_, 0, 2);
            in_row_ += kLine;
            if (in_row_ >= row_bytes_) next_row();
        }
    }
    __attribute__((always_inline)) void fetch_rest() { fetch(lines_); }

  private:
    static constexpr int64_t kLine = 64;

    void next_row() {
        in_row_ = 0;
        row_ += head_stride_;
        if (++head_ < heads_) return;
        head_ = 0;
        token_ += token_stride_;
        row_ = token_;
    }

    const uint8_t* token_ = nullptr;
    const uint8_t* row_ = nullptr;
    int64_t token_stride_ = 0, head_stride_ = 0;
    int heads_ = 0, head_ = 0;
    int64_t in_row_ = 0, row_bytes_ = 0, lines_ = 0;
};

// Rows of the caller, `stride` elements apart, the first from element `at` on.
struct InputRows {
    const void* data;
    int32_t dtype;
    int64_t at, stride;
};

struct RowKernels {
    // `count` stored rows in fp32. False: a value is not finite, saturates or is huge, and the plain path must
    // take these rows. Fetches lines_a_row lines ahead for each row.
    bool (*take)(const InputRows& input, int count, int dim, int32_t transform, int32_t window_dtype,
                 float* x, RowsAhead& ahead, int lines_a_row);
    // From memory in the window dtype. False: a value is not finite (x is right all the same).
    bool (*load)(const uint8_t* from, int32_t window_dtype, int dim, float* x);
    // Values that the window dtype holds exactly, to memory in it.
    void (*store)(const float* x, int32_t window_dtype, int dim, uint8_t* to);
};

struct PackKernels {
    // As pack_rows_plain, for finite rows and fewer than 16 bits. Fetches lines ahead.
    void (*nearest)(const TensorStore& store, const float* rows, int first, int count, uint8_t* part,
                    RowsAhead& ahead);
    // Channel axis; NULL where the instruction set has no fused multiply-add.
    void (*query_aware)(const TensorStore& store, const Feedback& feedback, const float* rows, int first,
                        int count, uint8_t* part, RowsAhead& ahead);
};

// NULL where the processor has no vectors that Highway serves: the plain path does everything.
const RowKernels* row_kernels();
const PackKernels* pack_kernels();

// Rows of whole vectors.
inline bool suits_write_kernels(int dim) { return dim % 16 == 0; }

}  // namespace kivi::cpu
