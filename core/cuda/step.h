// Appends of a few tokens: what write.cu calls for decode steps.
#pragma once
#include "cuda/launch.h"

namespace kivi::cuda {

constexpr int kStepTokens = 16;  // of a row, at most

// Whether there is a kernel for a layer that decode.h serves: min-max ranges.
bool step_serves(const TensorStore& key, const TensorStore& value);
void prepare_step(const Layer& layer);  // limits of shared memory, on the current device

// Whether it takes a call: at most kStepTokens tokens a row, nearest rounding, rows of the windows' 16-bit type on
// multiples of 16 bytes.
bool step_takes(const WriteArgs& args);
void step(const WriteArgs& args, Stream stream);

}  // namespace kivi::cuda
