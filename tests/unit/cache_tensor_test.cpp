// What tensors and batches may look like, through the C API. [TENSOR-1] [TENSOR-2] [TENSOR-3]
// [BATCH-1] [BATCH-2] [FAIL-1] [FAIL-2]
#include "cache_support.h"

#include <cmath>
#include <functional>
#include <limits>

#include "backend/backend.h"

using namespace kivi_test;

namespace {

constexpr int kCount = 3;

// Arguments of one append and one attend on a cache of one sequence of 50 tokens.
struct Arguments {
    std::vector<float> memory = Numbers(5).take(8 * kCount * kQueryHeads * kDim);
    std::vector<float> result = std::vector<float>(8 * kCount * kQueryHeads * kDim, 7.0f);
    std::vector<float> lse_memory = std::vector<float>(8 * kCount * kQueryHeads, 7.0f);
    OneRow row{0, kCount};
    kivi_tensor k = dense(memory, {kCount, kHeads, kDim});
    kivi_tensor v = dense(memory, {kCount, kHeads, kDim});
    kivi_tensor q = dense(memory, {kCount, kQueryHeads, kDim});
    kivi_tensor out = dense(result, {kCount, kQueryHeads, kDim});
    kivi_tensor lse = dense(lse_memory, {kCount, kQueryHeads});
    kivi_attend_params params;
    void* stream = nullptr;

    Arguments() {
        kivi_attend_params_init(&params, sizeof params);
        params.lse = &lse;
    }
};

struct Refusal {
    const char* what;
    std::function<void(Arguments&)> change;
    const char* sentence;
};

kivi_status attend(kivi_cache* cache, const Arguments& a) {
    size_t bytes = 0;
    kivi_attend_workspace(cache, 0, 4, 8, &bytes);
    std::vector<uint8_t> workspace(bytes);
    return kivi_attend(cache, 0, &a.row, &a.q, &a.out, &a.params, workspace.data(), bytes, a.stream);
}

}  // namespace

TEST_CASE("an append that is refused names argument, value and limit, and changes nothing") {
    TestCache cache(small_config());
    REQUIRE(cache.append(0, 50) == KIVI_OK);
    const std::vector<uint8_t> before = cache.blob(0);
    static int32_t doubled[2] = {0, 0}, far[1] = {3}, negative[1] = {-2}, counts[1] = {kCount},
                   long_counts[1] = {kCount + 1}, negative_counts[1] = {-1};
    static int64_t offsets[1] = {1}, negative_offsets[1] = {-1}, huge_offsets[1] = {INT64_MAX};
    const std::vector<Refusal> refusals = {
        {"dtype", [](auto& a) { a.k.dtype = 4; }, "k.dtype is 4"},
        {"device", [](auto& a) { a.v.device = KIVI_CUDA; }, "v is on device 2"},
        {"device number", [](auto& a) { a.k.device_id = 1; }, "k is on device 1 number 1"},
        {"rank", [](auto& a) { a.k.rank = 2; }, "k.rank is 2"},
        {"heads", [](auto& a) { a.k.shape[1] = 3; }, "k: shape[1] (heads) is 3; it must be 2"},
        {"dim", [](auto& a) { a.v.shape[2] = 65; }, "v: shape[2] (dim) is 65; it must be 64"},
        {"tokens", [](auto& a) { a.k.shape[0] = 2; }, "k: shape[0] (tokens) is 2; the batch needs 3"},
        {"negative size", [](auto& a) { a.k.shape[0] = -1; }, "k: shape[0] is -1"},
        {"negative stride", [](auto& a) { a.k.stride[0] = -128; }, "k: stride[0] is -128"},
        {"inner stride", [](auto& a) { a.k.stride[2] = 2; }, "innermost stride must be 1"},
        {"no data", [](auto& a) { a.k.data = nullptr; }, "k.data is NULL"},
        {"misaligned", [](auto& a) { a.k.data = static_cast<char*>(a.k.data) + 2; }, "k.data is not aligned"},
        {"fault 70: extent past 64 bits", [](auto& a) { a.k.stride[0] = INT64_MAX / 2 + 1; },
         "past the limit"},
        {"extent past the address space", [](auto& a) { a.k.stride[0] = INT64_MAX / 16; }, "past the limit"},
        {"stream", [](auto& a) { a.stream = &a; }, "stream is"},
        {"id too large", [](auto& a) { a.row.batch.sequences = far; }, "batch.sequences[0] is 3"},
        {"id below -1", [](auto& a) { a.row.batch.sequences = negative; }, "batch.sequences[0] is -2"},
        {"rows", [](auto& a) { a.row.batch.rows = -1; }, "batch.rows is -1"},
        {"max_count", [](auto& a) { a.row.batch.max_count = -1; }, "batch.max_count is -1"},
        {"count above max_count", [](auto& a) { a.row.batch.counts = long_counts; }, "batch.counts[0] is 4"},
        {"negative count", [](auto& a) { a.row.batch.counts = negative_counts; }, "batch.counts[0] is -1"},
        {"offset out of the tensor",
         [](auto& a) {
             a.row.batch.counts = counts;
             a.row.batch.offsets = offsets;
         },
         "the batch needs 4"},
        {"negative offset",
         [](auto& a) {
             a.row.batch.counts = counts;
             a.row.batch.offsets = negative_offsets;
         },
         "batch.offsets[0] is -1"},
        {"huge offset",
         [](auto& a) {
             a.row.batch.counts = counts;
             a.row.batch.offsets = huge_offsets;
         },
         "batch.offsets[0] is"},
        {"doubled",
         [](auto& a) {
             a.row.batch.rows = 2;
             a.row.batch.sequences = doubled;
             a.row.batch.max_count = 1;
         },
         "stands in an earlier row"},
        {"device arrays", [](auto& a) { a.row.batch.device = KIVI_CUDA; }, "batch.device is 2"},
        {"unknown device of arrays", [](auto& a) { a.row.batch.device = 9; }, "batch.device is 9"},
        {"misaligned array",
         [](auto& a) {
             a.row.batch.counts = reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(counts) + 1);
         },
         "batch.counts is not aligned"},
        {"more rows than sequences",
         [](auto& a) {
             a.row.batch.rows = 4;
             a.row.batch.sequences = nullptr;
             a.row.batch.max_count = 0;
         },
         "batch.sequences[3] is 3"},
    };
    for (const Refusal& refusal : refusals) {
        CAPTURE(refusal.what);
        Arguments a;
        refusal.change(a);
        CHECK(kivi_append(cache, 0, &a.row, &a.k, &a.v, a.stream) == KIVI_ERROR_INVALID_ARGUMENT);
        CAPTURE(error());
        CHECK(contains(error(), refusal.sentence));
        CHECK(cache.blob(0) == before);
    }
    Arguments a;
    CHECK(kivi_append(cache, 0, nullptr, &a.k, &a.v, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(contains(error(), "batch is NULL"));
    CHECK(kivi_append(cache, 0, &a.row, nullptr, &a.v, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(contains(error(), "k is NULL"));
    for (int32_t layer : {-1, 2, INT32_MAX}) {
        CHECK(kivi_append(cache, layer, &a.row, &a.k, &a.v, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
        CHECK(contains(error(), "layer is " + std::to_string(layer)));
    }
    CHECK(cache.blob(0) == before);
}

TEST_CASE("an attend that is refused names argument, value and limit, and writes nothing") {
    TestCache cache(small_config());
    REQUIRE(cache.append(0, 50) == KIVI_OK);
    const float kNaN = std::numeric_limits<float>::quiet_NaN(),
                kInfinity = std::numeric_limits<float>::infinity();
    static kivi_tensor fresh;
    const std::vector<Refusal> refusals = {
        {"heads of q", [](auto& a) { a.q.shape[1] = kHeads; }, "q: shape[1] (heads) is 2"},
        {"heads of out", [](auto& a) { a.out.shape[1] = kHeads; }, "out: shape[1] (heads) is 2"},
        {"broadcast output", [](auto& a) { a.out.stride[0] = 0; }, "an output cannot be broadcast"},
        {"dtype of the LSE", [](auto& a) { a.lse.dtype = KIVI_F16; }, "params.lse.dtype is 2"},
        {"rank of the LSE", [](auto& a) { a.lse.rank = 1; }, "params.lse.rank is 1"},
        {"heads of the LSE", [](auto& a) { a.lse.shape[1] = 3; }, "params.lse: shape[1] (heads) is 3"},
        {"scale NaN", [=](auto& a) { a.params.scale = kNaN; }, "params.scale is"},
        {"scale infinite", [=](auto& a) { a.params.scale = kInfinity; }, "params.scale is inf"},
        {"fault 22: negative cap", [](auto& a) { a.params.soft_cap = -30; }, "params.soft_cap is -30"},
        {"fault 22: cap NaN", [=](auto& a) { a.params.soft_cap = kNaN; }, "params.soft_cap is"},
        {"window", [](auto& a) { a.params.window_left = -2; }, "params.window_left is -2"},
        {"flags", [](auto& a) { a.params.flags = 4; }, "flags is 4"},
        {"fresh keys alone",
         [](auto& a) {
             fresh = a.k;
             a.params.k = &fresh;
         },
         "params.v is NULL"},
        {"fresh values alone",
         [](auto& a) {
             fresh = a.v;
             a.params.v = &fresh;
         },
         "params.k is NULL"},
        {"misaligned sinks",
         [](auto& a) {
             a.params.learned_sinks =
                 reinterpret_cast<const float*>(reinterpret_cast<const char*>(a.memory.data()) + 1);
         },
         "params.learned_sinks is not aligned"},
        {"stream", [](auto& a) { a.stream = &a; }, "stream is"},
    };
    for (const Refusal& refusal : refusals) {
        CAPTURE(refusal.what);
        Arguments a;
        refusal.change(a);
        CHECK(attend(cache, a) == KIVI_ERROR_INVALID_ARGUMENT);
        CAPTURE(error());
        CHECK(contains(error(), refusal.sentence));
        CHECK(a.result == std::vector<float>(a.result.size(), 7.0f));
        CHECK(a.lse_memory == std::vector<float>(a.lse_memory.size(), 7.0f));
    }
    Arguments a;
    CHECK(attend(cache, a) == KIVI_OK);
    CHECK(a.result[0] != 7.0f);
}

TEST_CASE("strided, broadcast and misaligned-to-words views are read as they stand") {
    // The same tokens once dense and once as every second head of a wide f16 buffer at an odd word.
    const std::vector<float> dense_kv = Numbers(9).take(kCount * kHeads * kDim);
    const int64_t wide = 4 * kHeads * kDim;
    std::vector<uint16_t> buffer(1 + kCount * wide);
    std::vector<float> rounded(dense_kv.size());
    for (int t = 0; t < kCount; t++) {
        for (int h = 0; h < kHeads; h++) {
            for (int c = 0; c < kDim; c++) {
                // Multiples of 1/64 are exact in f16.
                const float x = std::floor(dense_kv[(t * kHeads + h) * kDim + c] * 64) / 64;
                rounded[(t * kHeads + h) * kDim + c] = x;
                const int sign = x < 0, exponent = x == 0 ? 0 : std::ilogb(std::fabs(x));
                const int mantissa =
                    x == 0 ? 0 : static_cast<int>(std::ldexp(std::fabs(x), 10 - exponent)) & 1023;
                buffer[1 + t * wide + 2 * h * kDim + c] =
                    static_cast<uint16_t>(sign << 15 | (x == 0 ? 0 : (exponent + 15) << 10) | mantissa);
            }
        }
    }
    kivi_tensor strided = dense(rounded, {kCount, kHeads, kDim});
    strided.data = buffer.data() + 1;
    strided.dtype = KIVI_F16;
    strided.stride[0] = wide;
    strided.stride[1] = 2 * kDim;
    const kivi_tensor plain = dense(rounded, {kCount, kHeads, kDim});
    TestCache cache(small_config());
    const OneRow first(0, kCount), second(1, kCount), third(2, kCount);
    for (int32_t layer = 0; layer < 2; layer++) {
        REQUIRE(kivi_append(cache, layer, &first, &plain, &plain, nullptr) == KIVI_OK);
        REQUIRE(kivi_append(cache, layer, &second, &strided, &strided, nullptr) == KIVI_OK);
    }
    CHECK(cache.blob(0) == cache.blob(1));

    // Fault 76: stride 0 over heads and tokens.
    kivi_tensor repeated = plain;
    repeated.stride[0] = repeated.stride[1] = 0;
    std::vector<float> copies;
    for (int i = 0; i < kCount * kHeads; i++)
        copies.insert(copies.end(), rounded.begin(), rounded.begin() + kDim);
    const kivi_tensor copied = dense(copies, {kCount, kHeads, kDim});
    REQUIRE(kivi_sequence_reset(cache, 0, nullptr) == KIVI_OK);
    for (int32_t layer = 0; layer < 2; layer++) {
        REQUIRE(kivi_append(cache, layer, &third, &repeated, &repeated, nullptr) == KIVI_OK);
        REQUIRE(kivi_append(cache, layer, &first, &copied, &copied, nullptr) == KIVI_OK);
    }
    CHECK(cache.blob(0) == cache.blob(2));
}

TEST_CASE("strides beside a size of one, and whole tensors of no elements, are not looked at") {
    TestCache cache(small_config());
    const std::vector<float> one = Numbers(3).take(kHeads * kDim);
    kivi_tensor odd = dense(one, {1, 1, kHeads, kDim});
    odd.stride[0] = -77;
    odd.stride[1] = 1;
    OneRow row(0, 1);
    CHECK(kivi_append(cache, 0, &row, &odd, &odd, nullptr) == KIVI_OK);
    kivi_tensor empty = dense(nullptr, {1, 0, kHeads, kDim});
    row.batch.max_count = 0;
    CHECK(kivi_append(cache, 0, &row, &empty, &empty, nullptr) == KIVI_OK);
    CHECK(cache.length(0, 0) == 1);
}

TEST_CASE("rank 4 and rank 3 name the same tokens; offsets belong to rank 3") {
    // Rows of 2, 0 and 3 tokens: padded to 4 with NaN, and one after the other.
    const int32_t counts[3] = {2, 0, 3}, ids[3] = {2, 0, 1};
    const size_t token = kHeads * kDim;
    std::vector<float> ragged = Numbers(4).take(5 * token);
    std::vector<float> padded(3 * 4 * token, std::numeric_limits<float>::quiet_NaN());
    std::copy_n(ragged.begin(), 2 * token, padded.begin());
    std::copy_n(ragged.begin() + 2 * token, 3 * token, padded.begin() + 8 * token);
    kivi_batch batch;
    kivi_batch_init(&batch, sizeof batch);
    batch.rows = 3;
    batch.sequences = ids;
    batch.counts = counts;
    const kivi_tensor r3 = dense(ragged, {5, kHeads, kDim}), r4 = dense(padded, {3, 4, kHeads, kDim});

    TestCache one(small_config()), two(small_config()), three(small_config());
    for (int32_t layer = 0; layer < 2; layer++) {
        REQUIRE(kivi_append(one, layer, &batch, &r3, &r3, nullptr) == KIVI_OK);
        REQUIRE(kivi_append(two, layer, &batch, &r4, &r4, nullptr) == KIVI_OK);
    }
    const int64_t offsets[3] = {0, -5, 2};
    batch.offsets = offsets;
    for (int32_t layer = 0; layer < 2; layer++) {
        REQUIRE(kivi_append(three, layer, &batch, &r3, &r3, nullptr) == KIVI_OK);
    }
    CHECK(kivi_append(two, 0, &batch, &r4, &r4, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(contains(error(), "batch.offsets"));
    for (int32_t sequence = 0; sequence < 3; sequence++) {
        CHECK(one.blob(sequence) == two.blob(sequence));
        CHECK(one.blob(sequence) == three.blob(sequence));
    }
    CHECK(one.length(0, 0) == 0);
    CHECK(one.length(0, 1) == 3);

    // Fault 68: one row too few or too many in the tensor.
    batch.offsets = nullptr;
    const kivi_tensor narrow = dense(padded, {2, 4, kHeads, kDim});
    CHECK(kivi_append(two, 0, &batch, &narrow, &narrow, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(contains(error(), "shape[0] (rows) is 2; it must be 3"));
}

TEST_CASE("fault 71: row strides beyond 32 bits reach the row they mean") {
    // Virtual addresses only: the extent is checked, and the row's origin is formed in 64 bits.
    kivi::View view;
    view.row_stride = int64_t{1} << 30;
    view.token_stride = int64_t{1} << 33;
    kivi::Row row;
    row.index = 4;
    row.offset = 3;
    CHECK(kivi::origin(view, row) == int64_t{1} << 32);
    view.ragged = true;
    CHECK(kivi::origin(view, row) == 3 * (int64_t{1} << 33));
}

TEST_CASE("dequantize checks its range") {
    TestCache cache(small_config());
    REQUIRE(cache.append(0, 50) == KIVI_OK);
    std::vector<float> memory(50 * kHeads * kDim);
    const kivi_tensor all = dense(memory, {50, kHeads, kDim});
    CHECK(kivi_dequantize(cache, 0, 0, 0, 50, &all, nullptr, 0, nullptr) == KIVI_OK);
    CHECK(kivi_dequantize(cache, 0, 0, 0, 51, &all, nullptr, 0, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(contains(error(), "end is 51"));
    CHECK(kivi_dequantize(cache, 0, 0, -1, 50, &all, nullptr, 0, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(kivi_dequantize(cache, 0, 0, 10, 9, &all, nullptr, 0, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(kivi_dequantize(cache, 0, 0, 0, 49, &all, nullptr, 0, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(kivi_dequantize(cache, 0, 3, 0, 0, &all, nullptr, 0, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(kivi_dequantize(cache, 0, 0, 0, 50, &all, nullptr, 2, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(kivi_dequantize(cache, 0, 0, 20, 20, nullptr, nullptr, 0, nullptr) == KIVI_OK);
}
