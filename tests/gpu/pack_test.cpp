// Prompts packed on a GPU against the CPU, byte for byte: every instance, both roundings, with and without transforms,
// prompts in pieces, strides, and numbers that are hard to code.
#define DOCTEST_CONFIG_IMPLEMENT
#include <cmath>
#include <limits>
#include <string>

#include "gpu_support.h"
#include "instances.h"

using namespace gpu_test;

namespace {

enum class Content { usual, ties, tiny, damaged, minus_zero, constant, large, symmetric, huge, spread };
const char* const kContentNames[] = {
    "usual", "ties",      "tiny scales", "NaN and infinity", "-0 beside NaN", "constant channels",
    "large", "symmetric", "huge",       "blocks of wide range"};

struct Way {
    bool rotated_keys, rotated_values, query_aware;
    int sink, recent, flush;
    int32_t dtype = KIVI_F16;  // of rows and windows
};

kivi_config config_for(const Instance& instance, const Way& way, int64_t max_tokens) {
    kivi_config config;
    kivi_config_init(&config, sizeof config);
    config.layer_count = 1;
    config.layer.kv_heads = 2, config.layer.q_heads = 4;
    config.layer.key_dim = config.layer.value_dim = instance.dim;
    kivi_spec& k = config.layer.k;
    kivi_spec& v = config.layer.v;
    k = v = kivi_spec{};
    k.bits = instance.key_bits, k.axis = KIVI_AXIS_CHANNEL, k.group = instance.key_group;
    v.bits = instance.value_bits, v.axis = KIVI_AXIS_TOKEN, v.group = instance.value_group;
    if (way.rotated_keys) k.transform = KIVI_TRANSFORM_HADAMARD;
    if (way.rotated_values) v.transform = KIVI_TRANSFORM_HADAMARD;
    if (way.query_aware) k.rounding = KIVI_ROUND_QUERY_AWARE;
    set_windows(config, instance, way.sink, way.recent, way.flush);
    config.window_dtype = way.dtype;
    config.max_sequences = 3;
    config.max_tokens = max_tokens;
    config.threads = 4;
    return config;
}

// Sixteen neighbours whose sums of stages are exact or not, by little: `gap` is how many powers of two are between the
// largest and the least. x: a usual number.
float spread_number(size_t row, int channel, float x) {
    const int block = channel / 16, place = channel % 16, other = static_cast<int>(row / 4 % 16);
    const int gap = 7 + static_cast<int>((row / 16 + block) % 11), usual_gap = 7 + static_cast<int>(row / 4 % 11);
    const auto of = [&](int exponent) { return std::ldexp(std::copysign(1 + std::fabs(x) / 16, x), exponent); };
    // Two large numbers cancel in half of the results: what others were rounded by is left.
    if (row % 4 == 0) return place == other || place == (other ^ 9) ? 1.375f : of(-usual_gap);
    if (row % 4 == 1) return block != other % 4 ? x : of(place == other ? -gap : 0);  // one such block in a row
    switch ((row * 5 + block) % 11) {
        case 0: return of(place == other ? -gap : 0);
        case 1: return of(place == other ? 0 : -gap);
        case 2: return of(-place * gap / 15);
        case 3: return place % 3 == 0 ? 0.0f : place % 3 == 1 ? -0.0f : of(0);
        case 4: return place % 2 ? 0.0f : -0.0f;
        case 5: return place == other ? of(-gap / 2) : std::round(x * 100) * 0x1p-24f;  // subnormal in f16
        case 6: return std::round(x * 200) * 0x1p-24f;
        case 7: return std::ldexp(std::round(x * 10), place == other ? gap - 133 : -133);  // in bf16, zero in f16
        case 8: return place == other ? of(0) : std::ldexp(std::round(x * 10), -133);
        default: return x;
    }
}

std::vector<float> rows_of(Numbers& numbers, int64_t rows, int dim, Content content) {
    std::vector<float> x = numbers.rows(rows, dim);
    for (size_t i = 0; i < x.size(); ++i) {
        const int c = static_cast<int>(i % dim);
        switch (content) {
            case Content::usual: break;
            case Content::ties: x[i] = std::floor(x[i] * 3) * (c % 2 ? 0.25f : 3.0f); break;
            case Content::tiny: x[i] = i % 3 == 0 ? 0.0f : x[i] * 6e-8f * static_cast<float>(1 + c % 40); break;
            case Content::damaged:
                if (i % 997 == 3) {
                    x[i] = i % 2 ? std::numeric_limits<float>::quiet_NaN()
                                 : -std::numeric_limits<float>::infinity();
                }
                break;
            case Content::minus_zero:  // the least number of most groups
                x[i] = i % 997 == 3 ? std::numeric_limits<float>::quiet_NaN() : i % 7 == 2 ? -0.0f : std::fabs(x[i]);
                break;
            case Content::constant: x[i] = c % 5 ? x[i] : 1.5f; break;
            case Content::symmetric:  // ties at zero, and numbers that are nothing beside them
                x[i] = i % 9 == 0   ? 3.0f * static_cast<float>(1 << c % 9)
                       : i % 9 == 4 ? -3.0f * static_cast<float>(1 << c % 9)
                                    : x[i] * 6e-8f * static_cast<float>(1 << c % 16);
                break;
            case Content::huge: x[i] = std::fmax(-3e38f, std::fmin(3e38f, x[i] * (c % 7 < 3 ? 1e38f : 1e30f))); break;
            case Content::spread: x[i] = spread_number(i / dim, c, x[i]); break;
            case Content::large: x[i] = std::fmax(-65000.0f, std::fmin(65000.0f, x[i] * 20000)); break;
        }
    }
    return x;
}

class Pair {
  public:
    Pair(const Instance& instance, const Way& way, uint64_t seed, int64_t max_tokens = 3000)
        : cpu(config_for(instance, way, max_tokens), KIVI_CPU),
          gpu(config_for(instance, way, max_tokens), KIVI_CUDA),
          numbers(seed),
          dim_(instance.dim),
          dtype_(way.dtype) {
        if (!way.query_aware) return;
        std::vector<float> m(size_t(2) * dim_ * dim_, 0.0f);
        for (int head = 0; head < 2; ++head) {
            const std::vector<float> q = numbers.rows(2 * dim_, dim_);
            for (int row = 0; row < 2 * dim_; ++row) {
                for (int i = 0; i < dim_; ++i) {
                    for (int j = 0; j < dim_; ++j) {
                        m[(size_t(head) * dim_ + i) * dim_ + j] += q[row * dim_ + i] * q[row * dim_ + j];
                    }
                }
            }
        }
        Floats matrices(m);
        for (Cache* cache : {&cpu, &gpu}) {
            const kivi_tensor tensor = matrices.view(cache->device, {2, dim_, dim_});
            KIVI_OK_(kivi_moments_set(*cache, 0, &tensor, 0, nullptr));
            KIVI_OK_(kivi_moments_commit(*cache, 0, nullptr));
        }
    }

    // `count` tokens to sequence 1, two thirds as many to sequence 0; rows as far apart as `pad` channels more.
    void append(int count, int pad, Content content, kivi_stream stream = nullptr) {
        const int width = dim_ + pad;
        const int32_t ids[2] = {1, 0}, counts[2] = {count, count * 2 / 3};
        Halfs k(rows_of(numbers, int64_t{2} * count * 2, width, content), dtype_);
        Halfs v(rows_of(numbers, int64_t{2} * count * 2, width, content), dtype_);
        const kivi_batch batch = batch_of(2, ids, counts, count);
        for (Cache* cache : {&cpu, &gpu}) {
            kivi_tensor keys = k.view(cache->device, {2, count, 2, width}),
                        values = v.view(cache->device, {2, count, 2, width});
            keys.shape[3] = values.shape[3] = dim_;
            KIVI_OK_(kivi_append(*cache, 0, &batch, &keys, &values, cache == &gpu ? stream : nullptr));
        }
        CUDA_OK(cudaDeviceSynchronize());
    }

    void compare() {
        for (int32_t sequence : {0, 1}) check_same_blob(cpu, gpu, sequence);
        check_same_saturation(cpu, gpu);
    }

    Cache cpu, gpu;
    Numbers numbers;

  private:
    int dim_;
    int32_t dtype_;
};

}  // namespace

static void check_every_instance(int32_t dtype) {
    uint64_t seed = 1;
    for (const Instance& instance : coded_instances()) {
        const int group = instance.key_group;
        for (int which = 0; which < 8; ++which) {
            const Way way{(which & 1) != 0,
                          (which & 2) != 0,
                          (which & 4) != 0,
                          which % 3 == 1 ? 0 : group,
                          which % 2 ? 64 : 0,
                          which % 3 == 0 ? 128 : group,
                          dtype};
            CAPTURE(instance.name);
            CAPTURE(which);
            Pair pair(instance, way, seed++);
            pair.append(300 + 17 * which, 0, Content::usual);
            pair.append(33, 8, Content::usual);
            pair.append(1, 0, Content::usual);
            pair.append(411, 16, Content::usual);
            pair.append(17, 0, Content::usual);
            pair.compare();
        }
    }
}

static void check_hard_numbers(int32_t dtype, std::initializer_list<Content> contents) {
    uint64_t seed = 1000;
    for (const Instance& instance : coded_instances()) {
        for (Content content : contents) {
            for (int which : {0, 3, 4, 7}) {
                CAPTURE(instance.name);
                CAPTURE(which);
                CAPTURE(kContentNames[static_cast<int>(content)]);
                Pair pair(
                    instance,
                    {(which & 1) != 0, (which & 2) != 0, (which & 4) != 0, 0, 32, instance.key_group, dtype},
                    seed++);
                pair.append(450, 0, content);
                pair.append(100, 8, content);
                pair.compare();
            }
        }
    }
}

TEST_CASE("every instance, rounding and transform, prompts in pieces") { check_every_instance(KIVI_F16); }
TEST_CASE("the same of bf16") { check_every_instance(KIVI_BF16); }

TEST_CASE("ties and tiny scales") { check_hard_numbers(KIVI_F16, {Content::ties, Content::tiny}); }
TEST_CASE("damaged groups") { check_hard_numbers(KIVI_F16, {Content::damaged, Content::minus_zero}); }
TEST_CASE("constant, large and symmetric groups") {
    check_hard_numbers(KIVI_F16, {Content::constant, Content::large, Content::symmetric});
}
TEST_CASE("ties and damaged groups of bf16") {
    check_hard_numbers(KIVI_BF16, {Content::ties, Content::damaged, Content::minus_zero});
}
TEST_CASE("symmetric and huge groups of bf16") { check_hard_numbers(KIVI_BF16, {Content::symmetric, Content::huge}); }
TEST_CASE("blocks of wide range") { check_hard_numbers(KIVI_F16, {Content::spread}); }
TEST_CASE("blocks of wide range in bf16") { check_hard_numbers(KIVI_BF16, {Content::spread}); }

// Blocks go from page to page, and pages have neighbours of other heads.
TEST_CASE("long prompts") {
    for (int number : {0, 3}) {
        Pair pair(kInstances[number], {false, true, false, kInstances[number].key_group, 64, 64}, 21, 20000);
        pair.append(19000, 0, Content::usual);
        pair.compare();
    }
}

// Few blocks for each row: they go from head to head, and the batch takes two launches.
TEST_CASE("many rows") {
    constexpr int kRows = 70, kHeads = 6, kCount = 150;
    for (int number : {1, 5}) {
        const Instance& instance = kInstances[number];
        CAPTURE(instance.name);
        Numbers numbers(11);
        std::vector<int32_t> ids(kRows), counts(kRows);
        for (int32_t row = 0; row < kRows; ++row) ids[row] = row, counts[row] = kCount - row % 5;
        const kivi_batch batch = batch_of(kRows, ids.data(), counts.data(), kCount);
        const int64_t rows = int64_t{kRows} * kCount * kHeads;
        Halfs k(numbers.rows(rows, instance.dim)), v(numbers.rows(rows, instance.dim));
        std::vector<std::vector<uint8_t>> blobs[2];
        for (const int32_t device : {KIVI_CPU, KIVI_CUDA}) {
            kivi_config config = config_for(instance, {false, true, false, 0, 0, instance.key_group}, 200);
            config.layer.kv_heads = config.layer.q_heads = kHeads;
            config.max_sequences = kRows;
            Cache cache(config, device);
            const kivi_tensor keys = k.view(device, {kRows, kCount, kHeads, instance.dim}),
                              values = v.view(device, {kRows, kCount, kHeads, instance.dim});
            KIVI_OK_(kivi_append(cache, 0, &batch, &keys, &values, nullptr));
            for (int32_t row = 0; row < kRows; ++row) blobs[device == KIVI_CPU ? 0 : 1].push_back(cache.blob(row));
        }
        CHECK(blobs[0] == blobs[1]);
    }
}

TEST_CASE("rows that are not aligned take the general packer") {
    const Instance& instance = kInstances[3];
    Pair pair(instance, {false, true, false, 64, 64, 64}, 5);
    pair.append(300, 1, Content::usual);
    pair.append(300, 4, Content::usual);
    pair.append(300, 8, Content::usual);
    pair.compare();
}

// Every kernel of an instance once, small enough for tools that watch each access.
namespace {

void check_two_instances(bool query_aware) {
    for (int number : {3, 8}) {
        Pair pair(kInstances[number], {query_aware, true, query_aware, kInstances[number].key_group, 64, 64}, 7);
        pair.append(500, 0, Content::usual);
        pair.append(200, 8, Content::large);
        pair.compare();
    }
}

}  // namespace

TEST_CASE("sanitized: two instances") { check_two_instances(false); }

TEST_CASE("sanitized: two instances, query-aware") { check_two_instances(true); }

// One whose weights do not stand in shared memory all together.
TEST_CASE("sanitized: wide heads, query-aware") {
    Pair pair(kInstances[12], {false, false, true, 64, 64, 64}, 8);
    pair.append(300, 0, Content::usual);
    pair.append(100, 0, Content::usual);
    pair.compare();
}

TEST_CASE("a captured chunk of a prompt replays") {
    const Instance& instance = kInstances[0];
    const int count = 200, dim = instance.dim;
    const int32_t sequence = 2;
    Pair pair(instance, {false, false, false, 32, 96, 32}, 9);
    KIVI_OK_(kivi_sequence_reserve(pair.gpu, sequence, 3000, nullptr));
    Halfs k(pair.numbers.rows(count * 2, dim)), v(pair.numbers.rows(count * 2, dim));
    const kivi_batch batch = batch_of(1, &sequence, nullptr, count);
    const Stream stream;
    const auto append = [&](Cache& cache, kivi_stream on) {
        const kivi_tensor keys = k.view(cache.device, {1, count, 2, dim}),
                          values = v.view(cache.device, {1, count, 2, dim});
        KIVI_OK_(kivi_append(cache, 0, &batch, &keys, &values, on));
    };
    const Captured captured(stream, [&] { append(pair.gpu, stream); });
    for (int i = 0; i < 5; ++i) {
        k.set(pair.numbers.rows(count * 2, dim)), v.set(pair.numbers.rows(count * 2, dim));
        captured.replay();
        append(pair.cpu, nullptr);
    }
    KIVI_OK_(kivi_synchronize(pair.gpu, stream));
    CHECK(pair.gpu.blob(sequence, stream) == pair.cpu.blob(sequence));
}

int main(int argc, char** argv) {
    if (!gpu_there()) return kSkipped;
    return doctest::Context(argc, argv).run();
}
