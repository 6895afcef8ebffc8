// kivi_batch -> Batch: counts, ids and offsets in range. That no sequence stands twice is checked by the
// cache, which has memory for it.
#pragma once
#include "cache/batch.h"
#include "format/model.h"
#include "kivi/kivi.h"

namespace kivi {

// What of the batch the call looks at.
enum class BatchUse {
    tokens,     // sequences and counts
    sequences,  // sequences only: every row that is not -1 has work
    counts      // counts only: ids are ignored
};

Batch check_batch(const kivi_batch* batch, const Model& model, BatchUse use = BatchUse::tokens);

}  // namespace kivi
