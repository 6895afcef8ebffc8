// Append and flush. One block works on a tensor of a head of a row:
//
//   before   S ... packed ... | tail (ring) ........... | new tokens ..................
//   after    S ... packed ............................................ | tail (ring)
//                             |-- 1: packed from ring and new rows ----|-- 2: stored --|
//
// Slots of the ring are reused by 2, so 1 comes first: in one block one after the other (few tokens: one
// launch), or in two launches, the first spread over page units (prompts). The last block of a row to finish
// moves the sequence's state on; until then every block sees the state before and comes to the same decision.
//
// Compiled without contraction: every code is that of core/format.
#include <cuda_runtime.h>

#include "cuda/batch.cuh"
#include "cuda/warp_row.cuh"

namespace kivi::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kChannelsAThread = 4;  // head dims up to 512

enum class Stage { all, pack, store };

// What happens to one sequence.
struct Step {
    Span before, after;
    bool possible = false;
};

__device__ Step plan(const WriteArgs& args, const RowArg& row) {
    const Layer& layer = args.layer;
    const Windows& windows = layer.key.windows;
    Step step;
    step.before = layer.spans[row.sequence];
    if (args.mode == WriteMode::append) {
        const int64_t length = step.before.length + row.count;
        step.after = after_append(windows, step.before, length);
        step.possible = length <= layer.max_tokens;
    } else {
        step.after = after_flush(windows, step.before);
        step.possible = true;
    }
    step.possible = step.possible && blocks_of(windows, step.after) <= layer.bound[row.sequence];
    return step;
}

__device__ __noinline__ int encode_exactly(float y, float scale, float min, int bits) {
    return encode(y, GroupParams{scale, min}, bits);
}

// Parameters of a group as they are coded with.
struct Coder {
    float scale, min;
    float inverse;  // 1 / scale
};
__device__ inline Coder coder_of(const GroupParams& params) { return {params.scale, params.min, 1.0f / params.scale}; }

// encode() of format/quantize.h. A product with the reciprocal decides unless it comes near a rounding boundary:
// it differs from the quotient by less than 2^-23 of itself.
__device__ inline int encode_fast(float y, const Coder& coder, int bits) {
    if (!(coder.scale > 0.0f)) return 0;
    const float steps = (y - coder.min) * coder.inverse;
    const float nearest = rintf(steps);
    const bool certain = finite(coder.inverse) && (fabsf(steps - nearest) < 0.499f || fabsf(steps) >= 1024.0f);
    if (!certain) return encode_exactly(y, coder.scale, coder.min, bits);
    return static_cast<int>(fminf(fmaxf(nearest, 0.0f), static_cast<float>((1 << bits) - 1)));
}

// Shared memory of a block: rows of a slab, codes of a slab, parameters of the channels.
struct Shared {
    float* rows;     // [32][stride]
    int stride;      // dim, or dim + 1 where threads run over tokens
    uint8_t* codes;  // [32][dim]
    Coder* coders;   // [dim]; channel axis only
};

__device__ Shared shared_memory(int dim, bool padded) {
    extern __shared__ float4 memory[];
    Shared shared;
    shared.rows = reinterpret_cast<float*>(memory);
    shared.stride = padded ? dim + 1 : dim;
    shared.coders = reinterpret_cast<Coder*>(shared.rows + kSlabTokens * (dim + 1));
    shared.codes = reinterpret_cast<uint8_t*>(shared.coders + dim);
    return shared;
}

size_t shared_bytes(int dim) {
    return sizeof(float) * kSlabTokens * (dim + 1) + sizeof(Coder) * dim + static_cast<size_t>(kSlabTokens) * dim;
}

__device__ void put_param(const kivi_spec& spec, uint8_t* at, float value) {
    store_element(at, spec.param_dtype == KIVI_F32 ? KIVI_F32 : KIVI_F16, 0, value);
}

template <int STRIPES, class Order>
class HeadWriter {
  public:
    __device__ HeadWriter(const WriteArgs& args, const RowArg& row, const Step& step, const TensorStore& store,
                          const View& input, int head)
        : layer_(args.layer),
          row_(row),
          step_(step),
          store_(store),
          input_(input),
          head_(head),
          dim_(store.dim),
          begin_(input.origin(row.index, row.offset) + head * input.head_stride),
          query_aware_(store.part == Part::key && args.layer.feedback.order != nullptr),
          shared_(shared_memory(store.dim, query_aware_)) {}

    // Packs units u, u + step, ... of what moves behind the border, counted from the unit that holds its begin.
    __device__ void pack(int first_unit, int unit_step) {
        const int64_t sink = store_.windows.sink;
        const int64_t begin = tail_begin(store_.windows, step_.before, store_.part);
        const int64_t end = tail_begin(store_.windows, step_.after, store_.part);
        if (begin == end) return;
        const kivi_spec& spec = store_.spec();
        const bool by_channel = spec.bits != 16 && spec.axis == KIVI_AXIS_CHANNEL;
        const int size = by_channel ? spec.group : kSlabTokens;
        for (int64_t u = (begin - sink) / size + first_unit; sink + u * size < end; u += unit_step) {
            const int64_t from = max(begin, sink + u * size), to = min(end, sink + (u + 1) * size);
            const int64_t slot = from - sink;
            uint8_t* const part = store_.page(layer_.block(row_.sequence, slot / kPageTokens), head_);
            const int first = static_cast<int>(slot % kPageTokens), count = static_cast<int>(to - from);
            by_channel ? pack_channels(from, first, count, part) : pack_tokens(from, first, count, part);
        }
    }

    // Rows that end in the windows.
    __device__ void store(int first_row, int row_step) {
        const int64_t begin = step_.before.length, end = step_.after.length;
        const int64_t sink = store_.windows.sink;
        const int64_t tail = max(begin, tail_begin(store_.windows, step_.after, store_.part));
#pragma unroll 1
        for (int64_t position = begin + first_row; position < end; position += row_step) {
            if (position >= sink && position < tail) continue;
            WarpRow<STRIPES> x;
            take(position, x, true);
            x.store(store_.window_row(row_.sequence, head_, position), store_.window_dtype, 0, dim_);
        }
    }

    __device__ void count_saturated() {
        if (lane() == 0 && saturated_ > 0) atomicAdd(layer_.saturated, saturated_);
    }

  private:
    // The stored row of a position, by one warp. A row is counted once: where it first is taken.
    __device__ void take(int64_t position, WarpRow<STRIPES>& x, bool counted) {
        const int64_t fresh = position - step_.before.length;
        if (fresh < 0) {
            x.load(store_.tail_row(row_.sequence, head_, position), store_.window_dtype, 0, dim_);
        } else {
            x.load(input_.data, input_.dtype, begin_ + fresh * input_.token_stride, dim_);
            if (round_row(x, dim_, store_.rotated(), store_.window_dtype) && counted) ++saturated_;
        }
    }

    // ---- Token axis: one warp a token, parameters by shuffles. 16 bits: a page holds rows as windows do ----

    __device__ void pack_tokens(int64_t position, int first, int count, uint8_t* part) {
        const bool plain = store_.spec().bits == 16;
#pragma unroll 1
        for (int t = threadIdx.x / kWarp; t < count; t += kWarps) {
            WarpRow<STRIPES> x;
            take(position + t, x, true);
            if (plain) {
                x.store(part + (first + t) * store_.row_bytes(), store_.window_dtype, 0, dim_);
            } else {
                pack_token(x, first + t, part, shared_.codes + t * dim_);
            }
        }
        if (plain) return;
        __syncthreads();
        write_codes(first, count, part);
        __syncthreads();
    }

    __device__ void pack_token(const WarpRow<STRIPES>& x, int token, uint8_t* part, uint8_t* codes) {
        const kivi_spec& spec = store_.spec();
        const int group = group_shape(spec, dim_).channels;
        const bool whole = group > kStripe || (spec.group == KIVI_GROUP_HEAD);
        const int lanes = whole ? kWarp : group / kLaneChannels;
        float low[STRIPES], high[STRIPES];
        bool good[STRIPES];
#pragma unroll
        for (int j = 0; j < STRIPES; ++j) {
            low[j] = __uint_as_float(0x7F800000u), high[j] = -low[j];
            good[j] = true;
            if (x.channel(j) < dim_) {
#pragma unroll
                for (int i = 0; i < kLaneChannels; ++i) {
                    good[j] = good[j] && finite(x.x[j][i]);
                    low[j] = fminf(low[j], x.x[j][i]);
                    high[j] = fmaxf(high[j], x.x[j][i]);
                }
            }
            for (int step = 1; step < lanes; step *= 2) {
                low[j] = fminf(low[j], __shfl_xor_sync(kAllLanes, low[j], step));
                high[j] = fmaxf(high[j], __shfl_xor_sync(kAllLanes, high[j], step));
                good[j] = __shfl_xor_sync(kAllLanes, static_cast<int>(good[j]), step) != 0 && good[j];
            }
        }
        if (whole) {
#pragma unroll
            for (int j = 1; j < STRIPES; ++j) {
                low[0] = fminf(low[0], low[j]);
                high[0] = fmaxf(high[0], high[j]);
                good[0] = good[0] && good[j];
            }
        }
        x.for_each(dim_, [&](int j, int c) {
            const float least = whole ? low[0] : low[j], most = whole ? high[0] : high[j];
            const GroupParams params =
                (whole ? good[0] : good[j]) ? params_of_extremes(spec, least, most) : damaged_params();
            const Coder coder = coder_of(params);
            uint32_t word = 0;
#pragma unroll
            for (int i = 0; i < kLaneChannels; ++i) word |= static_cast<uint32_t>(encode_fast(x.x[j][i], coder, spec.bits)) << (8 * i);
            *reinterpret_cast<uint32_t*>(codes + c) = word;
            if (c % group == 0) put_params(part, token, c, params);
        });
    }

    // ---- Channel axis: a slab of rows in shared memory, then one thread a channel ----

    // Two passes over the slabs of a unit: extremes, then codes. A lone slab stays in shared memory between them.
    __device__ void pack_channels(int64_t position, int first, int count, uint8_t* part) {
        float low[kChannelsAThread], high[kChannelsAThread];
        bool good[kChannelsAThread];
#pragma unroll
        for (int k = 0; k < kChannelsAThread; ++k) {
            low[k] = __uint_as_float(0x7F800000u), high[k] = -low[k];
            good[k] = true;
        }
        const int slabs = count / kSlabTokens;
#pragma unroll 1
        for (int turn = 0; turn < 2 * slabs; ++turn) {
            const bool coding = turn >= slabs;
            const int slab = (coding ? turn - slabs : turn) * kSlabTokens;
            if (!coding || slabs > 1) load_slab(position + slab, !coding);
            if (!coding) {
                add_extremes(low, high, good);
                if (turn + 1 == slabs) set_params(low, high, good, first, part);
                __syncthreads();
                continue;
            }
            query_aware_ ? encode_query_aware() : encode_nearest();
            __syncthreads();
            write_codes(first + slab, kSlabTokens, part);
            __syncthreads();
        }
    }

    __device__ void add_extremes(float* low, float* high, bool* good) const {
#pragma unroll
        for (int k = 0; k < kChannelsAThread; ++k) {
            const int column = threadIdx.x + k * kThreads;
            if (column >= dim_) break;
#pragma unroll 8
            for (int t = 0; t < kSlabTokens; ++t) {
                const float x = shared_.rows[t * shared_.stride + column];
                good[k] = good[k] && finite(x);
                low[k] = fminf(low[k], x);
                high[k] = fmaxf(high[k], x);
            }
        }
    }

    __device__ void set_params(const float* low, const float* high, const bool* good, int first, uint8_t* part) {
#pragma unroll
        for (int k = 0; k < kChannelsAThread; ++k) {
            const int column = threadIdx.x + k * kThreads;
            if (column >= dim_) break;
            const GroupParams params =
                good[k] ? params_of_extremes(store_.spec(), low[k], high[k]) : damaged_params();
            shared_.coders[column] = coder_of(params);
            put_params(part, first, channel_of(column), params);
        }
    }

    // Columns are channels, in coding order where rounding is query-aware.
    __device__ int channel_of(int column) const {
        return query_aware_ ? layer_.feedback.order[head_ * dim_ + column] : column;
    }

    __device__ void load_slab(int64_t position, bool counted) {
        const uint16_t* const place = query_aware_ ? layer_.feedback.place + head_ * dim_ : nullptr;
#pragma unroll 1
        for (int t = threadIdx.x / kWarp; t < kSlabTokens; t += kWarps) {
            WarpRow<STRIPES> x;
            take(position + t, x, counted);
            float* const row = shared_.rows + t * shared_.stride;
            x.for_each(dim_, [&](int j, int c) {
                if (query_aware_) {
#pragma unroll
                    for (int i = 0; i < kLaneChannels; ++i) row[place[c + i]] = x.x[j][i];
                } else {
                    *reinterpret_cast<float4*>(row + c) = make_float4(x.x[j][0], x.x[j][1], x.x[j][2], x.x[j][3]);
                }
            });
        }
        __syncthreads();
    }

    __device__ void encode_nearest() {
        const int bits = store_.spec().bits;
        for (int c = threadIdx.x; c < dim_; c += kThreads) {
            const Coder coder = shared_.coders[c];
#pragma unroll 4
            for (int t = 0; t < kSlabTokens; ++t) {
                shared_.codes[t * dim_ + c] = static_cast<uint8_t>(encode_fast(shared_.rows[t * shared_.stride + c], coder, bits));
            }
        }
    }

    // format/feedback.h: one thread a token, channels in coding order, panel by panel. Finished channels leave
    // their error in place of their value.
    __device__ void encode_query_aware() {
        const int t = threadIdx.x;
        if (t >= kSlabTokens) return;
        const int bits = store_.spec().bits;
        float* const row = shared_.rows + t * shared_.stride;
        const float* const head_weights = layer_.feedback.weights + head_ * panel_floats(dim_);
        const uint16_t* const order = layer_.feedback.order + head_ * dim_;
        for (int panel = 0; panel < dim_ / kPanel; ++panel) {
            const float4* weights = reinterpret_cast<const float4*>(head_weights + panel_begin(panel));
            const int begin = panel * kPanel;
            float y[kPanel];
#pragma unroll
            for (int i = 0; i < kPanel; ++i) y[i] = row[begin + i];
            for (int j = 0; j < begin; ++j, weights += 2) {
                const float error = -row[j];
                const float4 a = __ldg(weights), b = __ldg(weights + 1);
                y[0] = __fmaf_rn(error, a.x, y[0]), y[1] = __fmaf_rn(error, a.y, y[1]);
                y[2] = __fmaf_rn(error, a.z, y[2]), y[3] = __fmaf_rn(error, a.w, y[3]);
                y[4] = __fmaf_rn(error, b.x, y[4]), y[5] = __fmaf_rn(error, b.y, y[5]);
                y[6] = __fmaf_rn(error, b.z, y[6]), y[7] = __fmaf_rn(error, b.w, y[7]);
            }
            const float* const own = reinterpret_cast<const float*>(weights);
#pragma unroll
            for (int j = 0; j < kPanel; ++j) {
                const Coder coder = shared_.coders[begin + j];
                const int code = encode_fast(y[j], coder, bits);
                shared_.codes[t * dim_ + order[begin + j]] = static_cast<uint8_t>(code);
                // A damaged group passes nothing on.
                const float error = coder.scale == coder.scale ? y[j] - decode(code, {coder.scale, coder.min}) : 0.0f;
                row[begin + j] = error;
#pragma unroll
                for (int i = j + 1; i < kPanel; ++i) y[i] = __fmaf_rn(-error, __ldg(own + j * kPanel + i), y[i]);
            }
        }
    }

    // ---- Pages ----

    __device__ void put_params(uint8_t* part, int token, int channel, const GroupParams& params) {
        put_param(store_.spec(), part + Order::scale(store_.order, token, channel), params.scale);
        put_param(store_.spec(), part + Order::min(store_.order, token, channel), params.min);
    }

    __device__ void write_codes(int first, int count, uint8_t* part) {
        const uint8_t* const codes = shared_.codes;
        const int dim = dim_;
        const auto code = [=](int t, int c) { return codes[t * dim + c]; };
        const int pieces = Order::pieces(store_.order, count);
        for (int i = threadIdx.x; i < pieces; i += kThreads) Order::write(store_.order, part, first, i, code);
    }

    const Layer& layer_;
    const RowArg row_;
    const Step& step_;
    const TensorStore& store_;
    const View& input_;
    const int head_;
    const int dim_;
    const int64_t begin_;  // element of the head's first new token
    const bool query_aware_;
    const Shared shared_;
    unsigned saturated_ = 0;  // of this warp
};

// Grid: x splits units (pack) or rows (store), y head and tensor, z rows of the batch.
template <int STRIPES, Stage STAGE>
__global__ void __launch_bounds__(kThreads) write_kernel(const __grid_constant__ WriteArgs args) {
    const RowArg row = row_of(args.batch, blockIdx.z);
    if (row.count == 0) return;
    const Step step = plan(args, row);
    if (!step.possible) {
        if (threadIdx.x == 0) args.layer.full[row.sequence] = 1;
        return;
    }
    const int heads = args.layer.key.heads;
    const int head = blockIdx.y % heads;
    const bool key = blockIdx.y < heads;
    const TensorStore& store = key ? args.layer.key : args.layer.value;
    with_order(store.order, [&](auto order) {
        HeadWriter<STRIPES, decltype(order)> writer(args, row, step, store, key ? args.k : args.v, head);
        if (STAGE != Stage::store) writer.pack(blockIdx.x, gridDim.x);
        if (STAGE == Stage::all) __syncthreads();
        if (STAGE != Stage::pack) writer.store(blockIdx.x * kWarps + threadIdx.x / kWarp, gridDim.x * kWarps);
        writer.count_saturated();
    });
    if (STAGE == Stage::pack) return;
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    uint32_t* const arrivals = args.layer.arrivals + row.sequence;
    if (atomicAdd(arrivals, 1) + 1 == gridDim.x * gridDim.y) {
        *arrivals = 0;
        args.layer.spans[row.sequence] = step.after;
    }
}

// From so many new tokens a row on, packing is spread over units.
constexpr int kPromptTokens = 17;

template <int STRIPES>
void prepare_stripes() {
    const int bytes = static_cast<int>(shared_bytes(STRIPES * kStripe));
    cudaFuncSetAttribute(write_kernel<STRIPES, Stage::all>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    cudaFuncSetAttribute(write_kernel<STRIPES, Stage::pack>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

template <int STRIPES>
void write_stripes(const WriteArgs& args, Stream stream) {
    const TensorStore& key = args.layer.key;
    const TensorStore& value = args.layer.value;
    const unsigned y = 2 * key.heads, z = args.batch.size;
    const size_t bytes = shared_bytes(max(key.dim, value.dim));
    if (args.mode == WriteMode::flush || args.batch.max_count < kPromptTokens) {
        write_kernel<STRIPES, Stage::all><<<dim3(1, y, z), kThreads, bytes, stream>>>(args);
        return;
    }
    const int64_t most_packed = args.batch.max_count + max(key.tail_rows, value.tail_rows);
    const unsigned units = static_cast<unsigned>(most_packed / kSlabTokens + 2);
    const int64_t most_stored = key.windows.sink + max(key.tail_rows, value.tail_rows);
    const unsigned stores = static_cast<unsigned>(most_stored < 8 * kWarps ? most_stored / kWarps + 1 : 8);
    write_kernel<STRIPES, Stage::pack><<<dim3(units, y, z), kThreads, bytes, stream>>>(args);
    write_kernel<STRIPES, Stage::store><<<dim3(stores, y, z), kThreads, 0, stream>>>(args);
}

}  // namespace

void prepare_write() {
    prepare_stripes<1>();
    prepare_stripes<2>();
    prepare_stripes<4>();
}

void write(const WriteArgs& args, Stream stream) {
    switch (stripes(max(args.layer.key.dim, args.layer.value.dim))) {
        case 1: return write_stripes<1>(args, stream);
        case 2: return write_stripes<2>(args, stream);
        default: return write_stripes<4>(args, stream);
    }
}

}  // namespace kivi::cuda
