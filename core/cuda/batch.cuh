// Rows of a batch inside a kernel.
#pragma once
#include "cuda/launch.h"

namespace kivi::cuda {

// A count out of range is none, so that it moves no row behind it [BATCH-3].
__device__ __forceinline__ int32_t count_at(const BatchArrays& batch, int index) {
    const int32_t count = batch.counts != nullptr ? batch.counts[index] : batch.max_count;
    return count >= 0 && count <= batch.max_count ? count : 0;
}

// Row `index` of a device batch; a skipped one has count 0, and anything else.
__device__ __forceinline__ RowArg row_at(const BatchArrays& batch, int index) {
    RowArg row;
    row.index = index;
    row.sequence = batch.sequences != nullptr ? batch.sequences[index] : index;
    row.count = count_at(batch, index);
    if (batch.offsets != nullptr) {
        row.offset = batch.offsets[index];
    } else if (batch.counts == nullptr) {
        row.offset = static_cast<int64_t>(index) * batch.max_count;
    } else {
        row.offset = 0;
#pragma unroll 1
        for (int i = 0; i < index; ++i) row.offset += count_at(batch, i);
    }
    const bool there = row.sequence >= 0 && row.sequence < batch.max_sequences && row.offset >= 0 &&
                       row.offset <= batch.tokens - row.count;
    if (!there) row.count = 0;
    return row;
}

// Row r of this launch; a skipped one has count 0.
__device__ __forceinline__ RowArg row_of(const BatchArgs& batch, int r) {
    if (!batch.on_device) return batch.rows[r];
    RowArg row = row_at(batch.arrays, batch.first_row + r);
    if (row.count > batch.max_count || row.count < batch.least_count) row.count = 0;
    return row;
}

// Whether an earlier row with a count is of the same sequence as row `index` of a device batch.
__device__ __forceinline__ bool stands_earlier(const BatchArrays& batch, int index, int32_t sequence) {
    bool earlier = false;
#pragma unroll 1
    for (int i = 0; batch.sequences != nullptr && i < index; ++i) {
        earlier = earlier || (batch.sequences[i] == sequence && count_at(batch, i) > 0);
    }
    return earlier;
}
// Row r of a call that moves sequences on: of a device batch's rows for one sequence all but the first are skipped.
__device__ __forceinline__ RowArg moving_row_of(const BatchArgs& batch, int r) {
    RowArg row = row_of(batch, r);
    if (batch.on_device && stands_earlier(batch.arrays, row.index, row.sequence)) row.count = 0;
    return row;
}

}  // namespace kivi::cuda
