// What the decode kernel gets from the host.
#pragma once
#include <cstdint>

#include "cuda/launch.h"

namespace kivi::cuda::fast {

// Elements from one batch row, query token and query head to the next.
struct Strides {
    int64_t row, token, head;
    bool ragged;  // rows are found by their token offset
};

// Counts the blocks that have left their part of a segment; see decode_merge.cuh.
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

}  // namespace kivi::cuda::fast
