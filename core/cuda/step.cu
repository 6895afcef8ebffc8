// Decode steps: a few new tokens a row on layers with pages in the fragment order or of 16 bits. One launch, let in while
// the kernel before it ends; it needs little more than the time that its loads take. It does not let the next one in before
// its own end: blocks of an attend that find these in their place begin after all others, and all others wait for them.
//
//   every step           a warp has a head's keys or values: their new rows to the windows
//   when borders move    warps have 32 tokens each: from the ring to their pages, as pack.cu packs them
//
// The ring has room for one row more than a tail holds between calls, so tokens go one by one, and groups are packed when
// their last row stands in the ring. What is packed row by row (pages of 16 bits; values of the published schedule) is packed
// by the warp whose it is, and never waits for others.
//
// Compiled without contraction: every code is that of core/format.
#include "cuda/step.h"

#include "cuda/decode_instances.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/device.h"
#include "cuda/pack_nearest.cuh"
#include "cuda/step_rows.cuh"
#include "cuda/write_plan.cuh"

namespace kivi::cuda {
namespace {

// What a kernel is compiled for.
template <bool BF16, int DIM, int KEY_BITS, int VALUE_BITS, int KEY_GROUP, int VALUE_GROUP>
struct StepConfig {
    using P = Pairs<BF16>;
    [[maybe_unused]] static constexpr int kDim = DIM, kKeyBits = KEY_BITS, kValueBits = VALUE_BITS;
    [[maybe_unused]] static constexpr int kKeyGroup = KEY_GROUP, kValueGroups = DIM / VALUE_GROUP;
    static constexpr bool kPlain = KEY_BITS == 16;
    static constexpr int kWarps = DIM > 128 ? 8 : 16, kThreads = kWarps * kWarp;  // packing takes 128 registers, or 256
    static constexpr int kHeads = kWarps / 2;                                     // of a block
};

// A state in few registers: positions are below 2^31.
struct Borders {
    int length, key, value;
    __device__ __forceinline__ explicit Borders(const Span& span)
        : length(static_cast<int>(span.length)),
          key(static_cast<int>(span.key_border)),
          value(static_cast<int>(span.value_border)) {}
    __device__ __forceinline__ Span span() const { return {length, key, value}; }
    __device__ __forceinline__ int tail(const Windows& windows, Part part) const {
        return max(part == Part::key ? key : value, static_cast<int>(windows.sink));
    }
};

// Of a block that packs.
template <class C>
struct StepShared {
    Tile<C::kDim> tiles[C::kWarps];
    union {
        typename CoderOf<typename C::P, C::kKeyBits>::template Keys<C::kDim> keys;
        typename CoderOf<typename C::P, C::kValueBits>::template Values<C::kValueGroups> values;
    } groups[C::kWarps];
    // Of warps whose tokens share groups.
    static constexpr int kGroupWarps = C::kKeyGroup / kBlockTokens;
    typename KeyExtremes<typename C::P, C::kDim>::Shared extremes[kGroupWarps > 1 ? C::kWarps / kGroupWarps : 1];
};

// Packs what the borders of a block's heads have moved over, all of it in the ring; values only if `with_values`.
template <class C>
__device__ __forceinline__ void pack_tiles(StepShared<C>& shared, const Layer& layer, int32_t sequence,
                                           const Borders& before, const Borders& after, bool with_values,
                                           int first_head, int heads) {
    using P = typename C::P;
    const int warp = threadIdx.x / kWarp, lane = kivi::cuda::lane();
    const Windows& windows = layer.key.windows;
    const auto tiles_of = [&](Part part) {
        return (after.tail(windows, part) - before.tail(windows, part)) / kBlockTokens;
    };
    const int key_tiles = tiles_of(Part::key), value_tiles = with_values ? tiles_of(Part::value) : 0;
    const int key_tasks = heads * key_tiles, tasks = key_tasks + heads * value_tiles;
#pragma unroll 1
    for (int first = 0; first < tasks; first += C::kWarps) {
        const int task = first + warp;
        if (task < tasks) {
            const bool of_keys = task < key_tasks;
            const TensorStore& store = of_keys ? layer.key : layer.value;
            const int number = of_keys ? task : task - key_tasks, tiles = of_keys ? key_tiles : value_tiles;
            const int head = first_head + number / tiles;
            const unsigned from = before.tail(windows, store.part) - static_cast<int>(windows.sink) +
                                  number % tiles * kBlockTokens;
            const auto slots = static_cast<unsigned>(store.tail_rows);
            Tile<C::kDim>& tile = shared.tiles[warp];
            const uint8_t* const ring = store.tail_row(sequence, head, windows.sink);
            const unsigned slot = from % slots;
            tile.fetch(lane, [&](int first, int further) {
                const unsigned row = slot + first + further;
                return ring + (row < slots ? row : row - slots) * (2 * C::kDim);
            });
            uint8_t* const part = store.page(layer.block(sequence, from / kPageTokens), head);
            const int block = from % kPageTokens / kBlockTokens;
            if (of_keys) {
                auto& extremes = shared.extremes[StepShared<C>::kGroupWarps > 1 ? warp / StepShared<C>::kGroupWarps : 0];
                pack_keys<P, C::kKeyBits, C::kDim, C::kKeyGroup>(tile, shared.groups[warp].keys, extremes, part, block);
            } else {
                pack_values<P, C::kValueBits, C::kDim, C::kValueGroups>(tile, shared.groups[warp].values, part, block);
            }
        }
        __syncthreads();
    }
}

// A head's keys or values of one sequence, by a warp. What the parameters tell is asked of them again and again: packing
// needs the registers.
template <class C>
struct HeadRows {
    using Row = WarpRow<stripes(C::kDim)>;
    static constexpr int kFetched = 4, kRowBytes = 2 * C::kDim;  // rows at a time

    const WriteArgs& args;
    int item;              // 2 h: keys of head h; 2 h + 1: its values
    int32_t sequence = 0;
    typename Row::Raw raw[kFetched]{};

    template <class T>
    __device__ __forceinline__ T choose(T of_keys, T of_values) const {  // both are read
        return item % 2 == 0 ? of_keys : of_values;
    }
    __device__ __forceinline__ const TensorStore& k() const { return args.layer.key; }
    __device__ __forceinline__ const TensorStore& v() const { return args.layer.value; }

    // Packed row by row.
    __device__ __forceinline__ bool by_rows() const {
        return C::kPlain || choose(false, k().windows.schedule == KIVI_SCHEDULE_PUBLISHED);
    }

    // The caller's row of the first new token; others are stride() bytes apart.
    __device__ __forceinline__ const uint8_t* input(const RowArg& row) const {
        const int64_t first = choose(args.k.origin(row.index, row.offset), args.v.origin(row.index, row.offset)) +
                              item / 2 * choose(args.k.head_stride, args.v.head_stride);
        return static_cast<const uint8_t*>(choose(args.k.data, args.v.data)) + 2 * first;
    }
    __device__ __forceinline__ int64_t stride() const {
        return 2 * choose(args.k.token_stride, args.v.token_stride);
    }

    static __device__ __forceinline__ typename Row::Raw load(const uint8_t* row) {
        typename Row::Raw raw{};
        Row::for_each(C::kDim, [&](int j, int channel) {
            const uint2 four = *reinterpret_cast<const uint2*>(row + 2 * channel);
            raw.words[j].x = four.x, raw.words[j].y = four.y;
        });
        return raw;
    }
    static __device__ __forceinline__ void store(uint8_t* to, const Row& row) {
        Row::for_each(C::kDim, [&](int j, int channel) {
            uint16_t half[kLaneChannels];
#pragma unroll
            for (int i = 0; i < kLaneChannels; ++i) store_element(half, C::P::kType, i, row.x[j][i]);
            *reinterpret_cast<uint2*>(to + 2 * channel) =
                make_uint2(half[0] | static_cast<uint32_t>(half[1]) << 16, half[2] | static_cast<uint32_t>(half[3]) << 16);
        });
    }

    // New tokens from one on, as far as there are so many.
    __device__ __forceinline__ void fetch(const uint8_t* from, int count) {
#pragma unroll
        for (int i = 0; i < kFetched; ++i) {
            if (i < count) raw[i] = load(from + i * stride());
        }
    }

    __device__ __forceinline__ uint8_t* window_row(int position) const {
        const int64_t number = static_cast<int64_t>(sequence) * k().heads + item / 2;
        const int sinks = static_cast<int>(k().windows.sink), slots = static_cast<int>(choose(k().tail_rows, v().tail_rows));
        return position < sinks
                   ? choose(k().sink, v().sink) + (number * sinks + position) * kRowBytes
                   : choose(k().tail, v().tail) +
                         (number * slots + static_cast<unsigned>(position - sinks) % static_cast<unsigned>(slots)) * kRowBytes;
    }

    __device__ __forceinline__ void pack_row(const Row& x, int position) const {
        const unsigned from = position - static_cast<int>(k().windows.sink);
        const int64_t number = static_cast<int64_t>(args.layer.block(sequence, from / kPageTokens)) * k().heads + item / 2;
        uint8_t* const page = k().pages + number * k().page_bytes + choose(k().part_offset, v().part_offset);
        if constexpr (C::kPlain) {
            store(page + from % kPageTokens * kRowBytes, x);
        } else {
            pack_value_row<C::kValueBits, C::kDim, C::kValueGroups>(x, from % kPageTokens, page);
        }
    }

    // The next new token, at a position; tokens from `from` to `to` are packed.
    __device__ __forceinline__ void add(int position, int from, int to) {
        if (by_rows()) {
#pragma unroll 1
            for (; from < min(to, position); ++from) {
                Row x;
                x.set(load(window_row(from)), C::P::kType);
                pack_row(x, from);
            }
        }
        Row x;
        x.set(raw[0], C::P::kType);
        if (choose(k().rotated(), v().rotated()) && round_row(x, C::kDim, true, C::P::kType) && lane() == 0) {
            atomicAdd(args.layer.saturated, 1);
        }
        if (by_rows() && from <= position && position < to) {
            pack_row(x, position);
        } else {
            store(window_row(position), x);
        }
#pragma unroll
        for (int i = 1; i < kFetched; ++i) raw[i - 1] = raw[i];  // registers have no running index
    }
};

// Grid: x shares the heads, y rows of the batch.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) step_kernel(const __grid_constant__ WriteArgs args) {
#if KIVI_FRAGMENT_KERNELS
    const int warp = threadIdx.x / kWarp, first_head = blockIdx.x * C::kHeads;
    const int heads = min(C::kHeads, args.layer.key.heads - first_head);
    const bool busy = warp / 2 < heads, on_device = args.batch.on_device;
    touch_parameters(args, warp, C::kWarps);
    RowArg row{};
    HeadRows<C> rows{args, 2 * first_head + warp};
    const uint8_t* input = nullptr;
    if (!on_device) row = args.batch.rows[blockIdx.y], input = rows.input(row);
    wait_for_earlier_kernels();
    if (on_device) row = row_of(args.batch, blockIdx.y), input = rows.input(row);
    if (row.count == 0) return;
    const Span state = args.layer.spans[row.sequence];
    const int32_t bound = args.layer.bound[row.sequence];
    rows.sequence = row.sequence;
    if (busy) rows.fetch(input, row.count);
    const Step step = plan(args, row, state, bound);
    if (!step.possible) {
        if (threadIdx.x == 0) args.layer.full[row.sequence] = 1;
        return;
    }
    __syncthreads();  // all have read the state
    if (threadIdx.x == 0) move_on(args.layer, row.sequence, step.after, gridDim.x);
    const Windows& windows = args.layer.key.windows;
    const Part part = warp % 2 == 0 ? Part::key : Part::value;
    Borders before(step.before), after(row.count == 1 ? step.after
                                                      : after_append(windows, step.before, step.before.length + 1));
#pragma unroll 1
    for (int token = 0;;) {
        if (busy) rows.add(before.length, before.tail(windows, part), after.tail(windows, part));
        const bool by_rows = windows.schedule == KIVI_SCHEDULE_PUBLISHED;  // values
        const bool packs = !C::kPlain && (after.key != before.key || (!by_rows && after.value != before.value));
        if constexpr (!C::kPlain) {
            if (packs) {
                extern __shared__ __align__(128) uint8_t memory[];
                __syncthreads();
                pack_tiles<C>(*reinterpret_cast<StepShared<C>*>(memory), args.layer, row.sequence, before, after, !by_rows,
                              first_head, heads);
            }
        }
        if (++token == row.count) break;
        if (busy && (packs || token % HeadRows<C>::kFetched == 0)) rows.fetch(rows.input(row) + token * rows.stride(), row.count - token);
        before = after;
        after = Borders(after_append(windows, before.span(), before.length + 1));
    }
#endif
}

template <class C>
constexpr size_t step_bytes() {
    if constexpr (C::kPlain) {
        return 0;
    } else {
        return sizeof(StepShared<C>);
    }
}

// visit(StepConfig) for the layer's kernel: there is one for each spec of decode; false if there is none.
template <class Visit>
bool with_config(const TensorStore& key, const TensorStore& value, const Visit& visit) {
    const kivi_spec& k = key.spec();
    const kivi_spec& v = value.spec();
    const int dim = key.dim, group = v.group == KIVI_GROUP_HEAD ? dim : v.group;
    const bool bf16 = key.window_dtype == KIVI_BF16;
#define KIVI_VISIT_STEP(BF16, DIM, KEY_BITS, VALUE_BITS, KEY_GROUP, VALUE_GROUP, ...)                            \
    if (bf16 == BF16 && dim == DIM && k.bits == KEY_BITS && v.bits == VALUE_BITS &&                              \
        (KEY_BITS == 16 || (k.group == KEY_GROUP && group == VALUE_GROUP))) {                                    \
        visit(StepConfig<BF16, DIM, KEY_BITS, VALUE_BITS, KEY_GROUP, VALUE_GROUP>{});                            \
        return true;                                                                                             \
    }
    KIVI_DECODE_INSTANCES(KIVI_VISIT_STEP)
#undef KIVI_VISIT_STEP
    return false;
}

}  // namespace

bool step_serves(const TensorStore& key, const TensorStore& value) {
    return key.spec().range == KIVI_RANGE_MINMAX && value.spec().range == KIVI_RANGE_MINMAX &&
           with_config(key, value, [](auto) {});
}

void prepare_step(const Layer& layer) {
    with_config(layer.key, layer.value, [](auto config) {
        using C = decltype(config);
        prepare_kernel(step_kernel<C>, step_bytes<C>(), cudaSharedmemCarveoutMaxShared);
    });
}

bool step_takes(const WriteArgs& args) {
    const auto reads = [&](const View& view) { return view.dtype == args.layer.key.window_dtype && aligned(view); };
    return args.layer.steps && args.mode == WriteMode::append && args.batch.max_count <= kStepTokens &&
           args.layer.feedback.order == nullptr && reads(args.k) && reads(args.v) &&
           args.layer.max_tokens < int64_t{1} << 31;
}

void step(const WriteArgs& args, Stream stream) {
    with_config(args.layer.key, args.layer.value, [&](auto config) {
        using C = decltype(config);
        const unsigned shares = (args.layer.key.heads + C::kHeads - 1) / C::kHeads;
        const dim3 grid(shares, static_cast<unsigned>(args.batch.size));
        launch_dependent(step_kernel<C>, Launch{grid, C::kThreads, step_bytes<C>(), stream}, args);
    });
}

}  // namespace kivi::cuda
