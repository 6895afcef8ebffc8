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

#include "cuda/decode_instances.h"
#include "cuda/pack_nearest.cuh"
#include "cuda/pack_query_aware.cuh"
#include "cuda/write_head.cuh"

namespace kivi::cuda {
namespace {

static_assert(kPackThreads == kWriteThreads);
constexpr unsigned kWindowBlocks = 8;        // of a head of keys or values
constexpr int32_t kMaxCount = 1 << 22;       // tokens of a row: pages stand in gridDim.y

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
__device__ void arrive(const WriteArgs& args, const Work& work, unsigned blocks) {
    if (threadIdx.x != 0) return;
    uint32_t* const arrivals = args.layer.arrivals + work.row.sequence;
    if (atomicAdd(arrivals, 1) + 1 == blocks) {
        *arrivals = 0;
        args.layer.spans[work.row.sequence] = work.step.after;
    }
}

__device__ PackSource source_of(const View& input, const Work& work, int head, int64_t position) {
    const int64_t at = input.origin(work.row.index, work.row.offset) + head * input.head_stride +
                       (position - work.step.before.length) * input.token_stride;
    return {static_cast<const uint8_t*>(input.data) + 2 * at, 2 * input.token_stride};
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
// where another kernel packs them.
template <class C>
__global__ void __launch_bounds__(kPackThreads, 4) pack_kernel(const __grid_constant__ WriteArgs args, bool key_pages) {
    extern __shared__ float4 memory[];
    __shared__ Work work;
    const int heads = args.layer.key.heads;
    const bool key = blockIdx.x < heads;
    const int head = key ? blockIdx.x : blockIdx.x - heads;
    const bool windows = blockIdx.y < kWindowBlocks;
    if (key && !windows && !key_pages) return;
    const TensorStore& store = key ? args.layer.key : args.layer.value;
    const View& input = key ? args.k : args.v;
    if (!find_work(args, store, work)) return;
    if (windows) {
        write_windows(args, store, input, head, work);
    } else {
        const int64_t sink = store.windows.sink, begin = work.fresh.begin - sink, end = work.fresh.end - sink;
        const int64_t page = begin / kPageTokens + blockIdx.y - kWindowBlocks;
        if (page * kPageTokens < end) {
            auto& shared = *reinterpret_cast<PackShared<C::kDim>*>(memory);
            uint8_t* const part = store.page(args.layer.block(work.row.sequence, page), head);
            const int64_t slot = page * kPageTokens + threadIdx.x / kWarp * kBlockTokens;
            const bool active = slot >= begin && slot < end;
            const PackSource source = source_of(input, work, head, sink + slot);
            int clamped_rows = 0;
            if (key) {
                clamped_rows = pack_keys<C::kKeyBits, C::kDim>(shared, args.layer.key.spec(), source, active, part);
            } else if (active) {
                clamped_rows = pack_values<C::kValueBits, C::kDim, C::kValueGroups>(shared, args.layer.value.spec(), source, part);
            }
            if (lane() == 0 && clamped_rows > 0) {
                atomicAdd(args.layer.saturated, static_cast<unsigned long long>(clamped_rows));
            }
        }
    }
    __syncthreads();
    const unsigned left_out = key_pages ? 0 : heads * (gridDim.y - kWindowBlocks);
    arrive(args, work, gridDim.x * gridDim.y - left_out);
}

// Pages of keys with query-aware rounding; pack_kernel does the rest. Grid: x heads, y pages, z rows of the batch.
template <int BITS, int DIM>
__global__ void __launch_bounds__(kPackThreads, 2) pack_aware_kernel(const __grid_constant__ WriteArgs args) {
    extern __shared__ float4 memory[];
    __shared__ Work work;
    auto& shared = *reinterpret_cast<AwareShared<DIM>*>(memory);
    const TensorStore& store = args.layer.key;
    if (!find_work(args, store, work)) return;
    const int64_t sink = store.windows.sink, begin = work.fresh.begin - sink, end = work.fresh.end - sink;
    const int64_t page = begin / kPageTokens + blockIdx.y, slot = page * kPageTokens;
    if (slot >= end) return;
    const int head = blockIdx.x;
    fetch_tables<DIM>(shared, args.layer.feedback, head);
    __syncthreads();
    const int clamped_rows = pack_keys_aware<BITS, DIM>(
        shared, store.spec(), source_of(args.k, work, head, sink + slot), static_cast<int>(max(begin - slot, int64_t{0})),
        static_cast<int>(min(end - slot, int64_t{kPageTokens})), store.page(args.layer.block(work.row.sequence, page), head));
    if (lane() == 0 && clamped_rows > 0) atomicAdd(args.layer.saturated, static_cast<unsigned long long>(clamped_rows));
}

// What a kernel is compiled for.
template <int DIM, int KEY_BITS, int VALUE_BITS, int VALUE_GROUP>
struct PackConfig {
    static constexpr int kDim = DIM, kKeyBits = KEY_BITS, kValueBits = VALUE_BITS, kValueGroups = DIM / VALUE_GROUP;
};

// visit(PackConfig) for the layer's kernel: there is one for each instance of decode.
template <class Visit>
void with_config(const Layer& layer, const Visit& visit) {
    const kivi_spec& k = layer.key.spec();
    const kivi_spec& v = layer.value.spec();
    const int dim = layer.key.dim, group = v.group == KIVI_GROUP_HEAD ? dim : v.group;
#define KIVI_VISIT_PACK(BF16, DIM, KEY_BITS, VALUE_BITS, KEY_GROUP, VALUE_GROUP, ...)                                      \
    if (dim == DIM && k.bits == KEY_BITS && v.bits == VALUE_BITS && k.group == KEY_GROUP && group == VALUE_GROUP) { \
        return visit(PackConfig<DIM, KEY_BITS, VALUE_BITS, VALUE_GROUP>{});                                         \
    }
    KIVI_DECODE_INSTANCES(KIVI_VISIT_PACK)
#undef KIVI_VISIT_PACK
}

bool plain(const View& view) {
    return view.dtype == KIVI_F16 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.token_stride % 8 == 0 &&
           view.head_stride % 8 == 0 && (view.ragged || view.row_stride % 8 == 0);
}
bool plain(const TensorStore& store) {
    return store.order.order == Order::fragment && store.window_dtype == KIVI_F16 && store.spec().range == KIVI_RANGE_MINMAX;
}
bool query_aware(const WriteArgs& args) { return args.layer.feedback.order != nullptr; }

template <class C>
constexpr size_t pack_bytes() {
    return max(write_shared_bytes(C::kDim), sizeof(PackShared<C::kDim>));
}

}  // namespace

void prepare_pack(const Layer& layer) {
    with_config(layer, [](auto config) {
        using C = decltype(config);
        cudaFuncSetAttribute(pack_aware_kernel<C::kKeyBits, C::kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(sizeof(AwareShared<C::kDim>)));
        cudaFuncSetAttribute(pack_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(pack_bytes<C>()));
    });
}

bool pack_takes(const WriteArgs& args) {
    const Layer& layer = args.layer;
    return plain(layer.key) && plain(layer.value) && plain(args.k) && plain(args.v) && args.batch.max_count <= kMaxCount;
}

void pack(const WriteArgs& args, Stream stream) {
    const unsigned heads = args.layer.key.heads, rows = args.batch.size, pages = args.batch.max_count / kPageTokens + 2;
    const bool key_pages = !query_aware(args);
    with_config(args.layer, [&](auto config) {
        using C = decltype(config);
        if (!key_pages) {
            pack_aware_kernel<C::kKeyBits, C::kDim><<<dim3(heads, pages, rows), kPackThreads, sizeof(AwareShared<C::kDim>), stream>>>(args);
        }
        pack_kernel<C><<<dim3(2 * heads, kWindowBlocks + pages, rows), kPackThreads, pack_bytes<C>(), stream>>>(args, key_pages);
    });
}

}  // namespace kivi::cuda
