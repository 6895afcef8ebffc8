// Attention on the CPU, fast path: sink rows, pages and tail rows in one softmax.
#pragma once
#include <cstddef>

#include "backend/backend.h"
#include "cpu/storage.h"
#include "cpu/thread_pool.h"

namespace kivi::cpu {

// Bytes of workspace for any call of at most `rows` rows with at most `max_count` queries each, on sequences of
// at most `max_tokens` tokens, by at most `threads` threads. Grows with every argument.
size_t attend_workspace(const LayerStore& layer, int64_t max_tokens, int threads, int32_t rows, int32_t max_count);

void fast_attend(const LayerStore& layer, const AttendCall& call, ThreadPool& pool);

// Which kernels serve the layer, and if not the fast ones, why.
PathInfo attend_path(const kivi_layer& layer);

}  // namespace kivi::cpu
