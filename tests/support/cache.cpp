// Calls of the C API behind cache.h. A call that must succeed and does not ends the case with its sentence.
#include "support/cache.h"

#include <algorithm>
#include <cstring>

namespace kivi_test {
namespace {

void require_ok(kivi_status status) {
    const std::string sentence = status == KIVI_OK ? "" : error();
    INFO(std::string(kivi_status_name(status)), ": ", sentence);
    REQUIRE(status == KIVI_OK);
}

kivi_spec quantised(int bits, int axis, int group) {
    kivi_spec spec{};
    spec.bits = bits;
    spec.axis = axis;
    spec.group = group;
    return spec;
}

int64_t tokens_in(const Rows& rows) {
    int64_t tokens = 0;
    for (const Row& row : rows) tokens += row.sequence < 0 ? 0 : row.count;
    return tokens;
}

}  // namespace

kivi_spec channel(int bits, int group) { return quantised(bits, KIVI_AXIS_CHANNEL, group); }
kivi_spec token(int bits, int group) { return quantised(bits, KIVI_AXIS_TOKEN, group); }
kivi_spec full() { return quantised(16, 0, 0); }
kivi_spec rotated(kivi_spec spec) {
    spec.transform = KIVI_TRANSFORM_HADAMARD;
    return spec;
}
kivi_spec query_aware(kivi_spec spec) {
    spec.rounding = KIVI_ROUND_QUERY_AWARE;
    return spec;
}
kivi_spec ratio(kivi_spec spec, float of_range) {
    spec.range = KIVI_RANGE_RATIO;
    spec.range_ratio = of_range;
    return spec;
}
kivi_spec wide(kivi_spec spec) {
    spec.param_dtype = KIVI_F32;
    return spec;
}

kivi_config config(kivi_spec k, kivi_spec v, Heads heads, Span windows) {
    kivi_config made;
    require_ok(kivi_config_init(&made, sizeof made));
    made.device = backend().device;
    made.flags = backend().cache_flags;
    made.threads = 2;
    made.layer_count = 1;
    made.max_sequences = 1;
    made.max_tokens = 1024;
    made.layer.kv_heads = heads.kv;
    made.layer.q_heads = heads.q;
    made.layer.key_dim = heads.key_dim;
    made.layer.value_dim = heads.value_dim;
    made.layer.k = k;
    made.layer.v = v;
    made.sink = int32_t(windows.sink);
    made.recent = int32_t(windows.recent);
    made.flush = int32_t(windows.flush);
    return made;
}

kivi_config preset(const char* name, Heads heads) {
    kivi_config made = config({}, {}, heads, {});
    require_ok(kivi_config_preset(&made, name));
    return made;
}

kivi_config published(kivi_spec k, kivi_spec v, Heads heads, int residual) {
    kivi_config made = config(k, v, heads, {0, residual, residual});
    made.schedule = KIVI_SCHEDULE_PUBLISHED;
    return made;
}

std::string error() { return kivi_last_error(); }
bool says(const std::string& what) { return error().find(what) != std::string::npos; }

Batch::Batch(const Rows& rows, std::vector<int64_t> offsets) : offsets_(std::move(offsets)) {
    require_ok(kivi_batch_init(&batch_, sizeof batch_));
    for (const Row& row : rows) {
        sequences_.push_back(row.sequence);
        counts_.push_back(row.count);
    }
    batch_.rows = int32_t(rows.size());
    batch_.sequences = sequences_.data();
    batch_.counts = counts_.data();
    batch_.offsets = offsets_.empty() ? nullptr : offsets_.data();
}

Cache::Cache(const kivi_config& config) : config_(config) {
    if (config.layers != nullptr) {
        layers_.assign(config.layers, config.layers + config.layer_count);
        config_.layers = layers_.data();
    }
    require_ok(kivi_cache_create(&config_, &cache_));
}

const kivi_layer& Cache::layer(int index) const {
    return layers_.empty() ? config_.layer : layers_[size_t(index)];
}

kivi_status Cache::try_append(const Rows& rows, const Tokens& tokens, int index, int32_t dtype) const {
    const kivi_layer& shape = layer(index);
    const int64_t count = tokens_in(rows);
    const Tensor k(dtype, {count, shape.kv_heads, shape.key_dim}, tokens.k);
    const Tensor v(dtype, {count, shape.kv_heads, shape.value_dim}, tokens.v);
    // Offsets that leave skipped rows out.
    std::vector<int64_t> offsets;
    int64_t next = 0;
    for (const Row& row : rows) {
        offsets.push_back(next);
        next += row.sequence < 0 ? 0 : row.count;
    }
    return kivi_append(cache_, index, Batch(rows, offsets), k, v, nullptr);
}

void Cache::append(const Rows& rows, const Tokens& tokens, int index, int32_t dtype) const {
    require_ok(try_append(rows, tokens, index, dtype));
}

void Cache::append(int32_t sequence, const Tokens& tokens, int64_t begin, int64_t end, int64_t chunk,
                   int index, int32_t dtype) const {
    if (chunk == 0) chunk = std::max<int64_t>(1, end - begin);
    for (int64_t at = begin; at < end; at += chunk) {
        const int64_t stop = std::min(at + chunk, end);
        append({{sequence, int32_t(stop - at)}}, slice(tokens, layer(index), at, stop), index, dtype);
    }
}

void Cache::flush(int32_t sequence, int index) const {
    require_ok(kivi_flush_residual(cache_, index, Batch({{sequence, 1}}), nullptr));
}

void Cache::reset() const { require_ok(kivi_cache_reset(cache_, nullptr)); }

Answer Cache::attend(const Rows& rows, const Floats& q, const Ask& ask, int index) const {
    return answer(rows, q, ask, index, false);
}

Answer Cache::step(const Rows& rows, const Floats& q, const Ask& ask, int index) const {
    return answer(rows, q, ask, index, true);
}

Answer Cache::answer(const Rows& rows, const Floats& q, const Ask& ask, int index, bool step) const {
    const kivi_layer& shape = layer(index);
    const int64_t count = tokens_in(rows);
    const Tensor queries(ask.q_dtype, {count, shape.q_heads, shape.key_dim}, q);
    const Tensor out(ask.out_dtype, {count, shape.q_heads, shape.value_dim});
    const Tensor lse(KIVI_F32, {count, shape.q_heads});
    const Tensor k(ask.kv_dtype, {count, shape.kv_heads, shape.key_dim}, ask.fresh_k);
    const Tensor v(ask.kv_dtype, {count, shape.kv_heads, shape.value_dim}, ask.fresh_v);
    const Tensor sinks(KIVI_F32, {1, shape.q_heads}, ask.sinks);

    kivi_attend_params params;
    require_ok(kivi_attend_params_init(&params, sizeof params));
    params.scale = ask.scale;
    params.soft_cap = ask.soft_cap;
    params.window_left = ask.window_left;
    params.lse = lse;
    params.flags = ask.flags;
    if (!step && !ask.fresh_k.empty()) {
        params.k = k;
        params.v = v;
    }
    if (!ask.sinks.empty()) params.learned_sinks = static_cast<const float*>(sinks.data());

    int32_t most = 0;
    std::vector<int64_t> offsets;
    int64_t next = 0;
    for (const Row& row : rows) {
        most = std::max(most, row.count);
        offsets.push_back(next);
        next += row.sequence < 0 ? 0 : row.count;
    }
    size_t bytes = 0;
    require_ok(kivi_attend_workspace(cache_, index, int32_t(rows.size()), most, &bytes));
    const Workspace workspace(bytes);
    const Batch batch(rows, offsets);
    require_ok(step ? kivi_step(cache_, index, batch, queries, k, v, out, &params, workspace.data(), bytes, nullptr)
                    : kivi_attend(cache_, index, batch, queries, out, &params, workspace.data(), bytes, nullptr));
    CHECK(out.marks_intact());
    CHECK(lse.marks_intact());
    CHECK(workspace.marks_intact());
    return {out.read(), lse.read()};
}

Tokens Cache::dequantize(int32_t sequence, int index, uint64_t flags) const {
    return dequantize(sequence, index, 0, length(sequence, index).length, flags);
}

Tokens Cache::dequantize(int32_t sequence, int index, int64_t begin, int64_t end, uint64_t flags) const {
    const kivi_layer& shape = layer(index);
    const Tensor k(KIVI_F32, {end - begin, shape.kv_heads, shape.key_dim});
    const Tensor v(KIVI_F32, {end - begin, shape.kv_heads, shape.value_dim});
    require_ok(kivi_dequantize(cache_, index, sequence, begin, end, k, v, flags, nullptr));
    CHECK(k.marks_intact());
    CHECK(v.marks_intact());
    return {k.read(), v.read()};
}

kivi_length Cache::length(int32_t sequence, int index) const {
    kivi_length length{};
    require_ok(kivi_sequence_length(cache_, index, sequence, &length, sizeof length));
    return length;
}

kivi_statistics Cache::statistics(int index) const {
    kivi_statistics statistics{};
    require_ok(kivi_query_statistics(cache_, index, &statistics, sizeof statistics));
    return statistics;
}

kivi_memory Cache::memory() const {
    kivi_memory memory{};
    require_ok(kivi_cache_memory(cache_, &memory, sizeof memory));
    return memory;
}

Bytes Cache::blob(int32_t sequence) const {
    size_t bytes = 0, written = 0;
    require_ok(kivi_export_size(cache_, sequence, &bytes));
    Bytes blob(bytes);
    require_ok(kivi_export(cache_, sequence, blob.data(), bytes, &written, nullptr));
    REQUIRE(written == bytes);
    return blob;
}

kivi_status Cache::import(int32_t sequence, const Bytes& blob) const {
    return kivi_import(cache_, sequence, blob.data(), blob.size(), nullptr);
}

Bytes Cache::moments_blob(int index) const {
    size_t bytes = 0, written = 0;
    require_ok(kivi_moments_export_size(cache_, index, &bytes));
    Bytes blob(bytes);
    require_ok(kivi_moments_export(cache_, index, blob.data(), bytes, &written));
    REQUIRE(written == bytes);
    return blob;
}

kivi_status create_status(const kivi_config& config) {
    kivi_cache* cache = nullptr;
    const kivi_status status = kivi_cache_create(&config, &cache);
    CHECK((status == KIVI_OK) == (cache != nullptr));
    kivi_cache_destroy(cache);
    return status;
}

Tokens random_tokens(Random& random, const kivi_layer& layer, int64_t tokens) {
    const size_t rows = size_t(tokens) * size_t(layer.kv_heads);
    return {key_like(random, rows, layer.key_dim), random.normals(rows * size_t(layer.value_dim))};
}

Floats rows_of(const Floats& x, size_t width, int64_t begin, int64_t end) {
    return Floats(x.begin() + begin * int64_t(width), x.begin() + end * int64_t(width));
}

Tokens slice(const Tokens& tokens, const kivi_layer& layer, int64_t begin, int64_t end) {
    const size_t heads = size_t(layer.kv_heads);
    return {rows_of(tokens.k, heads * size_t(layer.key_dim), begin, end),
            rows_of(tokens.v, heads * size_t(layer.value_dim), begin, end)};
}

bool bit_equal(const Floats& a, const Floats& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}
bool bit_equal(const Answer& a, const Answer& b) {
    return bit_equal(a.out, b.out) && bit_equal(a.lse, b.lse);
}

}  // namespace kivi_test
