// The kernel of prefill_pages.cuh, as prefill.cu launches it. Compiled for compute capability 9.0 alone.
#pragma once
#include "cuda/launch.h"

namespace kivi::cuda::prompt {

struct Args;
constexpr int kPageRows = 128;  // query rows of a block

// Whether there is an instance for such a layer on a GPU of this compute capability, like 90.
bool serves_pages(const TensorStore& key, int32_t capability);
void prepare_pages(const TensorStore& key);
// With args.tiles * args.page_parts blocks for each batch row and KV head.
void attend_pages(const Args& args, Stream stream);

}  // namespace kivi::cuda::prompt
