// What a query sees, and partial results of attention: how they are added to each other and become an output row.
#pragma once
#include "cuda/warp_row.cuh"

namespace kivi::cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ inline float infinity() { return __uint_as_float(0x7F800000u); }
__device__ inline float quiet_nan() { return __uint_as_float(kNanF32); }

// A softmax so far: all weights are relative to 2^max.
struct Sum {
    float max, sum;
};
__device__ inline Sum no_sum() { return {-infinity(), 0.0f}; }
__device__ inline bool empty(const Sum& s) { return s.max == -infinity() && s.sum == 0.0f; }

// Factors that bring two partial results to a common maximum; the sum of both. Adding an empty one changes
// nothing, bit for bit.
struct Joint {
    float of_first, of_second;
    Sum sum;
};
__device__ inline Joint join(const Sum& a, const Sum& b) {
    if (empty(b)) return {1.0f, 0.0f, a};
    if (empty(a)) return {0.0f, 1.0f, b};
    Joint joint;
    joint.sum.max = fmaxf(a.max, b.max);
    joint.of_first = a.max == joint.sum.max ? 1.0f : exp2f(a.max - joint.sum.max);
    joint.of_second = b.max == joint.sum.max ? 1.0f : exp2f(b.max - joint.sum.max);
    joint.sum.sum = __fmaf_rn(b.sum, joint.of_second, __fmul_rn(a.sum, joint.of_first));
    return joint;
}
__device__ inline float add(float of_first, float of_second, float first, float second) {
    if (of_second == 0.0f && of_first == 1.0f) return first;
    if (of_first == 0.0f && of_second == 1.0f) return second;
    return __fmaf_rn(second, of_second, __fmul_rn(first, of_first));
}

// Adds the row value(j, c), four channels from c on, whose sum is `sum`, to a row so far.
template <int STRIPES, class Value>
__device__ inline void fold(Sum& to_sum, WarpRow<STRIPES>& to, const Sum& sum, int dim, const Value& value) {
    const Joint joint = join(to_sum, sum);
    to_sum = joint.sum;
    to.for_each(dim, [&](int j, int c) {
        const float4 part = value(j, c);
        to.x[j][0] = add(joint.of_first, joint.of_second, to.x[j][0], part.x);
        to.x[j][1] = add(joint.of_first, joint.of_second, to.x[j][1], part.y);
        to.x[j][2] = add(joint.of_first, joint.of_second, to.x[j][2], part.z);
        to.x[j][3] = add(joint.of_first, joint.of_second, to.x[j][3], part.w);
    });
}

__host__ __device__ inline int ratio(const Layer& layer) { return layer.q_heads / layer.key.heads; }

// Query i of a row and KV head: token i / ratio, head i % ratio of the group.
struct Query {
    int token, head;
    int64_t first, last;  // positions that it sees
    __device__ Query(const AttendArgs& args, const RowArg& row, const Span& span, int kv_head, int i) {
        const int group = ratio(args.layer);
        token = i / group;
        head = kv_head * group + i % group;
        last = span.length + token - (args.k ? 0 : row.count);
        first = args.window_left < 0 ? 0 : max(int64_t{0}, last - args.window_left);
    }
    // Element of its row in q, out or LSE.
    __device__ int64_t in(const View& view, const RowArg& row) const {
        return view.origin(row.index, row.offset) + token * view.token_stride + head * view.head_stride;
    }
};

// Divides, transforms back if it is `rotated`, and writes one query's result.
template <int STRIPES>
__device__ void finish(const AttendArgs& args, const RowArg& row, const Query& query, const Sum& sum,
                       WarpRow<STRIPES>& x, bool rotated) {
    const int dim = args.layer.value.dim;
    const bool none = empty(sum);
    if (args.lse && lane() == 0) {
        static_cast<float*>(args.lse.data)[query.in(args.lse, row)] =
            none ? -infinity() : sum.max * kLn2 + logf(sum.sum);
    }
    float factor = none ? 0.0f : 1.0f / sum.sum;
    if (args.learned_sinks != nullptr && !none) {
        const Joint joint = join(sum, {args.learned_sinks[query.head] * kLog2E, 1.0f});
        factor = joint.of_first / joint.sum.sum;
    }
#pragma unroll
    for (int j = 0; j < STRIPES; ++j) {
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) x.x[j][i] = none ? 0.0f : x.x[j][i] * factor;
    }
    if (rotated) x.hadamard(dim);
    x.store(args.out.data, args.out.dtype, query.in(args.out, row), dim);
}

}  // namespace kivi::cuda
