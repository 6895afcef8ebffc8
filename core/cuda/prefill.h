// Attention over the fragment order of pages for what decode.h does not take: more query rows than its instances have
// (prompts in pieces, longer drafts), rows of unequal counts, windows that end among the call's own keys. Head dims 64, 128
// and 256. What the host calls.
#pragma once
#include "cuda/launch.h"

namespace kivi::cuda {

// Whether the kernel reads what a call on such a layer brings: q, and keys and values of the call, in the window dtype and
// aligned.
bool prefill_reads(const AttendArgs& args);
// Whether it takes the call: positions times rows are small enough.
bool prefill_takes(const AttendArgs& args);

// Up to so many tokens a row, calls take the instance for few rows.
int32_t prefill_few_count(const Layer& layer);

void prepare_prefill(const TensorStore& key, const Gpu& gpu);
size_t prefill_workspace(const Layer& layer, int32_t rows, int32_t max_count, const Gpu& gpu);
void prefill(const AttendArgs& args, const Gpu& gpu, Stream stream);

}  // namespace kivi::cuda
