// One row of channels held by a warp: loads, the Hadamard, rounding to the window dtype, stores. The device's
// side of format/row.h and format/hadamard.h, bit for bit. Compiled without contraction where codes depend on it.
//
//   register x[j][i] of lane l is channel 128 j + 4 l + i
#pragma once
#include <cstdint>

#include "cuda/launch.h"

namespace kivi::cuda {

constexpr int kWarp = 32;
constexpr int kLaneChannels = 4;
constexpr int kStripe = kWarp * kLaneChannels;  // channels of one j
constexpr int kMaxStripes = 4;                  // head dims up to 512
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

__host__ __device__ constexpr int stripes(int dim) { return (dim + kStripe - 1) / kStripe; }

__device__ inline int lane() { return threadIdx.x % kWarp; }
__device__ inline bool finite(float x) { return (__float_as_uint(x) & 0x7F800000u) != 0x7F800000u; }

template <class T>
__device__ inline T warp_max(T x) {
    for (int step = kWarp / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(kAllLanes, x, step));
    return x;
}
template <class T>
__device__ inline T warp_sum(T x) {
    for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
    return x;
}

template <int STRIPES, class T = float>
struct WarpRow {
    T x[STRIPES][kLaneChannels];

    static __device__ int channel(int j) { return j * kStripe + lane() * kLaneChannels; }

    // visit(j, channel of x[j][0]) for the stripes that this lane has channels in.
    template <class Visit>
    static __device__ void for_each(int dim, const Visit& visit) {
#pragma unroll
        for (int j = 0; j < STRIPES; ++j) {
            if (channel(j) < dim) visit(j, channel(j));
        }
    }

    __device__ void clear() {
#pragma unroll
        for (int j = 0; j < STRIPES; ++j) {
#pragma unroll
            for (int i = 0; i < kLaneChannels; ++i) x[j][i] = 0;
        }
    }

    // Elements as they stand in memory: fetched first, for several rows, so that their loads overlap.
    struct Raw {
        uint4 words[STRIPES];
    };

    // From element `at` of an array of any alignment.
    static __device__ Raw fetch(const void* data, int32_t dtype, int64_t at, int dim) {
        Raw raw;
        const char* const row = static_cast<const char*>(data) + at * static_cast<int64_t>(dtype_bytes(dtype));
        const bool wide = reinterpret_cast<uintptr_t>(row) % (kLaneChannels * dtype_bytes(dtype)) == 0;
#pragma unroll
        for (int j = 0; j < STRIPES; ++j) {
            raw.words[j] = make_uint4(0, 0, 0, 0);
            const int c = channel(j);
            if (c >= dim) continue;
            if (dtype == KIVI_F32) {
                const uint32_t* const words = reinterpret_cast<const uint32_t*>(row) + c;
                raw.words[j] = wide ? *reinterpret_cast<const uint4*>(words)
                                    : make_uint4(words[0], words[1], words[2], words[3]);
            } else {
                const uint16_t* const halfs = reinterpret_cast<const uint16_t*>(row) + c;
                const uint2 pair = wide ? *reinterpret_cast<const uint2*>(halfs)
                                        : make_uint2(halfs[0] | static_cast<uint32_t>(halfs[1]) << 16,
                                                     halfs[2] | static_cast<uint32_t>(halfs[3]) << 16);
                raw.words[j].x = pair.x, raw.words[j].y = pair.y;
            }
        }
        return raw;
    }

    __device__ void set(const Raw& raw, int32_t dtype) {
#pragma unroll
        for (int j = 0; j < STRIPES; ++j) {
            const uint4 word = raw.words[j];
            if (dtype == KIVI_F32) {
                x[j][0] = __uint_as_float(word.x), x[j][1] = __uint_as_float(word.y);
                x[j][2] = __uint_as_float(word.z), x[j][3] = __uint_as_float(word.w);
            } else {
                const uint16_t half[kLaneChannels] = {
                    static_cast<uint16_t>(word.x), static_cast<uint16_t>(word.x >> 16),
                    static_cast<uint16_t>(word.y), static_cast<uint16_t>(word.y >> 16)};
#pragma unroll
                for (int i = 0; i < kLaneChannels; ++i) {
                    x[j][i] = dtype == KIVI_F16 ? f16_to_f32(half[i]) : bf16_to_f32(half[i]);
                }
            }
        }
    }

    __device__ void load(const void* data, int32_t dtype, int64_t at, int dim) {
        set(fetch(data, dtype, at, dim), dtype);
    }

    // To element `at` of an array of any alignment; rounds, and writes the one NaN.
    __device__ void store(void* data, int32_t dtype, int64_t at, int dim) const {
        char* const row = static_cast<char*>(data) + at * static_cast<int64_t>(dtype_bytes(dtype));
        const bool wide = reinterpret_cast<uintptr_t>(row) % (kLaneChannels * dtype_bytes(dtype)) == 0;
        for_each(dim, [&](int j, int c) {
            if (!wide) {
#pragma unroll
                for (int i = 0; i < kLaneChannels; ++i) store_element(row, dtype, c + i, static_cast<float>(x[j][i]));
            } else if (dtype == KIVI_F32) {
                float4 word;
                float* const of = &word.x;
#pragma unroll
                for (int i = 0; i < kLaneChannels; ++i) store_element(of, dtype, i, static_cast<float>(x[j][i]));
                *reinterpret_cast<float4*>(row + c * 4) = word;
            } else {
                uint16_t half[kLaneChannels];
#pragma unroll
                for (int i = 0; i < kLaneChannels; ++i) {
                    const float value = static_cast<float>(x[j][i]);
                    half[i] = dtype == KIVI_F16 ? f32_to_f16(value) : f32_to_bf16(value);
                }
                *reinterpret_cast<uint2*>(row + c * 2) =
                    make_uint2(half[0] | static_cast<uint32_t>(half[1]) << 16,
                               half[2] | static_cast<uint32_t>(half[3]) << 16);
            }
        });
    }

    // format/hadamard.h: stages h = 1, 2 inside a lane, up to 64 across lanes, then across stripes.
    __device__ void hadamard(int dim) {
        const int block = dim & -dim;
#pragma unroll
        for (int j = 0; j < STRIPES; ++j) {
            butterfly(x[j][0], x[j][1]);
            butterfly(x[j][2], x[j][3]);
            butterfly(x[j][0], x[j][2]);
            butterfly(x[j][1], x[j][3]);
#pragma unroll
            for (int step = 1; step < kWarp; step *= 2) {
                if (step * kLaneChannels >= block) break;
#pragma unroll
                for (int i = 0; i < kLaneChannels; ++i) {
                    const T other = __shfl_xor_sync(kAllLanes, x[j][i], step);
                    x[j][i] = (lane() & step) != 0 ? other - x[j][i] : x[j][i] + other;
                }
            }
        }
#pragma unroll
        for (int step = 1; step < STRIPES; step *= 2) {
            if (step * kStripe >= block) break;
#pragma unroll
            for (int j = 0; j < STRIPES; ++j) {
                if ((j & step) != 0 || j + step >= STRIPES) continue;
#pragma unroll
                for (int i = 0; i < kLaneChannels; ++i) butterfly(x[j][i], x[j + step][i]);
            }
        }
        const T norm = norm_of(block, T{});
#pragma unroll
        for (int j = 0; j < STRIPES; ++j) {
#pragma unroll
            for (int i = 0; i < kLaneChannels; ++i) x[j][i] *= norm;
        }
    }

  private:
    static __device__ void butterfly(T& a, T& b) {
        const T left = a, right = b;
        a = left + right;
        b = left - right;
    }
    // 1 / sqrt(block), rounded once.
    static __device__ float norm_of(int block, float) {
        const int log = __ffs(block) - 1;
        return ldexpf(log % 2 == 1 ? __uint_as_float(0x3F3504F3u) : 1.0f, -(log / 2));
    }
    static __device__ double norm_of(int block, double) { return 1.0 / sqrt(static_cast<double>(block)); }
};

// Largest magnitude that a block of 512 values stands in all stages (format/row.cpp).
constexpr float kSafePeak = 332306998946228968225951765070086144.0f;  // 2^118

// format/row.h on a row of the caller: afterwards x holds what the window dtype holds, and is stored by `store`
// without loss. True if the row was saturated.
template <int STRIPES>
__device__ inline bool round_row(WarpRow<STRIPES>& row, int dim, bool rotate, int32_t window_dtype) {
    float unit = 1;
    if (rotate) {
        float peak = 0;
        row.for_each(dim, [&](int j, int) {
#pragma unroll
            for (int i = 0; i < kLaneChannels; ++i) {
                if (finite(row.x[j][i])) peak = fmaxf(peak, fabsf(row.x[j][i]));
            }
        });
        if (warp_max(peak) > kSafePeak) {
            unit = 1024.0f;
            row.for_each(dim, [&](int j, int) {
#pragma unroll
                for (int i = 0; i < kLaneChannels; ++i) row.x[j][i] = row.x[j][i] / unit;
            });
        }
        row.hadamard(dim);
    }
    bool saturated = false;
    row.for_each(dim, [&](int j, int) {
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) {
            const float x = row.x[j][i];
            float stored;
            store_element(&stored, window_dtype, 0, x * unit);
            stored = load_element(&stored, window_dtype, 0);
            if (finite(x) && !finite(stored)) {
                stored = copysignf(dtype_max(window_dtype), x);
                saturated = true;
            }
            row.x[j][i] = stored;
        }
    });
    return __any_sync(kAllLanes, saturated);
}

}  // namespace kivi::cuda
