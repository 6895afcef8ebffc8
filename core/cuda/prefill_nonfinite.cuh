// Values that are not finite, in pieces that some rows do not see all of: 0 times NaN is NaN, so that products would
// carry them to rows whose weights are 0. They are taken out of the operands, and rows that see them become NaN there.
#pragma once
#include "cuda/prefill_products.cuh"
#include "cuda/prefill_tiles.cuh"

namespace kivi::cuda::prompt {

template <bool BF16>
__device__ __forceinline__ uint4 nonfinite_halves(uint4 x) {
    return make_uint4(fast::nonfinite_halves<BF16>(x.x), fast::nonfinite_halves<BF16>(x.y),
                      fast::nonfinite_halves<BF16>(x.z), fast::nonfinite_halves<BF16>(x.w));
}

// By the whole block, between unpack and multiply. BF16: the operands are bf16.
template <class C, bool BF16>
__device__ __forceinline__ void set_nonfinite_apart(State<C>& s, SharedStorage<C>& shared, const Piece& piece) {
    constexpr int kVectors = C::kPieceUnits * C::kSteps * 32;
    constexpr uint32_t kOne = BF16 ? 0x3F80u : 0x3C00u;
    uint4* const values = reinterpret_cast<uint4*>(shared.values);
    uint32_t found = 0;
#pragma unroll 1
    for (int i = fresh_thread(); i < kVectors; i += C::kThreads) {
        const uint4 bad = nonfinite_halves<BF16>(values[i]);
        found |= bad.x | bad.y | bad.z | bad.w;
    }
    if (!__syncthreads_or(static_cast<int>(found != 0))) return;

    // How many such tokens a row sees is a product too: of ones.
    constexpr uint32_t kOnes = kOne | kOne << 16;
    const int lane = fresh_lane(), warp = fresh_warp();
    const int first_row = warp % C::kRowWarps * C::kWarpRows + lane / 4;
#pragma unroll 1
    for (int u = 0; u < C::kUnits; ++u) {
        const int unit = warp / C::kRowWarps * C::kUnits + u;
        uint32_t sees[C::kRowTiles][2][2];  // [row tile][half of the depth][upper rows]
#pragma unroll
        for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const Visible::Range range = seen_by(shared, piece, first_row + 16 * r + 8 * h);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const int token = token_of_column(unit, n, lane % 4);
                    sees[r][n][h] = (range.holds(token) ? kOne : 0u) | (range.holds(token + 1) ? kOne << 16 : 0u);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < C::kSteps; ++j) {
            uint4 b = nonfinite_halves<BF16>(load16(shared.values[unit][j][lane]));
            b = make_uint4(b.x & kOnes, b.y & kOnes, b.z & kOnes, b.w & kOnes);
#pragma unroll
            for (int r = 0; r < C::kRowTiles; ++r) {
                const uint4 a = make_uint4(sees[r][0][0], sees[r][0][1], sees[r][1][0], sees[r][1][1]);
                float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
                mma<BF16>(even, a, b.x, b.y);
                mma<BF16>(odd, a, b.z, b.w);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (even[e] > 0) s.out[r][2 * j][e] = quiet_nan();
                    if (odd[e] > 0) s.out[r][2 * j + 1][e] = quiet_nan();
                }
            }
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = fresh_thread(); i < kVectors; i += C::kThreads) {
        const uint4 bad = nonfinite_halves<BF16>(values[i]), x = values[i];
        values[i] = make_uint4(x.x & ~bad.x, x.y & ~bad.y, x.z & ~bad.z, x.w & ~bad.w);
    }
    __syncthreads();
}

}  // namespace kivi::cuda::prompt
