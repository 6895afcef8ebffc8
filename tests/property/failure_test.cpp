// [FAIL-1] A failed call changes nothing: every failing call that can be made, against the whole visible
// state.
#include <functional>

#include "property/random_case.h"

using namespace kivi_test;

namespace {

// Everything that can be read of a cache.
struct State {
    std::vector<Bytes> blobs;
    std::vector<Bytes> moments;
    std::vector<int64_t> numbers;

    explicit State(const Cache& cache) {
        for (int32_t s = 0; s < cache.config().max_sequences; ++s) {
            blobs.push_back(cache.blob(s));
            for (int layer = 0; layer < cache.layers(); ++layer) {
                const kivi_length length = cache.length(s, layer);
                numbers.insert(numbers.end(),
                               {length.length, length.sink, length.key_border, length.value_border});
            }
        }
        for (int layer = 0; layer < cache.layers(); ++layer) {
            const kivi_statistics s = cache.statistics(layer);
            numbers.insert(numbers.end(), {s.tokens, s.packed_tokens, s.blocks_used, s.blocks_free,
                                           s.saturated_rows, s.key_rounding, s.moments, s.moment_queries,
                                           s.device_error, int64_t(s.live_bytes)});
            if (s.moments == 2) moments.push_back(cache.moments_blob(layer));
        }
        numbers.push_back(int64_t(cache.memory().total_bytes));
    }
    bool operator==(const State& other) const {
        return blobs == other.blobs && moments == other.moments && numbers == other.numbers;
    }
};

struct Failure {
    std::string what;
    kivi_status status;
    std::function<kivi_status()> call;
};

}  // namespace

TEST_CASE("a failed call leaves a byte-identical state and its outputs alone") {
    kivi_config with =
        config(query_aware(rotated(channel(3, 32))), rotated(token(2, 32)), {2, 4, 64, 64}, {32, 32, 32});
    with.layer_count = 2;
    with.max_sequences = 3;
    with.max_tokens = 400;
    with.pool_tokens = 512;
    const Cache cache(with);
    Random random(1);
    commit_moments(cache, random);
    const Tokens tokens = random_tokens(random, cache.layer(), 400);
    for (int layer : {0, 1}) {
        cache.append(0, tokens, 0, 300, 0, layer);
        cache.append(1, tokens, 0, 200, 0, layer);
    }
    const State before(cache);

    const Tensor k(KIVI_F32, {8, 2, 64}, tokens.k), v(KIVI_F32, {8, 2, 64}, tokens.v);
    const Tensor many_k(KIVI_F32, {300, 2, 64}, tokens.k), many_v(KIVI_F32, {300, 2, 64}, tokens.v);
    const Tensor q(KIVI_F32, {8, 4, 64}, random.normals(8 * 4 * 64)), out(KIVI_F32, {8, 4, 64}),
        lse(KIVI_F32, {8, 4});
    const Tensor m(KIVI_F32, {2, 64, 64}, Floats(2 * 64 * 64, 1.0f));
    const Batch one({{0, 2}}), two({{0, 2}, {0, 1}}), far({{3, 2}}), long_row({{0, 101}}),
        full_pool({{2, 300}});
    const Batch mixed({{1, 2}, {0, 101}}), beyond({{0, 9}});
    const Batch offset({{0, 2}}, {7}), negative({{0, 2}}, {-1});
    const Bytes sequence = before.blobs[0], moments = before.moments[0];
    Bytes cut(sequence.begin(), sequence.end() - 1), flipped = sequence, bad_moments = moments;
    flipped[200] ^= 4;
    bad_moments[100] ^= 1;
    Bytes buffer(sequence.size(), 0xA5);
    const Workspace workspace(1 << 20);
    size_t written = 7, bytes = 7;
    kivi_attend_params params;
    kivi_attend_params_init(&params, sizeof params);
    params.lse = lse;
    kivi_attend_params broken = params;
    broken.soft_cap = -1;
    kivi_attend_params half = params;
    half.k = k;
    const auto attend = [&](int layer, const kivi_batch* batch, const kivi_attend_params& p, size_t size) {
        return kivi_attend(cache, layer, batch, q, out, &p, workspace.data(), size, nullptr);
    };
    const Tensor many_q(KIVI_F32, {300, 4, 64}, random.normals(300 * 4 * 64)), many_out(KIVI_F32, {300, 4, 64}),
        many_lse(KIVI_F32, {300, 4});
    size_t needed = 0;
    REQUIRE(kivi_attend_workspace(cache, -1, 2, 300, &needed) == KIVI_OK);
    const Workspace roomy(needed);
    kivi_attend_params many = params, many_half = half;
    many.lse = many_half.lse = many_lse;
    const auto step = [&](int layer, const kivi_batch* batch, const kivi_attend_params& p, size_t size,
                          kivi_stream on = nullptr) {
        return kivi_step(cache, layer, batch, many_q, many_k, many_v, many_out, &p, roomy.data(), size, on);
    };
    const auto changed = [&](const Tensor& from, const std::function<void(kivi_tensor&)>& change) {
        kivi_tensor tensor = *static_cast<const kivi_tensor*>(from);
        change(tensor);
        return tensor;
    };
    const kivi_tensor no_data = changed(k, [](kivi_tensor& t) { t.data = nullptr; });
    const kivi_tensor backwards = changed(k, [](kivi_tensor& t) { t.stride[0] = -128; });
    const kivi_tensor inner = changed(k, [](kivi_tensor& t) { t.stride[2] = 2; });
    const kivi_tensor dtype = changed(k, [](kivi_tensor& t) { t.dtype = 9; });
    const kivi_tensor device = changed(k, [](kivi_tensor& t) { t.device = 3; });
    const kivi_tensor heads = changed(k, [](kivi_tensor& t) { t.shape[1] = 1; });
    const kivi_tensor flat = changed(out, [](kivi_tensor& t) { t.stride[0] = 0; });
    const kivi_tensor huge = changed(k, [](kivi_tensor& t) { t.stride[0] = INT64_MAX / 4; });
    void* const stream = &bytes;

    constexpr kivi_status kInvalid = KIVI_ERROR_INVALID_ARGUMENT;
    std::vector<Failure> failures = {
        {"append to a full sequence", KIVI_ERROR_CAPACITY,
         [&] { return kivi_append(cache, 0, long_row, many_k, many_v, nullptr); }},
        {"append, the second row full", KIVI_ERROR_CAPACITY,
         [&] { return kivi_append(cache, 0, mixed, many_k, many_v, nullptr); }},
        {"append past the pool", KIVI_ERROR_CAPACITY,
         [&] { return kivi_append(cache, 1, full_pool, many_k, many_v, nullptr); }},
        {"append twice to one", kInvalid, [&] { return kivi_append(cache, 0, two, k, v, nullptr); }},
        {"append to no sequence", kInvalid, [&] { return kivi_append(cache, 0, far, k, v, nullptr); }},
        {"append to no layer", kInvalid, [&] { return kivi_append(cache, 2, one, k, v, nullptr); }},
        {"append of too few tokens", kInvalid, [&] { return kivi_append(cache, 0, beyond, k, v, nullptr); }},
        {"append past the tensor", kInvalid, [&] { return kivi_append(cache, 0, offset, k, v, nullptr); }},
        {"append before the tensor", kInvalid,
         [&] { return kivi_append(cache, 0, negative, k, v, nullptr); }},
        {"append of NULL", kInvalid, [&] { return kivi_append(cache, 0, one, nullptr, v, nullptr); }},
        {"append of no batch", kInvalid, [&] { return kivi_append(cache, 0, nullptr, k, v, nullptr); }},
        {"append on a stream", kInvalid, [&] { return kivi_append(cache, 0, one, k, v, stream); }},
        {"append to NULL", kInvalid, [&] { return kivi_append(nullptr, 0, one, k, v, nullptr); }},
        {"flush of no layer", kInvalid, [&] { return kivi_flush_residual(cache, 2, one, nullptr); }},
        {"flush of layer -2", kInvalid, [&] { return kivi_flush_residual(cache, -2, one, nullptr); }},
        {"flush of no sequence", kInvalid, [&] { return kivi_flush_residual(cache, -1, far, nullptr); }},
        {"flush twice of one", kInvalid, [&] { return kivi_flush_residual(cache, -1, two, nullptr); }},
        {"flush on a stream", kInvalid, [&] { return kivi_flush_residual(cache, -1, one, stream); }},
        {"attend without workspace", KIVI_ERROR_BUFFER_TOO_SMALL, [&] { return attend(0, one, params, 0); }},
        {"attend with a negative cap", kInvalid, [&] { return attend(0, one, broken, workspace.size()); }},
        {"attend with keys alone", kInvalid, [&] { return attend(0, one, half, workspace.size()); }},
        {"attend twice to one", kInvalid, [&] { return attend(0, two, params, workspace.size()); }},
        {"attend to no layer", kInvalid, [&] { return attend(-1, one, params, workspace.size()); }},
        {"attend to no sequence", kInvalid, [&] { return attend(0, far, params, workspace.size()); }},
        {"attend into a broadcast", kInvalid,
         [&] {
             return kivi_attend(cache, 0, one, q, &flat, &params, workspace.data(), workspace.size(),
                                nullptr);
         }},
        {"step of a full sequence", KIVI_ERROR_CAPACITY, [&] { return step(0, long_row, many, needed); }},
        {"step, the second row full", KIVI_ERROR_CAPACITY, [&] { return step(0, mixed, many, needed); }},
        {"step past the pool", KIVI_ERROR_CAPACITY, [&] { return step(1, full_pool, many, needed); }},
        {"step without workspace", KIVI_ERROR_BUFFER_TOO_SMALL, [&] { return step(0, one, many, 0); }},
        {"step with keys in the params", kInvalid, [&] { return step(0, one, many_half, needed); }},
        {"step twice of one", kInvalid, [&] { return step(0, two, many, needed); }},
        {"step of no layer", kInvalid, [&] { return step(2, one, many, needed); }},
        {"step of no sequence", kInvalid, [&] { return step(0, far, many, needed); }},
        {"step of NULL", kInvalid,
         [&] {
             return kivi_step(cache, 0, one, many_q, nullptr, many_v, many_out, &many, roomy.data(), needed, nullptr);
         }},
        {"step on a stream", kInvalid, [&] { return step(0, one, many, needed, stream); }},
        {"reset of no sequence", kInvalid, [&] { return kivi_sequence_reset(cache, 3, nullptr); }},
        {"reset on a stream", kInvalid, [&] { return kivi_cache_reset(cache, stream); }},
        {"reserve of less than nothing", kInvalid, [&] { return kivi_reserve(cache, -1, nullptr); }},
        {"reserve past every limit", kInvalid, [&] { return kivi_reserve(cache, INT64_MAX, nullptr); }},
        {"dequantise past the end", kInvalid,
         [&] { return kivi_dequantize(cache, 0, 0, 0, 301, out, nullptr, 0, nullptr); }},
        {"dequantise backwards", kInvalid,
         [&] { return kivi_dequantize(cache, 0, 0, 9, 8, out, nullptr, 0, nullptr); }},
        {"dequantise with a flag", kInvalid,
         [&] { return kivi_dequantize(cache, 0, 0, 0, 8, k, nullptr, 8, nullptr); }},
        {"export into too little", KIVI_ERROR_BUFFER_TOO_SMALL,
         [&] { return kivi_export(cache, 0, buffer.data(), sequence.size() - 1, &written, nullptr); }},
        {"export of no sequence", kInvalid,
         [&] { return kivi_export(cache, -1, buffer.data(), buffer.size(), &written, nullptr); }},
        {"import of a cut blob", KIVI_ERROR_CORRUPT, [&] { return cache.import(0, cut); }},
        {"import of a flipped blob", KIVI_ERROR_CORRUPT, [&] { return cache.import(1, flipped); }},
        {"import of moments as a sequence", KIVI_ERROR_CORRUPT, [&] { return cache.import(1, moments); }},
        {"import to no sequence", kInvalid, [&] { return cache.import(3, sequence); }},
        {"import past the pool", KIVI_ERROR_CAPACITY, [&] { return cache.import(2, sequence); }},
        {"accumulate while packed", KIVI_ERROR_STATE,
         [&] { return kivi_moments_accumulate(cache, 0, one, q, nullptr); }},
        {"set while packed", KIVI_ERROR_STATE, [&] { return kivi_moments_set(cache, 0, m, 0, nullptr); }},
        {"commit while packed", KIVI_ERROR_STATE, [&] { return kivi_moments_commit(cache, 0, nullptr); }},
        {"import of moments while packed", KIVI_ERROR_STATE,
         [&] { return kivi_moments_import(cache, 0, moments.data(), moments.size(), nullptr); }},
        {"import of broken moments", KIVI_ERROR_CORRUPT,
         [&] { return kivi_moments_import(cache, 0, bad_moments.data(), bad_moments.size(), nullptr); }},
        {"moments of no layer", kInvalid, [&] { return kivi_moments_commit(cache, 2, nullptr); }},
        {"workspace of a negative count", kInvalid,
         [&] { return kivi_attend_workspace(cache, 0, 1, -1, &bytes); }},
    };
    if (!backend().host_memory) {  // a handle that is no stream is beyond what a device's runtime can check
        failures.erase(std::remove_if(failures.begin(), failures.end(),
                                      [](const Failure& failure) {
                                          return failure.what.find("on a stream") != std::string::npos;
                                      }),
                       failures.end());
    }
    for (const kivi_tensor* bad : {&no_data, &backwards, &inner, &dtype, &device, &heads, &huge}) {
        failures.push_back({"append of broken keys", kInvalid,
                            [&cache, &one, &v, bad] { return kivi_append(cache, 0, one, bad, v, nullptr); }});
        failures.push_back({"append of broken values", kInvalid,
                            [&cache, &one, &k, bad] { return kivi_append(cache, 0, one, k, bad, nullptr); }});
    }
    for (const Failure& failure : failures) {
        CAPTURE(failure.what);
        const kivi_status status = failure.call();
        CAPTURE(error());
        CHECK(status == failure.status);
        CHECK(error().size() > 8);
        CHECK(State(cache) == before);
    }
    CHECK(out.untouched());
    CHECK(lse.untouched());
    CHECK(many_out.untouched());
    CHECK(many_lse.untouched());
    CHECK(buffer == Bytes(sequence.size(), 0xA5));
    CHECK(written == 7);
    CHECK(bytes == 7);

    // And the cache goes on as if nothing had been.
    const Cache fresh(with);
    Random again(1);
    commit_moments(fresh, again);
    for (int layer : {0, 1}) fresh.append(0, tokens, 0, 310, 0, layer);
    for (int layer : {0, 1}) cache.append(0, tokens, 300, 310, 0, layer);
    CHECK(fresh.blob(0) == cache.blob(0));
}

TEST_CASE("moments that cannot be factored, or that nobody gave, leave everything as it was") {
    const kivi_config with = config(query_aware(channel(2, 32)), token(2, 32), {1, 2, 64, 64}, {0, 32, 32});
    const Cache cache(with);
    const State before(cache);
    CHECK(kivi_moments_commit(cache, 0, nullptr) == KIVI_ERROR_STATE);
    Floats identity(64 * 64, 0.0f);
    for (size_t i = 0; i < 64; ++i) identity[i * 65] = 1;
    struct Wrong {
        std::string what;
        size_t row, column;
        float value;
    };
    for (const Wrong& wrong : {Wrong{"asymmetric", 3, 4, 0.5f},
                               {"NaN", 5, 5, kNaN},
                               {"infinite", 5, 5, kInfinity},
                               {"zero on the diagonal", 7, 7, 0.0f},
                               {"negative", 7, 7, -1.0f}}) {
        CAPTURE(wrong.what);
        Floats broken = identity;
        broken[wrong.row * 64 + wrong.column] = wrong.value;
        const Tensor m(KIVI_F32, {1, 64, 64}, broken);
        CHECK(kivi_moments_set(cache, 0, m, 0, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
        CHECK(State(cache) == before);
    }
    Floats indefinite = identity;
    indefinite[1] = indefinite[64] = 5;
    const Tensor m(KIVI_F32, {1, 64, 64}, indefinite);
    CHECK(kivi_moments_set(cache, 0, m, KIVI_STORED_BASIS, nullptr) < 0);
    CHECK(State(cache) == before);
    // Blobs of another basis or dim are a mismatch.
    for (const kivi_spec& spec : {rotated(with.layer.k), with.layer.k}) {
        kivi_config other = with;
        other.layer.k = spec;
        other.layer.key_dim = spec.transform ? 64 : 128;
        const Cache source(other);
        Random random(9);
        commit_moments(source, random);
        const Bytes blob = source.moments_blob();
        CHECK(kivi_moments_import(cache, 0, blob.data(), blob.size(), nullptr) == KIVI_ERROR_MISMATCH);
        CHECK(State(cache) == before);
    }
}
