// Scores from plain rows and sums of plain rows: windows, 16-bit pages, fresh tokens, decoded tiles.
#if defined(KIVI_CPU_KERNELS_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_KERNELS_ROWS_INL_H_
#undef KIVI_CPU_KERNELS_ROWS_INL_H_
#else
#define KIVI_CPU_KERNELS_ROWS_INL_H_
#endif

#include <algorithm>

#include "cpu/kernels_common-inl.h"

#if HWY_TARGET != HWY_SCALAR  // see kernels.h: processors without vectors take the plain path
HWY_BEFORE_NAMESPACE();
namespace kivi::cpu::HWY_NAMESPACE {

// Cache lines that token t of a run uses up.
HWY_INLINE int LinesOf(int64_t row_bytes, int t) {
    return static_cast<int>((t + 1) * row_bytes / 64 - t * row_bytes / 64);
}

constexpr int kScoreTokens = 4;               // tokens of a tile: Reduce4 adds the lanes of each
constexpr int kMixVectors = N == 16 ? 4 : 2;  // of channels, whose sums stay in registers

// Scores of kScoreTokens tokens and R query rows.
template <int R, class Load>
HWY_INLINE void ScoreTile(const uint8_t* const* rows, int dim, const float* HWY_RESTRICT q, int q_stride, int tokens,
                          float* HWY_RESTRICT s) {
    const DF d;
    VF acc[R][kScoreTokens];
    HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
        HWY_UNROLL(4) for (int i = 0; i < kScoreTokens; ++i) acc[r][i] = hn::Zero(d);
    }
    const Load load;
    for (int c = 0; c < dim; c += N) {
        VF x[kScoreTokens];
        HWY_UNROLL(4) for (int i = 0; i < kScoreTokens; ++i) x[i] = load(rows[i], c);
        HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
            const VF y = hn::LoadU(d, q + r * q_stride + c);
            HWY_UNROLL(4) for (int i = 0; i < kScoreTokens; ++i) acc[r][i] = hn::MulAdd(x[i], y, acc[r][i]);
        }
    }
    HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
        float* to = s + r * kPageTokens;
        if (tokens == kScoreTokens) {
            Reduce4(AddLanes(), acc[r][0], acc[r][1], acc[r][2], acc[r][3], to);
        } else {
            float sums[kScoreTokens];
            Reduce4(AddLanes(), acc[r][0], acc[r][1], acc[r][2], acc[r][3], sums);
            for (int i = 0; i < tokens; ++i) to[i] = sums[i];
        }
    }
}

template <class Load>
void ScoreRowsOf(const RowRun& run, int count, const float* HWY_RESTRICT q, int q_stride, int rows,
                 float* HWY_RESTRICT s, Ahead& ahead) {
    const int64_t row_bytes = run.dim * static_cast<int64_t>(run.dtype == KIVI_F32 ? 4 : 2);
    for (int t = 0; t < count; t += kScoreTokens) {
        const int tokens = std::min(kScoreTokens, count - t);
        const uint8_t* row[kScoreTokens];
        for (int i = 0; i < kScoreTokens; ++i) row[i] = run.data + (t + std::min(i, tokens - 1)) * run.stride;
        for (int i = 0; i < tokens; ++i) ahead.step(LinesOf(row_bytes, t + i));
        ForRowBlocks<N == 16 ? 4 : 2>(rows, [&](int r, auto block) HWY_ATTR {
            ScoreTile<block, Load>(row, run.dim, q + r * q_stride, q_stride, tokens, s + r * kPageTokens + t);
        });
    }
}

// V vectors of channels from c on, R query rows, all tokens.
template <int R, int V, class Load>
HWY_INLINE void MixTile(const RowRun& run, int count, int c, const float* HWY_RESTRICT p, float* const* acc,
                        int64_t ahead_bytes, Ahead& ahead) {
    const DF d;
    const Load load;
    VF sum[R][V];
    HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
        HWY_UNROLL(4) for (int i = 0; i < V; ++i) sum[r][i] = hn::LoadU(d, acc[r] + c + i * N);
    }
    const uint8_t* row = run.data;
    for (int t = 0; t < count; ++t, row += run.stride) {
        if (ahead_bytes > 0) ahead.step(LinesOf(ahead_bytes, t));
        VF x[V];
        HWY_UNROLL(4) for (int i = 0; i < V; ++i) x[i] = load(row, c + i * N);
        HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
            const VF weight = hn::Set(d, p[r * kPageTokens + t]);
            HWY_UNROLL(4) for (int i = 0; i < V; ++i) sum[r][i] = hn::MulAdd(x[i], weight, sum[r][i]);
        }
    }
    HWY_UNROLL(4) for (int r = 0; r < R; ++r) {
        HWY_UNROLL(4) for (int i = 0; i < V; ++i) hn::StoreU(sum[r][i], d, acc[r] + c + i * N);
    }
}

template <int V, class Load>
HWY_INLINE void MixChannels(const RowRun& run, int count, int c, const float* HWY_RESTRICT p, int rows,
                            float* const* acc, int64_t ahead_bytes, Ahead& ahead) {
    ForRowBlocks(rows, [&](int r, auto block) HWY_ATTR {
        MixTile<block, V, Load>(run, count, c, p + r * kPageTokens, acc + r, r == 0 ? ahead_bytes : 0, ahead);
    });
}

template <class Load>
void MixRowsOf(const RowRun& run, int count, const float* HWY_RESTRICT p, int rows, float* const* acc,
               Ahead& ahead) {
    const int64_t row_bytes = run.dim * static_cast<int64_t>(run.dtype == KIVI_F32 ? 4 : 2);
    int c = 0;
    for (; c + kMixVectors * N <= run.dim; c += kMixVectors * N) {
        MixChannels<kMixVectors, Load>(run, count, c, p, rows, acc, c == 0 ? row_bytes : 0, ahead);
    }
    for (; c < run.dim; c += N) MixChannels<1, Load>(run, count, c, p, rows, acc, c == 0 ? row_bytes : 0, ahead);
}

void ScoreRows(const RowRun& run, int count, const float* q, int q_stride, int rows, float* s, Ahead& ahead) {
    switch (run.dtype) {
        case KIVI_F16: return ScoreRowsOf<LoadF16>(run, count, q, q_stride, rows, s, ahead);
        case KIVI_BF16: return ScoreRowsOf<LoadBF16>(run, count, q, q_stride, rows, s, ahead);
        default: return ScoreRowsOf<LoadF32>(run, count, q, q_stride, rows, s, ahead);
    }
}

void MixRows(const RowRun& run, int count, const float* p, int rows, float* const* acc, Ahead& ahead) {
    switch (run.dtype) {
        case KIVI_F16: return MixRowsOf<LoadF16>(run, count, p, rows, acc, ahead);
        case KIVI_BF16: return MixRowsOf<LoadBF16>(run, count, p, rows, acc, ahead);
        default: return MixRowsOf<LoadF32>(run, count, p, rows, acc, ahead);
    }
}

}  // namespace kivi::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_SCALAR

#endif  // include guard of this instruction set
