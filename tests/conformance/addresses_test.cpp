// Section D of the public faults: strides, alignments, offsets past 2^31 and what the caller's memory may do.
#include <sys/mman.h>

#include <cstring>

#include "support/cache.h"
#include "support/oracle.h"
#include "support/restate.h"

using namespace kivi_test;

namespace {

// Address space without memory behind it, until it is written.
class Sparse {
  public:
    explicit Sparse(size_t bytes) : bytes_(bytes) {
        memory_ =
            mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        REQUIRE(memory_ != MAP_FAILED);
    }
    ~Sparse() { munmap(memory_, bytes_); }
    Sparse(const Sparse&) = delete;
    Sparse& operator=(const Sparse&) = delete;
    float* floats() const { return static_cast<float*>(memory_); }

  private:
    void* memory_;
    size_t bytes_;
};

kivi_tensor strided(float* data, std::vector<int64_t> shape, std::vector<int64_t> stride) {
    kivi_tensor tensor{};
    tensor.data = data;
    tensor.dtype = KIVI_F32;
    tensor.device = backend().device;
    tensor.rank = int32_t(shape.size());
    std::copy(shape.begin(), shape.end(), tensor.shape);
    std::copy(stride.begin(), stride.end(), tensor.stride);
    return tensor;
}

}  // namespace

TEST_CASE(
    "fault 70, fault 71, S4, S12: row and token strides past 2^31 elements reach what they mean, in and "
    "out") {
    if (!backend().host_memory) return;  // address space without memory is the host's
    const int64_t row = int64_t{1} << 30, step = (int64_t{1} << 31) + 64;
    kivi_config with = config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, {0, 32, 32});
    with.max_sequences = 5;
    const Cache cache(with), plain(with);
    Random random(71);
    // Row 4 begins 2^32 elements in, its second token past 2^32 + 2^31.
    const Sparse in(size_t(4 * row + step + 64) * sizeof(float)),
        out(size_t(4 * row + step + 64) * sizeof(float));
    const Tokens tokens{random.normals(2 * 64), random.normals(2 * 64)};
    for (int64_t t : {0, 1}) {
        std::memcpy(in.floats() + 4 * row + t * step, tokens.k.data() + 64 * t, 64 * sizeof(float));
    }
    const Rows rows{{-1, 0}, {-1, 0}, {-1, 0}, {0, 0}, {4, 2}};
    const kivi_tensor k = strided(in.floats(), {5, 2, 1, 64}, {row, step, 64, 1});
    REQUIRE(kivi_append(cache, 0, Batch(rows), &k, &k, nullptr) == KIVI_OK);
    plain.append(4, {tokens.k, tokens.k}, 0, 2);
    CHECK(cache.blob(4) == plain.blob(4));
    CHECK(cache.length(0).length == 0);

    kivi_tensor q = k, result = strided(out.floats(), {5, 2, 1, 64}, {row, step, 64, 1});
    const Workspace workspace(1 << 20);
    REQUIRE(kivi_attend(cache, 0, Batch(rows), &q, &result, nullptr, workspace.data(), workspace.size(),
                        nullptr) == KIVI_OK);
    const Answer expected = plain.attend({{4, 2}}, tokens.k);
    for (int64_t t : {0, 1}) {
        CHECK(std::memcmp(out.floats() + 4 * row + t * step, expected.out.data() + 64 * t,
                          64 * sizeof(float)) == 0);
    }
    CHECK(Floats(out.floats(), out.floats() + 64) == Floats(64, 0.0f));  // row 0 is unchanged

    // Rank 3: offsets in tokens of such a stride.
    const Cache ragged(with);
    const kivi_tensor k3 = strided(in.floats() + 4 * row, {2, 1, 64}, {step, 64, 1});
    REQUIRE(kivi_append(ragged, 0, Batch({{4, 1}}, {1}), &k3, &k3, nullptr) == KIVI_OK);
    const Cache second(with);
    second.append(4, {tokens.k, tokens.k}, 1, 2);
    CHECK(ragged.blob(4) == second.blob(4));
}

TEST_CASE(
    "TEST 22, fault 70: windows past 2^31 elements: the last of 4096 sequences is as right as the first") {
    kivi_config with = config(channel(2, 32), token(2, 32), {8, 8, 128, 128}, {256, 256, 256});
    with.max_sequences = 4096;
    with.max_tokens = 900;
    with.pool_tokens = 2 * 1024;  // K windows alone: 4096 * 8 * 256 and 4096 * 8 * 512 rows of 128
    kivi_memory memory{};
    REQUIRE(kivi_cache_estimate(&with, &memory, sizeof memory) == KIVI_OK);
    CHECK(memory.window_bytes / 2 / 2 > (uint64_t{1} << 31));
    const Cache cache(with);
    Random random(22);
    const Tokens tokens = random_tokens(random, cache.layer(), 600);
    for (int sequence : {0, 4095}) cache.append(sequence, tokens, 0, 600);
    CHECK(cache.blob(0) == cache.blob(4095));
    const Floats q = random.normals(8 * 128);
    check_attend(cache, {{4095, 1}}, q);
    CHECK(bit_equal(cache.attend({{0, 1}}, q), cache.attend({{4095, 1}}, q)));
}

TEST_CASE("fault 73, TEST 22: sizes are 64-bit, or refused with the limit") {
    kivi_config with = config(channel(2, 32), token(2, 32), {64, 64, 256, 256}, {0, 32, 32});
    with.max_tokens = int64_t{1} << 31;
    kivi_memory memory{};
    REQUIRE(kivi_cache_estimate(&with, &memory, sizeof memory) == KIVI_OK);
    // The tail keeps 32 tokens out of the pages; blocks are 128 tokens.
    const uint64_t block =
        64 * uint64_t(part_bytes(with.layer.k, 256, KIVI_F16) + part_bytes(with.layer.v, 256, KIVI_F16));
    CHECK(memory.block_bytes == block);
    CHECK(memory.page_bytes == uint64_t(memory.blocks) * block);
    CHECK(uint64_t(memory.blocks) >= (uint64_t{1} << 31) / 128 - 1);
    CHECK(uint64_t(memory.blocks) <= (uint64_t{1} << 31) / 128);
    with.max_tokens = INT64_MAX;
    CHECK(kivi_cache_estimate(&with, &memory, sizeof memory) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(says("2^62 bytes"));
    CHECK(create_status(with) == KIVI_ERROR_INVALID_ARGUMENT);
    // 4096 heads of 4128 tokens, 2.2e9 elements a tensor.
    kivi_config many = config(channel(2, 32), token(2, 32), {4096, 4096, 128, 128}, {0, 32, 32});
    many.max_tokens = 4128;
    REQUIRE(kivi_cache_estimate(&many, &memory, sizeof memory) == KIVI_OK);
    CHECK(memory.page_bytes == uint64_t(memory.blocks) * 4096 * 2 * 6144);
}

TEST_CASE(
    "fault 74: head dims and bases that no vector fits: any element alignment works, others are refused") {
    for (int dim : {8, 80, 96}) {
        for (int32_t dtype : {KIVI_F16, KIVI_BF16, KIVI_F32}) {
            const kivi_config with =
                config(channel(2, 32), token(2, KIVI_GROUP_HEAD), {2, 4, dim, dim}, {0, 16, 32});
            const Cache odd(with), even(with);
            Random random(74);
            const Tokens tokens = random_tokens(random, odd.layer(), 90);
            even.append(0, tokens, 0, 90, 0, 0, dtype);
            const Tensor k(dtype, {90, 2, dim}, {2 * dim + 1, dim, 1}, 1, tokens.k);
            const Tensor v(dtype, {90, 2, dim}, {2 * dim + 3, dim + 1, 1}, 3, tokens.v);
            REQUIRE(kivi_append(odd, 0, Batch({{0, 90}}), k, v, nullptr) == KIVI_OK);
            CHECK(odd.blob() == even.blob());
            const Floats queries = random.normals(4 * size_t(dim));
            const Tensor q(dtype, {1, 4, dim}, {1, dim + 1, 1}, 1, queries);
            const Tensor out(dtype, {1, 4, dim}, {1, dim + 1, 1}, 1);
            const Workspace workspace(1 << 20);
            REQUIRE(kivi_attend(odd, 0, Batch({{0, 1}}), q, out, nullptr, workspace.data() + 3,
                                workspace.size() - 3, nullptr) == KIVI_OK);
            CHECK(out.marks_intact());
            Ask ask;
            ask.q_dtype = ask.out_dtype = dtype;
            CHECK(bit_equal(out.read(), even.attend({{0, 1}}, queries, ask).out));
            kivi_tensor broken = *static_cast<const kivi_tensor*>(k);
            broken.data = static_cast<char*>(broken.data) + 1;
            CHECK(kivi_append(odd, 0, Batch({{0, 1}}), &broken, v, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
            CHECK(says("aligned"));
        }
    }
}

TEST_CASE(
    "fault 76: K and V as views of one packed QKV, and heads and tokens that are expanded with stride 0") {
    kivi_config with = config(channel(2, 32), token(2, 32), {2, 4, 64, 64}, {0, 32, 32});
    const Cache viewed(with), copied(with);
    Random random(76);
    const Tokens tokens = random_tokens(random, viewed.layer(), 100);
    const Floats q = random.normals(100 * 4 * 64);
    // [token][4 query heads, 2 key heads, 2 value heads]
    Floats fused;
    for (int64_t t = 0; t < 100; ++t) {
        for (const Floats& part : {rows_of(q, 256, t, t + 1), rows_of(tokens.k, 128, t, t + 1),
                                   rows_of(tokens.v, 128, t, t + 1)}) {
            fused.insert(fused.end(), part.begin(), part.end());
        }
    }
    const Tensor qkv(KIVI_F32, {100, 8, 64}, fused);
    kivi_tensor k = *static_cast<const kivi_tensor*>(qkv), v = k, queries = k;
    k.shape[1] = v.shape[1] = 2;
    queries.shape[1] = 4;
    k.data = static_cast<float*>(k.data) + 256;
    v.data = static_cast<float*>(v.data) + 384;
    REQUIRE(kivi_append(viewed, 0, Batch({{0, 100}}), &k, &v, nullptr) == KIVI_OK);
    copied.append(0, tokens, 0, 100);
    CHECK(viewed.blob() == copied.blob());
    const Tensor out(KIVI_F32, {100, 4, 64});
    size_t bytes = 0;
    REQUIRE(kivi_attend_workspace(viewed, 0, 1, 100, &bytes) == KIVI_OK);
    const Workspace workspace(bytes);
    REQUIRE(kivi_attend(viewed, 0, Batch({{0, 100}}), &queries, out, nullptr, workspace.data(),
                        workspace.size(), nullptr) == KIVI_OK);
    CHECK(bit_equal(out.read(), copied.attend({{0, 100}}, q).out));

    // One head for all, one token for all; also for the queries. Refused for outputs.
    const Cache expanded(with), repeated(with);
    const Floats head = random.normals(64);
    Floats copies;
    for (int i = 0; i < 100 * 2; ++i) copies.insert(copies.end(), head.begin(), head.end());
    const Tensor broadcast(KIVI_F32, {100, 2, 64}, {0, 0, 1}, 0, head);
    REQUIRE(kivi_append(expanded, 0, Batch({{0, 100}}), broadcast, broadcast, nullptr) == KIVI_OK);
    repeated.append(0, {copies, copies}, 0, 100);
    CHECK(expanded.blob() == repeated.blob());
    const Tensor one_query(KIVI_F32, {1, 4, 64}, {0, 0, 1}, 0, head), row(KIVI_F32, {1, 4, 64});
    REQUIRE(kivi_attend(expanded, 0, Batch({{0, 1}}), one_query, row, nullptr, workspace.data(),
                        workspace.size(), nullptr) == KIVI_OK);
    CHECK(bit_equal(row.read(), repeated.attend({{0, 1}}, rows_of(copies, 64, 0, 4)).out));
    CHECK(kivi_attend(expanded, 0, Batch({{0, 1}}), one_query, one_query, nullptr, workspace.data(),
                      workspace.size(), nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(says("broadcast"));
}

TEST_CASE(
    "fault 77: gaps between rows, tokens and heads of inputs and outputs are neither read nor written") {
    kivi_config with = config(channel(2, 32), token(2, 32), {2, 4, 64, 64}, {0, 32, 32});
    with.max_sequences = 2;
    const Cache gapped(with), dense(with);
    Random random(77);
    const Tokens tokens = random_tokens(random, gapped.layer(), 100);
    dense.append({{0, 50}, {1, 50}}, tokens);
    const Tensor k(KIVI_F32, {2, 50, 2, 64}, {60 * 170, 170, 80, 1}, 5, tokens.k);
    const Tensor v(KIVI_F32, {2, 50, 2, 64}, {70 * 150, 150, 70, 1}, 2, tokens.v);
    REQUIRE(kivi_append(gapped, 0, Batch({{0, 50}, {1, 50}}), k, v, nullptr) == KIVI_OK);
    for (int sequence : {0, 1}) CHECK(gapped.blob(sequence) == dense.blob(sequence));
    const Floats q = random.normals(2 * 3 * 4 * 64);
    const Tensor queries(KIVI_F32, {2, 3, 4, 64}, {3 * 300, 300, 70, 1}, 1, q);
    const Tensor out(KIVI_BF16, {2, 3, 4, 64}, {3 * 310, 310, 75, 1}, 7);
    const Tensor lse(KIVI_F32, {2, 3, 4}, {30, 9, 1}, 1);
    kivi_attend_params params;
    kivi_attend_params_init(&params, sizeof params);
    params.lse = lse;
    size_t bytes = 0;
    REQUIRE(kivi_attend_workspace(gapped, 0, 2, 3, &bytes) == KIVI_OK);
    const Workspace workspace(bytes);
    REQUIRE(kivi_attend(gapped, 0, Batch({{0, 3}, {1, 3}}), queries, out, &params, workspace.data(),
                        workspace.size(), nullptr) == KIVI_OK);
    CHECK(out.marks_intact());
    CHECK(lse.marks_intact());
    Ask ask;
    ask.out_dtype = KIVI_BF16;
    const Answer expected = dense.attend({{0, 3}, {1, 3}}, q, ask);
    CHECK(bit_equal(out.read(), expected.out));
    CHECK(bit_equal(lse.read(), expected.lse));
    const Tensor read(KIVI_F16, {50, 2, 64}, {200, 70, 1}, 3);
    REQUIRE(kivi_dequantize(gapped, 0, 1, 0, 50, read, nullptr, 0, nullptr) == KIVI_OK);
    CHECK(read.marks_intact());
}

TEST_CASE("fault 79: capacity 1000 holds exactly 1000 tokens, whatever the group") {
    for (int group : {32, 128}) {
        kivi_config with = config(channel(2, group), token(2, 32), {1, 1, 64, 64}, {0, group, group});
        with.max_tokens = 1000;
        const Cache cache(with);
        Random random(79);
        const Tokens tokens = random_tokens(random, cache.layer(), 1001);
        cache.append(0, tokens, 0, 1000, 333);
        const Bytes before = cache.blob();
        CHECK(cache.try_append({{0, 1}}, slice(tokens, cache.layer(), 1000, 1001)) == KIVI_ERROR_CAPACITY);
        CHECK(says("max_tokens, 1000"));
        CHECK(cache.blob() == before);
        cache.flush();
        CHECK(cache.length().length == 1000);
        check_attend(cache, {{0, 1}}, random.normals(64));
    }
}

TEST_CASE("fault 85: the host arrays of a call may be overwritten as soon as it returns") {
    kivi_config with = config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, {0, 32, 32});
    with.max_sequences = 2;
    const Cache cache(with);
    Random random(85);
    const Tokens tokens = random_tokens(random, cache.layer(), 10);
    int32_t sequences[2] = {0, 1}, counts[2] = {3, 7};
    kivi_batch batch;
    REQUIRE(kivi_batch_init(&batch, sizeof batch) == KIVI_OK);
    batch.rows = 2;
    batch.sequences = sequences;
    batch.counts = counts;
    const Tensor k(KIVI_F32, {10, 1, 64}, tokens.k), v(KIVI_F32, {10, 1, 64}, tokens.v);
    REQUIRE(kivi_append(cache, 0, &batch, k, v, nullptr) == KIVI_OK);
    sequences[0] = 1, sequences[1] = 0, counts[0] = 1, counts[1] = 2;
    REQUIRE(kivi_append(cache, 0, &batch, k, v, nullptr) == KIVI_OK);
    sequences[0] = sequences[1] = -1;
    CHECK(cache.length(0).length == 5);
    CHECK(cache.length(1).length == 8);
}

TEST_CASE("fault 92: keys and values may be freed and written over once the stream has passed") {
    kivi_config with = config(channel(2, 32), token(2, 32), {1, 1, 64, 64}, {0, 32, 32});
    const Cache cache(with), plain(with);
    Random random(92);
    const Tokens tokens = random_tokens(random, cache.layer(), 100);
    plain.append(0, tokens, 0, 100);
    Floats k = tokens.k, v = tokens.v;
    if (backend().host_memory) {
        const kivi_tensor keys = strided(k.data(), {100, 1, 64}, {64, 64, 1}),
                          values = strided(v.data(), {100, 1, 64}, {64, 64, 1});
        REQUIRE(kivi_append(cache, 0, Batch({{0, 100}}), &keys, &values, nullptr) == KIVI_OK);
    } else {
        cache.append(0, tokens, 0, 100);
    }
    std::fill(k.begin(), k.end(), kNaN);
    std::fill(v.begin(), v.end(), kNaN);
    CHECK(cache.blob() == plain.blob());
}
