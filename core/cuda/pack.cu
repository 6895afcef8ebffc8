// Prompts on layers with pages in the fragment order. What an append moves behind the border falls into a part that is
// still in the ring and one that comes straight from the caller's rows:
//
//   before   S ... packed ... | tail (ring) ......... | new tokens .................................
//   after    S ... packed ...................................................... | tail (ring) ....
//                             |- window blocks, 1 -|----- page blocks ----------|- window blocks, 2 -|
//                                                  ^ first whole group of new tokens
//
// Blocks share the windows, and then the pages of a row's heads, keys and values of each apart. Warps have 32 tokens of
// a page. Slots of the ring are reused by 2, so one block does 1 and 2 of a head, or several do 2 where there is no 1.
// Keys with query-aware rounding are packed before, ring and all, by a kernel of their own.
//
// Compiled without contraction: every code is that of core/format.
#include "cuda/pack.h"

#include "cuda/device.h"
#include "cuda/fast_layer.cuh"
#include "cuda/pack_nearest.cuh"
#include "cuda/pack_query_aware.cuh"
#include "cuda/pack_transform.cuh"
#include "cuda/write_plan.cuh"

namespace kivi::cuda {
namespace {

constexpr int kWindowShares = 8;  // of a head's windows of keys or of values

// Tokens count from S here, the first slot of the first page of a sequence.
struct Tokens {
    int64_t begin, end;
};
__device__ __forceinline__ Tokens moved_tokens(const Step& step, const TensorStore& store) {
    const int64_t sink = store.windows.sink;
    return {tail_begin(store.windows, step.before, store.part) - sink,
            tail_begin(store.windows, step.after, store.part) - sink};
}
// Those that are packed straight from the caller's rows: whole groups of new tokens. Under the published schedule some
// of a block of values may follow.
template <int UNIT>
__device__ __forceinline__ Tokens fresh_tokens(const Step& step, const TensorStore& store) {
    const Tokens moved = moved_tokens(step, store);
    const auto first = static_cast<uint64_t>(max(moved.begin, step.before.length - store.windows.sink));
    const auto begin = static_cast<int64_t>((first + UNIT - 1) / UNIT * UNIT);
    const auto end = static_cast<int64_t>(static_cast<uint64_t>(moved.end) / UNIT * UNIT);
    return begin <= end ? Tokens{begin, end} : Tokens{moved.end, moved.end};
}

// Where the caller's row of a token stands, for head 0.
__device__ __forceinline__ const uint8_t* row_of_token(const View& input, const RowArg& row, const Step& step,
                                                       const TensorStore& store, int64_t token) {
    const int64_t number = store.windows.sink + token - step.before.length;
    return static_cast<const uint8_t*>(input.data) +
           2 * (input.origin(row.index, row.offset) + number * input.token_stride);
}

// The rows of 32 tokens of a head: those before `fresh` stand in the ring, from `slot` on.
struct TileRows {
    const uint8_t *ring, *rows;
    int64_t stride, row_bytes;
    int slot, slots, fresh;
    __device__ __forceinline__ TileRows(const TensorStore& store, const View& input, int head, const RowArg& row,
                                        const Step& step, int64_t token)
        : ring(store.tail_row(row.sequence, head, store.windows.sink)),
          rows(row_of_token(input, row, step, store, token) + 2 * head * input.head_stride),
          stride(2 * input.token_stride),
          row_bytes(store.row_bytes()),
          slot(static_cast<int>(token % store.tail_rows)),
          slots(static_cast<int>(store.tail_rows)),
          fresh(static_cast<int>(
              min(max(step.before.length - store.windows.sink - token, int64_t{0}), int64_t{kBlockTokens}))) {}
    __device__ __forceinline__ const uint8_t* at(int number) const {
        const int place = slot + number;
        if (number < fresh) return ring + (place < slots ? place : place - slots) * row_bytes;
        return rows + number * stride;
    }
    __device__ __forceinline__ const uint8_t* operator()(int first, int further) const { return at(first + further); }
};

// The pages that new tokens of a row are packed into, for one tensor. Tokens count from the first slot of the first
// page.
struct Pages {
    const uint8_t* rows;                 // of the caller: head 0, token 0
    uint32_t token_stride, head_stride;  // bytes
    int32_t begin, end;                  // tokens that are packed
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
    // Tokens that are packed, and those of them that are packed straight from the caller's rows.
    __device__ __forceinline__ Tokens moved(bool of_keys, const Layer& layer) const {
        return moved_tokens(step, of_keys ? layer.key : layer.value);
    }
    __device__ __forceinline__ Tokens fresh(bool of_keys) const {
        const int64_t first = first_page * kPageTokens;
        return {first + parts[of_keys ? 0 : 1].begin, first + parts[of_keys ? 0 : 1].end};
    }
};

__device__ __forceinline__ Pages pages_of(const TensorStore& store, const View& input, const Tokens& fresh,
                                          const RowArg& row, const Step& step, int64_t first_page) {
    const int64_t first = first_page * kPageTokens;
    return {row_of_token(input, row, step, store, first), static_cast<uint32_t>(2 * input.token_stride),
            static_cast<uint32_t>(2 * input.head_stride), static_cast<int32_t>(fresh.begin - first),
            static_cast<int32_t>(fresh.end - first), store.pages + store.part_offset, store.rotated()};
}

// The row and what happens to it, for one thread of a block. False if there is nothing to do.
__device__ __forceinline__ bool find_step(const WriteArgs& args, RowArg& row, Step& step) {
    row = moving_row_of(args.batch, blockIdx.z);
    if (row.count == 0) return false;
    step = plan(args, row);
    if (!step.possible) args.layer.full[row.sequence] = 1;
    return step.possible;
}

// False if this block has nothing to do with the row.
template <class C>
__device__ __forceinline__ bool find_work(const WriteArgs& args, Work& work) {
    const int part = threadIdx.x / kWarp;
    if (part < 2 && threadIdx.x % kWarp == 0) {  // a thread for keys, and one for values
        RowArg row;
        Step step;
        if (find_step(args, row, step)) {
            const Tokens k = fresh_tokens<C::kKeyGroup>(step, args.layer.key);
            const Tokens v = fresh_tokens<kBlockTokens>(step, args.layer.value);
            const auto first_page = static_cast<uint64_t>(min(k.begin, v.begin)) / kPageTokens;
            const auto end = static_cast<uint64_t>(max(k.end, v.end) + kPageTokens - 1) / kPageTokens;
            work.parts[part] = part == 0 ? pages_of(args.layer.key, args.k, k, row, step, first_page)
                                         : pages_of(args.layer.value, args.v, v, row, step, first_page);
            if (part == 0) work.first_page = first_page, work.pages = static_cast<int32_t>(end - first_page);
        }
        if (part == 0) work.row = row, work.step = step;
    }
    __syncthreads();
    return work.step.possible;
}

// All blocks of a launch that moves the state on call this when they need the state before no more.
__device__ void arrive(const WriteArgs& args, const Work& work, unsigned blocks) {
    if (threadIdx.x == 0) move_on(args.layer, work.row.sequence, work.step.after, blocks);
}

// New rows of the positions begin .. end - 1 to slots of a window, from `slot` on and round after `slots` of them.
// Warps of several blocks share them.
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

__device__ __forceinline__ void count_clamped(const Layer& layer, int rows) {
    if (lane() == 0 && rows > 0) atomicAdd(layer.saturated, static_cast<unsigned long long>(rows));
}

// What a kernel is compiled for.
template <class L>
struct PackConfig : L {
    static constexpr int kBlocks = L::kDim > 128 ? 2 : 4;  // a multiprocessor
    // Whether there are layers of the published schedule, which moves the border of values token by token.
#define KIVI_IS(_, D, K, V, KG, VG, ...) \
    || (L::kDim == D && L::kKeyBits == K && L::kValueBits == V && L::kKeyGroup == KG && L::kValueGroups == D / VG)
    static constexpr bool kPublished = false KIVI_DECODE_PUBLISHED(KIVI_IS, _);
#undef KIVI_IS
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

// Packs a warp's tile, of which rows from `fresh` on are the caller's; of values only tokens begin .. end - 1. Returns
// how many rows have left the range of their type, in every lane.
template <class C>
__device__ __forceinline__ int pack_tile(PackShared<C>& shared, int turn, bool of_keys, bool rotated, int fresh,
                                         uint8_t* part, int begin = 0, int end = kBlockTokens) {
    using P = typename C::P;
    const int warp = threadIdx.x / kWarp;
    Tile<C::kDim>& tile = shared.tiles[warp];
    auto& groups = shared.groups[warp];
    const int clamped_rows = rotated ? transform<P>(tile, lane(), fresh, end) : 0;
    if (of_keys) {
        pack_keys<P, C::kKeyBits, C::kDim, C::kKeyGroup>(tile, groups.keys, shared.extremes[turn], part, warp);
    } else {
        pack_values<P, C::kValueBits, C::kDim, C::kValueGroups>(tile, groups.values, part, warp, begin, end);
    }
    return clamped_rows;
}

// A head's tokens that are not packed by pages: what the ring holds and what is new up to the first whole group, or
// what follows the last whole one. By one block.
template <class C>
__device__ __forceinline__ void pack_few(PackShared<C>& shared, const WriteArgs& args, const Work& work, bool of_keys,
                                         int head, const Tokens& tokens) {
    const TensorStore& store = of_keys ? args.layer.key : args.layer.value;
    const View& input = of_keys ? args.k : args.v;
    int clamped_rows = 0, turn = 0;
#pragma unroll 1
    for (int64_t page = tokens.begin / kPageTokens; page * kPageTokens < tokens.end; ++page) {
        const int64_t token = page * kPageTokens + threadIdx.x / kWarp * kBlockTokens;
        if (token + kBlockTokens > tokens.begin && token < tokens.end) {
            const int begin = C::kPublished ? static_cast<int>(max(tokens.begin - token, int64_t{0})) : 0;
            const int end =
                C::kPublished ? static_cast<int>(min(tokens.end - token, int64_t{kBlockTokens})) : kBlockTokens;
            const TileRows rows(store, input, head, work.row, work.step, token);
            shared.tiles[threadIdx.x / kWarp].fetch(lane(), [&](int first, int further) {
                return rows.at(min(max(first + further, begin), end - 1));  // no rows but those
            });
            clamped_rows += pack_tile(shared, turn, of_keys, store.rotated(), max(rows.fresh, begin),
                                      store.page(args.layer.block(work.row.sequence, page), head), begin, end);
        }
        turn = (turn + 1) % PackShared<C>::kExtremes;
        __syncwarp();
    }
    count_clamped(args.layer, clamped_rows);
    __syncthreads();
}

// One of `shares` of a head's windows.
struct Share {
    bool of_keys;
    int head, number;
    __device__ __forceinline__ explicit Share(int among_all)
        : of_keys(among_all % 2 == 0), head(among_all / 2 / kWindowShares), number(among_all / 2 % kWindowShares) {}
};
template <class C>
__device__ __forceinline__ void write_windows(const WriteArgs& args, const Work& work, const Share& share, int shares) {
    const TensorStore& store = share.of_keys ? args.layer.key : args.layer.value;
    const View& input = share.of_keys ? args.k : args.v;
    const int head = share.head;
    const int64_t begin = work.step.before.length, end = work.step.after.length, sink = store.windows.sink;
    const int64_t tail = max(begin, sink + moved_tokens(work.step, store).end);
    const int slots = static_cast<int>(store.tail_rows);
    const int warp = share.number * kPackWarps + threadIdx.x / kWarp, warps = shares * kPackWarps;
    const int32_t sequence = work.row.sequence;
    const WindowRows to[2] = {
        {begin, min(end, sink), store.sink_row(sequence, head, 0), static_cast<int>(begin), static_cast<int>(sink)},
        {tail, end, store.tail_row(sequence, head, sink), static_cast<int>((tail - sink) % slots), slots}};
    int clamped_rows = 0;
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
        const WindowRows rows = which == 0 ? to[0] : to[1];
        clamped_rows += store_rows<typename C::P, C::kDim>(rows, input, store.rotated(), head, work, warp, warps);
    }
    count_clamped(args.layer, clamped_rows);
}

// A page of keys or of values, as a warp comes to it.
template <class C>
struct PageTask {
    int index, head;  // pages of a head, keys' and values' apart
    bool of_keys, active;
    const uint8_t* rows;
    int32_t block;

    // Of two that follow each other the first is of keys, or the second if they are `flipped`.
    __device__ __forceinline__ void find(const Work& work, const int32_t* blocks, bool with_keys, bool flipped) {
        const int page = with_keys ? index / 2 : index, token = page * kPageTokens + threadIdx.x / kWarp * kBlockTokens;
        of_keys = with_keys && (index % 2 != 0) == flipped;
        const Pages& part = work.parts[of_keys ? 0 : 1];
        active = page < work.pages && token >= part.begin && token < part.end;
        if (!active) return;
        rows = part.at(head, token);
        block = blocks[page];
    }
};

// Packs this block's share of a row's pages; those of keys only if `with_keys`. Its first is number `number`, and
// others follow gridDim.x apart. A block has keys and values by turns, since they take longer or shorter.
template <class C>
__device__ __forceinline__ void pack_pages(PackShared<C>& shared, const WriteArgs& args, const Work& work,
                                           bool with_keys, int number) {
    const int heads = args.layer.key.heads;
    const int ends = with_keys ? 2 * work.pages : work.pages;
    const int32_t* const blocks = args.layer.table + work.row.sequence * args.layer.table_stride + work.first_page;
    const auto page_bytes = static_cast<uint32_t>(args.layer.key.page_bytes);
    const int index_step = gridDim.x / heads, head_step = gridDim.x % heads;
    const bool flips = index_step % 2 == 0 && head_step == 0;
    bool flipped = false;
    int clamped_rows = 0, turn = 0;
    PageTask<C> task;
    task.index = number / heads, task.head = number % heads;
    task.find(work, blocks, with_keys, flipped);
#pragma unroll 1
    while (task.index < ends) {
        const Pages& part = work.parts[task.of_keys ? 0 : 1];
        if (task.active) shared.tiles[threadIdx.x / kWarp].fetch(lane(), task.rows, part.token_stride);
        PageTask<C> next = task;
        next.index += index_step, next.head += head_step;
        if (next.head >= heads) next.head -= heads, ++next.index;
        flipped = flipped != flips;
        next.find(work, blocks, with_keys, flipped);
        uint8_t* const to = part.pages + uint64_t{page_bytes} * static_cast<uint32_t>(task.block * heads + task.head);
        if (task.active) clamped_rows += pack_tile(shared, turn, task.of_keys, part.rotated, 0, to);
        if (task.of_keys) turn = (turn + 1) % PackShared<C>::kExtremes;
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
    auto& shared = *reinterpret_cast<PackShared<C>*>(memory);
    if (!find_work<C>(args, work)) return;
    const int shares = 2 * args.layer.key.heads * kWindowShares;
#pragma unroll 1
    for (int number = blockIdx.x; number < shares; number += gridDim.x) {
        const Share share(number);
        if (share.number > 0 || (share.of_keys && !with_keys)) continue;
        const Tokens moved = work.moved(share.of_keys, args.layer), fresh = work.fresh(share.of_keys);
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            const Tokens few = i == 0 ? Tokens{moved.begin, fresh.begin} : Tokens{fresh.end, moved.end};
            if (few.begin < few.end) pack_few(shared, args, work, share.of_keys, share.head, few);
        }
    }
    int number = blockIdx.x;
#pragma unroll 1
    for (; number < shares; number += gridDim.x) {
        const Share share(number);
        const bool from_ring = (with_keys || !share.of_keys) &&
                               work.moved(share.of_keys, args.layer).begin < work.fresh(share.of_keys).begin;
        const int count = from_ring ? 1 : kWindowShares;
        if (share.number < count) write_windows<C>(args, work, share, count);
    }
    pack_pages<C>(shared, args, work, with_keys, number - shares);
    __syncthreads();
    arrive(args, work, gridDim.x);
#endif
}

// Pages of keys with query-aware rounding; pack_kernel does the rest. Grid: x pages of heads, z rows of the batch.
template <class P, int BITS, int DIM, int GROUP>
__global__ void __launch_bounds__(AwareShared<P, DIM>::kThreads, DIM > 128 ? 1 : 2)
    pack_aware_kernel(const __grid_constant__ WriteArgs args) {
#if KIVI_FRAGMENT_KERNELS
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ Work work;
    auto& shared = *reinterpret_cast<AwareShared<P, DIM>*>(memory);
    const TensorStore& store = args.layer.key;
    const int head = blockIdx.x % store.heads;
    if (threadIdx.x == 0) {
        RowArg row;
        Step step;
        find_step(args, row, step);
        work.row = row, work.step = step;
    }
    __syncthreads();
    if (!work.step.possible) return;
    const Tokens moved = moved_tokens(work.step, store);
    const int64_t page = moved.begin / kPageTokens + blockIdx.x / store.heads;
    const int64_t token = page * kPageTokens + threadIdx.x / kWarp % kPackWarps * kBlockTokens;
    if (page * kPageTokens >= moved.end) return;
    fetch_tables(shared, args.layer.feedback, head);
    const bool active = token >= moved.begin && token < moved.end;
    const TileRows rows(store, args.k, head, work.row, work.step, token);
    if (active && threadIdx.x < kPackThreads) shared.tiles[threadIdx.x / kWarp].fetch(lane(), rows);
    const int clamped_rows = pack_keys_aware<P, BITS, DIM, GROUP>(
        shared, args.layer.feedback.weights + head * panel_floats(DIM), active, store.rotated(), rows.fresh,
        store.page(args.layer.block(work.row.sequence, page), head));
    count_clamped(args.layer, clamped_rows);
#endif
}

// visit(PackConfig) for a layer with codes; false if there is no kernel for it.
template <class Visit>
bool with_config(const TensorStore& key, const TensorStore& value, const Visit& visit) {
    bool coded = false;
    with_fast_layer(key, value, [&](auto layer) {
        if constexpr (!decltype(layer)::kPlain) coded = true, visit(PackConfig<decltype(layer)>{});
    });
    return coded;
}

// Rows that tiles are fetched from: 16-byte chunks, and strides whose bytes fit a word.
bool plain(const View& view, const TensorStore& store) {
    const auto fits = [](int64_t elements) { return elements >= 0 && elements < int64_t{1} << 30; };
    return view.dtype == store.window_dtype && store.window_dtype != KIVI_F32 && store.order.order == Order::fragment &&
           store.spec().range == KIVI_RANGE_MINMAX && aligned(view) && fits(view.token_stride) &&
           fits(view.head_stride);
}
bool query_aware(const WriteArgs& args) { return args.layer.feedback.order != nullptr; }

// All of the multiprocessor's memory that is not the caller's is for shared memory: as many blocks as launch bounds
// say.
template <class... Args>
void prepare(void (*kernel)(Args...), size_t shared_bytes) {
    prepare_kernel(kernel, shared_bytes, cudaSharedmemCarveoutMaxShared);
}

}  // namespace

void prepare_pack(const Layer& layer) {
    with_config(layer.key, layer.value, [](auto config) {
        using C = decltype(config);
        prepare(pack_aware_kernel<typename C::P, C::kKeyBits, C::kDim, C::kKeyGroup>,
                sizeof(AwareShared<typename C::P, C::kDim>));
        prepare(pack_kernel<C>, sizeof(PackShared<C>));
    });
}

bool pack_serves(const TensorStore& key, const TensorStore& value) {
    return key.spec().range == KIVI_RANGE_MINMAX && value.spec().range == KIVI_RANGE_MINMAX &&
           with_config(key, value, [](auto) {});
}

bool pack_takes(const WriteArgs& args) {
    const Layer& layer = args.layer;
    return plain(args.k, layer.key) && plain(args.v, layer.value) &&
           with_config(layer.key, layer.value, [](auto) {});
}

void pack(const WriteArgs& args, int32_t multiprocessors, Stream stream) {
    const unsigned heads = args.layer.key.heads, rows = args.batch.size;
    const auto pages_of = [](int64_t tokens) { return static_cast<unsigned>(tokens / kPageTokens + 2); };
    const bool with_keys = !query_aware(args);
    with_config(args.layer.key, args.layer.value, [&](auto config) {
        using C = decltype(config);
        if (!with_keys) {
            using Shared = AwareShared<typename C::P, C::kDim>;
            const unsigned pages = pages_of(args.batch.max_count + args.layer.key.tail_rows);
            const auto kernel = pack_aware_kernel<typename C::P, C::kKeyBits, C::kDim, C::kKeyGroup>;
            kernel<<<dim3(heads * pages, 1, rows), Shared::kThreads, sizeof(Shared), stream>>>(args);
        }
        const unsigned slots = multiprocessors * C::kBlocks, share = max(1u, slots / rows);
        const unsigned items = 2 * heads * (pages_of(args.batch.max_count) + kWindowShares);
        // Keys and values go by turns where all blocks go on by pages of all heads. That may cost a few blocks.
        const unsigned turns = share / (2 * heads) * (2 * heads);
        const unsigned blocks = min(items, 8 * turns >= 7 * share ? turns : share);
        pack_kernel<C><<<dim3(blocks, 1, rows), kPackThreads, sizeof(PackShared<C>), stream>>>(args, with_keys);
    });
}

}  // namespace kivi::cuda
