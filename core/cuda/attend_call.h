// Which kernel attends.
#pragma once
#include "cuda/launch.h"

namespace kivi::cuda {

// One attend of the rows of a launch. `decodes`: decode.h has a kernel for the layer. Whether one was launched.
bool attend_call(const AttendArgs& args, bool decodes, const Gpu& gpu, Stream stream);
size_t attend_call_workspace(const Layer& layer, bool decodes, int32_t rows, int32_t max_count, const Gpu& gpu);

}  // namespace kivi::cuda
