// Chooses the instance of the fast kernel and launches it.
#include "cuda/decode.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>

#include "cuda/decode_config.h"
#include "cuda/decode_instances.h"
#include "cuda/decode_kernels.h"
#include "cuda/decode_shared.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/device.h"

namespace kivi::cuda {
namespace {

// Compute capabilities with bulk copies and 227 KB of shared memory a block: from 9.0 to below 12.0.
constexpr int32_t kFirstCapability = 90, kEndCapability = 120;
constexpr int64_t kMaxTokens = 1 << 24;  // places on the line of work are 32-bit
constexpr size_t kRoomForRuns = size_t{32} << 20;  // bytes; rows with more runs come in several launches

template <class C>
bool fits(const TensorStore& key, const TensorStore& value) {
    return key.dim == C::kDim && value.dim == C::kDim && key.window_dtype == (C::kBf16 ? KIVI_BF16 : KIVI_F16) &&
           key.spec().bits == C::kKeyBits && value.spec().bits == C::kValueBits &&
           (key.windows.schedule == KIVI_SCHEDULE_PUBLISHED) == C::kPublished &&
           (C::kPlain || (key.spec().group == C::kKeyGroup && value.group() == C::kDim / C::kValueGroups));
}

// visit(Config) for the layer's instances, until it returns true; whether it did.
template <class Visit>
bool with_instances(const TensorStore& key, const TensorStore& value, const Visit& visit) {
#define KIVI_VISIT_INSTANCE(...) \
    if (fits<fast::Config<__VA_ARGS__>>(key, value) && visit(fast::Config<__VA_ARGS__>{})) return true;
    KIVI_DECODE_INSTANCES(KIVI_VISIT_INSTANCE)
#undef KIVI_VISIT_INSTANCE
    return false;
}

int64_t query_rows(const AttendArgs& args) {
    return static_cast<int64_t>(args.layer.q_heads / args.layer.key.heads) * args.batch.max_count;
}
// The one with the fewest rows that are enough.
template <class Visit>
bool with_instance(const AttendArgs& args, const Visit& visit) {
    return with_instances(args.layer.key, args.layer.value, [&](auto config) {
        if (query_rows(args) > decltype(config)::kRows) return false;
        visit(config);
        return true;
    });
}

fast::Strides strides_of(const View& view) {
    return {view.row_stride, view.token_stride, view.head_stride, view.ragged};
}

// All but the places in the workspace.
fast::DecodeArgs arguments(const AttendArgs& args, int32_t blocks) {
    const Layer& layer = args.layer;
    const BatchArgs& batch = args.batch;
    fast::DecodeArgs p{};
    p.spans = layer.spans;
    p.table = layer.table;
    p.arrays = batch.arrays;
    p.batch_rows = batch.size;
    p.first_row = batch.first_row;
    p.kv_heads = layer.key.heads;
    p.tokens = batch.max_count;
    p.group = fast::Divisor(layer.q_heads / layer.key.heads);
    p.query_rows = fast::Divisor(p.group.by * p.tokens);
    const int32_t segments = p.batch_rows * p.kv_heads, each = segments > 0 ? blocks / segments : 0;
    p.segment_blocks = 10 * each * segments >= 9 * blocks ? each : 0;
    p.sink = static_cast<int32_t>(layer.key.windows.sink);
    p.tail_rows = static_cast<int32_t>(layer.key.tail_rows);
    p.table_stride = static_cast<int32_t>(layer.table_stride);
    p.page_bytes = static_cast<int32_t>(layer.key.page_bytes);
    p.value_offset = static_cast<int32_t>(layer.value.part_offset);
    p.scale_log2 = args.scale * fast::kLog2E;
    p.window_left = static_cast<int32_t>(std::min<int64_t>(args.window_left, 1 << 30));
    p.unseen = p.tokens - 1;
    p.in_tail = args.k && p.tokens == 1 && layer.key.windows.schedule == KIVI_SCHEDULE_ROLLING;
    p.own = args.k && !p.in_tail;
    p.keeps = args.keeps;
    if (p.keeps) p.layer = layer;
    if (args.k) {
        p.k = args.k;
        p.v = args.v;
    }
    if (p.own) {
        p.unseen = 0;
        if (p.window_left >= 0) p.window_left -= p.tokens;
    }
    if (args.soft_cap > 0) {  // beyond 2^+-60 it works like one at that border
        const float cap = std::min(std::max(args.soft_cap, 0x1p-60f), 0x1p60f);
        p.cap = cap * fast::kLog2E;
        p.cap_rate = 2.0f / cap;
    }
    p.learned_sinks = args.learned_sinks;
    p.on_device = batch.on_device;
    p.ahead = args.settled && !p.on_device;  // device arrays are the caller's
    p.rotated_keys = layer.key.rotated();
    p.rotated_values = layer.value.rotated();
    p.pages = layer.key.pages;
    p.sink_keys = layer.key.sink;
    p.sink_values = layer.value.sink;
    p.tail_keys = layer.key.tail;
    p.tail_values = layer.value.tail;
    p.q = args.q.data;
    p.q_strides = strides_of(args.q);
    p.out = args.out.data;
    p.out_strides = strides_of(args.out);
    p.lse = static_cast<float*>(args.lse.data);
    p.lse_strides = strides_of(args.lse);
    p.invariant = args.invariant;
    p.ragged = p.q_strides.ragged || p.out_strides.ragged || p.lse_strides.ragged || p.k.ragged || p.v.ragged;
    for (int32_t i = 0; i < batch.size && !batch.on_device; ++i) {
        const RowArg& row = batch.rows[i];
        p.rows[i] = {row.count > 0 ? row.sequence : -1, row.index};
        p.offset[i] = static_cast<int32_t>(row.offset);
    }
    return p;
}

template <class C>
int64_t most_runs_of_a_row(const Layer& layer) {
    const auto visits = [](int64_t tokens, int of) { return (tokens + of - 1) / of; };
    const int64_t all = visits(layer.key.windows.sink, C::kWindowTokens) +
                        visits(layer.value.tail_rows, C::kWindowTokens) +
                        visits(layer.max_tokens, C::kVisitTokens);
    return layer.key.heads * visits(all, C::kRunVisits);
}
template <class C>
int32_t rows_with_runs_at_once(const Layer& layer, int32_t rows) {
    const int64_t fit = kRoomForRuns / (most_runs_of_a_row<C>(layer) * C::kRunBytes);
    return static_cast<int32_t>(std::min<int64_t>(std::min(rows, kRowsAtOnce), std::max(int64_t{1}, fit)));
}

// Rows first .. first + size - 1 of the launch.
BatchArgs part_of(const BatchArgs& batch, int32_t first, int32_t size) {
    BatchArgs part = batch;
    part.size = size;
    part.first_row += first;
    std::copy(batch.rows + first, batch.rows + first + size, part.rows);
    return part;
}

// Segments that may grow longer get more multiprocessors than a cluster has: up to one and a half visits a warp the
// quicker merge makes up for it.
template <class C>
constexpr int64_t kMostInCluster = 3 * fast::kClusterBlocks * C::kWarps * C::kVisitWeight / 2;

// Of a segment on the line of work, until the host binds more pages.
template <class C>
int64_t most_weight(const AttendArgs& args) {
    const TensorStore& key = args.layer.key;
    const auto visits = [](int64_t rows) { return (rows + C::kWindowTokens - 1) / C::kWindowTokens; };
    return (visits(key.windows.sink) + visits(args.layer.value.tail_rows)) * C::kWindowWeight +
           args.batch.most_pages * (kPageTokens / C::kVisitTokens) * C::kVisitWeight;
}

template <class C>
Launch launch_of(unsigned blocks, unsigned cluster_blocks, Stream stream = nullptr) {
    return {blocks, C::kThreads, sizeof(fast::SharedStorage<C>), stream, cluster_blocks};
}

}  // namespace

const char* why_not_decode(const TensorStore& key, const TensorStore& value, int32_t ratio, int32_t capability) {
    const kivi_spec& k = key.spec();
    const kivi_spec& v = value.spec();
    if (capability < kFirstCapability || capability >= kEndCapability) {
        return "the fast kernel needs compute capability 9.0 to below 12.0";
    }
    const bool plain = k.bits == 16 && v.bits == 16;
    if (!plain && (k.axis != KIVI_AXIS_CHANNEL || v.axis != KIVI_AXIS_TOKEN)) {
        return "the fast kernel needs keys by channel and values by token, or both of 16 bits";
    }
    if (k.param_dtype == KIVI_F32 || v.param_dtype == KIVI_F32) return "the fast kernel needs scales in f16";
    if (!with_instances(key, value, [](auto) { return true; })) {
        if (key.windows.schedule == KIVI_SCHEDULE_PUBLISHED) {
            return "no fast kernel is made for these bits, groups, head dims and window dtype with the published "
                   "schedule";
        }
        return "no fast kernel is made for these bits, groups, head dims and window dtype";
    }
    if (!with_instances(key, value, [&](auto config) { return ratio <= decltype(config)::kRows; })) {
        return "no fast kernel is made for so many query heads a KV head";
    }
    return "";
}

bool decode_serves(const TensorStore& key, const TensorStore& value, int32_t ratio, int32_t capability) {
    return *why_not_decode(key, value, ratio, capability) == 0;
}

bool decode_reads(const AttendArgs& args) {
    const int32_t dtype = args.layer.key.window_dtype;
    const auto reads = [&](const View& view) { return view.dtype == dtype && aligned(view); };
    // Windows that end among the call's own keys are left to others.
    const bool ends_before = args.window_left < 0 || args.window_left >= decode_max_count(args.layer);
    return (!args.k || (reads(args.k) && reads(args.v) && ends_before)) && reads(args.q) && reads(args.out);
}

bool decode_takes(const AttendArgs& args) {
    const Layer& layer = args.layer;
    if (!decode_reads(args) || args.batch.max_count > decode_max_count(layer)) return false;
    if (!args.invariant &&
        args.batch.size * static_cast<int64_t>(layer.key.heads) * layer.max_tokens > int64_t{64} * kMaxTokens) {
        return false;
    }
    const BatchArgs& batch = args.batch;
    constexpr int64_t kEndOffset = int64_t{1} << 31;
    if (batch.on_device) {
        const BatchArrays& arrays = batch.arrays;
        const int64_t end = arrays.offsets != nullptr ? arrays.tokens
                                                      : int64_t{batch.first_row + batch.size} * arrays.max_count;
        return end <= kEndOffset &&
               (arrays.counts == nullptr || batch.max_count == 1 || batch.least_count == batch.max_count);
    }
    for (int32_t i = 0; i < batch.size; ++i) {
        const RowArg& row = batch.rows[i];
        if (row.count == 0) continue;
        if (row.count != batch.max_count || row.offset >= kEndOffset) return false;
    }
    return true;
}

bool decode_keeps(const AttendArgs& args) {
    const Layer& layer = args.layer;
    return args.k && !args.invariant && args.batch.max_count == 1 && layer.steps && layer.key.spec().bits != 16 &&
           layer.key.windows.schedule == KIVI_SCHEDULE_ROLLING && layer.key.windows.recent > 0 &&
           layer.feedback.order == nullptr && decode_takes(args);
}

int32_t decode_max_count(const Layer& layer) {
    int most = 0;
    with_instances(layer.key, layer.value, [&](auto config) {
        most = std::max(most, decltype(config)::kRows);
        return false;
    });
    return most / (layer.q_heads / layer.key.heads);
}

int32_t prepare_decode(const TensorStore& key, const TensorStore& value) {
    int32_t clusters = std::numeric_limits<int32_t>::max();
    with_instances(key, value, [&](auto config) {
        using C = decltype(config);
        prepare_kernel(fast::kernel_of<C>(), sizeof(fast::SharedStorage<C>));
        const Launch one = launch_of<C>(fast::kClusterBlocks, fast::kClusterBlocks);
        clusters = std::min(clusters, most_clusters(fast::kernel_of<C>(), one));
        return false;
    });
    return clusters;
}

size_t decode_workspace(const Layer& layer, int32_t rows, int32_t max_count, int32_t multiprocessors) {
    const int64_t query_rows = static_cast<int64_t>(layer.q_heads / layer.key.heads) * max_count;
    size_t bytes = 0;
    with_instances(layer.key, layer.value, [&](auto config) {
        using C = decltype(config);
        const int64_t runs = rows_with_runs_at_once<C>(layer, rows) * most_runs_of_a_row<C>(layer);
        bytes = std::max({bytes, C::workspace(multiprocessors), runs * C::kRunBytes});
        return C::kRows >= query_rows;  // fewer rows take this one or one before it
    });
    return bytes;
}

void decode(const AttendArgs& args, int32_t multiprocessors, Stream stream) {
    with_instance(args, [&](auto config) {
        using C = decltype(config);
        const auto launch = [&](fast::DecodeArgs p, size_t tickets, int32_t blocks) {
            p.tickets = reinterpret_cast<unsigned long long*>(args.workspace);
            p.partials = reinterpret_cast<float*>(p.tickets + tickets);
            p.spills = p.partials + size_t(multiprocessors) * 2 * C::kPartialFloats;
            const unsigned cluster_blocks = p.clustered ? fast::kClusterBlocks : 1;
            launch_dependent(fast::kernel_of<C>(), launch_of<C>(blocks, cluster_blocks, stream), p);
        };
        if (!args.invariant) {
            const int32_t segments = args.batch.size * args.layer.key.heads;
            const bool clustered = segments <= args.layer.clusters && most_weight<C>(args) <= kMostInCluster<C>;
            const int32_t blocks = clustered ? segments * fast::kClusterBlocks : multiprocessors;
            fast::DecodeArgs p = arguments(args, blocks);
            p.clustered = clustered;
            return launch(p, size_t(multiprocessors) * C::kRows, blocks);
        }
        const int32_t at_once = rows_with_runs_at_once<C>(args.layer, args.batch.size);
        AttendArgs part = args;
        for (int32_t first = 0; first < args.batch.size; first += at_once) {
            part.batch = part_of(args.batch, first, std::min(at_once, args.batch.size - first));
            launch(arguments(part, multiprocessors),
                   size_t(part.batch.size) * most_runs_of_a_row<C>(args.layer) * 2 * C::kRows, multiprocessors);
        }
    });
}

}  // namespace kivi::cuda
