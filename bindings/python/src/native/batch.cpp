// Batch, see batch.h. The C API takes bare pointers, so the lengths of the arrays are checked here.
#include "batch.h"

#include <algorithm>

namespace kivi_python {
namespace {

int32_t int32_size(const char* name, int64_t size) {
    if (size > INT32_MAX) {
        raise(KIVI_ERROR_INVALID_ARGUMENT,
              std::string(name) + ": " + std::to_string(size) + " does not fit 32 bits");
    }
    return static_cast<int32_t>(size);
}

template <class T>
const T* fill(std::vector<T>& storage, const char* name, py::handle values, int32_t& rows) {
    if (values.is_none()) {
        return nullptr;
    }
    storage = integers<T>(name, values);
    const int32_t size = int32_size(name, static_cast<int64_t>(storage.size()));
    if (rows >= 0 && size != rows) {
        raise(KIVI_ERROR_INVALID_ARGUMENT, std::string(name) + ": " + std::to_string(size) +
                                               " entries for a batch of " + std::to_string(rows) + " rows");
    }
    rows = size;
    // An empty vector may have no memory, but the array was given: NULL would mean "the default".
    static const T none = 0;
    return storage.empty() ? &none : storage.data();
}

}  // namespace

Batch::Batch(py::handle sequences, py::handle counts, py::handle offsets, const kivi_tensor& lead,
             const char* lead_name) {
    if (lead.rank != 3 && lead.rank != 4) {
        raise(KIVI_ERROR_INVALID_ARGUMENT, std::string(lead_name) + ": " + std::to_string(lead.rank) +
                                               " dimensions, must be [rows, tokens, heads, dim] or "
                                               "[tokens, heads, dim]");
    }
    const bool by_rows = lead.rank == 4;
    int32_t rows = by_rows ? int32_size(lead_name, lead.shape[0]) : -1;
    batch_.struct_size = sizeof batch_;
    batch_.sequences = fill(sequences_, "sequences", sequences, rows);
    batch_.counts = fill(counts_, "counts", counts, rows);
    batch_.offsets = fill(offsets_, "offsets", offsets, rows);
    batch_.rows = rows < 0 ? 1 : rows;
    if (batch_.counts == nullptr) {
        if (!by_rows && batch_.rows != 1) {
            raise(KIVI_ERROR_INVALID_ARGUMENT, "counts: needed for " + std::to_string(batch_.rows) +
                                                   " rows in a tensor [tokens, heads, dim]");
        }
        batch_.max_count = int32_size(lead_name, lead.shape[by_rows ? 1 : 0]);
    }
}

Batch::Batch(py::handle sequences, int32_t max_sequences) {
    int32_t rows = -1;
    batch_.struct_size = sizeof batch_;
    batch_.sequences = fill(sequences_, "sequences", sequences, rows);
    batch_.rows = rows < 0 ? max_sequences : rows;
}

int32_t Batch::max_count() const {
    if (batch_.counts == nullptr) {
        return batch_.max_count;
    }
    return counts_.empty() ? 0 : std::max(0, *std::max_element(counts_.begin(), counts_.end()));
}

}  // namespace kivi_python
