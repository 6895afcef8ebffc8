// A head's keys or values of one sequence, and what an append of a few tokens does with them; by one warp, which waits
// for no other. A token goes to the windows; what it pushes behind a border is packed:
//
//   rolling schedule      when it is in the ring, which has room for one row more than a tail holds between calls
//   pages of 16 bits,
//   published values      row by row, before it takes a slot
//
// Codes are those of core/format with and without contraction: no product here meets a sum but in an fma.
#pragma once
#include "cuda/fast_layer.cuh"
#include "cuda/pack_transform.cuh"
#include "cuda/step_pack.cuh"
#include "cuda/write_plan.cuh"

namespace kivi::cuda {

// A lane's channels of a row: four of each stripe.
template <int DIM>
struct RawRow {
    uint2 at[stripes(DIM)];
};

// format/row.h in full.
template <class P, int DIM>
__device__ __noinline__ RawRow<DIM> round_any_row(RawRow<DIM> row, bool rotated, unsigned long long* saturated) {
    constexpr int kStripes = stripes(DIM);
    WarpRow<kStripes> x;
    typename WarpRow<kStripes>::Raw words;
#pragma unroll
    for (int j = 0; j < kStripes; ++j) words.words[j] = make_uint4(row.at[j].x, row.at[j].y, 0, 0);
    x.set(words, P::kType);
    if (rotated && round_row(x, DIM, true, P::kType) && lane() == 0) atomicAdd(saturated, 1);
#pragma unroll
    for (int j = 0; j < kStripes; ++j) {
        uint16_t half[kLaneChannels];
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) store_element(half, P::kType, i, x.x[j][i]);
        row.at[j] = make_uint2(half[0] | static_cast<uint32_t>(half[1]) << 16,
                               half[2] | static_cast<uint32_t>(half[3]) << 16);
    }
    return row;
}
// The Hadamard of WarpRow where no number leaves the type's range. A stage across lanes is one fma: 1 * x and -1 * x
// are exact.
template <class P, int DIM>
__device__ __forceinline__ void transform(RawRow<DIM>& row) {
    const auto butterfly = [](float& a, float& b) {
        const float left = a, right = b;
        a = left + right, b = left - right;
    };
    float x[stripes(DIM)][kLaneChannels];
#pragma unroll
    for (int j = 0; j < stripes(DIM); ++j) {
        x[j][0] = P::low(row.at[j].x), x[j][1] = P::high(row.at[j].x);
        x[j][2] = P::low(row.at[j].y), x[j][3] = P::high(row.at[j].y);
        butterfly(x[j][0], x[j][1]), butterfly(x[j][2], x[j][3]);
        butterfly(x[j][0], x[j][2]), butterfly(x[j][1], x[j][3]);
#pragma unroll
        for (int step = 1; step < kWarp && step * kLaneChannels < DIM; step *= 2) {
            const float sign = (lane() & step) != 0 ? -1.0f : 1.0f;
#pragma unroll
            for (int i = 0; i < kLaneChannels; ++i) {
                x[j][i] = __fmaf_rn(x[j][i], sign, __shfl_xor_sync(kAllLanes, x[j][i], step));
            }
        }
    }
    if constexpr (stripes(DIM) == 2) {
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) butterfly(x[0][i], x[1][i]);
    }
    constexpr float kNorm = kHadamardNorm<DIM>;
#pragma unroll
    for (int j = 0; j < stripes(DIM); ++j) {
        row.at[j] = make_uint2(P::of(x[j][0] * kNorm, x[j][1] * kNorm), P::of(x[j][2] * kNorm, x[j][3] * kNorm));
    }
}

// The caller's row of a head's keys or values (item, as in HeadRows). `at`: of the batch, with View::origin's index and
// offset.
template <class At>
__device__ __forceinline__ const uint8_t* new_row_of(const View& k, const View& v, const At& at, int item,
                                                     int token = 0) {
    const View& view = item % 2 == 0 ? k : v;
    return static_cast<const uint8_t*>(view.data) +
           2 * (view.origin(at.index, at.offset) + item / 2 * view.head_stride + token * view.token_stride);
}

// What the layer tells is asked of it again and again. L: a FastLayer.
template <class L>
struct HeadRows {
    using P = typename L::P;
    static constexpr int kStripes = stripes(L::kDim), kRowBytes = 2 * L::kDim;
    using Raw = uint2[kStripes];

    const Layer& layer;
    int item;  // 2 h: keys of head h; 2 h + 1: its values
    int32_t sequence;

    template <class T>
    __device__ __forceinline__ T choose(T of_keys, T of_values) const {  // without a branch
        return item % 2 == 0 ? of_keys : of_values;
    }
    __device__ __forceinline__ const TensorStore& k() const { return layer.key; }
    __device__ __forceinline__ const TensorStore& v() const { return layer.value; }

    // Packed row by row.
    __device__ __forceinline__ bool by_rows() const {
        return L::kPlain || choose(false, k().windows.schedule == KIVI_SCHEDULE_PUBLISHED);
    }

    // Where the tail begins at a length, if it began at `before`.
    __device__ __forceinline__ int tail_after(int length, int before) const {
        const Span span = after_append(k().windows, Span{}, length);
        return max(static_cast<int>(choose(span.key_border, span.value_border)), before);
    }

    static __device__ __forceinline__ void load(const uint8_t* row, Raw& raw) {
#pragma unroll
        for (int j = 0; j < kStripes; ++j) {
            const int channel = j * kStripe + kLaneChannels * lane();
            raw[j] = channel < L::kDim ? load_two_words(row + 2 * channel) : make_uint2(0, 0);
        }
    }
    static __device__ __forceinline__ void store(uint8_t* row, const Raw& raw) {
#pragma unroll
        for (int j = 0; j < kStripes; ++j) {
            const int channel = j * kStripe + kLaneChannels * lane();
            if (channel < L::kDim) *reinterpret_cast<uint2*>(row + 2 * channel) = raw[j];
        }
    }

    // As windows hold it: transformed, and with the one NaN. Rows that have left the type's range are counted in
    // counter(*this).
    template <class Rotated, class Counter>
    __device__ __forceinline__ void round(Raw& raw, const Rotated& is_rotated, const Counter& counter) const {
        const bool rotated = is_rotated(*this);
        RawRow<L::kDim> row;
#pragma unroll
        for (int j = 0; j < kStripes; ++j) row.at[j] = raw[j];
        if (rotated) transform<P>(row);
        uint32_t most = 0;
#pragma unroll
        for (int j = 0; j < kStripes; ++j) {
            most = P::most(most, P::most(P::magnitudes(row.at[j].x), P::magnitudes(row.at[j].y)));
        }
        if (!__all_sync(kAllLanes, both_plain<P>(most))) {
#pragma unroll
            for (int j = 0; j < kStripes; ++j) row.at[j] = raw[j];
            row = round_any_row<P>(row, rotated, counter(*this));
        }
#pragma unroll
        for (int j = 0; j < kStripes; ++j) raw[j] = row.at[j];
    }
    __device__ __forceinline__ void round(Raw& raw) const {
        round(raw, [](const HeadRows& x) { return x.choose(x.k().rotated(), x.v().rotated()); },
              [](const HeadRows& x) { return x.layer.saturated; });
    }

    __device__ __forceinline__ int sinks() const { return static_cast<int>(k().windows.sink); }
    __device__ __forceinline__ unsigned slots() const {
        return static_cast<unsigned>(choose(k().tail_rows, v().tail_rows));
    }
    __device__ __forceinline__ int64_t number() const { return static_cast<int64_t>(sequence) * k().heads + item / 2; }
    __device__ __forceinline__ uint8_t* ring() const {
        return choose(k().tail, v().tail) + number() * slots() * kRowBytes;
    }
    __device__ __forceinline__ uint8_t* window_row(int position) const {
        return position < sinks() ? choose(k().sink, v().sink) + (number() * sinks() + position) * kRowBytes
                                  : ring() + static_cast<unsigned>(position - sinks()) % slots() * kRowBytes;
    }
    // Of the page that holds what is `from` tokens behind the sink window.
    __device__ __forceinline__ uint8_t* page(unsigned from) const {
        const int32_t block = __ldcg(layer.table + sequence * layer.table_stride + from / kPageTokens);
        const int64_t place = static_cast<int64_t>(block) * k().heads + item / 2;
        return k().pages + place * k().page_bytes + choose(k().part_offset, v().part_offset);
    }

    __device__ __forceinline__ void pack_row(const Raw& raw, int position) const {
        const unsigned from = position - sinks();
        if constexpr (L::kPlain) {
            store(page(from) + from % kPageTokens * kRowBytes, raw);
        } else {
            pack_value_row<P, L::kValueBits, L::kDim, L::kValueGroups>(raw, from % kPageTokens, page(from));
        }
    }

    // The next new token, at a position; tokens from `from` to `to` are packed, if row by row.
    __device__ __forceinline__ void add(Raw& raw, int position, int from, int to) const {
        if (by_rows()) {
#pragma unroll 1
            for (; from < min(to, position); ++from) {
                Raw old;
                load(window_row(from), old);
                pack_row(old, from);
            }
        }
        if (by_rows() && from <= position && position < to) {
            round(raw);
            pack_row(raw, position);
        } else {
            keep(raw, position);
        }
    }
    // To a window.
    __device__ __forceinline__ void keep(Raw& raw, int position) const {
        round(raw);
        store(window_row(position), raw);
    }

    // Tokens from `from` to `to`, whole groups, out of the ring, so many rows at once.
    template <int KEYS_AT_ONCE, int VALUES_AT_ONCE, class Words>
    __device__ __forceinline__ void pack_groups(Words& words, int from, int to) const {
        __syncwarp();  // lanes read what others have stored
#pragma unroll 1
        for (; from < to; from += choose(L::kKeyGroup, kBlockTokens)) {
            const unsigned place = from - sinks(), slots = this->slots(), slot = place % slots;
            const uint8_t* const ring = this->ring();
            const auto row_at = [&](int token) {
                const unsigned row = slot + token;
                return ring + (row < slots ? row : row - slots) * kRowBytes;
            };
            const int block = place % kPageTokens / kBlockTokens;
            if (item % 2 == 0) {
                pack_key_group<P, L::kKeyBits, L::kDim, L::kKeyGroup, KEYS_AT_ONCE>(words.keys, row_at, page(place),
                                                                                    block);
            } else {
                pack_value_block<P, L::kValueBits, L::kDim, L::kValueGroups, VALUES_AT_ONCE>(words.values, row_at,
                                                                                             page(place), block);
            }
        }
    }
};

template <class L>
union StepWords {
    CodeWords<L::kKeyBits, L::kDim> keys;
    CodeWords<L::kValueBits, L::kDim> values;
};

}  // namespace kivi::cuda
