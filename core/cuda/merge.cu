// Combining partial results of attention over disjoint keys: one warp a query head, weights in double.
#include <cuda_runtime.h>

#include "cuda/warp_row.cuh"

namespace kivi::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;

__device__ int64_t element(const View& view, int64_t row, int64_t token, int64_t head) {
    return row * view.row_stride + token * view.token_stride + head * view.head_stride;
}

// The arithmetic of cpu/merge.cpp. All values of a channel are read before its result is written, so out may be
// one of the parts.
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeArgs args) {
    const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    if (item >= args.rows * args.tokens * args.heads) return;
    const int64_t head = item % args.heads, token = item / args.heads % args.tokens;
    const int64_t row = item / args.heads / args.tokens;
    const double none = -__longlong_as_double(0x7FF0000000000000ll);

    double largest = none;
    int live = 0, last_live = 0;
    for (int i = 0; i < args.parts; ++i) {
        const double lse = static_cast<const float*>(args.lses[i].data)[element(args.lses[i], row, token, head)];
        if (lse == none) continue;
        ++live;
        last_live = i;
        // A NaN stays the largest: it marks a head that saw a non-finite key, and so does the result.
        if (lse != lse || lse > largest) largest = lse;
    }
    const bool has_sink = args.learned_sinks != nullptr;
    const double sink = has_sink ? args.learned_sinks[head] : none;
    const double top = sink > largest ? sink : largest;  // a NaN stays
    double total = has_sink ? exp(sink - top) : 0, parts_sum = 0;
    for (int i = 0; i < args.parts; ++i) {
        const double lse = static_cast<const float*>(args.lses[i].data)[element(args.lses[i], row, token, head)];
        if (lse == none) continue;
        parts_sum += exp(lse - largest);
        total += exp(lse - top);
    }

    const int64_t to = element(args.out, row, token, head);
    for (int64_t channel = lane(); channel < args.dim; channel += kWarp) {
        const auto value = [&](int i) {
            const View& out = args.outs[i];
            return load_element(out.data, out.dtype, element(out, row, token, head) + channel);
        };
        float merged = 0;
        if (live == 1 && !has_sink) {
            merged = value(last_live);
        } else {
            double sum = 0;
            for (int i = 0; i < args.parts; ++i) {
                const double lse =
                    static_cast<const float*>(args.lses[i].data)[element(args.lses[i], row, token, head)];
                const double weight = lse == none ? 0 : exp(lse - top);
                if (weight != 0) sum += weight / total * value(i);
            }
            merged = static_cast<float>(sum);
        }
        store_element(args.out.data, args.out.dtype, to + channel, merged);
    }
    __syncwarp();  // lse may be one of lses
    if (args.lse && lane() == 0) {
        const double lse = live == 0 ? none : largest + log(parts_sum);
        static_cast<float*>(args.lse.data)[element(args.lse, row, token, head)] = static_cast<float>(lse);
    }
}

}  // namespace

void merge(const MergeArgs& args, Stream stream) {
    const int64_t items = args.rows * args.tokens * args.heads;
    merge_kernel<<<static_cast<unsigned>((items + kWarps - 1) / kWarps), kThreads, 0, stream>>>(args);
}

}  // namespace kivi::cuda
