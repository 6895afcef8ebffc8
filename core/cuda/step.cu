// Decode steps: a few new tokens a row on layers with pages in the fragment order or of 16 bits. One launch, let in
// while the kernel before it ends; it needs little more than the time that its loads take. It does not let the next one
// in before its own end: blocks of an attend that find these in their place begin after all others, and all others wait
// for them.
#include "cuda/step.h"

#include <cstddef>

#include "cuda/dependent_launch.cuh"
#include "cuda/device.h"
#include "cuda/step_rows.cuh"

namespace kivi::cuda {
namespace {

constexpr int kStepWarps = 4, kStepThreads = kStepWarps * kWarp;

// Grid: x shares heads' keys and values, y rows of the batch.
template <class C>
__global__ void __launch_bounds__(kStepThreads, 8) step_kernel(const __grid_constant__ WriteArgs args) {
#if KIVI_FRAGMENT_KERNELS
    touch_parameters<offsetof(WriteArgs, batch) + offsetof(BatchArgs, rows)>(args);
    const int items = 2 * args.layer.key.heads;
    HeadRows<C> rows{args.layer, static_cast<int>(blockIdx.x * kStepWarps + threadIdx.x / kWarp), 0};
    RowArg row{};
    const uint8_t* input = nullptr;
    if (!args.batch.on_device) row = args.batch.rows[blockIdx.y], input = new_row_of(args.k, args.v, row, rows.item);
    wait_for_earlier_kernels();
    if (args.batch.on_device) {
        row = moving_row_of(args.batch, blockIdx.y), input = new_row_of(args.k, args.v, row, rows.item);
    }
    if (row.count == 0) return;
    rows.sequence = row.sequence;
    const auto* const at = reinterpret_cast<const long long*>(args.layer.spans + row.sequence);
    const Span state{__ldcg(at), __ldcg(at + 1), __ldcg(at + 2)};
    const int32_t bound = __ldcg(args.layer.bound + row.sequence);
    typename HeadRows<C>::Raw raw{};
    if (rows.item < items) HeadRows<C>::load(input, raw);
    const Step step = plan(args, row, state, bound);
    if (!step.possible) {
        if (threadIdx.x == 0) args.layer.full[row.sequence] = 1;
        return;
    }
    __syncthreads();  // all have read the state
    if (threadIdx.x == 0) move_on(args.layer, row.sequence, step.after, gridDim.x);
    if (rows.item >= items) return;
    // Positions are below 2^31.
    const auto tail = [&](const Span& span) {
        return static_cast<int>(tail_begin(args.layer.key.windows, span, rows.choose(Part::key, Part::value)));
    };
    const int length = static_cast<int>(step.before.length), end = tail(step.after);
    int from = tail(step.before);
    if (row.count == 1 && from == end) return rows.keep(raw, length);  // as in most steps
#pragma unroll 1
    for (int token = 0; token < row.count; ++token) {
        const int to = token + 1 == row.count ? end : rows.tail_after(length + token + 1, from);
        if (token > 0) HeadRows<C>::load(new_row_of(args.k, args.v, row, rows.item, token), raw);
        rows.add(raw, length + token, from, to);
        if constexpr (!C::kPlain) {
            __shared__ StepWords<C> words[kStepWarps];
            if (from < to && !rows.by_rows()) rows.template pack_groups<4, 2>(words[threadIdx.x / kWarp], from, to);
        }
        from = to;
    }
#endif
}

}  // namespace

bool step_serves(const TensorStore& key, const TensorStore& value) {
    return key.spec().range == KIVI_RANGE_MINMAX && value.spec().range == KIVI_RANGE_MINMAX &&
           with_fast_layer(key, value, [](auto) {});
}

void prepare_step(const Layer& layer) {
    with_fast_layer(layer.key, layer.value, [](auto config) {
        prepare_kernel(step_kernel<decltype(config)>, 0, cudaSharedmemCarveoutMaxShared);
    });
}

bool step_takes(const WriteArgs& args) {
    const auto reads = [&](const View& view) { return view.dtype == args.layer.key.window_dtype && aligned(view); };
    return args.layer.steps && args.mode == WriteMode::append && args.batch.max_count <= kStepTokens &&
           args.layer.feedback.order == nullptr && reads(args.k) && reads(args.v) &&
           args.layer.max_tokens < int64_t{1} << 31;
}

void step(const WriteArgs& args, Stream stream) {
    with_fast_layer(args.layer.key, args.layer.value, [&](auto config) {
        const unsigned items = 2 * args.layer.key.heads;
        const dim3 grid((items + kStepWarps - 1) / kStepWarps, static_cast<unsigned>(args.batch.size));
        launch_dependent(step_kernel<decltype(config)>, Launch{grid, kStepThreads, 0, stream}, args);
    });
}

}  // namespace kivi::cuda
