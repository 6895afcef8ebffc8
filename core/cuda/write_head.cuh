// What append and flush do to a tensor of a head of a row, by one block:
//
//   before   S ... packed ... | tail (ring) ........... | new tokens ..................
//   after    S ... packed ............................................ | tail (ring)
//                             |-- 1: packed from ring and new rows ----|-- 2: stored --|
//
// Slots of the ring are reused by 2, so 1 comes first. Compiled without contraction: every code is that of core/format.
#pragma once
#include <cuda_runtime.h>

#include "cuda/warp_row.cuh"
#include "cuda/write_plan.cuh"

namespace kivi::cuda {

constexpr int kWriteThreads = 128;
constexpr int kWriteWarps = kWriteThreads / kWarp;
constexpr int kChannelsAThread = 4;  // head dims up to 512

static __device__ __noinline__ int encode_exactly(float y, float scale, float min, int bits) {
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

__device__ inline Shared shared_memory(int dim, bool padded) {
    extern __shared__ float4 memory[];
    Shared shared;
    shared.rows = reinterpret_cast<float*>(memory);
    shared.stride = padded ? dim + 1 : dim;
    shared.coders = reinterpret_cast<Coder*>(shared.rows + kSlabTokens * (dim + 1));
    shared.codes = reinterpret_cast<uint8_t*>(shared.coders + dim);
    return shared;
}

inline size_t write_shared_bytes(int dim) {
    return sizeof(float) * kSlabTokens * (dim + 1) + sizeof(Coder) * dim + static_cast<size_t>(kSlabTokens) * dim;
}

__device__ inline void put_param(const kivi_spec& spec, uint8_t* at, float value) {
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

    // Packs units u, u + step, ... of the positions begin .. end - 1, counted from the unit that holds `begin`.
    __device__ void pack(int64_t begin, int64_t end, int first_unit, int unit_step) {
        if (begin >= end) return;
        const int64_t sink = store_.windows.sink;
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

    // Rows that end in the windows: of the new ones those before `sink`, and those from the tail's begin on. Warps of
    // several blocks share them.
    __device__ void store(int first_warp, int warps) {
        const int64_t begin = step_.before.length, end = step_.after.length, sink = store_.windows.sink;
        store_rows(begin, min(end, sink), first_warp, warps);
        store_rows(max(begin, tail_begin(store_.windows, step_.after, store_.part)), end, first_warp, warps);
    }

    __device__ void count_saturated() {
        if (lane() == 0 && saturated_ > 0) atomicAdd(layer_.saturated, saturated_);
    }

  private:
    static __device__ int warp() { return threadIdx.x / kWarp; }

    __device__ void store_rows(int64_t begin, int64_t end, int first_warp, int warps) {
        if (begin >= end) return;
        for_each_row(begin, static_cast<int>(end - begin), first_warp, warps, true,
                     [&](int t, const WarpRow<STRIPES>& x) {
                         x.store(store_.window_row(row_.sequence, head_, begin + t), store_.window_dtype, 0,
                                 dim_);
                     });
    }

    // Calls use(t, x) for the stored rows of positions position + t, t = first, first + step, ... below `count`. Rows
    // are fetched several at a time, so that their latencies overlap. New ones are counted where they saturate and
    // `counted` says so.
    template <class Use>
    __device__ void for_each_row(int64_t position, int count, int first, int step, bool counted, const Use& use) {
        using Raw = typename WarpRow<STRIPES>::Raw;
        constexpr int kFetched = STRIPES == 1 ? 8 : STRIPES == 2 ? 4 : 2;
#pragma unroll 1
        for (int begin = first; begin < count; begin += kFetched * step) {
            Raw raw[kFetched];
#pragma unroll
            for (int i = 0; i < kFetched; ++i) {
                const int t = begin + i * step;
                if (t < count) raw[i] = fetch(position + t);
            }
#pragma unroll 1
            for (int t = begin; t < count && t < begin + kFetched * step; t += step) {
                const bool fresh = position + t >= step_.before.length;
                WarpRow<STRIPES> x;
                x.set(raw[0], fresh ? input_.dtype : store_.window_dtype);
                if (fresh && round_row(x, dim_, store_.rotated(), store_.window_dtype) && counted) ++saturated_;
                use(t, x);
#pragma unroll
                for (int i = 1; i < kFetched; ++i) raw[i - 1] = raw[i];  // registers have no running index
            }
        }
    }

    __device__ typename WarpRow<STRIPES>::Raw fetch(int64_t position) const {
        const int64_t fresh = position - step_.before.length;
        const bool ring = fresh < 0;
        const void* const from = ring ? store_.tail_row(row_.sequence, head_, position) : input_.data;
        return WarpRow<STRIPES>::fetch(from, ring ? store_.window_dtype : input_.dtype,
                                       ring ? 0 : begin_ + fresh * input_.token_stride, dim_);
    }

    // ---- Token axis: one warp a token, parameters by shuffles. 16 bits: a page holds rows as windows do ----

    __device__ void pack_tokens(int64_t position, int first, int count, uint8_t* part) {
        const bool plain = store_.spec().bits == 16;
        for_each_row(position, count, warp(), kWriteWarps, true, [&](int t, const WarpRow<STRIPES>& x) {
            if (plain) {
                x.store(part + (first + t) * store_.row_bytes(), store_.window_dtype, 0, dim_);
            } else {
                pack_token(x, first + t, part, shared_.codes + t * dim_);
            }
        });
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
            for (int i = 0; i < kLaneChannels; ++i) {
                word |= static_cast<uint32_t>(encode_fast(x.x[j][i], coder, spec.bits)) << (8 * i);
            }
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
            const int column = threadIdx.x + k * kWriteThreads;
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
            const int column = threadIdx.x + k * kWriteThreads;
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
        for_each_row(position, kSlabTokens, warp(), kWriteWarps, counted, [&](int t, const WarpRow<STRIPES>& x) {
            float* const row = shared_.rows + t * shared_.stride;
            x.for_each(dim_, [&](int j, int c) {
                if (query_aware_) {
#pragma unroll
                    for (int i = 0; i < kLaneChannels; ++i) row[place[c + i]] = x.x[j][i];
                } else {
                    *reinterpret_cast<float4*>(row + c) = make_float4(x.x[j][0], x.x[j][1], x.x[j][2], x.x[j][3]);
                }
            });
        });
        __syncthreads();
    }

    __device__ void encode_nearest() {
        const int bits = store_.spec().bits;
        for (int c = threadIdx.x; c < dim_; c += kWriteThreads) {
            const Coder coder = shared_.coders[c];
#pragma unroll 4
            for (int t = 0; t < kSlabTokens; ++t) {
                shared_.codes[t * dim_ + c] =
                    static_cast<uint8_t>(encode_fast(shared_.rows[t * shared_.stride + c], coder, bits));
            }
        }
    }

    // format/feedback.h: lane t has token t; panels of eight channels, in coding order, go round the warps.
    //
    //   panel p:  its warp codes it, channel by channel, and leaves errors in place of values
    //             then every warp brings the errors into its own later panels
    //
    // A warp codes its next panel as soon as that one is complete. Every value sees the errors in coding order.
    __device__ void encode_query_aware() {
        const int panels = dim_ / kPanel, warp = threadIdx.x / kWarp;
        float* const row = shared_.rows + lane() * shared_.stride;
        if (warp == 0) encode_panel(0, row);
#pragma unroll 1
        for (int panel = 0; panel + 1 < panels; ++panel) {
            __syncthreads();
            float error[kPanel];
#pragma unroll
            for (int j = 0; j < kPanel; ++j) error[j] = -row[panel * kPanel + j];
            const int next = panel + 1;
            // The panels of this warp after `panel`: next, if it is one, first.
#pragma unroll 1
            for (int later = next + (warp - next % kWriteWarps + kWriteWarps) % kWriteWarps; later < panels;
                 later += kWriteWarps) {
                add_errors(error, panel, later, row);
                if (later == next) encode_panel(next, row);
            }
        }
    }

    __device__ const float4* weights_of(int panel, int j) const {
        return reinterpret_cast<const float4*>(layer_.feedback.weights + head_ * panel_floats(dim_) +
                                               panel_begin(panel)) + 2 * j;
    }

    // y_c = fma(-e_j, W_jc, y_c) for the channels c of panel `later` and the j of panel `panel`.
    __device__ void add_errors(const float* error, int panel, int later, float* row) const {
        float* const to = row + later * kPanel;
        float y[kPanel];
#pragma unroll
        for (int i = 0; i < kPanel; ++i) y[i] = to[i];
        const float4* const weights = weights_of(later, panel * kPanel);
#pragma unroll
        for (int j = 0; j < kPanel; ++j) {
            const float4 a = __ldg(weights + 2 * j), b = __ldg(weights + 2 * j + 1);
            y[0] = __fmaf_rn(error[j], a.x, y[0]), y[1] = __fmaf_rn(error[j], a.y, y[1]);
            y[2] = __fmaf_rn(error[j], a.z, y[2]), y[3] = __fmaf_rn(error[j], a.w, y[3]);
            y[4] = __fmaf_rn(error[j], b.x, y[4]), y[5] = __fmaf_rn(error[j], b.y, y[5]);
            y[6] = __fmaf_rn(error[j], b.z, y[6]), y[7] = __fmaf_rn(error[j], b.w, y[7]);
        }
#pragma unroll
        for (int i = 0; i < kPanel; ++i) to[i] = y[i];
    }

    __device__ void encode_panel(int panel, float* row) const {
        const int bits = store_.spec().bits, begin = panel * kPanel;
        const uint16_t* const order = layer_.feedback.order + head_ * dim_ + begin;
        const float* const weights = reinterpret_cast<const float*>(weights_of(panel, begin));
        float y[kPanel];
#pragma unroll
        for (int i = 0; i < kPanel; ++i) y[i] = row[begin + i];
#pragma unroll
        for (int j = 0; j < kPanel; ++j) {
            const Coder coder = shared_.coders[begin + j];
            const int code = encode_fast(y[j], coder, bits);
            shared_.codes[lane() * dim_ + order[j]] = static_cast<uint8_t>(code);
            // A damaged group passes nothing on.
            const float error = coder.scale == coder.scale ? y[j] - decode(code, {coder.scale, coder.min}) : 0.0f;
            row[begin + j] = error;
#pragma unroll
            for (int i = j + 1; i < kPanel; ++i) y[i] = __fmaf_rn(-error, __ldg(weights + j * kPanel + i), y[i]);
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
        with_bits(store_.spec().bits, [&](auto bits) {
            const int pieces = Order::pieces(store_.order, count);
            for (int i = threadIdx.x; i < pieces; i += kWriteThreads) {
                Order::template write<decltype(bits)::value>(store_.order, part, first, count, i, code);
            }
        });
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

}  // namespace kivi::cuda
