// The Hadamard of a tile's rows (format/hadamard.h), by the tile's warp.
#pragma once
#include "cuda/pack_pairs.cuh"
#include "cuda/pack_tile.cuh"

namespace kivi::cuda {

template <int DIM>
constexpr float kHadamardNorm = DIM == 256 ? 0.0625f : DIM == 128 ? 0.08838834764831845f : 0.125f;

// Row `token` of a tile by its warp, with all that format/row.h asks for: true if a number has left the type's range
// and was clamped.
template <class P, int DIM>
__device__ __noinline__ bool transform_any_row(Tile<DIM>& tile, int token) {
    using Row = WarpRow<stripes(DIM)>;
    const auto at = [&](int channel) {
        return reinterpret_cast<uint2*>(tile.chunks + tile.place(token, channel / 8)) + channel / kLaneChannels % 2;
    };
    typename Row::Raw raw{};
    Row::for_each(DIM, [&](int j, int channel) { raw.words[j].x = at(channel)->x, raw.words[j].y = at(channel)->y; });
    Row row;
    row.set(raw, P::kType);
    const bool clamped = round_row(row, DIM, true, P::kType);
    Row::for_each(DIM, [&](int j, int channel) {
        *at(channel) = make_uint2(P::of(row.x[j][0], row.x[j][1]), P::of(row.x[j][2], row.x[j][3]));
    });
    return clamped;
}

// Stages 1, 2, 4 and 8 stay inside blocks of sixteen neighbouring channels, where they are a product with a matrix of
// +-1: two instructions of the tensor cores for sixteen blocks. Of these a lane has, before and after,
//
//   channels 2 c, 2 c + 1, 2 c + 8 and 2 c + 9    c = lane % 4
//   of rows r and r + 8                           r = lane / 4
//
// Rows of head dim 64 are tokens. Of wider heads they are halves of tokens: r + 8 is the upper half of token r. So all
// later stages are between a lane's own numbers, and they go back to where they came from.
//
// The product is the CPU's result if no stage of the CPU rounds: if a block's numbers are multiples of some u, and
// their magnitudes, L together, are at most 2^24 u. A number x of d digits is a multiple of 2^(1 - d) times the power
// of two below it, which is more than |x| / 2. So it is enough that every |x| is at least its share of L, 2^(d - 24) L,
// which may be rounded to d digits. A zero does not pass beside others. A NaN may, but then the row is not plain.
template <bool BF16>
struct BlockLimits {
    static constexpr uint32_t kOne = BF16 ? 0x3F803F80u : 0x3C003C00u;
    static constexpr float kShare = BF16 ? 1.0f / 65536.0f : 1.0f / 8192.0f;
    static constexpr uint32_t kMinusShare = BF16 ? 0xB780B780u : 0x88008800u;
    // Transformed magnitudes of plain rows are below. The CPU divides rows first that have a number beyond 2^118.
    static constexpr float kPlain = BF16 ? 2596148429267413814265248164610048.0f : 65504.0f;  // 2^111
};

// Stages 1, 2, 4 and 8 of sixteen blocks, one after the other. a: as they stand in the tile; x[0]: of row r.
template <class P>
__device__ __forceinline__ void transform_block(const uint32_t (&a)[4], int lane, float (&x)[2][4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float y[4] = {P::low(a[h]), P::high(a[h]), P::low(a[h + 2]), P::high(a[h + 2])};
#pragma unroll
        for (int i = 0; i < 4; i += 2) x[h][i] = y[i] + y[i + 1], x[h][i + 1] = y[i] - y[i + 1];
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const float sign = (lane & step) != 0 ? -1.0f : 1.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int i = 0; i < 4; ++i) x[h][i] = __fmaf_rn(x[h][i], sign, __shfl_xor_sync(kAllLanes, x[h][i], step));
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float left = x[h][i], right = x[h][i + 2];
            x[h][i] = left + right, x[h][i + 2] = left - right;
        }
    }
}

// Transforms rows begin .. end - 1 of a tile where they stand, as they come, and returns how many have left the type's
// range, in every lane. A zero may have another sign than the CPU's: no code and no parameter tells. A function of its
// own: kernels call it from several places.
template <class P, int DIM>
__device__ __noinline__ int transform(Tile<DIM>& tile, int begin, int end) {
    constexpr bool kBf16 = P::kType == KIVI_BF16;
    using Limits = BlockLimits<kBf16>;
    constexpr bool kHalves = DIM > 64;
    constexpr int kTokens = kHalves ? 8 : 16;                  // at a time
    constexpr int kBlocks = (kHalves ? DIM / 2 : DIM) / 16;  // of a row
    constexpr float kNorm = kHadamardNorm<DIM>;
    static_assert(kTokens % Tile<DIM>::kQuarter == 0);
    const int lane = fresh_lane(), column = lane % 4, row = lane / 4;
    // The lane's row of the four matrices that are moved at a time: rows r, rows r + 8, and both of the next chunk.
    const int upper = lane / 8 % 2, chunk = lane / 16;
    const uint32_t first = fast::shared_address(
        tile.chunks + (kHalves ? tile.place(lane % 8, chunk + upper * DIM / 16) : tile.place(lane % 16, chunk)));
    // Signs of the matrix's rows 2 c and 2 c + 1, in column r.
    const uint32_t signs = Limits::kOne ^ (__popc(row & 2 * column) << 15 & 0x8000u) ^
                           static_cast<uint32_t>(__popc(row & (2 * column + 1))) << 31;
    const uint32_t opposite = signs ^ 0x80008000u;
    int clamped_rows = 0;
#pragma unroll 1
    for (int token = 0; token < kBlockTokens; token += kTokens) {
        tile.wait_for_quarter((token + kTokens) / Tile<DIM>::kQuarter - 1);
        const uint32_t at = tile.step_address(first, token, 0);
        const auto place = [&](int block) { return tile.step_address(at, 0, 2 * block); };
        float x[kBlocks][2][4], shares[2] = {};
        uint32_t rounded = 0;  // bits 15 and 31: the last block, the others below
#pragma unroll
        for (int b = 0; b < kBlocks; b += 2) {
            uint32_t a[2][4], larger[4];
#pragma unroll
            for (int i = 0; i < 2; ++i) load_matrices(a[i], place(b + i));
#pragma unroll
            for (int i = 0; i < 4; ++i) larger[i] = P::most(P::magnitudes(a[0][i]), P::magnitudes(a[1][i]));
            float share[4] = {};  // of both blocks, as if each had the larger magnitudes
            fast::mma<kBf16>(share, larger[0], larger[1], larger[2], larger[3], Limits::kMinusShare,
                             Limits::kMinusShare);
            shares[0] += share[0], shares[1] += share[2];
            const uint32_t minus[2] = {P::of(share[0], share[0]), P::of(share[2], share[2])};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32_t left[2];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    left[h] = P::sum(P::least(P::magnitudes(a[i][h]), P::magnitudes(a[i][h + 2])), minus[h]);
                }
                rounded = (rounded >> 1) + ((left[0] | left[1]) & 0x80008000u);
                float y[2][4] = {};
                fast::mma<kBf16>(y[0], a[i][0], a[i][1], a[i][2], a[i][3], signs, signs);
                fast::mma<kBf16>(y[1], a[i][0], a[i][1], a[i][2], a[i][3], signs, opposite);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    x[b + i][h][0] = y[0][2 * h], x[b + i][h][1] = y[0][2 * h + 1];
                    x[b + i][h][2] = y[1][2 * h], x[b + i][h][3] = y[1][2 * h + 1];
                }
            }
        }
        // A row's magnitudes together are at most twice what the shares are of.
        constexpr float kMost = Limits::kPlain / kNorm / 2 * Limits::kShare;
        if (kHalves) shares[0] += shares[1];
        const bool plain = shares[0] > -kMost && (kHalves || shares[1] > -kMost);
        if (!__all_sync(kAllLanes, plain)) {
#pragma unroll 1
            for (int i = max(begin, token); i < min(end, token + kTokens); ++i) {
                clamped_rows += transform_any_row<P>(tile, i);
            }
            continue;
        }
        rounded = __reduce_or_sync(kAllLanes, rounded);
        if (rounded != 0) {
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
                if ((rounded & 0x80008000u >> (kBlocks - 1 - b)) == 0) continue;
                uint32_t a[4];
                load_matrices(a, place(b));
                transform_block<P>(a, lane, x[b]);
            }
        }
#pragma unroll
        for (int step = 1; step < kBlocks; step *= 2) {
#pragma unroll
            for (int i = 0; i < 8 * kBlocks; ++i) {
                const int b = i / 8, h = i / 4 % 2, j = i % 4;
                if ((b & step) != 0) continue;
                const float left = x[b][h][j], right = x[b + step][h][j];
                x[b][h][j] = left + right, x[b + step][h][j] = left - right;
            }
        }
        uint32_t pairs[kBlocks][4];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int h = i % 2, j = i / 2 * 2;
                const auto last = [&](int number) {  // between halves
                    const float left = x[b][0][number], right = x[b][1][number];
                    return !kHalves ? x[b][h][number] : h == 0 ? left + right : left - right;
                };
                pairs[b][i] = P::of(last(j) * kNorm, last(j + 1) * kNorm);
            }
        }
        if (begin > token || end < token + kTokens) {  // other rows stay as they are
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
                uint32_t a[4];
                load_matrices(a, place(b));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int own = token + row + (kHalves ? 0 : i % 2 * 8);
                    if (own < begin || own >= end) pairs[b][i] = a[i];
                }
            }
        }
        __syncwarp();  // all of the rows have been read
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) store_matrices(place(b), pairs[b]);
    }
    __syncwarp();
    return clamped_rows;
}

}  // namespace kivi::cuda
