// The batch of a work call: which sequences, how many tokens each.
#pragma once
#include <vector>

#include "array.h"

namespace kivi_python {

class Batch {
  public:
    // `lead` is the tensor that brings the tokens, rank 4 or 3. None for sequences: row r is sequence r.
    // None for counts: every row has all tokens of `lead`, which for rank 3 means a single row.
    Batch(py::handle sequences, py::handle counts, py::handle offsets, const kivi_tensor& lead,
          const char* lead_name);
    // Sequences without tokens, for flush_residual. None: all of the cache's.
    Batch(py::handle sequences, int32_t max_sequences);

    const kivi_batch* get() const { return &batch_; }
    int32_t rows() const { return batch_.rows; }
    int32_t max_count() const;

  private:
    std::vector<int32_t> sequences_;
    std::vector<int32_t> counts_;
    std::vector<int64_t> offsets_;
    kivi_batch batch_ = {};
};

}  // namespace kivi_python
