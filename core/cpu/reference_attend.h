// Attention in double precision on the dequantised cache: the oracle of the tests, and the path of caches
// made with KIVI_CACHE_REFERENCE.
#pragma once
#include "backend/backend.h"
#include "cpu/storage.h"
#include "cpu/thread_pool.h"

namespace kivi::cpu {

// Needs no workspace.
void reference_attend(const LayerStore& layer, const AttendCall& call, ThreadPool& pool);

}  // namespace kivi::cpu
