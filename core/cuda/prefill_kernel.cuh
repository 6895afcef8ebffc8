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
#include "cuda/batch.cuh"
#include "cuda/prefill_nonfinite.cuh"
#include "cuda/prefill_partials.cuh"
#include "cuda/prefill_products.cuh"
#include "cuda/prefill_tiles.cuh"

namespace kivi::cuda::prompt {

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
        const int first_row = (p.first_tile + tile) * C::kRows;
        const RowArg row = row_of(args.batch, blockIdx.z);
        const int rows = min(C::kRows, row.count * ratio(layer) - first_row);
        if (rows <= 0) return;
        // The pieces that any of the rows sees, and this block's share of them.
        const Span span = layer.spans[row.sequence];
        const Walk<C> walk(args, row, span, done_before(p, row, span, first_row));
        const Query first(args, row, span, head, first_row), last(args, row, span, head, first_row + rows - 1);
        number = max(walk.number_of(static_cast<int>(first.first)), 0);
        const int pieces = last.last < 0 ? 0 : walk.number_of(static_cast<int>(last.last)) + 1 - number;
        if (threadIdx.x == 0) {
            shared.row = row;
            shared.walk = walk;
            shared.visible = Visible(first_row, rows, ratio(layer), walk.length() - (args.k ? 0 : row.count),
                                     args.window_left);
            shared.begin = number + pieces * part / p.parts;
            shared.end = number + pieces * (part + 1) / p.parts;
            shared.rows = rows;
            shared.has_results = part == 0 && walk.done.packed + walk.done.fresh > 0;
            shared.fresh_begin = walk.fresh_begin();
            const bool rotated = layer.key.rotated() || layer.value.rotated();
            shared.stored_begin = shared.begin - (shared.has_results ? 1 : 0);
            shared.stored_end = rotated ? min(shared.end, shared.fresh_begin) : shared.stored_begin;
            for (uint64_t& full : shared.full) fast::barrier_init(fast::shared_address(&full));
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        number += pieces * part / p.parts;
    }
    __syncthreads();
    // By the first thread, which waits for its copies before it fetches the piece.
    const auto find_block = [&](int number) {
        if (threadIdx.x != 0) return;
        const Piece piece = shared.walk[number];
        const int page = (piece.position - static_cast<int>(layer.key.windows.sink)) / kPageTokens;
        if (!packed_keys<C>(piece)) return;
        fast::copy4(fast::shared_address(&shared.next_block),
                    &layer.table[shared.row.sequence * layer.table_stride + page]);
    };

    const auto fetch_piece = [&](int number, int stage) {
        if (number >= shared.end) return;
        if (rarely(number >= shared.fresh_begin)) {
            fetch_fresh(p, shared, stage, head, shared.walk[number]);
        } else if (warp == 0) {
            fetch(p, shared, stage, head, shared.walk[number], threadIdx.x == 0 ? shared.next_block : 0);
        }
    };

    for (int i = 0; i < C::kStages; ++i) {
        find_block(number + i);
        fast::wait_for_copies();
        fetch_piece(number + i, i);
    }
    find_block(number + C::kStages);
    fast::wait_for_copies();
    __syncthreads();
    // What the queries are multiplied with, and what has been summed, is as the cache stores it or as the caller has it.
    const auto in_stored_basis = [&](int number) {
        return number >= shared.stored_begin && number < shared.stored_end;
    };
    State<C> state;
    clear(state, shared);
    if constexpr (C::kTokenWarps == 1) {
        if (shared.has_results) take_results(state, shared, p, head);
    }
#pragma unroll 1
    for (;; ++number) {
        const bool done = number >= shared.end;
        const Piece piece = shared.walk[number];
        const bool stored_before = in_stored_basis(number - 1), stored = in_stored_basis(number);
        if (rarely(number == shared.begin || stored_before != stored)) {
            if (stored_before && !stored && layer.value.rotated()) rotate_back(state);
            if (!done) load_queries<C>(args, shared, head, stored && layer.key.rotated());
        }
        if (done) break;
        const int turn = number - shared.begin, stage = turn % C::kStages;
        if (piece.kind != Kind::fresh) {  // those come last
            fast::barrier_wait(fast::shared_address(&shared.full[stage]), turn / C::kStages % 2);
        }
        unpack(p, shared, stage, piece);
        __syncthreads();
        fetch_piece(number + C::kStages, stage);
        find_block(number + C::kStages + 1);
        const bool partly = !seen_by_all(shared, piece);
        if (!C::kBf16 || piece.kind == Kind::page) {
            if (rarely(partly)) set_nonfinite_apart<C, false>(state, shared, piece);
            multiply<C, false, false>(state, shared, piece, args);
        } else {
            if (rarely(partly)) set_nonfinite_apart<C, C::kBf16>(state, shared, piece);
            if (C::kPublished && piece.kind == Kind::middle) {
                if constexpr (C::kPublished) multiply<C, false, C::kBf16>(state, shared, piece, args);
            } else {
                multiply<C, C::kBf16, C::kBf16>(state, shared, piece, args);
            }
        }
        fast::wait_for_copies();
        __syncthreads();
    }

    static_assert(sizeof(Results<C>) <= offsetof(SharedStorage<C>, unit));
    Results<C>& results = *reinterpret_cast<Results<C>*>(memory);
    deposit(state, shared, results);
    __syncthreads();
    constexpr int kStripes = stripes(C::kDim);
    const int tile = shared.visible.first_row / C::kRows - p.first_tile, part = blockIdx.x % p.parts;
    const PartialsOf<C> partials(p, args.workspace, p.parts, blockIdx.z, head, tile, part);
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
            finish(args, shared.row, Query(args, shared.row, Span{}, head, shared.visible.first_row + r), sum,
                   x, false);
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
        if (part >= p.parts) return no_sum();
        return PartialsOf<C>(p, args.workspace, p.parts, blockIdx.z, head, tile, part).sums[r];
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
            const PartialsOf<C> partials(p, args.workspace, p.parts, blockIdx.z, head, tile, first + i);
            const float* const from = partials.rows + int64_t{r} * C::kDim;
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
