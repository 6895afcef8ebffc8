// Attention for every spec: rows are decoded to fp32 in shared memory, 32 positions at a time, and multiplied
// there. One block serves some queries of one KV head. A sequence is cut into chunks (chunks.h), each with a
// softmax of its own; chunks are added in order to groups of eight, groups in order to the whole:
//
//   whole = (c0 + c1 + .. + c7) + (c8 + .. + c15) + ..
//
// Chunks or groups can be blocks of their own, which a second kernel adds, or one block does all of them. The
// arithmetic is the same, so the bits do not depend on which it was.
#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/attend_results.cuh"
#include "cuda/batch.cuh"
#include "cuda/chunks.h"
#include "cuda/device.h"

namespace kivi::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kTile = kSlabTokens;        // positions decoded at a time
constexpr int kGroup = 8;                 // chunks
constexpr int64_t kEnoughBlocks = 264;    // from so many items on, chunks of decode steps are not spread
constexpr int64_t kEnoughTiles = 24;      // nor groups of prompts

// Sizes of a call.
enum class Spread : int32_t { none, chunks, groups };
struct Shape {
    int tiles;   // of queries, for a row of max_count tokens
    int chunks;  // of the longest sequence
    Spread spread;
    __host__ __device__ int parts() const {  // blocks that share one item's keys
        return spread == Spread::none ? 1 : spread == Spread::chunks ? chunks : (chunks + kGroup - 1) / kGroup;
    }
};

// Rows so wide that keys and values take turns in one tile.
constexpr bool one_tile(int stripe_count) { return stripe_count > 2; }

// Wide rows leave shared memory for few queries only.
constexpr int most_queries(int stripe_count) { return stripe_count == 1 ? 16 : stripe_count == 2 ? 8 : 4; }

int queries_a_block(const Layer& layer, int32_t max_count) {
    const int64_t queries = static_cast<int64_t>(max_count) * ratio(layer);
    const int most = most_queries(stripes(max(layer.key.dim, layer.value.dim)));
    return queries <= 4 ? 4 : queries <= 8 ? min(8, most) : most;
}

Shape shape_of(const Layer& layer, int32_t rows, int32_t max_count) {
    const int64_t queries = static_cast<int64_t>(max_count) * ratio(layer);
    const int a_block = queries_a_block(layer, max_count);
    Shape shape;
    shape.tiles = static_cast<int>((queries + a_block - 1) / a_block);
    shape.chunks = chunk_of(layer.max_tokens + max_count) + 1;
    const int64_t items = static_cast<int64_t>(shape.tiles) * rows * layer.key.heads;
    shape.spread = Spread::none;
    if (shape.tiles == 1 && items < kEnoughBlocks && shape.chunks > 1) shape.spread = Spread::chunks;
    if (shape.tiles > 1 && items < kEnoughTiles && shape.chunks > kGroup) shape.spread = Spread::groups;
    return shape;
}

// Partial results: [row][head][tile][part] of QUERIES sums, then of QUERIES rows of value_dim.
struct Partials {
    Sum* sums;
    float* rows;
    __device__ Partials(const AttendArgs& args, const Shape& shape, int queries, int64_t item, int part) {
        const int64_t items = static_cast<int64_t>(args.batch.size) * args.layer.key.heads * shape.tiles;
        const int64_t slot = item * shape.parts() + part;
        sums = reinterpret_cast<Sum*>(args.workspace) + slot * queries;
        rows = args.workspace + (2 * items * shape.parts() + slot * args.layer.value.dim) * queries;
    }
};

// ---- Decoding ----

// Tiles begin at multiples of kTile from the end of the sink window, whatever a query sees of them.
__device__ int64_t tile_begin(int64_t position, int64_t sink) {
    return sink + last_multiple(kTile, position - sink);
}

// Where the run that begins at `position` ends: positions of one tile that are stored alike.
__device__ int64_t run_end(const TensorStore& store, const Span& span, int64_t position, int64_t total) {
    const int64_t sink = store.windows.sink, border = tail_begin(store.windows, span, store.part);
    int64_t end = min(total, tile_begin(position, sink) + kTile);
    for (const int64_t edge : {sink, border, span.length}) {
        if (position < edge) end = min(end, edge);
    }
    return end;
}

// Threads that load something together.
struct Team {
    int thread, threads;
};

// decode() of quantize.h.
__device__ float decode_code(uint32_t code, const GroupParams& params) {
    const float number = __uint_as_float(0x4B000000u | code) - 8388608.0f;  // 2^23: sooner done than a conversion
    return fmaf(number, params.scale, params.min);
}

// Codes of 32 tokens of a channel: token skip becomes row 0 of `to`. Rows that are not wanted go behind the tile.
template <int BITS>
__device__ void decode_slab(const uint8_t* from, const GroupParams& params, int skip, float* to, int stride) {
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(from);
    uint32_t word[BITS + 1];
#pragma unroll
    for (int i = 0; i < BITS; ++i) word[i] = words[i];
    word[BITS] = 0;
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
        const int bit = t * BITS;
        const uint32_t code = __funnelshift_r(word[bit / 32], word[bit / 32 + 1], bit % 32) & ((1u << BITS) - 1);
        to[min(static_cast<unsigned>(t - skip), unsigned{kTile}) * stride] = decode_code(code, params);
    }
}

// Codes of eight channels of a token. Their bytes are aligned like numbers of their size.
template <int BITS>
__device__ void decode_eight(const uint8_t* from, const GroupParams& params, float* to) {
    uint32_t low = 0, high = 0;
    if constexpr (BITS == 2) {
        low = *reinterpret_cast<const uint16_t*>(from);
    } else if constexpr (BITS == 3) {
        low = from[0] | from[1] << 8 | from[2] << 16;
    } else {
        low = *reinterpret_cast<const uint32_t*>(from);
        if constexpr (BITS == 8) high = *reinterpret_cast<const uint32_t*>(from + 4);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int bit = i * BITS;
        to[i] = decode_code((bit < 32 ? low >> bit : high >> (bit - 32)) & ((1u << BITS) - 1), params);
    }
}

__device__ GroupParams load_params(const PageOrder& order, const uint8_t* part, int64_t scale, int64_t min) {
    const int32_t dtype = order.spec.param_dtype == KIVI_F32 ? KIVI_F32 : KIVI_F16;
    return {load_element(part + scale, dtype, 0), load_element(part + min, dtype, 0)};
}

// Tokens first .. first + count - 1 of a page, inside one slab.
__device__ void decode_packed(const TensorStore& store, const uint8_t* part, int first, int count, float* to,
                              int stride, const Team& team) {
    const PageOrder& order = store.order;
    const int bits = order.spec.bits, dim = store.dim;
    if (order.order == Order::fragment) {
        const int skip = first % kTile, block = first - skip;
        const FragmentOrder::BlockParams at(order, block / kBlockTokens);
        with_bits(bits, [&](auto of) {
            for (int i = team.thread; i < FragmentOrder::pieces(order, kTile); i += team.threads) {
                FragmentOrder::read<decltype(of)::value>(order, part, block, i, [&](int t, int c, int code) {
                    if (t < skip || t >= skip + count) return;
                    const int offset = at.offset(t, c);
                    const GroupParams params = load_params(order, part, at.scales + offset, at.mins + offset);
                    to[(t - skip) * stride + c] = decode_code(code, params);
                });
            }
        });
        return;
    }
    const int64_t scales = canonical_code_bytes(order.spec, dim);
    const int64_t mins = scales + group_shape(order.spec, dim).groups * param_bytes(order.spec);
    const int scale_bytes = param_bytes(order.spec);
    if (order.spec.axis == KIVI_AXIS_CHANNEL) {
        const int skip = first % kTile;
        for (int c = team.thread; c < dim; c += team.threads) {
            const CanonicalPlace place = canonical_place(order.spec, dim, first - skip, c);
            const int64_t param = place.group * scale_bytes;
            const GroupParams params = load_params(order, part, scales + param, mins + param);
            const uint8_t* const from = part + place.stream + place.index * bits / 8;
            with_bits(bits, [&](auto of) { decode_slab<decltype(of)::value>(from, params, skip, to + c, stride); });
        }
        return;
    }
    const int eights = dim / 8, groups_a_row = canonical_place(order.spec, dim, 0, dim - 1).group + 1;
    const int shift = order.spec.group == KIVI_GROUP_HEAD ? 31 : 31 - __clz(order.spec.group);
    // Neighbouring threads have neighbouring tokens: their rows begin in different banks.
    for (int i = team.thread; i < kTile * eights; i += team.threads) {
        const int t = i % kTile, c = i / kTile * 8;
        if (t >= count) continue;
        const int param = ((first + t) * groups_a_row + (c >> shift)) * scale_bytes;
        const GroupParams params = load_params(order, part, scales + param, mins + param);
        const uint8_t* const from = part + ((first + t) * eights + c / 8) * bits;
        with_bits(bits, [&](auto of) { decode_eight<decltype(of)::value>(from, params, to + t * stride + c); });
    }
}

// Positions position .. position + count - 1 of one run, to rows of `stride` floats in shared memory.
template <int STRIPES>
__device__ void load_tile(const Layer& layer, const TensorStore& store, const View& fresh, const RowArg& row,
                          const Span& span, int head, int64_t position, int count, float* to, int stride,
                          const Team& team) {
    const int64_t sink = store.windows.sink;
    const bool packed = position >= sink && position < min(tail_begin(store.windows, span, store.part), span.length);
    const int64_t slot = position - sink;
    const uint8_t* part = nullptr;
    if (packed) {
        part = store.page(layer.block(row.sequence, slot / kPageTokens), head);
        if (store.spec().bits != 16) {
            decode_packed(store, part, static_cast<int>(slot % kPageTokens), count, to, stride, team);
            return;
        }
    }
#pragma unroll 1
    for (int t = team.thread / kWarp; t < count; t += team.threads / kWarp) {
        WarpRow<STRIPES> x;
        const void* from;
        int32_t dtype = store.window_dtype;
        int64_t at = 0;
        const bool is_fresh = position >= span.length;
        if (is_fresh) {
            from = fresh.data;
            dtype = fresh.dtype;
            at = fresh.origin(row.index, row.offset) + (position + t - span.length) * fresh.token_stride +
                 head * fresh.head_stride;
        } else if (packed) {
            from = part + (slot % kPageTokens + t) * store.row_bytes();
        } else {
            from = store.window_row(row.sequence, head, position + t);
        }
        x.load(from, dtype, at, store.dim);
        if (is_fresh && store.rotated()) x.hadamard(store.dim);
        x.for_each(store.dim, [&](int j, int c) {
#pragma unroll
            for (int i = 0; i < kLaneChannels; ++i) to[t * stride + c + i] = x.x[j][i];
        });
    }
}

// Positions that a query sees.
struct alignas(16) SeenPositions {
    int64_t first, last;
};

// Shared memory: what queries see, queries, weights of a tile, results of the group and of all, one tile of keys and one of
// values (or one of both, see one_tile). Tiles have one row more, see decode_slab.
struct Shared {
    SeenPositions* seen;
    float *queries, *keys, *values, *weights, *shrink, *group, *whole;
};

constexpr size_t shared_bytes(int key_dim, int value_dim, int queries, int stripe_count) {
    const int widest = key_dim > value_dim ? key_dim : value_dim;
    const int columns = one_tile(stripe_count) ? widest + 1 : key_dim + value_dim + 2;
    return queries * (sizeof(SeenPositions) + (key_dim + 2 * value_dim + kTile + 2) * sizeof(float)) +
           (kTile + 1) * columns * sizeof(float);
}
constexpr size_t kSharedBytes = 99 * 1024;  // of a block, on every GPU from compute capability 8.0 on

// Blocks that a multiprocessor must be able to hold, which limits the registers of a thread: as many as have room in 227 KB
// of shared memory, but for 8 queries of one stripe, which would spill with four.
constexpr int resident_blocks(int queries, int stripe_count) {
    if (stripe_count == 1) return queries == 4 ? 5 : 3;
    return 2;
}

// Grid: x = part + parts * tile, y = KV head, z = row. QUERIES a block; thread c owns
// channels c, c + 128, ... of the result.
template <int QUERIES, int STRIPES>
__global__ void __launch_bounds__(kThreads, resident_blocks(QUERIES, STRIPES))
attend_kernel(const __grid_constant__ AttendArgs args, const __grid_constant__ Shape shape) {
    constexpr int kWarpQueries = QUERIES / kWarps;
    extern __shared__ float4 memory[];
    const Layer& layer = args.layer;
    const int key_dim = layer.key.dim, value_dim = layer.value.dim;
    Shared shared;
    shared.seen = reinterpret_cast<SeenPositions*>(memory);
    shared.queries = reinterpret_cast<float*>(shared.seen + QUERIES);
    shared.group = shared.queries + QUERIES * key_dim;
    shared.whole = shared.group + QUERIES * value_dim;
    shared.weights = shared.whole + QUERIES * value_dim;
    shared.shrink = shared.weights + QUERIES * kTile;
    shared.keys = shared.shrink + 2 * QUERIES;
    shared.values = one_tile(STRIPES) ? shared.keys : shared.keys + (kTile + 1) * (key_dim + 1);

    const RowArg row = row_of(args.batch, blockIdx.z);
    const int tile = blockIdx.x / shape.parts(), part = blockIdx.x % shape.parts();
    const int head = blockIdx.y, warp = threadIdx.x / kWarp;
    const int first_query = tile * QUERIES;
    const int queries = min(QUERIES, row.count * ratio(layer) - first_query);
    if (queries <= 0) return;
    const Span span = layer.spans[row.sequence];
    const int64_t item = (static_cast<int64_t>(blockIdx.z) * gridDim.y + head) * shape.tiles + tile;

    // Positions that any of the block's queries sees.
    const int64_t last = Query(args, row, span, head, first_query + queries - 1).last;
    const int64_t first = Query(args, row, span, head, first_query).first;
    const int64_t total = last + 1, sink = layer.key.windows.sink;
    int chunk = chunk_of(max(first - sink, int64_t{0}));
    int end_chunk = total <= 0 ? chunk : chunk_of(max(total - 1 - sink, int64_t{0})) + 1;
    if (shape.spread != Spread::none) {
        const int size = shape.spread == Spread::chunks ? 1 : kGroup;
        chunk = max(chunk, part * size);
        end_chunk = min(end_chunk, (part + 1) * size);
    }

    for (int q = warp; q < QUERIES; q += kWarps) {
        WarpRow<STRIPES> x;
        x.clear();
        SeenPositions seen{1, 0};
        if (q < queries) {
            const Query query(args, row, span, head, first_query + q);
            seen = {query.first, query.last};
            x.load(args.q.data, args.q.dtype, query.in(args.q, row), key_dim);
            if (layer.key.rotated()) x.hadamard(key_dim);
        }
        x.for_each(key_dim, [&](int j, int c) {
#pragma unroll
            for (int i = 0; i < kLaneChannels; ++i) shared.queries[q * key_dim + c + i] = x.x[j][i];
        });
        if (lane() == 0) shared.seen[q] = seen;
    }
    for (int i = threadIdx.x; i < 2 * QUERIES * value_dim; i += kThreads) shared.group[i] = 0.0f;
    __syncthreads();

    Sum group[kWarpQueries], whole[kWarpQueries];  // of the warp's queries
#pragma unroll
    for (int k = 0; k < kWarpQueries; ++k) group[k] = whole[k] = no_sum();
    // Adds to `to`, whose sums are `sums`, what value(q, c, v) gives with the sums `more`. Factors go through shared
    // memory.
    const auto fold = [&](Sum* sums, const Sum* more, float* to, const auto& value) {
        __syncthreads();
#pragma unroll
        for (int k = 0; k < kWarpQueries; ++k) {
            const int q = warp + k * kWarps;
            const Joint joint = join(sums[k], more[k]);
            if (lane() == 0) {
                shared.shrink[q] = joint.of_first;
                shared.shrink[QUERIES + q] = joint.of_second;
            }
            sums[k] = joint.sum;
        }
        __syncthreads();
#pragma unroll
        for (int q = 0; q < QUERIES; ++q) {
#pragma unroll
            for (int v = 0; v < STRIPES; ++v) {
                const int c = threadIdx.x + v * kThreads;
                if (c >= value_dim) break;
                float& result = to[q * value_dim + c];
                result = add(shared.shrink[q], shared.shrink[QUERIES + q], result, value(q, c, v));
            }
        }
        __syncthreads();
    };

#pragma unroll 1
    for (; chunk < end_chunk; ++chunk) {
        const int64_t chunk_first =
            max(tile_begin(first, sink), chunk == 0 ? int64_t{0} : sink + chunk_begin(chunk));
        const int64_t chunk_end = min(total, sink + chunk_begin(chunk + 1));
        Sum sums[kWarpQueries];
        float acc[QUERIES][STRIPES];
#pragma unroll
        for (int k = 0; k < kWarpQueries; ++k) sums[k] = no_sum();
#pragma unroll
        for (int q = 0; q < QUERIES; ++q) {
#pragma unroll
            for (int v = 0; v < STRIPES; ++v) acc[q][v] = 0.0f;
        }

#pragma unroll 1
        for (int64_t position = chunk_first; position < chunk_end;) {
            const int64_t end = min(chunk_end, min(run_end(layer.key, span, position, total),
                                                   run_end(layer.value, span, position, total)));
            const int count = static_cast<int>(end - position);
            const auto load = [&](bool keys, const Team& team) {
                load_tile<STRIPES>(layer, keys ? layer.key : layer.value, keys ? args.k : args.v, row, span, head,
                                   position, count, keys ? shared.keys : shared.values,
                                   (keys ? key_dim : value_dim) + 1, team);
            };
            const int thread = static_cast<int>(threadIdx.x);
            if constexpr (one_tile(STRIPES)) {
                load(true, {thread, kThreads});
            } else {  // half of the block loads keys, the other half values
                load(thread < kThreads / 2, {thread % (kThreads / 2), kThreads / 2});
            }
            __syncthreads();

            // Scores: lane t has position t, a warp its queries.
            bool hidden = false;
#pragma unroll
            for (int k = 0; k < kWarpQueries; ++k) {
                const int q = warp + k * kWarps;
                const int t = lane();
                float score = -infinity();
                if (q < queries && t < count) {
                    const SeenPositions seen = shared.seen[q];
                    if (position + t >= seen.first && position + t <= seen.last) {
                        const float* const x = shared.keys + t * (key_dim + 1);
                        const float4* const y = reinterpret_cast<const float4*>(shared.queries + q * key_dim);
                        float4 dots = make_float4(0, 0, 0, 0);  // sums that need not wait for each other
#pragma unroll 4
                        for (int c = 0; c < key_dim / 4; ++c) {
                            const float4 part = y[c];
                            dots.x = fmaf(part.x, x[4 * c], dots.x);
                            dots.y = fmaf(part.y, x[4 * c + 1], dots.y);
                            dots.z = fmaf(part.z, x[4 * c + 2], dots.z);
                            dots.w = fmaf(part.w, x[4 * c + 3], dots.w);
                        }
                        const float dot = (dots.x + dots.y) + (dots.z + dots.w);
                        float s = dot * args.scale;
                        if (args.soft_cap > 0) s = args.soft_cap * tanhf(s / args.soft_cap);
                        // A non-finite key must not hide behind exp(-inf) or tanh(inf): [ATTEND-4].
                        score = finite(dot) ? s * kLog2E : quiet_nan();
                    } else {
                        hidden = true;
                    }
                }
                const float max_before = sums[k].max;
                sums[k].max = fmaxf(max_before, warp_max(score));  // fmaxf passes NaN by
                const float weight = score == -infinity() ? 0.0f : exp2f(score - sums[k].max);
                const float shrink = max_before == sums[k].max ? 1.0f : exp2f(max_before - sums[k].max);
                sums[k].sum = fmaf(sums[k].sum, shrink, warp_sum(weight));
                shared.weights[q * kTile + t] = weight;
                if (t == 0) shared.shrink[q] = shrink;
            }
            hidden = __syncthreads_or(hidden);
            if constexpr (one_tile(STRIPES)) {
                load(false, {thread, kThreads});
                __syncthreads();
            }

#pragma unroll
            for (int v = 0; v < STRIPES; ++v) {
                const int c = threadIdx.x + v * kThreads;
                if (c >= value_dim) break;
#pragma unroll
                for (int q = 0; q < QUERIES; ++q) acc[q][v] *= shared.shrink[q];
                const float* const values = shared.values + c;
                int t = 0;
                if (!hidden) {
#pragma unroll QUERIES < 16 ? 2 : 1
                    for (; t + 4 <= count; t += 4) {
                        float x[4];
#pragma unroll
                        for (int i = 0; i < 4; ++i) x[i] = values[(t + i) * (value_dim + 1)];
#pragma unroll
                        for (int q = 0; q < QUERIES; ++q) {
                            const float4 w = *reinterpret_cast<const float4*>(shared.weights + q * kTile + t);
                            acc[q][v] = fmaf(w.x, x[0], acc[q][v]);
                            acc[q][v] = fmaf(w.y, x[1], acc[q][v]);
                            acc[q][v] = fmaf(w.z, x[2], acc[q][v]);
                            acc[q][v] = fmaf(w.w, x[3], acc[q][v]);
                        }
                    }
                }
#pragma unroll 1
                for (; t < count; ++t) {
                    const float x = values[t * (value_dim + 1)];
#pragma unroll
                    for (int q = 0; q < QUERIES; ++q) {
                        const float weight = shared.weights[q * kTile + t];
                        // What a query does not see must not reach it, not even as 0 times infinity.
                        if (!hidden || weight != 0.0f) acc[q][v] = fmaf(weight, x, acc[q][v]);
                    }
                }
            }
            __syncthreads();
            position = end;
        }

        if (shape.spread == Spread::chunks) {  // the only one of this block
            const Partials to(args, shape, QUERIES, item, part);
#pragma unroll
            for (int k = 0; k < kWarpQueries; ++k) {
                if (lane() == 0) to.sums[warp + k * kWarps] = sums[k];
            }
#pragma unroll
            for (int q = 0; q < QUERIES; ++q) {
#pragma unroll
                for (int v = 0; v < STRIPES; ++v) {
                    const int c = threadIdx.x + v * kThreads;
                    if (c < value_dim) to.rows[q * value_dim + c] = acc[q][v];
                }
            }
            return;
        }
        fold(group, sums, shared.group, [&](int q, int, int v) { return acc[q][v]; });
        const bool last_of_group = chunk % kGroup == kGroup - 1 || chunk + 1 == end_chunk;
        if (shape.spread == Spread::groups || !last_of_group) continue;
        fold(whole, group, shared.whole, [&](int q, int c, int) { return shared.group[q * value_dim + c]; });
#pragma unroll
        for (int k = 0; k < kWarpQueries; ++k) group[k] = no_sum();
    }

    if (shape.spread != Spread::none) {  // a group, or a part without chunks
        const Partials to(args, shape, QUERIES, item, part);
#pragma unroll
        for (int k = 0; k < kWarpQueries; ++k) {
            if (lane() == 0) to.sums[warp + k * kWarps] = group[k];
        }
        for (int i = threadIdx.x; i < QUERIES * value_dim; i += kThreads) to.rows[i] = shared.group[i];
        return;
    }
#pragma unroll
    for (int k = 0; k < kWarpQueries; ++k) {
        const int q = warp + k * kWarps;
        if (q >= queries) continue;
        WarpRow<STRIPES> x;
        x.load(shared.whole + q * value_dim, KIVI_F32, 0, value_dim);
        finish(args, row, Query(args, row, span, head, first_query + q), whole[k], x, layer.value.rotated());
    }
}

// Adds the parts of spread queries. Grid: x = tile, y = KV head, z = row; one warp a query.
template <int QUERIES, int STRIPES>
__global__ void __launch_bounds__(kThreads)
add_parts_kernel(const __grid_constant__ AttendArgs args, const __grid_constant__ Shape shape) {
    const RowArg row = row_of(args.batch, blockIdx.z);
    const int head = blockIdx.y, value_dim = args.layer.value.dim;
    const int first_query = blockIdx.x * QUERIES;
    const int queries = min(QUERIES, row.count * ratio(args.layer) - first_query);
    if (queries <= 0) return;
    const Span span = args.layer.spans[row.sequence];
    const int64_t item = (static_cast<int64_t>(blockIdx.z) * gridDim.y + head) * shape.tiles + blockIdx.x;
    const int size = shape.spread == Spread::chunks ? kGroup : 1;  // parts of a group
    for (int q = threadIdx.x / kWarp; q < queries; q += kWarps) {
        WarpRow<STRIPES> whole, group;
        Sum whole_sum = no_sum();
        whole.clear();
        for (int first_part = 0; first_part < shape.parts(); first_part += size) {
            Sum group_sum = no_sum();
            group.clear();
            for (int part = first_part; part < min(first_part + size, shape.parts()); ++part) {
                const Partials from(args, shape, QUERIES, item, part);
                const float* const rows = from.rows + q * value_dim;
                fold(group_sum, group, from.sums[q], value_dim,
                     [&](int, int c) { return *reinterpret_cast<const float4*>(rows + c); });
            }
            fold(whole_sum, whole, group_sum, value_dim, [&](int j, int) {
                return make_float4(group.x[j][0], group.x[j][1], group.x[j][2], group.x[j][3]);
            });
        }
        finish(args, row, Query(args, row, span, head, first_query + q), whole_sum, whole, args.layer.value.rotated());
    }
}

template <int QUERIES, int STRIPES>
void prepare_sizes() {
    constexpr size_t kBytes = shared_bytes(STRIPES * kStripe, STRIPES * kStripe, QUERIES, STRIPES);
    static_assert(kBytes <= kSharedBytes);
    prepare_kernel(attend_kernel<QUERIES, STRIPES>, kBytes);
    prepare_kernel(add_parts_kernel<QUERIES, STRIPES>, 0);
}

template <int QUERIES, int STRIPES>
void launch(const AttendArgs& args, const Shape& shape, Stream stream) {
    const size_t bytes = shared_bytes(args.layer.key.dim, args.layer.value.dim, QUERIES, STRIPES);
    const unsigned y = args.layer.key.heads, z = args.batch.size;
    const unsigned x = shape.tiles * shape.parts();
    attend_kernel<QUERIES, STRIPES><<<dim3(x, y, z), kThreads, bytes, stream>>>(args, shape);
    if (shape.spread == Spread::none) return;
    add_parts_kernel<QUERIES, STRIPES><<<dim3(shape.tiles, y, z), kThreads, 0, stream>>>(args, shape);
}

// visit(QUERIES, STRIPES) as integral constants; at most most_queries of them.
template <class Visit>
void with_sizes(int queries, int stripe_count, const Visit& visit) {
    using std::integral_constant;
    const integral_constant<int, 4> four;
    const integral_constant<int, 8> eight;
    if (stripe_count > 2) return visit(four, four);
    if (stripe_count == 2) {
        const integral_constant<int, 2> two;
        return queries == 4 ? visit(four, two) : visit(eight, two);
    }
    const integral_constant<int, 1> one;
    if (queries == 4) return visit(four, one);
    if (queries == 8) return visit(eight, one);
    return visit(integral_constant<int, 16>{}, one);
}

}  // namespace

void prepare_attend(const Layer& layer) {
    for (int queries : {4, 8, 16}) {
        with_sizes(queries, stripes(max(layer.key.dim, layer.value.dim)),
                   [](auto q, auto s) { prepare_sizes<decltype(q)::value, decltype(s)::value>(); });
    }
}

// Grows with rows and max_count: the largest spread call at or below them, of decode steps or of prompts.
size_t attend_workspace(const Layer& layer, int32_t rows, int32_t max_count) {
    const int queries = queries_a_block(layer, max_count);
    Shape shape = shape_of(layer, rows, max_count);
    const auto bytes = [&](int64_t items, int64_t most, Spread spread) {
        shape.spread = spread;
        return static_cast<size_t>(items < most ? items : most - 1) * shape.parts() * queries * (layer.value.dim + 2) *
               sizeof(float);
    };
    const int64_t heads = static_cast<int64_t>(rows) * layer.key.heads;
    const size_t steps = bytes(heads, kEnoughBlocks, Spread::chunks);
    const size_t prompts = shape.tiles > 1 ? bytes(heads * shape.tiles, kEnoughTiles, Spread::groups) : 0;
    return steps > prompts ? steps : prompts;
}

void attend(const AttendArgs& args, Stream stream) {
    const Shape shape = shape_of(args.layer, args.batch.size, args.batch.max_count);
    const int widest = max(args.layer.key.dim, args.layer.value.dim);
    with_sizes(queries_a_block(args.layer, args.batch.max_count), stripes(widest),
               [&](auto q, auto s) { launch<decltype(q)::value, decltype(s)::value>(args, shape, stream); });
}

}  // namespace kivi::cuda
