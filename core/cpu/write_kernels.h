// The SIMD half of the write side: rows on their way in, and packers. One table for each instruction set;
// every function gives the bytes of its plain counterpart (rows.h, pack.h) or declines.
#pragma once
#include <cstdint>

#include "cpu/storage.h"
#include "format/feedback.h"

namespace kivi::cpu {

// Rows in the order [token][head]: the first from element `at` on. heads 0: none.
struct Stripe {
    int64_t at = 0, token_stride = 0, head_stride = 0;
    int heads = 0;
};

// Rows of the caller, `stride` elements apart, the first from element `at` on.
struct InputRows {
    const void* data;
    int32_t dtype;
    int64_t at, stride;
    Stripe ahead{};  // beside each row that is taken, one of these is fetched into the second-level cache
};

struct RowKernels {
    // `count` stored rows in fp32. False: a value is not finite, saturates or is huge, and the plain path must
    // take these rows.
    bool (*take)(const InputRows& input, int count, int dim, int32_t transform, int32_t window_dtype,
                 float* x);
    // From memory in the window dtype. False: a value is not finite (x is right all the same).
    bool (*load)(const uint8_t* from, int32_t window_dtype, int dim, float* x);
    // Values that the window dtype holds exactly, to memory in it.
    void (*store)(const float* x, int32_t window_dtype, int dim, uint8_t* to);
};

struct PackKernels {
    // As pack_rows_plain, for finite rows and fewer than 16 bits.
    void (*nearest)(const TensorStore& store, const float* rows, int first, int count, uint8_t* part);
    // Channel axis; NULL where the instruction set has no fused multiply-add.
    void (*query_aware)(const TensorStore& store, const Feedback& feedback, const float* rows, int first,
                        int count, uint8_t* part);
};

// NULL where the processor has no vectors that Highway serves: the plain path does everything.
const RowKernels* row_kernels();
const PackKernels* pack_kernels();

// Rows of whole vectors.
inline bool suits_write_kernels(int dim) { return dim % 16 == 0; }

}  // namespace kivi::cpu
