// What the decode kernel gets from the host.
#pragma once
#include <cstdint>

#include "cuda/launch.h"

namespace kivi::cuda::fast {

constexpr float kLog2E = 1.4426950408889634f;  // exponentials are powers of two

// Elements from one batch row, query token and query head to the next.
struct Strides {
    int64_t row, token, head;
    bool ragged;  // rows are found by their token offset
};

// Division of small numbers by one that the host knows.
struct Divisor {
    uint32_t by, reciprocal;
    KIVI_HOST_DEVICE Divisor(uint32_t by = 1) : by(by), reciprocal(65536 / by + 1) {}
    KIVI_HOST_DEVICE uint32_t quotient(uint32_t x) const { return x * reciprocal >> 16; }  // x * by <= 2^16
};

// Of a cluster, where a launch has clusters.
constexpr int kClusterBlocks = 8;

// A row of a host batch; read at once, since lanes get their own parameters one after the other.
struct alignas(8) RowPlace {
    int32_t sequence;  // -1: a row to be skipped
    int32_t index;     // see BatchRow
};

struct DecodeCall {
    const Span* spans;     // [sequence]
    const int32_t* table;  // [sequence][table_stride]
    BatchArrays arrays;    // of device batches
    int32_t batch_rows, first_row, kv_heads, tokens;  // tokens: of each row
    Divisor group, query_rows;                        // query heads of a KV head; group * tokens
    int32_t segment_blocks;                           // most that segments can have each, if that is nearly all; or 0
    int32_t sink, tail_rows;                          // rows of the windows
    int32_t table_stride, page_bytes, value_offset;
    int32_t window_left;  // as in kivi_attend_params, if the cache's last token were the last query's; -1: all
    int32_t unseen;       // of the cache's last tokens, which query token 0 does not see; token 1 one less
    float scale_log2;
    float cap, cap_rate;  // soft cap * log2(e), and 2 / soft cap; 0: none
    bool on_device, ragged, rotated_keys, rotated_values;
    bool invariant;  // the line is cut into runs
    bool clustered;  // the launch has a cluster for each segment
    bool own;        // keys and values come with the call, as terms of their own (decode_output.cuh),
    bool in_tail;    // or, one token a row, as the tail's last row (decode_new_rows.cuh),
    bool keeps;      // and are appended by it
    bool ahead;      // it begins with the cache before the kernels in front have ended
    const uint8_t* pages;
    const uint8_t *sink_keys, *sink_values, *tail_keys, *tail_values;
    const void* q;
    Strides q_strides;
    // Partials of blocks, what warps leave on their way, and how many have arrived; cut from the caller's workspace.
    unsigned long long* tickets;  // [block][row]; of runs [run][2][row]
    float* partials;              // [block][2]; of runs [run]
    float* spills;                // [block][warp][2]
    void* out;
    float* lse;                  // or NULL
    const float* learned_sinks;  // or NULL
    Strides out_strides, lse_strides;
    // Keys and values of the call, of the query tokens, as the caller has them, if there are any.
    View k, v;
};
struct DecodeArgs : DecodeCall {
    Layer layer;  // to which they are appended
    // Of host batches; offsets where tensors are ragged.
    RowPlace rows[kRowsAtOnce];
    int32_t offset[kRowsAtOnce];
};

}  // namespace kivi::cuda::fast
