// Packing of prompts on layers whose pages stand in the fragment order: what write.cu calls.
#pragma once
#include "cuda/launch.h"

namespace kivi::cuda {

void prepare_pack(const Layer& layer);  // limits of shared memory, on the current device

// Whether an append of many tokens can be taken: aligned rows of the windows' 16-bit type, min-max ranges.
bool pack_takes(const WriteArgs& args);
void pack(const WriteArgs& args, int32_t multiprocessors, Stream stream);

}  // namespace kivi::cuda
