// Attention of few query rows over pages in the fragment order or of 16 bits: what the host calls.
#pragma once
#include "cuda/launch.h"

namespace kivi::cuda {

// Whether the layer has a kernel on GPUs of this compute capability (10 * major + minor). Its pages then stand in
// the fragment order, but for those of 16 bits. `ratio`: query heads of a KV head.
bool decode_serves(const TensorStore& key, const TensorStore& value, int32_t ratio, int32_t capability);
// The same in words: "" or what is missing.
const char* why_not_decode(const TensorStore& key, const TensorStore& value, int32_t ratio, int32_t capability);

// Whether the kernel reads what a call on such a layer brings: q, out, and keys and values of the call in the window
// dtype and aligned.
bool decode_reads(const AttendArgs& args);
// Whether it takes the call: its rows have the same number of tokens, or none, and few enough.
bool decode_takes(const AttendArgs& args);
// Whether it also appends the call's keys and values (decode_new_rows.cuh): one token a row, rolling schedule with a
// recent window, nearest rounding. A sequence must stand in one launch of a call only: the host sees to it.
bool decode_keeps(const AttendArgs& args);
// Tokens that a row can have at most.
int32_t decode_max_count(const Layer& layer);

// How many clusters of a layer's kernels can run at the same time: Layer::clusters.
int32_t prepare_decode(const TensorStore& key, const TensorStore& value);
// For at most `rows` rows of at most max_count tokens.
size_t decode_workspace(const Layer& layer, int32_t rows, int32_t max_count, int32_t multiprocessors);
// The kernel lets the next one start when all before it have ended: a gate (launch_order.h).
void decode(const AttendArgs& args, int32_t multiprocessors, Stream stream);

}  // namespace kivi::cuda
