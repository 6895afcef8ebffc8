// Rows of a batch inside a kernel.
#pragma once
#include "cuda/launch.h"

namespace kivi::cuda {

// Row r of this launch; a skipped one has count 0.
__device__ inline RowArg row_of(const BatchArgs& batch, int r) {
    if (!batch.on_device) return batch.rows[r];
    const int index = batch.first_row + r;
    RowArg row;
    row.index = index;
    row.sequence = batch.sequences != nullptr ? batch.sequences[index] : index;
    row.count = batch.counts != nullptr ? batch.counts[index] : batch.max_count;
    row.offset = 0;
    if (batch.offsets != nullptr) {
        row.offset = batch.offsets[index];
    } else {
        for (int i = 0; i < index; ++i) row.offset += batch.counts != nullptr ? batch.counts[i] : batch.max_count;
    }
    if (row.sequence < 0 || row.count > batch.max_count || row.count < batch.least_count) row.count = 0;
    return row;
}

}  // namespace kivi::cuda
