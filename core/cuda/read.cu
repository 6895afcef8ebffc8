// Reading back: rows as attend sees them, and pages to and from the canonical order.
#include <cuda_runtime.h>

#include "cuda/warp_row.cuh"

namespace kivi::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;

__device__ GroupParams params_at(const kivi_spec& spec, const uint8_t* part, int64_t scale, int64_t min) {
    const int32_t dtype = spec.param_dtype == KIVI_F32 ? KIVI_F32 : KIVI_F16;
    return {load_element(part + scale, dtype, 0), load_element(part + min, dtype, 0)};
}

template <class Order, int STRIPES>
__device__ void decode_row(const TensorStore& store, const uint8_t* part, int token, WarpRow<STRIPES>& x) {
    x.clear();
    x.for_each(store.dim, [&](int j, int c) {
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) {
            const GroupParams params = params_at(store.spec(), part, Order::scale(store.order, token, c + i),
                                                 Order::min(store.order, token, c + i));
            x.x[j][i] = decode(Order::code(store.order, part, token, c + i), params);
        }
    });
}

// Grid: x = positions, y = heads; one warp a row. A Hadamard is undone in double and rounded once.
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const __grid_constant__ DequantizeArgs args) {
    const Layer& layer = args.layer;
    const TensorStore& store = layer.part(args.part);
    const int head = blockIdx.y;
    const int64_t position = args.begin + static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    if (position >= args.end) return;
    const Span span = layer.spans[args.sequence];
    const int64_t slot = position - store.windows.sink;
    WarpRow<kMaxStripes> x;
    if (slot < 0 || position >= tail_begin(store.windows, span, store.part)) {
        x.load(store.window_row(args.sequence, head, position), store.window_dtype, 0, store.dim);
    } else {
        const uint8_t* const part = store.page(layer.block(args.sequence, slot / kPageTokens), head);
        const int token = static_cast<int>(slot % kPageTokens);
        if (store.spec().bits == 16) {
            x.load(part + token * store.row_bytes(), store.window_dtype, 0, store.dim);
        } else {
            with_order(store.order, [&](auto order) { decode_row<decltype(order)>(store, part, token, x); });
        }
    }
    const int64_t at = args.to.origin(0, 0) + (position - args.begin) * args.to.token_stride +
                       head * args.to.head_stride;
    if (args.stored_basis || !store.rotated()) {
        x.store(args.to.data, args.to.dtype, at, store.dim);
        return;
    }
    WarpRow<kMaxStripes, double> wide;
#pragma unroll
    for (int j = 0; j < kMaxStripes; ++j) {
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) wide.x[j][i] = x.x[j][i];
    }
    wide.hadamard(store.dim);
    wide.store(args.to.data, args.to.dtype, at, store.dim);
}

// The canonical bytes of some tokens: codes, scales, mins of all groups, one after the other.
struct Canonical {
    int64_t groups, scales, mins, bytes;
    __device__ Canonical(const kivi_spec& spec, int dim, int tokens) {
        const GroupShape shape = group_shape(spec, dim);
        groups = static_cast<int64_t>(tokens / shape.tokens) * shape.blocks_a_row;
        scales = canonical_code_bytes(spec, dim) / kPageTokens * tokens;
        mins = scales + groups * param_bytes(spec);
        bytes = mins + groups * param_bytes(spec);
    }
};

// First element of a group.
__device__ void group_at(const kivi_spec& spec, int dim, int64_t group, int* token, int* channel) {
    const GroupShape shape = group_shape(spec, dim);
    *token = static_cast<int>(group / shape.blocks_a_row) * shape.tokens;
    *channel = static_cast<int>(group % shape.blocks_a_row) * shape.channels;
}

__device__ void copy_bytes(uint8_t* to, const uint8_t* from, int64_t bytes) {
    for (int64_t i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}

// One block. A thread writes whole bytes of whole groups, which are bit streams of their own.
template <class Order>
__device__ void export_groups(const TensorStore& store, const uint8_t* part, int tokens, uint8_t* to) {
    const kivi_spec& spec = store.spec();
    const Canonical at(spec, store.dim, tokens);
    const int size = param_bytes(spec);
    for (int64_t group = threadIdx.x; group < at.groups; group += blockDim.x) {
        int token, channel;
        group_at(spec, store.dim, group, &token, &channel);
        const bool down = spec.axis == KIVI_AXIS_CHANNEL;
        const GroupShape shape = group_shape(spec, store.dim);
        const int elements = down ? shape.tokens : group_channels(shape, store.dim, channel / shape.channels);
        const auto code = [&](int i) {
            return i < elements ? Order::code(store.order, part, down ? token + i : token, down ? channel : channel + i)
                                : 0;
        };
        uint8_t* const stream = to + canonical_place(spec, store.dim, token, channel).stream;
        with_bits(spec.bits, [&](auto bits) {
            for (int byte = 0; byte < group_code_bytes(spec, elements); ++byte) {
                stream[byte] = static_cast<uint8_t>(stream_bits<decltype(bits)::value>(8 * byte, 8, code));
            }
        });
        const uint8_t* const scale = part + Order::scale(store.order, token, channel);
        const uint8_t* const min = part + Order::min(store.order, token, channel);
        for (int i = 0; i < size; ++i) {
            to[at.scales + group * size + i] = scale[i];
            to[at.mins + group * size + i] = min[i];
        }
    }
}

template <class Order>
__device__ void import_groups(const TensorStore& store, uint8_t* part, int tokens, const uint8_t* from) {
    const kivi_spec& spec = store.spec();
    const Canonical at(spec, store.dim, tokens);
    const int size = param_bytes(spec);
    for (int first = 0; first < tokens; first += kSlabTokens) {
        const auto code = [&](int t, int c) {
            const CanonicalPlace place = canonical_place(spec, store.dim, first + t, c);
            return get_code(from + place.stream, spec.bits, place.index);
        };
        const int count = min(kSlabTokens, tokens - first), pieces = Order::pieces(store.order, count);
        with_bits(spec.bits, [&](auto bits) {
            for (int i = threadIdx.x; i < pieces; i += blockDim.x) {
                Order::template write<decltype(bits)::value>(store.order, part, first, count, i, code);
            }
        });
    }
    for (int64_t group = threadIdx.x; group < at.groups; group += blockDim.x) {
        int token, channel;
        group_at(spec, store.dim, group, &token, &channel);
        uint8_t* const scale = part + Order::scale(store.order, token, channel);
        uint8_t* const min = part + Order::min(store.order, token, channel);
        for (int i = 0; i < size; ++i) {
            scale[i] = from[at.scales + group * size + i];
            min[i] = from[at.mins + group * size + i];
        }
    }
}

__global__ void export_kernel(const __grid_constant__ TensorStore store, const uint8_t* part, int32_t tokens,
                              uint8_t* to) {
    if (store.spec().bits == 16) return copy_bytes(to, part, tokens * store.row_bytes());
    with_order(store.order, [&](auto order) { export_groups<decltype(order)>(store, part, tokens, to); });
}

__global__ void import_kernel(const __grid_constant__ TensorStore store, uint8_t* part, int32_t tokens,
                              const uint8_t* from) {
    if (store.spec().bits == 16) return copy_bytes(part, from, tokens * store.row_bytes());
    with_order(store.order, [&](auto order) { import_groups<decltype(order)>(store, part, tokens, from); });
}

}  // namespace

void dequantize(const DequantizeArgs& args, Stream stream) {
    const int64_t rows = args.end - args.begin;
    const dim3 grid(static_cast<unsigned>((rows + kWarps - 1) / kWarps), args.layer.key.heads);
    dequantize_kernel<<<grid, kThreads, 0, stream>>>(args);
}

void export_page(const TensorStore& store, const uint8_t* part, int32_t tokens, uint8_t* to, Stream stream) {
    export_kernel<<<1, 256, 0, stream>>>(store, part, tokens, to);
}

void import_page(const TensorStore& store, uint8_t* part, int32_t tokens, const uint8_t* from, Stream stream) {
    import_kernel<<<1, 256, 0, stream>>>(store, part, tokens, from);
}

}  // namespace kivi::cuda
