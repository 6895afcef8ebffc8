// Packing of prompts on layers whose pages stand in the fragment order: what write.cu calls.
#pragma once
#include "cuda/launch.h"

namespace kivi::cuda {

void prepare_pack(const Layer& layer);  // limits of shared memory, on the current device

// Whether there is a packer for a layer whose pages stand in the fragment order: min-max ranges.
bool pack_serves(const TensorStore& key, const TensorStore& value);
// Whether it takes an append of many tokens: rows of the windows' 16-bit type on multiples of 16 bytes, strides below
// 2^30.
bool pack_takes(const WriteArgs& args);
void pack(const WriteArgs& args, int32_t multiprocessors, Stream stream);

}  // namespace kivi::cuda
