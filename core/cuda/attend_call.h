// Which kernel attends.
#pragma once
#include "cuda/launch.h"

namespace kivi::cuda {

// One attend of the rows of a launch. `fragment_pages`: the layer's pages stand in the order that decode.h and prefill.h
// read.
void attend_call(const AttendArgs& args, bool fragment_pages, int32_t multiprocessors, Stream stream);
size_t attend_call_workspace(const Layer& layer, bool fragment_pages, int32_t rows, int32_t max_count,
                             int32_t multiprocessors);

}  // namespace kivi::cuda
