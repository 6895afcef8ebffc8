// Prompts on layers with pages in the fragment order. What an append moves behind the border falls into a part that is
// still in the ring and one that comes straight from the caller's rows:
//
//   before   S ... packed ... | tail (ring) ......... | new tokens .................................
//   after    S ... packed ...................................................... | tail (ring) ....
//                             |- window blocks, 1 -|----- page blocks ----------|- window blocks, 2 -|
//                                                  ^ first whole group of new tokens
//
// A page block packs one page of a head, keys and then values; warps have 32 tokens each. Slots of the ring are reused
// by 2, so one block does 1 and 2 of a head, or several do 2 where there is no 1.
//
// Compiled without contraction: every code is that of core/format.
#include "cuda/pack.h"

#include "cuda/decode_instances.h"
#include "cuda/device.h"
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
    Fresh fresh[2];  // of keys, of values
    __device__ const Fresh& fresh_of(Part part) const { return fresh[part == Part::key ? 0 : 1]; }
};

// The number-th page of a tensor that page blocks pack into, and what of it is this warp's.
struct PagePart {
    bool any, active;
    int64_t position;
    uint8_t* part;
    __device__ __forceinline__ PagePart(const WriteArgs& args, const TensorStore& store, const Work& work, int head,
                                        unsigned number) {
        const int64_t sink = store.windows.sink;
        const Fresh& fresh = work.fresh_of(store.part);
        const int64_t begin = fresh.begin - sink, end = fresh.end - sink, page = begin / kPageTokens + number;
        const int64_t slot = page * kPageTokens + threadIdx.x / kWarp * kBlockTokens;
        any = page * kPageTokens < end;
        active = slot >= begin && slot < end;
        position = sink + slot;
        part = any ? store.page(args.layer.block(work.row.sequence, page), head) : nullptr;
    }
};

// False if this block has nothing to do with the row.
__device__ bool find_work(const WriteArgs& args, Work& work) {
    if (threadIdx.x == 0) {
        work.row = row_of(args.batch, blockIdx.z);
        work.step.possible = false;
        if (work.row.count > 0) {
            work.step = plan(args, work.row);
            if (work.step.possible) {
                work.fresh[0] = fresh_tokens(work.step, args.layer.key);
                work.fresh[1] = fresh_tokens(work.step, args.layer.value);
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
                                           int block, const Work& work) {
    const int64_t begin = tail_begin(store.windows, work.step.before, store.part);
    const int64_t fresh = work.fresh_of(store.part).begin;
    const bool from_ring = begin < fresh;
    const int blocks = from_ring ? 1 : kWindowBlocks;
    if (block >= blocks) return;
    HeadWriter<1, FragmentOrder> writer(args, work.row, work.step, store, input, head);
    if (from_ring) {
        writer.pack(begin, fresh, 0, 1);
        __syncthreads();
    }
    writer.store(block * kPackWarps + threadIdx.x / kWarp, blocks * kPackWarps);
    writer.count_saturated();
}

// Grid: x heads; y window blocks of keys, of values, then pages; z rows of the batch. Keys' pages are left out where
// another kernel packs them.
template <class C>
__global__ void __launch_bounds__(kPackThreads, 4) pack_kernel(const __grid_constant__ WriteArgs args, bool key_pages) {
#if KIVI_FRAGMENT_KERNELS
    extern __shared__ float4 memory[];
    __shared__ Work work;
    const int head = blockIdx.x;
    if (!find_work(args, work)) return;
    if (blockIdx.y < 2 * kWindowBlocks) {
        const bool key = blockIdx.y < kWindowBlocks;
        write_windows(args, key ? args.layer.key : args.layer.value, key ? args.k : args.v, head, blockIdx.y % kWindowBlocks, work);
    } else {
        auto& shared = *reinterpret_cast<PackShared<C::kDim>*>(memory);
        const unsigned number = blockIdx.y - 2 * kWindowBlocks;
        int clamped_rows = 0;
        if (key_pages) {
            const TensorStore& store = args.layer.key;
            const PagePart at(args, store, work, head, number);
            if (at.any) {
                clamped_rows = pack_keys<C::kKeyBits, C::kDim>(shared, store.spec(), source_of(args.k, work, head, at.position),
                                                               at.active, at.part);
            }
        }
        __syncthreads();
        const TensorStore& store = args.layer.value;
        const PagePart at(args, store, work, head, number);
        if (at.active) {
            clamped_rows += pack_values<C::kValueBits, C::kDim, C::kValueGroups>(
                shared, store.spec(), source_of(args.v, work, head, at.position), at.part);
        }
        if (lane() == 0 && clamped_rows > 0) {
            atomicAdd(args.layer.saturated, static_cast<unsigned long long>(clamped_rows));
        }
    }
    __syncthreads();
    arrive(args, work, gridDim.x * gridDim.y);
#endif
}

// Pages of keys with query-aware rounding; pack_kernel does the rest. Grid: x heads, y pages, z rows of the batch.
template <int BITS, int DIM>
__global__ void __launch_bounds__(kPackThreads, 2) pack_aware_kernel(const __grid_constant__ WriteArgs args) {
#if KIVI_FRAGMENT_KERNELS
    extern __shared__ float4 memory[];
    __shared__ Work work;
    auto& shared = *reinterpret_cast<AwareShared<DIM>*>(memory);
    const TensorStore& store = args.layer.key;
    const int head = blockIdx.x;
    if (!find_work(args, work)) return;
    const int64_t sink = store.windows.sink, begin = work.fresh[0].begin - sink, end = work.fresh[0].end - sink;
    const int64_t page = begin / kPageTokens + blockIdx.y, slot = page * kPageTokens;
    if (slot >= end) return;
    fetch_tables<DIM>(shared, args.layer.feedback, head);
    __syncthreads();
    const int clamped_rows = pack_keys_aware<BITS, DIM>(
        shared, store.spec(), source_of(args.k, work, head, sink + slot), static_cast<int>(max(begin - slot, int64_t{0})),
        static_cast<int>(min(end - slot, int64_t{kPageTokens})), store.page(args.layer.block(work.row.sequence, page), head));
    if (lane() == 0 && clamped_rows > 0) atomicAdd(args.layer.saturated, static_cast<unsigned long long>(clamped_rows));
#endif
}

// What a kernel is compiled for.
template <int DIM, int KEY_BITS, int VALUE_BITS, int VALUE_GROUP>
struct PackConfig {
    static constexpr int kDim = DIM, kKeyBits = KEY_BITS, kValueBits = VALUE_BITS, kValueGroups = DIM / VALUE_GROUP;
};

// visit(PackConfig) for the layer's kernel: there is one for each instance of decode up to dim 128; false if there is
// none.
template <class Visit>
bool with_config(const Layer& layer, const Visit& visit) {
    const kivi_spec& k = layer.key.spec();
    const kivi_spec& v = layer.value.spec();
    const int dim = layer.key.dim, group = v.group == KIVI_GROUP_HEAD ? dim : v.group;
#define KIVI_VISIT_PACK(BF16, DIM, KEY_BITS, VALUE_BITS, KEY_GROUP, VALUE_GROUP, ...)                                      \
    if constexpr (DIM <= 128) {                                                                                       \
        if (dim == DIM && k.bits == KEY_BITS && v.bits == VALUE_BITS && k.group == KEY_GROUP && group == VALUE_GROUP) { \
            visit(PackConfig<DIM, KEY_BITS, VALUE_BITS, VALUE_GROUP>{});                                              \
            return true;                                                                                              \
        }                                                                                                             \
    }
    KIVI_DECODE_INSTANCES(KIVI_VISIT_PACK)
#undef KIVI_VISIT_PACK
    return false;
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
        const auto aware = pack_aware_kernel<C::kKeyBits, C::kDim>;
        prepare_kernel(aware, sizeof(AwareShared<C::kDim>));
        check(cudaFuncSetAttribute(aware, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
              "shared memory of a kernel");  // two blocks a multiprocessor
        prepare_kernel(pack_kernel<C>, pack_bytes<C>());
    });
}

bool pack_takes(const WriteArgs& args) {
    const Layer& layer = args.layer;
    return plain(layer.key) && plain(layer.value) && plain(args.k) && plain(args.v) &&
           args.batch.max_count <= kMaxCount && with_config(layer, [](auto) {});
}

void pack(const WriteArgs& args, Stream stream) {
    const unsigned heads = args.layer.key.heads, rows = args.batch.size, pages = args.batch.max_count / kPageTokens + 2;
    const bool key_pages = !query_aware(args);
    with_config(args.layer, [&](auto config) {
        using C = decltype(config);
        if (!key_pages) {
            pack_aware_kernel<C::kKeyBits, C::kDim><<<dim3(heads, pages, rows), kPackThreads, sizeof(AwareShared<C::kDim>), stream>>>(args);
        }
        pack_kernel<C><<<dim3(heads, 2 * kWindowBlocks + pages, rows), kPackThreads, pack_bytes<C>(), stream>>>(args, key_pages);
    });
}

}  // namespace kivi::cuda
