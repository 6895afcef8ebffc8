// Second moments of the queries, in the stored basis: sums[head] += q q' over the rows' queries of the head's
// group. A block owns a square of the matrix and walks over all queries, a few at a time in shared memory.
#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "cuda/warp_row.cuh"

namespace kivi::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kSquare = 64;   // channels of a block's square
constexpr int kEach = 4;      // a thread owns 4 x 4 of it
constexpr int kQueries = 16;  // at a time

// Grid: x, y = square, z = KV head.
__global__ void __launch_bounds__(kThreads) moments_kernel(const __grid_constant__ MomentArgs args) {
    extern __shared__ float4 memory[];
    float* const rows = reinterpret_cast<float*>(memory);  // [kQueries][dim]
    const TensorStore& key = args.layer.key;
    const int dim = key.dim, head = blockIdx.z, group = args.layer.q_heads / key.heads;
    const int down = blockIdx.y * kSquare + threadIdx.x / (kSquare / kEach) * kEach;
    const int across = blockIdx.x * kSquare + threadIdx.x % (kSquare / kEach) * kEach;
    const bool inside = down < dim && across < dim;
    float sum[kEach][kEach] = {};
    for (int r = 0; r < args.batch.size; ++r) {
        const RowArg row = args.batch.rows[r];  // of the host: kivi_moments_accumulate takes no device arrays
        const int64_t queries = static_cast<int64_t>(row.count) * group;
        for (int64_t begin = 0; begin < queries; begin += kQueries) {
            const int count = static_cast<int>(min(queries - begin, static_cast<int64_t>(kQueries)));
            for (int q = threadIdx.x / kWarp; q < count; q += kWarps) {
                const int64_t token = (begin + q) / group, of = head * group + (begin + q) % group;
                WarpRow<kMaxStripes> x;
                x.load(args.q.data, args.q.dtype,
                       args.q.origin(row.index, row.offset) + token * args.q.token_stride +
                           of * args.q.head_stride,
                       dim);
                if (key.rotated()) x.hadamard(dim);
                x.store(rows + q * dim, KIVI_F32, 0, dim);
            }
            __syncthreads();
            for (int q = 0; inside && q < count; ++q) {
                const float* const x = rows + q * dim;
#pragma unroll
                for (int i = 0; i < kEach; ++i) {
#pragma unroll
                    for (int j = 0; j < kEach; ++j) sum[i][j] = fmaf(x[down + i], x[across + j], sum[i][j]);
                }
            }
            __syncthreads();
        }
    }
    if (!inside) return;
    float* const to = args.sums + static_cast<int64_t>(head) * dim * dim;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) to[static_cast<int64_t>(down + i) * dim + across + j] += sum[i][j];
    }
}

}  // namespace

void accumulate_moments(const MomentArgs& args, Stream stream) {
    const int dim = args.layer.key.dim;
    const unsigned squares = (dim + kSquare - 1) / kSquare;
    const size_t bytes = sizeof(float) * kQueries * dim;
    moments_kernel<<<dim3(squares, squares, args.layer.key.heads), kThreads, bytes, stream>>>(args);
}

}  // namespace kivi::cuda
