// Decode steps: a few new tokens a row on layers with pages in the fragment order or of 16 bits. One launch, let in
// while the kernel before it ends; it needs little more than the time that its loads take. It does not let the next one
// in before its own end: blocks of an attend that find these in their place begin after all others, and all others wait
// for them.
//
// A warp has a head's keys or values, and waits for no other. A token goes to the windows; what it pushes behind a
// border is packed:
//
//   rolling schedule      when it is in the ring, which has room for one row more than a tail holds between calls
//   pages of 16 bits,
//   published values      row by row, before it takes a slot
//
// Compiled without contraction: every code is that of core/format.
#include "cuda/step.h"

#include <cstddef>

#include "cuda/dependent_launch.cuh"
#include "cuda/device.h"
#include "cuda/fast_layer.cuh"
#include "cuda/step_pack.cuh"
#include "cuda/write_plan.cuh"

namespace kivi::cuda {
namespace {

constexpr int kStepWarps = 4, kStepThreads = kStepWarps * kWarp;

// A head's keys or values of one sequence. What the parameters tell is asked of them again and again.
template <class C>
struct HeadRows {
    using P = typename C::P;
    static constexpr int kStripes = stripes(C::kDim), kRowBytes = 2 * C::kDim;
    using Raw = uint2[kStripes];

    const WriteArgs& args;
    int item;  // 2 h: keys of head h; 2 h + 1: its values
    int32_t sequence;

    template <class T>
    __device__ __forceinline__ T choose(T of_keys, T of_values) const {  // without a branch
        return item % 2 == 0 ? of_keys : of_values;
    }
    __device__ __forceinline__ const TensorStore& k() const { return args.layer.key; }
    __device__ __forceinline__ const TensorStore& v() const { return args.layer.value; }

    // Packed row by row.
    __device__ __forceinline__ bool by_rows() const {
        return C::kPlain || choose(false, k().windows.schedule == KIVI_SCHEDULE_PUBLISHED);
    }

    // Where the tail begins at a length, if it began at `before`.
    __device__ __forceinline__ int tail_after(int length, int before) const {
        const Span span = after_append(k().windows, Span{}, length);
        return max(static_cast<int>(choose(span.key_border, span.value_border)), before);
    }

    // The caller's row of a new token.
    __device__ __forceinline__ const uint8_t* input(const RowArg& row, int token) const {
        const int64_t at = choose(args.k.origin(row.index, row.offset), args.v.origin(row.index, row.offset)) +
                           item / 2 * choose(args.k.head_stride, args.v.head_stride) +
                           token * choose(args.k.token_stride, args.v.token_stride);
        return static_cast<const uint8_t*>(choose(args.k.data, args.v.data)) + 2 * at;
    }

    static __device__ __forceinline__ void load(const uint8_t* row, Raw& raw) {
#pragma unroll
        for (int j = 0; j < kStripes; ++j) {
            const int channel = j * kStripe + kLaneChannels * lane();
            raw[j] = channel < C::kDim ? load_two_words(row + 2 * channel) : make_uint2(0, 0);
        }
    }
    static __device__ __forceinline__ void store(uint8_t* row, const Raw& raw) {
#pragma unroll
        for (int j = 0; j < kStripes; ++j) {
            const int channel = j * kStripe + kLaneChannels * lane();
            if (channel < C::kDim) *reinterpret_cast<uint2*>(row + 2 * channel) = raw[j];
        }
    }

    // As windows hold it: transformed, and with the one NaN.
    __device__ __forceinline__ void round(Raw& raw) const {
        WarpRow<kStripes> x;
        typename WarpRow<kStripes>::Raw words;
#pragma unroll
        for (int j = 0; j < kStripes; ++j) words.words[j] = make_uint4(raw[j].x, raw[j].y, 0, 0);
        x.set(words, P::kType);
        if (choose(k().rotated(), v().rotated()) && round_row(x, C::kDim, true, P::kType) && lane() == 0) {
            atomicAdd(args.layer.saturated, 1);
        }
#pragma unroll
        for (int j = 0; j < kStripes; ++j) {
            uint16_t half[kLaneChannels];
#pragma unroll
            for (int i = 0; i < kLaneChannels; ++i) store_element(half, P::kType, i, x.x[j][i]);
            raw[j] = make_uint2(half[0] | static_cast<uint32_t>(half[1]) << 16,
                                half[2] | static_cast<uint32_t>(half[3]) << 16);
        }
    }

    __device__ __forceinline__ int sinks() const { return static_cast<int>(k().windows.sink); }
    __device__ __forceinline__ unsigned slots() const {
        return static_cast<unsigned>(choose(k().tail_rows, v().tail_rows));
    }
    __device__ __forceinline__ int64_t number() const { return static_cast<int64_t>(sequence) * k().heads + item / 2; }
    __device__ __forceinline__ uint8_t* ring() const {
        return choose(k().tail, v().tail) + number() * slots() * kRowBytes;
    }
    __device__ __forceinline__ uint8_t* window_row(int position) const {
        return position < sinks() ? choose(k().sink, v().sink) + (number() * sinks() + position) * kRowBytes
                                  : ring() + static_cast<unsigned>(position - sinks()) % slots() * kRowBytes;
    }
    // Of the page that holds what is `from` tokens behind the sink window.
    __device__ __forceinline__ uint8_t* page(unsigned from) const {
        const int32_t block = __ldcg(args.layer.table + sequence * args.layer.table_stride + from / kPageTokens);
        const int64_t place = static_cast<int64_t>(block) * k().heads + item / 2;
        return k().pages + place * k().page_bytes + choose(k().part_offset, v().part_offset);
    }

    __device__ __forceinline__ void pack_row(const Raw& raw, int position) const {
        const unsigned from = position - sinks();
        if constexpr (C::kPlain) {
            store(page(from) + from % kPageTokens * kRowBytes, raw);
        } else {
            pack_value_row<P, C::kValueBits, C::kDim, C::kValueGroups>(raw, from % kPageTokens, page(from));
        }
    }

    // The next new token, at a position; tokens from `from` to `to` are packed, if row by row.
    __device__ __forceinline__ void add(Raw& raw, int position, int from, int to) const {
        if (by_rows()) {
#pragma unroll 1
            for (; from < min(to, position); ++from) {
                Raw old;
                load(window_row(from), old);
                pack_row(old, from);
            }
        }
        if (by_rows() && from <= position && position < to) {
            round(raw);
            pack_row(raw, position);
        } else {
            keep(raw, position);
        }
    }
    // To a window.
    __device__ __forceinline__ void keep(Raw& raw, int position) const {
        round(raw);
        store(window_row(position), raw);
    }

    // Tokens from `from` to `to`, whole groups, out of the ring.
    template <class Words>
    __device__ __forceinline__ void pack_groups(Words& words, int from, int to) const {
        __syncwarp();  // lanes read what others have stored
#pragma unroll 1
        for (; from < to; from += choose(C::kKeyGroup, kBlockTokens)) {
            const unsigned place = from - sinks(), slots = this->slots(), slot = place % slots;
            const uint8_t* const ring = this->ring();
            const auto row_at = [&](int token) {
                const unsigned row = slot + token;
                return ring + (row < slots ? row : row - slots) * kRowBytes;
            };
            const int block = place % kPageTokens / kBlockTokens;
            if (item % 2 == 0) {
                pack_key_group<P, C::kKeyBits, C::kDim, C::kKeyGroup>(words.keys, row_at, page(place), block);
            } else {
                pack_value_block<P, C::kValueBits, C::kDim, C::kValueGroups>(words.values, row_at, page(place), block);
            }
        }
    }
};

template <class C>
union StepWords {
    CodeWords<C::kKeyBits, C::kDim> keys;
    CodeWords<C::kValueBits, C::kDim> values;
};

// Grid: x shares heads' keys and values, y rows of the batch.
template <class C>
__global__ void __launch_bounds__(kStepThreads, 8) step_kernel(const __grid_constant__ WriteArgs args) {
#if KIVI_FRAGMENT_KERNELS
    touch_parameters<offsetof(WriteArgs, batch) + offsetof(BatchArgs, rows)>(args);
    const int items = 2 * args.layer.key.heads;
    HeadRows<C> rows{args, static_cast<int>(blockIdx.x * kStepWarps + threadIdx.x / kWarp), 0};
    RowArg row{};
    const uint8_t* input = nullptr;
    if (!args.batch.on_device) row = args.batch.rows[blockIdx.y], input = rows.input(row, 0);
    wait_for_earlier_kernels();
    if (args.batch.on_device) row = moving_row_of(args.batch, blockIdx.y), input = rows.input(row, 0);
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
        if (token > 0) HeadRows<C>::load(rows.input(row, token), raw);
        rows.add(raw, length + token, from, to);
        if constexpr (!C::kPlain) {
            __shared__ StepWords<C> words[kStepWarps];
            if (from < to && !rows.by_rows()) rows.pack_groups(words[threadIdx.x / kWarp], from, to);
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
