// Prompts on layers with pages in the fragment order. What an append moves behind the border falls into a part that is
// still in the ring and one that comes straight from the caller's rows:
//
//   before   S ... packed ... | tail (ring) ......... | new tokens .................................
//   after    S ... packed ...................................................... | tail (ring) ....
//                             |- window blocks, 1 -|----- page blocks ----------|- window blocks, 2 -|
//                                                  ^ first whole group of new tokens
//
// A page block packs one page of one head of keys or values; warps have 32 tokens each. Slots of the ring are reused
// by 2, so one block does 1 and 2 of a head, or several do 2 where there is no 1.
//
// Compiled without contraction: every code is that of core/format.
#include "cuda/pack.h"

#include "cuda/pack_nearest.cuh"
#include "cuda/write_head.cuh"

namespace kivi::cuda {
namespace {

constexpr int kPackThreads = kPackWarps * kWarp;
static_assert(kPackThreads == kWriteThreads);
constexpr unsigned kWindowBlocks = 8;        // of a head of keys or values
constexpr int32_t kMaxCount = 1 << 22;       // tokens of a row: pages stand in gridDim.y

__host__ __device__ int value_groups(const kivi_spec& spec, int dim) {
    return spec.group == KIVI_GROUP_HEAD ? 1 : dim / spec.group;
}

// Positions that page blocks pack: whole groups of new tokens.
struct Fresh {
    int64_t begin, end;
};
__device__ Fresh fresh_tokens(const Step& step, const TensorStore& store) {
    const int64_t sink = store.windows.sink;
    const int64_t unit = store.part == Part::key ? store.spec().group : kBlockTokens;
    const int64_t end = tail_begin(store.windows, step.after, store.part);
    const int64_t first = max(tail_begin(store.windows, step.before, store.part), step.before.length);
    return {min(sink + (first - sink + unit - 1) / unit * unit, end), end};
}

// The state of a row as one thread has worked it out for its block.
struct Work {
    RowArg row;
    Step step;
    Fresh fresh;
};

// False if this block has nothing to do with the row.
__device__ bool find_work(const WriteArgs& args, const TensorStore& store, Work& work) {
    if (threadIdx.x == 0) {
        work.row = row_of(args.batch, blockIdx.z);
        work.step.possible = false;
        if (work.row.count > 0) {
            work.step = plan(args, work.row);
            if (work.step.possible) {
                work.fresh = fresh_tokens(work.step, store);
            } else {
                args.layer.full[work.row.sequence] = 1;
            }
        }
    }
    __syncthreads();
    return work.step.possible;
}

// All blocks of a launch that moves the state on call this when they need the state before no more.
__device__ void arrive(const WriteArgs& args, const Work& work) {
    if (threadIdx.x != 0) return;
    uint32_t* const arrivals = args.layer.arrivals + work.row.sequence;
    if (atomicAdd(arrivals, 1) + 1 == gridDim.x * gridDim.y) {
        *arrivals = 0;
        args.layer.spans[work.row.sequence] = work.step.after;
    }
}

__device__ PackSource source_of(const View& input, const Work& work, int head, int64_t position) {
    const int64_t at = input.origin(work.row.index, work.row.offset) + head * input.head_stride +
                       (position - work.step.before.length) * input.token_stride;
    return {static_cast<const uint8_t*>(input.data) + 2 * at, 2 * input.token_stride};
}

template <int DIM>
__device__ int pack_page(PackShared<DIM>& shared, const TensorStore& store, const PackSource& source, bool active,
                         uint8_t* part) {
    const kivi_spec& spec = store.spec();
    if (store.part == Part::key) {
        if (DIM == 128 && spec.bits == 3) return pack_keys<DIM == 128 ? 3 : 2, DIM>(shared, spec, source, active, part);
        return spec.bits == 2 ? pack_keys<2, DIM>(shared, spec, source, active, part)
                              : pack_keys<4, DIM>(shared, spec, source, active, part);
    }
    if (!active) return 0;
    if (spec.bits == 4) return pack_values<4, DIM, DIM / 32>(shared, spec, source, part);
    const int groups = value_groups(spec, DIM);
    if (DIM == 128 && groups == 4) return pack_values<2, DIM, DIM / 32>(shared, spec, source, part);
    return groups == 2 ? pack_values<2, DIM, 2>(shared, spec, source, part)
                       : pack_values<2, DIM, 1>(shared, spec, source, part);
}

__device__ __noinline__ void write_windows(const WriteArgs& args, const TensorStore& store, const View& input, int head,
                                           const Work& work) {
    const int64_t begin = tail_begin(store.windows, work.step.before, store.part);
    const bool from_ring = begin < work.fresh.begin;
    const int blocks = from_ring ? 1 : kWindowBlocks, block = blockIdx.y;
    if (block >= blocks) return;
    HeadWriter<1, FragmentOrder> writer(args, work.row, work.step, store, input, head);
    if (from_ring) {
        writer.pack(begin, work.fresh.begin, 0, 1);
        __syncthreads();
    }
    writer.store(block * kPackWarps + threadIdx.x / kWarp, blocks * kPackWarps);
    writer.count_saturated();
}

// Grid: x heads of keys, then of values; y window blocks, then pages; z rows of the batch. Keys' pages are left out
// where another kernel has packed them.
template <int DIM>
__global__ void __launch_bounds__(kPackThreads, 4) pack_kernel(const __grid_constant__ WriteArgs args, bool key_pages) {
    extern __shared__ float4 memory[];
    __shared__ Work work;
    const int heads = args.layer.key.heads;
    const bool key = blockIdx.x < heads;
    const int head = key ? blockIdx.x : blockIdx.x - heads;
    const TensorStore& store = key ? args.layer.key : args.layer.value;
    const View& input = key ? args.k : args.v;
    if (!find_work(args, store, work)) return;
    if (blockIdx.y < kWindowBlocks) {
        write_windows(args, store, input, head, work);
    } else if (!key || key_pages) {
        const int64_t sink = store.windows.sink, begin = work.fresh.begin - sink, end = work.fresh.end - sink;
        const int64_t page = begin / kPageTokens + blockIdx.y - kWindowBlocks;
        if (page * kPageTokens < end) {
            const int64_t slot = page * kPageTokens + threadIdx.x / kWarp * kBlockTokens;
            const int clamped_rows = pack_page<DIM>(
                *reinterpret_cast<PackShared<DIM>*>(memory), store, source_of(input, work, head, sink + slot),
                slot >= begin && slot < end, store.page(args.layer.block(work.row.sequence, page), head));
            if (lane() == 0 && clamped_rows > 0) {
                atomicAdd(args.layer.saturated, static_cast<unsigned long long>(clamped_rows));
            }
        }
    }
    __syncthreads();
    arrive(args, work);
}

bool plain(const View& view) {
    return view.dtype == KIVI_F16 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.token_stride % 8 == 0 &&
           view.head_stride % 8 == 0 && (view.ragged || view.row_stride % 8 == 0);
}
bool plain(const TensorStore& store) {
    return store.order.order == Order::fragment && store.window_dtype == KIVI_F16 && store.spec().range == KIVI_RANGE_MINMAX;
}
bool query_aware(const WriteArgs& args) { return args.layer.feedback.order != nullptr; }

template <int DIM>
size_t pack_bytes() {
    return max(write_shared_bytes(DIM), sizeof(PackShared<DIM>));
}

template <int DIM>
void prepare_dim() {
    cudaFuncSetAttribute(pack_kernel<DIM>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(pack_bytes<DIM>()));
}

template <int DIM>
void pack_dim(const WriteArgs& args, Stream stream) {
    const unsigned heads = args.layer.key.heads, rows = args.batch.size;
    const unsigned pages = args.batch.max_count / kPageTokens + 2;
    pack_kernel<DIM><<<dim3(2 * heads, kWindowBlocks + pages, rows), kPackThreads, pack_bytes<DIM>(), stream>>>(
        args, !query_aware(args));
}

}  // namespace

void prepare_pack() {
    prepare_dim<64>();
    prepare_dim<128>();
}

bool pack_takes(const WriteArgs& args) {
    const Layer& layer = args.layer;
    return plain(layer.key) && plain(layer.value) && plain(args.k) && plain(args.v) && layer.key.dim == layer.value.dim &&
           (layer.key.dim == 64 || layer.key.dim == 128) && args.batch.max_count <= kMaxCount && !query_aware(args) &&
           (layer.value.spec().bits == 2 || (layer.value.spec().bits == 4 && layer.value.spec().group == kBlockTokens));
}

void pack(const WriteArgs& args, Stream stream) {
    args.layer.key.dim == 64 ? pack_dim<64>(args, stream) : pack_dim<128>(args, stream);
}

}  // namespace kivi::cuda
