// Ranges of ids, counts and offsets.
#include "api/batch_check.h"

#include <algorithm>
#include <limits>

#include "api/struct_size.h"

namespace kivi {
namespace {

template <class T>
void check_array(const char* name, const T* array) {
    if (array != nullptr) check_pointer(name, array, alignof(T));
}

// Device arrays are not read: rows and max_count stand for them.
Batch bounds_only(const kivi_batch& batch, Batch checked, int32_t max_sequences, BatchUse use) {
    if (use == BatchUse::counts)
        refuse_argument("batch.device is 2 (CUDA); this call takes host arrays only");
    if (batch.rows > max_sequences) {
        refuse_argument("batch.rows is ", batch.rows,
                        "; with device arrays it must be at most max_sequences, ", max_sequences);
    }
    if (use == BatchUse::tokens && batch.max_count == 0 && batch.rows > 0) {
        refuse_argument("batch.max_count is 0; with device arrays it must bound the counts");
    }
    checked.on_device = true;
    checked.active = batch.rows;
    checked.max_count = use == BatchUse::tokens ? batch.max_count : 1;
    return checked;
}

}  // namespace

Batch check_batch(const kivi_batch* from, const Model& model, BatchUse use) {
    const int32_t max_sequences = model.max_sequences;
    const kivi_batch batch = take_struct("batch", from);
    if (batch.reserved0 != 0) refuse_argument("batch.reserved0 must be zero");
    const bool on_device = batch.device == KIVI_CUDA;
    if (on_device && model.device != KIVI_CUDA) {
        refuse_argument(
            "batch.device is 2 (CUDA), but the cache is on the CPU: its arrays must be host memory");
    }
    if (batch.device != 0 && batch.device != KIVI_CPU && batch.device != KIVI_CUDA) {
        refuse_argument("batch.device is ", batch.device, "; supported are 0 and 1 (host memory)",
                        model.device == KIVI_CUDA ? " and 2 (CUDA)" : "");
    }
    if (batch.rows < 0) refuse_argument("batch.rows is ", batch.rows, "; it must not be negative");
    if (batch.max_count < 0)
        refuse_argument("batch.max_count is ", batch.max_count, "; it must not be negative");
    check_array("batch.sequences", batch.sequences);
    check_array("batch.counts", batch.counts);
    check_array("batch.offsets", batch.offsets);

    Batch checked;
    checked.rows = batch.rows;
    if (use != BatchUse::counts) checked.sequences = batch.sequences;
    if (use == BatchUse::sequences) {
        checked.uniform_count = 1;
    } else {
        checked.counts = batch.counts;
        checked.uniform_count = batch.counts ? 0 : batch.max_count;
        checked.offsets = batch.offsets;
    }

    if (on_device) return bounds_only(batch, checked, max_sequences, use);
    const int32_t most = batch.max_count > 0 ? batch.max_count : std::numeric_limits<int32_t>::max();
    for (int32_t row = 0; row < checked.rows; row++) {
        const int32_t count = checked.count(row);
        if (count < 0 || count > most) {
            refuse_argument("batch.counts[", row, "] is ", count, "; it must be from 0 to ", most,
                            batch.max_count > 0 ? " (max_count)" : "");
        }
        if (use == BatchUse::counts) continue;
        const int32_t sequence = checked.sequence(row);
        if (sequence < -1 || sequence >= max_sequences) {
            refuse_argument("batch.sequences[", row, "] is ", sequence,
                            "; it must be -1 or below max_sequences, ", max_sequences);
        }
    }
    checked.for_each([&](int32_t row, int32_t, int32_t count, int64_t offset) {
        if (offset < 0 || offset > std::numeric_limits<int64_t>::max() - count) {
            refuse_argument("batch.offsets[", row, "] is ", offset, "; it must be a token of the tensors");
        }
        checked.active++;
        checked.max_count = std::max(checked.max_count, count);
        checked.tokens_end = std::max(checked.tokens_end, offset + count);
    });
    return checked;
}

}  // namespace kivi
