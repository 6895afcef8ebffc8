// A checked batch: which sequences a call is about and how many tokens each brings.
#pragma once
#include <cstdint>
#include <limits>

namespace kivi {

struct Batch {
    int32_t rows = 0;
    const int32_t* sequences = nullptr;  // NULL: row r is sequence r
    const int32_t* counts = nullptr;     // NULL: uniform_count for every row
    int32_t uniform_count = 0;
    const int64_t* offsets = nullptr;  // NULL: running sum of counts

    bool on_device = false;  // the arrays are device memory: nothing here reads them
    int64_t tokens = std::numeric_limits<int64_t>::max();  // then: of the call's shortest rank-3 tensor

    // Found by the check, over rows that are not skipped.
    int32_t active = 0;      // rows with work
    int32_t max_count = 0;   // longest
    int64_t tokens_end = 0;  // rank-3 tensors: one past the last token used

    int32_t sequence(int32_t row) const { return sequences ? sequences[row] : row; }
    int32_t count(int32_t row) const { return counts ? counts[row] : uniform_count; }

    // Calls visit(row, sequence, count, offset) for every row with work.
    template <class Visit>
    void for_each(Visit&& visit) const {
        int64_t running = 0;
        for (int32_t row = 0; row < rows; row++) {
            const int32_t tokens = count(row);
            const int64_t offset = offsets ? offsets[row] : running;
            running += tokens;
            if (sequence(row) >= 0 && tokens > 0) visit(row, sequence(row), tokens, offset);
        }
    }
};

}  // namespace kivi
