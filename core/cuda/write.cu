// Append and flush: kernels for any spec. What a block does is in write_head.cuh; where there are fast kernels, decode
// steps are step.cu's, and prompts pack.cu's.
//
// Few tokens take one launch. Many take two: packing is spread over page units, and rows are stored when all is packed.
// The last block of a row to have read the sequence's state moves it on; until then every block sees the state before
// and comes to the same decision.
//
// Compiled without contraction: every code is that of core/format.
#include "cuda/device.h"
#include "cuda/pack.h"
#include "cuda/step.h"
#include "cuda/write_head.cuh"

namespace kivi::cuda {
namespace {

enum class Stage { all, pack, store };

// Grid: x splits units (pack) or rows (store), y head and tensor, z rows of the batch.
template <int STRIPES, Stage STAGE>
__global__ void __launch_bounds__(kWriteThreads, 1) write_kernel(const __grid_constant__ WriteArgs args) {
    const RowArg row = moving_row_of(args.batch, blockIdx.z);
    if (row.count == 0) return;
    const Step step = plan(args, row);
    if (!step.possible) {
        if (threadIdx.x == 0) args.layer.full[row.sequence] = 1;
        return;
    }
    // Nobody reads the state after this in the launch.
    if (STAGE != Stage::pack) {
        __syncthreads();
        if (threadIdx.x == kWriteThreads - 1) {
            move_on(args.layer, row.sequence, step.after, gridDim.x * gridDim.y);
        }
    }
    const int heads = args.layer.key.heads;
    const int head = blockIdx.y % heads;
    const bool key = blockIdx.y < heads;
    const TensorStore& store = key ? args.layer.key : args.layer.value;
    with_order(store.order, [&](auto order) {
        HeadWriter<STRIPES, decltype(order)> writer(args, row, step, store, key ? args.k : args.v, head);
        if (STAGE != Stage::store) {
            writer.pack(tail_begin(store.windows, step.before, store.part),
                        tail_begin(store.windows, step.after, store.part), blockIdx.x, gridDim.x);
        }
        if (STAGE == Stage::all) __syncthreads();
        if (STAGE != Stage::pack) writer.store(blockIdx.x * kWriteWarps + threadIdx.x / kWarp, gridDim.x * kWriteWarps);
        writer.count_saturated();
    });
}

// From so many new tokens a row on, packing is spread over units.
constexpr int kPromptTokens = kStepTokens + 1;

template <int STRIPES>
void prepare_stripes() {
    const size_t bytes = write_shared_bytes(STRIPES * kStripe);
    prepare_kernel(write_kernel<STRIPES, Stage::all>, bytes);
    prepare_kernel(write_kernel<STRIPES, Stage::pack>, bytes);
    prepare_kernel(write_kernel<STRIPES, Stage::store>, 0);
}

template <int STRIPES>
void write_stripes(const WriteArgs& args, Stream stream) {
    const TensorStore& key = args.layer.key;
    const TensorStore& value = args.layer.value;
    const unsigned y = 2 * key.heads, z = args.batch.size;
    const size_t bytes = write_shared_bytes(max(key.dim, value.dim));
    if (args.mode == WriteMode::flush || args.batch.max_count < kPromptTokens) {
        write_kernel<STRIPES, Stage::all><<<dim3(1, y, z), kWriteThreads, bytes, stream>>>(args);
        return;
    }
    const int64_t most_packed = args.batch.max_count + max(key.tail_rows, value.tail_rows);
    const unsigned units = static_cast<unsigned>(most_packed / kSlabTokens + 2);
    const int64_t most_stored = key.windows.sink + max(key.tail_rows, value.tail_rows);
    const unsigned stores = static_cast<unsigned>(most_stored < 8 * kWriteWarps ? most_stored / kWriteWarps + 1 : 8);
    write_kernel<STRIPES, Stage::pack><<<dim3(units, y, z), kWriteThreads, bytes, stream>>>(args);
    write_kernel<STRIPES, Stage::store><<<dim3(stores, y, z), kWriteThreads, 0, stream>>>(args);
}

}  // namespace

void prepare_write(const Layer& layer) {
    switch (stripes(max(layer.key.dim, layer.value.dim))) {
        case 1: return prepare_stripes<1>();
        case 2: return prepare_stripes<2>();
        default: return prepare_stripes<4>();
    }
}

void write(const WriteArgs& args, int32_t multiprocessors, Stream stream) {
    if (args.mode == WriteMode::append && args.batch.max_count >= kPromptTokens && pack_takes(args)) {
        return pack(args, multiprocessors, stream);
    }
    if (step_takes(args)) return step(args, stream);
    switch (stripes(max(args.layer.key.dim, args.layer.value.dim))) {
        case 1: return write_stripes<1>(args, stream);
        case 2: return write_stripes<2>(args, stream);
        default: return write_stripes<4>(args, stream);
    }
}

}  // namespace kivi::cuda
