// Attention of many query rows over pages in the fragment order, 16-bit windows, and keys and values of the call: what
// FlashAttention-2 (arXiv 2307.08691) does with the tiles of a matrix, with tiles that are dequantised on their way.
//
// A block takes some query rows of one sequence and KV head and walks over its pieces of 64 positions: a bulk copy
// brings the next piece to the stage while all warps multiply this one, whose operands they have made together.
//
//   copy      | piece 0 |        piece 1        |        piece 2        |
//   block               | unpack 0 | multiply 0 | unpack 1 | multiply 1 | ...
//
// Where there are fewer blocks than the GPU has room for, several share the pieces, and a second kernel adds what they
// leave. Lengths are read on the device.
#pragma once
#include "cuda/prefill_nonfinite.cuh"
#include "cuda/prefill_products.cuh"
#include "cuda/prefill_tiles.cuh"

namespace kivi::cuda::prompt {

// What blocks leave of shared rows: [batch row][head][tile][part] of kRows sums, then of kRows rows of dim.
template <class C>
struct Partials {
    Sum* sums;
    float* rows;
    __device__ Partials(const Args& p, int batch_row, int head, int tile, int part) {
        const int64_t items = static_cast<int64_t>(p.attend.batch.size) * p.attend.layer.key.heads * p.tiles;
        const int64_t item = (static_cast<int64_t>(batch_row) * p.attend.layer.key.heads + head) * p.tiles + tile;
        const int64_t slot = item * p.parts + part;
        sums = reinterpret_cast<Sum*>(p.attend.workspace) + slot * C::kRows;
        rows = p.attend.workspace + 2 * items * p.parts * C::kRows + slot * C::kRows * C::kDim;
    }
    // Floats of `blocks` blocks.
    static constexpr int64_t floats(int64_t blocks) { return blocks * C::kRows * (C::kDim + 2); }
};

// Grid: x = part + parts * tile, y = KV head, z = batch row. Later tiles of a prompt see more: they begin first.
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) prefill_kernel(const __grid_constant__ Args p) {
#if defined(__CUDA_ARCH__) && KIVI_FRAGMENT_KERNELS
    extern __shared__ uint4 memory[];
    SharedStorage<C>& shared = *reinterpret_cast<SharedStorage<C>*>(memory);
    const AttendArgs& args = p.attend;
    const Layer& layer = args.layer;
    const int warp = threadIdx.x / 32;
    const int head = blockIdx.y;
    int number;  // of the piece
    {
        const int tile = p.tiles - 1 - blockIdx.x / p.parts, part = blockIdx.x % p.parts;
        const int first_row = tile * C::kRows;
        const RowArg row = row_of(args.batch, blockIdx.z);
        const int rows = min(C::kRows, row.count * ratio(layer) - first_row);
        if (rows <= 0) return;
        // The pieces that any of the rows sees, and this block's share of them.
        const Span span = layer.spans[row.sequence];
        const Walk<C> walk(args, row, span);
        const Query first(args, row, span, head, first_row), last(args, row, span, head, first_row + rows - 1);
        number = walk.number_of(static_cast<int>(first.first));
        const int pieces = last.last < 0 ? 0 : walk.number_of(static_cast<int>(last.last)) + 1 - number;
        if (threadIdx.x == 0) {
            shared.row = row;
            shared.walk = walk;
            shared.visible = Visible(first_row, rows, ratio(layer), walk.length() - (args.k ? 0 : row.count),
                                     args.window_left);
            shared.end = number + pieces * (part + 1) / p.parts;
            shared.rows = rows;
            for (uint64_t& full : shared.full) fast::barrier_init(fast::shared_address(&full));
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        number += pieces * part / p.parts;
    }
    __syncthreads();
    const auto block_of = [&](int number) {
        const Piece piece = shared.walk[number];
        const int slot = piece.position - static_cast<int>(layer.key.windows.sink);
        return piece.kind == Kind::page ? layer.block(shared.row.sequence, slot / kPageTokens) : 0;
    };

    int next_block = 0;  // of the next piece to be fetched
    if (warp == 0) {
        for (int i = 0; i < C::kStages && number + i < shared.end; ++i) {
            fetch(p, shared, i, head, shared.walk[number + i], block_of(number + i));
        }
        next_block = block_of(number + C::kStages);
    }
    // What the queries are multiplied with, and what has been summed, is as the cache stores it or as the caller has it.
    enum class Basis { none, stored, callers } basis = Basis::none;
    State<C> state;
    clear(state, shared);
#pragma unroll 1
    for (int turn = 0;; ++number, ++turn) {
        const bool done = number >= shared.end;
        const Piece piece = shared.walk[number];
        const bool rotated = layer.key.rotated() || layer.value.rotated();
        const Basis wanted = rotated && !done && piece.kind != Kind::fresh ? Basis::stored : Basis::callers;
        if (rarely(basis != wanted)) {
            if (basis == Basis::stored && layer.value.rotated()) rotate_back(state);
            if (!done) load_queries<C>(args, shared, head, wanted == Basis::stored && layer.key.rotated());
            basis = wanted;
        }
        if (done) break;
        const int stage = turn % C::kStages;
        fast::barrier_wait(fast::shared_address(&shared.full[stage]), turn / C::kStages % 2);
        unpack(p, shared, stage, piece);
        __syncthreads();
        if (warp == 0 && number + C::kStages < shared.end) {
            fetch(p, shared, stage, head, shared.walk[number + C::kStages], next_block);
            next_block = block_of(number + C::kStages + 1);
        }
        const bool partly = !shared.visible.whole(piece, C::kTokens);
        if (!C::kBf16 || piece.kind == Kind::page) {
            if (rarely(partly)) set_nonfinite_apart<C, false>(state, shared, piece);
            multiply<C, false>(state, shared, piece, args);
        } else {
            if (rarely(partly)) set_nonfinite_apart<C, C::kBf16>(state, shared, piece);
            multiply<C, C::kBf16>(state, shared, piece, args);
        }
        __syncthreads();
    }

    static_assert(sizeof(Results<C>) <= offsetof(SharedStorage<C>, unit));
    Results<C>& results = *reinterpret_cast<Results<C>*>(memory);
    deposit(state, shared, results);
    __syncthreads();
    constexpr int kStripes = stripes(C::kDim);
    const Partials<C> partials(p, blockIdx.z, head, shared.visible.first_row / C::kRows, blockIdx.x % p.parts);
    for (int r = fresh_warp(); r < shared.rows; r += C::kWarps) {
        WarpRow<kStripes> x;
        Sum sum = no_sum();
        x.clear();
        for (int i = 0; i < C::kTokenWarps; ++i) {
            const float2 own = results.sums[i][r];
            fold(sum, x, {own.x, own.y}, C::kDim,
                 [&](int, int c) { return *reinterpret_cast<const float4*>(&results.rows[i][r][c]); });
        }
        if (p.parts == 1) {
            finish(args, shared.row, Query(args, shared.row, Span{}, head, shared.visible.first_row + r), sum, x, false);
            continue;
        }
        if (lane() == 0) partials.sums[r] = sum;
        x.for_each(C::kDim, [&](int j, int c) {
            float* const to = partials.rows + r * C::kDim + c;
            *reinterpret_cast<float4*>(to) = make_float4(x.x[j][0], x.x[j][1], x.x[j][2], x.x[j][3]);
        });
    }
#endif
}

// Adds the parts of shared rows. Grid: x = query rows of a sequence and KV head, one a warp; y = KV head, z = batch row.
constexpr int kAddThreads = 128;
template <class C>
__global__ void __launch_bounds__(kAddThreads) add_parts_kernel(const __grid_constant__ Args p) {
    const AttendArgs& args = p.attend;
    const RowArg row = row_of(args.batch, blockIdx.z);
    const int number = (blockIdx.x * kAddThreads + threadIdx.x) / kWarp, head = blockIdx.y;
    if (number >= row.count * ratio(args.layer)) return;
    const int tile = number / C::kRows, r = number % C::kRows;
    const auto sum_of = [&](int part) {
        return part < p.parts ? Partials<C>(p, blockIdx.z, head, tile, part).sums[r] : no_sum();
    };
    float top = -infinity();
    for (int first = 0; first < p.parts; first += kWarp) top = fmaxf(top, sum_of(first + lane()).max);
    top = warp_max(top);
    WarpRow<stripes(C::kDim)> x;
    x.clear();
    float total = 0;
    for (int first = 0; first < p.parts; first += kWarp) {
        const Sum own = sum_of(first + lane());
        const float weight = empty(own) ? 0.0f : exp2f(own.max - top);
        total = fmaf(own.sum, weight, total);
#pragma unroll 8
        for (int i = 0; i < min(kWarp, p.parts - first); ++i) {
            const float* const from = Partials<C>(p, blockIdx.z, head, tile, first + i).rows + int64_t{r} * C::kDim;
            const float of_part = __shfl_sync(kAllLanes, weight, i);
            x.for_each(C::kDim, [&](int j, int c) {
                const float4 value = *reinterpret_cast<const float4*>(from + c);
                x.x[j][0] = fmaf(value.x, of_part, x.x[j][0]);
                x.x[j][1] = fmaf(value.y, of_part, x.x[j][1]);
                x.x[j][2] = fmaf(value.z, of_part, x.x[j][2]);
                x.x[j][3] = fmaf(value.w, of_part, x.x[j][3]);
            });
        }
    }
    finish(args, row, Query(args, row, Span{}, head, number), {top, warp_sum(total)}, x, false);
}

}  // namespace kivi::cuda::prompt
