// Prompts on layers with pages in the fragment order. What an append moves behind the border falls into a part that is
// still in the ring and one that comes straight from the caller's rows:
//
//   before   S ... packed ... | tail (ring) ......... | new tokens .................................
//   after    S ... packed ...................................................... | tail (ring) ....
//                             |- window blocks, 1 -|----- page blocks ----------|- window blocks, 2 -|
//                                                  ^ first whole group of new tokens
//
// Blocks share the windows, and then the pages of a row's heads, keys and values of each apart. Warps have 32 tokens of a
// page. Slots of the ring are reused by 2, so one block does 1 and 2 of a head, or several do 2 where there is no 1.
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
constexpr int kWindowShares = 8;  // of a head's windows of keys or of values

// Positions that are packed straight from the caller's rows: whole groups of new tokens. Under the published schedule
// some of a block of values may follow.
struct Fresh {
    int64_t begin, end;
};
__device__ Fresh fresh_tokens(const Step& step, const TensorStore& store) {
    const int64_t sink = store.windows.sink;
    const int64_t unit = store.part == Part::key ? store.spec().group : kBlockTokens;
    const int64_t end = tail_begin(store.windows, step.after, store.part);
    const int64_t first = max(tail_begin(store.windows, step.before, store.part), step.before.length);
    const int64_t begin = sink + (first - sink + unit - 1) / unit * unit;
    const int64_t whole = sink + last_multiple(unit, end - sink);
    return begin <= whole ? Fresh{begin, whole} : Fresh{end, end};
}

// The pages that new tokens of a row are packed into, for one tensor. Tokens count from the first slot of the first page.
struct Pages {
    const uint8_t* rows;  // of the caller: head 0, token 0
    uint32_t token_stride, head_stride;  // bytes
    int32_t begin, end;   // tokens that are packed
    uint8_t* pages;
    bool rotated;
    __device__ __forceinline__ const uint8_t* at(int head, int token) const {
        return rows + uint64_t{token_stride} * static_cast<uint32_t>(token) +
               uint64_t{head_stride} * static_cast<uint32_t>(head);
    }
};

// The state of a row as one thread has worked it out for its block.
struct Work {
    RowArg row;
    Step step;
    Pages parts[2];  // of keys, of values
    int64_t first_page;
    int32_t pages;
};

__device__ int part_index(const TensorStore& store) { return store.part == Part::key ? 0 : 1; }
__device__ Fresh fresh_of(const TensorStore& store, const Work& work) {
    const int64_t first = store.windows.sink + work.first_page * kPageTokens;
    const Pages& part = work.parts[part_index(store)];
    return {first + part.begin, first + part.end};
}

__device__ Pages pages_of(const TensorStore& store, const View& input, const Fresh& fresh, const Work& work) {
    const int64_t first = store.windows.sink + work.first_page * kPageTokens;
    const int64_t at = input.origin(work.row.index, work.row.offset) +
                       (first - work.step.before.length) * input.token_stride;
    return {static_cast<const uint8_t*>(input.data) + 2 * at, static_cast<uint32_t>(2 * input.token_stride),
            static_cast<uint32_t>(2 * input.head_stride), static_cast<int32_t>(fresh.begin - first),
            static_cast<int32_t>(fresh.end - first), store.pages + store.part_offset, store.rotated()};
}

// False if this block has nothing to do with the row.
__device__ bool find_work(const WriteArgs& args, Work& work) {
    if (threadIdx.x == 0) {
        const TensorStore& key = args.layer.key;
        const TensorStore& value = args.layer.value;
        work.row = row_of(args.batch, blockIdx.z);
        work.step.possible = false;
        if (work.row.count > 0) {
            work.step = plan(args, work.row);
            if (work.step.possible) {
                const Fresh k = fresh_tokens(work.step, key), v = fresh_tokens(work.step, value);
                const int64_t sink = key.windows.sink;
                work.first_page = (min(k.begin, v.begin) - sink) / kPageTokens;
                work.pages = static_cast<int32_t>((max(k.end, v.end) - sink + kPageTokens - 1) / kPageTokens -
                                                  work.first_page);
                work.parts[0] = pages_of(key, args.k, k, work);
                work.parts[1] = pages_of(value, args.v, v, work);
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
    if (threadIdx.x == 0) move_on(args.layer, work.row.sequence, work.step.after, blocks);
}

// Positions begin .. end - 1 to their pages, from the ring or new. By one block.
template <int STRIPES>
__device__ __noinline__ void pack_few(const WriteArgs& args, const TensorStore& store, const View& input, int head,
                                      const Work& work, int64_t begin, int64_t end) {
    HeadWriter<STRIPES, FragmentOrder> writer(args, work.row, work.step, store, input, head);
    writer.pack(begin, end, 0, 1);
    writer.count_saturated();
    __syncthreads();
}

// New rows of the positions begin .. end - 1 to slots of a window, from `slot` on and round after `slots` of them. Warps of
// several blocks share them.
struct WindowRows {
    int64_t begin, end;
    uint8_t* window;
    int slot, slots;
};
template <class P, int DIM>
__device__ __forceinline__ int store_rows(const WindowRows& to, const View& input, bool rotated, int head,
                                          const Work& work, int first_warp, int warps) {
    using Row = WarpRow<stripes(DIM)>;
    constexpr int kFetched = 4;
    const int64_t from = input.origin(work.row.index, work.row.offset) + head * input.head_stride +
                         (to.begin - work.step.before.length) * input.token_stride;
    const int count = static_cast<int>(to.end - to.begin);
    int saturated = 0;
#pragma unroll 1
    for (int first = first_warp; first < count; first += kFetched * warps) {
        typename Row::Raw raw[kFetched];
#pragma unroll
        for (int i = 0; i < kFetched; ++i) {
            const int row = first + i * warps;
            if (row < count) raw[i] = Row::fetch(input.data, P::kType, from + row * input.token_stride, DIM);
        }
#pragma unroll 1
        for (int row = first; row < count && row < first + kFetched * warps; row += warps) {
            Row x;
            x.set(raw[0], P::kType);
            if (rotated) saturated += round_row(x, DIM, true, P::kType);
            const int slot = to.slot + row;
            x.store(to.window, P::kType, (slot < to.slots ? slot : slot - to.slots) * DIM, DIM);
#pragma unroll
            for (int i = 1; i < kFetched; ++i) raw[i - 1] = raw[i];  // registers have no running index
        }
    }
    return saturated;
}

// One of kWindowShares of a head's windows. Returns how many rows have left the range of their type, in every lane.
template <class P, int DIM>
__device__ __forceinline__ int write_windows(const WriteArgs& args, const TensorStore& store,
                                             const View& input, int head, int share, const Work& work) {
    const Fresh fresh = fresh_of(store, work);
    const int64_t packed = tail_begin(store.windows, work.step.before, store.part);
    const int64_t packs = tail_begin(store.windows, work.step.after, store.part);
    const bool from_ring = packed < fresh.begin;
    const int shares = from_ring ? 1 : kWindowShares;
    if (share >= shares) return 0;
    if (from_ring) pack_few<stripes(DIM)>(args, store, input, head, work, packed, fresh.begin);
    if (share == 0 && fresh.end < packs) pack_few<stripes(DIM)>(args, store, input, head, work, fresh.end, packs);
    const int64_t begin = work.step.before.length, end = work.step.after.length, sink = store.windows.sink;
    const int64_t tail = max(begin, packs);
    const int slots = static_cast<int>(store.tail_rows);
    const int warp = share * kPackWarps + threadIdx.x / kWarp, warps = shares * kPackWarps;
    const int32_t sequence = work.row.sequence;
    const WindowRows to[2] = {
        {begin, min(end, sink), store.sink_row(sequence, head, 0), static_cast<int>(begin), static_cast<int>(sink)},
        {tail, end, store.tail_row(sequence, head, sink), static_cast<int>((tail - sink) % slots), slots}};
    int saturated = 0;
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
        const WindowRows rows = which == 0 ? to[0] : to[1];
        saturated += store_rows<P, DIM>(rows, input, store.rotated(), head, work, warp, warps);
    }
    return saturated;
}

__device__ __forceinline__ void count_clamped(const Layer& layer, int rows) {
    if (lane() == 0 && rows > 0) atomicAdd(layer.saturated, static_cast<unsigned long long>(rows));
}

// What a kernel is compiled for.
template <bool BF16, int DIM, int KEY_BITS, int VALUE_BITS, int KEY_GROUP, int VALUE_GROUP>
struct PackConfig {
    using P = Pairs<BF16>;
    static constexpr int kDim = DIM, kKeyBits = KEY_BITS, kValueBits = VALUE_BITS;
    static constexpr int kKeyGroup = KEY_GROUP, kValueGroups = DIM / VALUE_GROUP;
    static constexpr int kBlocks = DIM > 128 ? 2 : 4;  // a multiprocessor
    static constexpr bool kAware = DIM <= 128;         // query-aware rounding has room
};

// Of a block.
template <class C>
struct PackShared {
    Tile<C::kDim> tiles[kPackWarps];
    union {
        typename CoderOf<typename C::P, C::kKeyBits>::template Keys<C::kDim> keys;
        typename CoderOf<typename C::P, C::kValueBits>::template Values<C::kValueGroups> values;
    } groups[kPackWarps];
    // Of longer groups than a warp's. Used by turns: warps still read those of one page when others write the next.
    static constexpr int kExtremes = C::kKeyGroup > kBlockTokens ? 2 : 1;
    typename KeyExtremes<typename C::P, C::kDim>::Shared extremes[kExtremes];
};

// A page of keys or of values, as a warp comes to it.
template <class C>
struct PageTask {
    int index, head;  // pages of a head, keys' and values' apart
    bool of_keys, active;
    const uint8_t* rows;
    int32_t block;

    __device__ __forceinline__ void find(const Work& work, const int32_t* blocks, bool with_keys) {
        const int page = with_keys ? index / 2 : index, token = page * kPageTokens + threadIdx.x / kWarp * kBlockTokens;
        of_keys = with_keys && index % 2 == 0;
        const Pages& part = work.parts[of_keys ? 0 : 1];
        active = page < work.pages && token >= part.begin && token < part.end;
        if (!active) return;
        rows = part.at(head, token);
        block = blocks[page];
    }
};

// Packs this block's share of a row's pages; those of keys only if `with_keys`. Its first is number `number`, and others
// follow gridDim.x apart.
template <class C>
__device__ __forceinline__ void pack_pages(PackShared<C>& shared, const WriteArgs& args, const Work& work,
                                           bool with_keys, int number) {
    using P = typename C::P;
    const int heads = args.layer.key.heads, warp = threadIdx.x / kWarp, lane = kivi::cuda::lane();
    const int ends = with_keys ? 2 * work.pages : work.pages;
    const int32_t* const blocks = args.layer.table + work.row.sequence * args.layer.table_stride + work.first_page;
    const auto page_bytes = static_cast<uint32_t>(args.layer.key.page_bytes);
    Tile<C::kDim>& tile = shared.tiles[warp];
    auto& groups = shared.groups[warp];
    const int index_step = gridDim.x / heads, head_step = gridDim.x % heads;
    int clamped_rows = 0, turn = 0;
    PageTask<C> task;
    task.index = number / heads, task.head = number % heads;
    task.find(work, blocks, with_keys);
#pragma unroll 1
    while (task.index < ends) {
        const Pages& part = work.parts[task.of_keys ? 0 : 1];
        if (task.active) tile.fetch(task.rows, part.token_stride, lane);
        end_copy_group();
        PageTask<C> next = task;
        next.index += index_step, next.head += head_step;
        if (next.head >= heads) next.head -= heads, ++next.index;
        next.find(work, blocks, with_keys);
        uint8_t* const to = part.pages + uint64_t{page_bytes} * static_cast<uint32_t>(task.block * heads + task.head);
        wait_for_copies<0>();
        __syncwarp();
        if (task.active) {
            if (part.rotated) clamped_rows += transform<P>(tile, lane);
            if (task.of_keys) {
                pack_keys<P, C::kKeyBits, C::kDim, C::kKeyGroup>(tile, groups.keys, shared.extremes[turn], to,
                                                                          warp);
                turn = (turn + 1) % PackShared<C>::kExtremes;
            } else {
                pack_values<P, C::kValueBits, C::kDim, C::kValueGroups>(tile, groups.values, to, warp);
            }
        }
        __syncwarp();
        task = next;
    }
    count_clamped(args.layer, clamped_rows);
}

// Grid: x shares the work of a row; z rows of the batch. Keys' pages are left out where another kernel packs them.
template <class C>
__global__ void __launch_bounds__(kPackThreads, C::kBlocks)
    pack_kernel(const __grid_constant__ WriteArgs args, bool with_keys) {
#if KIVI_FRAGMENT_KERNELS
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ Work work;
    if (!find_work(args, work)) return;
    const int shares = 2 * args.layer.key.heads * kWindowShares;
    int number = blockIdx.x;
#pragma unroll 1
    for (; number < shares; number += gridDim.x) {
        const bool key = number % 2 == 0;
        count_clamped(args.layer, write_windows<typename C::P, C::kDim>(
            args, key ? args.layer.key : args.layer.value, key ? args.k : args.v, number / 2 / kWindowShares,
            number / 2 % kWindowShares, work));
        __syncthreads();
    }
    pack_pages<C>(*reinterpret_cast<PackShared<C>*>(memory), args, work, with_keys, number - shares);
    __syncthreads();
    arrive(args, work, gridDim.x);
#endif
}

// Pages of keys with query-aware rounding; pack_kernel does the rest. Grid: x pages of heads, z rows of the batch.
template <class P, int BITS, int DIM, int GROUP>
__global__ void __launch_bounds__(kPackThreads, 2) pack_aware_kernel(const __grid_constant__ WriteArgs args) {
#if KIVI_FRAGMENT_KERNELS
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ Work work;
    auto& shared = *reinterpret_cast<AwareShared<P, DIM>*>(memory);
    const TensorStore& store = args.layer.key;
    const int head = blockIdx.x % store.heads;
    if (!find_work(args, work)) return;
    const int page = blockIdx.x / store.heads, token = page * kPageTokens;
    if (page >= work.pages) return;
    fetch_tables(shared, args.layer.feedback, head);
    const Pages& part = work.parts[0];
    const int clamped_rows = pack_keys_aware<P, BITS, DIM, GROUP>(
        shared, part.rotated, part.at(head, token), part.token_stride, max(part.begin - token, 0),
        min(part.end - token, kPageTokens),
        store.page(args.layer.block(work.row.sequence, work.first_page + page), head));
    count_clamped(args.layer, clamped_rows);
#endif
}

// visit(PackConfig) for the layer's kernel: there is one for each instance of decode that has codes; false if there is
// none.
template <class Visit>
bool with_config(const Layer& layer, const Visit& visit) {
    const kivi_spec& k = layer.key.spec();
    const kivi_spec& v = layer.value.spec();
    const int dim = layer.key.dim, group = v.group == KIVI_GROUP_HEAD ? dim : v.group;
    const bool bf16 = layer.key.window_dtype == KIVI_BF16;
#define KIVI_VISIT_PACK(BF16, DIM, KEY_BITS, VALUE_BITS, KEY_GROUP, VALUE_GROUP, ...)                                     \
    if constexpr (KEY_BITS < 16) {                                                                                       \
        if (bf16 == BF16 && dim == DIM && k.bits == KEY_BITS && v.bits == VALUE_BITS && k.group == KEY_GROUP &&          \
            group == VALUE_GROUP) {                                                                                      \
            visit(PackConfig<BF16, DIM, KEY_BITS, VALUE_BITS, KEY_GROUP, VALUE_GROUP>{});                                \
            return true;                                                                                                 \
        }                                                                                                                \
    }
    KIVI_DECODE_INSTANCES(KIVI_VISIT_PACK)
#undef KIVI_VISIT_PACK
    return false;
}

// Rows that tiles are fetched from: 16-byte chunks, and strides whose bytes fit a word.
bool plain(const View& view, const TensorStore& store) {
    const auto fits = [](int64_t elements) { return elements >= 0 && elements < int64_t{1} << 30; };
    return view.dtype == store.window_dtype && store.window_dtype != KIVI_F32 && store.order.order == Order::fragment &&
           store.spec().range == KIVI_RANGE_MINMAX && aligned(view) && fits(view.token_stride) && fits(view.head_stride);
}
bool query_aware(const WriteArgs& args) { return args.layer.feedback.order != nullptr; }

template <class C>
constexpr size_t pack_bytes() {
    return max(write_shared_bytes(C::kDim), sizeof(PackShared<C>));
}

// All of the multiprocessor's memory that is not the caller's is for shared memory: as many blocks as launch bounds say.
template <class... Args>
void prepare(void (*kernel)(Args...), size_t shared_bytes) {
    prepare_kernel(kernel, shared_bytes, cudaSharedmemCarveoutMaxShared);
}

}  // namespace

void prepare_pack(const Layer& layer) {
    with_config(layer, [](auto config) {
        using C = decltype(config);
        if constexpr (C::kAware) {
            prepare(pack_aware_kernel<typename C::P, C::kKeyBits, C::kDim, C::kKeyGroup>,
                    sizeof(AwareShared<typename C::P, C::kDim>));
        }
        prepare(pack_kernel<C>, pack_bytes<C>());
    });
}

bool pack_serves(const TensorStore& key, const TensorStore& value) {
    Layer layer;
    layer.key = key, layer.value = value;
    bool room = false;
    with_config(layer, [&](auto config) {
        room = decltype(config)::kAware || key.spec().rounding != KIVI_ROUND_QUERY_AWARE;
    });
    return room && key.spec().range == KIVI_RANGE_MINMAX && value.spec().range == KIVI_RANGE_MINMAX;
}

bool pack_takes(const WriteArgs& args) {
    const Layer& layer = args.layer;
    bool room = false;
    return plain(args.k, layer.key) && plain(args.v, layer.value) && with_config(layer, [&](auto config) {
        room = decltype(config)::kAware || !query_aware(args);
    }) && room;
}

void pack(const WriteArgs& args, int32_t multiprocessors, Stream stream) {
    const unsigned heads = args.layer.key.heads, rows = args.batch.size, pages = args.batch.max_count / kPageTokens + 2;
    const bool with_keys = !query_aware(args);
    with_config(args.layer, [&](auto config) {
        using C = decltype(config);
        if constexpr (C::kAware) {
            if (!with_keys) {
                using Shared = AwareShared<typename C::P, C::kDim>;
                const auto kernel = pack_aware_kernel<typename C::P, C::kKeyBits, C::kDim, C::kKeyGroup>;
                kernel<<<dim3(heads * pages, 1, rows), kPackThreads, sizeof(Shared), stream>>>(args);
            }
        }
        const unsigned slots = multiprocessors * C::kBlocks, items = 2 * heads * (pages + kWindowShares);
        // A block that goes on by an odd multiple of the heads has keys and values by turns. That may cost a few blocks.
        const unsigned share = max(1u, slots / rows), turns = ((share / heads + 1) / 2 * 2 - 1) * heads;
        const unsigned blocks = min(items, share >= heads && 8 * turns >= 7 * share ? turns : share);
        pack_kernel<C><<<dim3(blocks, 1, rows), kPackThreads, pack_bytes<C>(), stream>>>(args, with_keys);
    });
}

}  // namespace kivi::cuda
