// The state machine over a backend that only writes down what it is told: lengths, borders, blocks, and that
// a failed call changes nothing. [WINDOW-1] [APPEND-1] [FLUSH-1] [FAIL-1] [BATCH-1] [BATCH-2]
#include "cache_support.h"

#include "cache/cache.h"
#include "cache/config.h"
#include "format/error.h"

using namespace kivi_test;
using kivi::Batch;
using kivi::Cache;
using kivi::Error;
using kivi::Row;
using kivi::Span;
using kivi::View;

namespace {

class FakeBackend final : public kivi::Backend {
  public:
    struct Call {
        int layer;
        std::vector<Row> rows;
    };
    std::vector<Call> appends, flushes;
    std::vector<int32_t> published;
    mutable std::vector<Call> attends;
    kivi_status fail = KIVI_OK;
    int64_t pool = 0;

    void append(int layer, kivi::Rows rows, const View&, const View&, kivi_stream) override {
        note(appends, layer, rows);
    }
    void flush(int layer, kivi::Rows rows, kivi_stream) override { note(flushes, layer, rows); }
    size_t attend_workspace(int, int32_t rows, int32_t max_count) const override {
        return static_cast<size_t>(rows) * 10 + static_cast<size_t>(max_count);
    }
    void attend(const kivi::AttendCall& call) const override {
        CHECK(reinterpret_cast<uintptr_t>(call.workspace) % 64 == 0);
        CHECK(call.workspace_bytes >= attend_workspace(call.layer, call.rows.size, 1));
        std::memset(call.workspace, 0xEE, call.workspace_bytes);
        attends.push_back({call.layer, {call.rows.begin(), call.rows.end()}});
    }
    void dequantize(int, const Row&, int64_t, int64_t, const View&, const View&, bool,
                    kivi_stream) const override {}
    void export_page(int, kivi::Part, int, int32_t, int64_t, uint8_t*) const override {}
    void import_page(int, kivi::Part, int, int32_t, int64_t, const uint8_t*) override {}
    void export_window(int, kivi::Part, int, int32_t, int64_t, int64_t, uint8_t*) const override {}
    void import_window(int, kivi::Part, int, int32_t, int64_t, int64_t, const uint8_t*) override {}
    void synchronize(kivi_stream) const override {}
    void set_sequence(int32_t sequence, const std::vector<Span>&, const int32_t*, int64_t,
                      kivi_stream) override {
        published.push_back(sequence);
    }
    void accumulate_moments(int, kivi::Rows, const View&, kivi_stream) override {}
    void read_moments(int, float*) const override {}
    void write_moments(int, const float*) override {}
    void set_feedback(int, const std::vector<kivi::Feedback>&) override {}
    int64_t saturated_rows(int) const override { return 0; }
    void reset(kivi_stream) override {}
    void grow_pool(int64_t blocks, kivi_stream) override {
        if (fail != KIVI_OK) throw Error(fail, "the backend fails as asked");
        pool += blocks;
    }

  private:
    void note(std::vector<Call>& calls, int layer, kivi::Rows rows) {
        if (fail != KIVI_OK) throw Error(fail, "the backend fails as asked");
        calls.push_back({layer, {rows.begin(), rows.end()}});
    }
};

struct Machine {
    FakeBackend* backend;
    Cache cache;
    explicit Machine(const kivi_config& config)
        : Machine(kivi::make_model(config), std::make_unique<FakeBackend>()) {}
    Machine(const kivi::Model& model, std::unique_ptr<FakeBackend> fake)
        : backend(fake.get()), cache(model, std::move(fake), kivi::estimate(model, 1, 0)) {}

    // One call for rows of (sequence, count).
    kivi_status append(int32_t layer, const std::vector<std::pair<int32_t, int32_t>>& rows) {
        return run(rows, [&](const Batch& batch) { cache.append(layer, batch, View{}, View{}, nullptr); });
    }
    kivi_status flush(int32_t layer, const std::vector<std::pair<int32_t, int32_t>>& rows) {
        return run(rows, [&](const Batch& batch) { cache.flush(layer, batch, nullptr); });
    }
    template <class Work>
    kivi_status run(const std::vector<std::pair<int32_t, int32_t>>& rows, Work&& work) {
        std::vector<int32_t> sequences, counts;
        Batch batch;
        for (const auto& [sequence, count] : rows) {
            sequences.push_back(sequence);
            counts.push_back(count);
            if (sequence >= 0 && count > 0)
                batch.active++, batch.max_count = std::max(batch.max_count, count);
        }
        batch.rows = static_cast<int32_t>(rows.size());
        batch.sequences = sequences.data();
        batch.counts = counts.data();
        try {
            work(batch);
            return KIVI_OK;
        } catch (const Error& error) {
            sentence = error.what();
            return error.status();
        }
    }
    int64_t used() const { return cache.statistics(-1).blocks_used; }
    std::string sentence;
};

// Sink 32, recent 96, flush 32.
kivi_config machine_config(int64_t pool_tokens = 0) {
    kivi_config config = small_config();
    config.pool_tokens = pool_tokens;
    return config;
}

}  // namespace

TEST_CASE("the border follows the rule for every length, however the tokens arrive") {
    for (int chunk : {1, 7, 32, 600}) {
        Machine machine(machine_config());
        for (int64_t length = 0; length < 600;) {
            const auto count = static_cast<int32_t>(std::min<int64_t>(chunk, 600 - length));
            REQUIRE(machine.append(0, {{1, count}}) == KIVI_OK);
            length += count;
            const kivi_length now = machine.cache.length(0, 1);
            const int64_t target = length >= 96 ? (length - 96) / 32 * 32 : 0;
            CHECK(now.length == length);
            CHECK(now.sink == std::min<int64_t>(length, 32));
            CHECK(now.key_border == std::min(length, std::max<int64_t>(32, target)));
            CHECK(now.value_border == now.key_border);
            CHECK(machine.used() == (std::max<int64_t>(target - 32, 0) + 127) / 128);
        }
    }
}

TEST_CASE("the published schedule carries a border for each tensor") {
    kivi_config config = small_config("kivi2-paper");
    Machine machine(config);
    for (int64_t length = 1; length <= 600; length++) {
        REQUIRE(machine.append(0, {{0, 1}}) == KIVI_OK);
        const kivi_length now = machine.cache.length(0, 0);
        CHECK(now.key_border == (length - 1) / 128 * 128);
        CHECK(now.value_border == std::max<int64_t>(0, length - 129));
    }
    CHECK(machine.flush(0, {{0, 1}}) == KIVI_ERROR_UNSUPPORTED);
}

TEST_CASE("flush packs to the last multiple of the unit, once") {
    Machine machine(machine_config());
    REQUIRE(machine.append(0, {{0, 150}}) == KIVI_OK);
    REQUIRE(machine.append(1, {{0, 140}}) == KIVI_OK);
    REQUIRE(machine.flush(-1, {{0, 1}}) == KIVI_OK);
    CHECK(machine.cache.length(0, 0).key_border == 128);
    CHECK(machine.cache.length(1, 0).key_border == 128);
    const int64_t used = machine.used();
    REQUIRE(machine.flush(-1, {{0, 1}}) == KIVI_OK);
    CHECK(machine.cache.length(0, 0).key_border == 128);
    CHECK(machine.used() == used);
    REQUIRE(machine.append(0, {{0, 30}}) == KIVI_OK);
    CHECK(machine.cache.length(0, 0).key_border == 128);
    CHECK(machine.cache.length(0, 0).length == 180);
}

TEST_CASE("the first layer reserves for all, so that the others cannot fail") {
    // Three sequences, but blocks for two.
    Machine machine(machine_config(256));
    REQUIRE(machine.append(0, {{0, 200}, {1, 200}}) == KIVI_OK);
    CHECK(machine.used() == 2);
    CHECK(machine.append(0, {{2, 200}}) == KIVI_ERROR_CAPACITY);
    CHECK(contains(machine.sentence, "needs 1 more blocks"));
    CHECK(machine.append(1, {{0, 200}, {1, 200}}) == KIVI_OK);
    CHECK(machine.used() == 2);
    CHECK(machine.append(0, {{2, 100}}) == KIVI_OK);  // still in the windows
    machine.cache.reset_sequence(0, nullptr);
    CHECK(machine.used() == 1);
    CHECK(machine.append(0, {{2, 100}}) == KIVI_OK);
    CHECK(machine.cache.length(0, 2).length == 200);
}

TEST_CASE("fault 112: a batch that does not fit changes nothing") {
    kivi_config config = machine_config();
    config.max_tokens = 100;
    Machine machine(config);
    REQUIRE(machine.append(0, {{0, 99}, {1, 50}}) == KIVI_OK);
    CHECK(machine.append(0, {{1, 2}, {0, 2}}) == KIVI_ERROR_CAPACITY);
    CHECK(contains(machine.sentence, "sequence 0 has 99 tokens; 2 more pass max_tokens, 100"));
    CHECK(machine.cache.length(0, 0).length == 99);
    CHECK(machine.cache.length(0, 1).length == 50);
    CHECK(machine.append(0, {{0, 1}}) == KIVI_OK);  // fault 79: exactly max_tokens fit
    CHECK(machine.append(0, {{0, 1}}) == KIVI_ERROR_CAPACITY);
}

TEST_CASE("a pool that is too small for the whole batch takes none of it") {
    Machine machine(machine_config(256));
    CHECK(machine.append(0, {{0, 200}, {1, 200}, {2, 200}}) == KIVI_ERROR_CAPACITY);
    CHECK(machine.used() == 0);
    for (int32_t sequence = 0; sequence < 3; sequence++) CHECK(machine.cache.length(0, sequence).length == 0);
    CHECK(machine.backend->appends.empty());
}

TEST_CASE("flush of all layers checks all before it packs any") {
    Machine machine(machine_config(128));
    REQUIRE(machine.append(0, {{0, 160}}) == KIVI_OK);
    REQUIRE(machine.append(1, {{0, 280}}) == KIVI_OK);  // flushing this one needs a second block
    CHECK(machine.used() == 2 - 1);
    CHECK(machine.flush(-1, {{0, 1}}) == KIVI_ERROR_CAPACITY);
    CHECK(machine.backend->flushes.empty());
    CHECK(machine.cache.length(0, 0).key_border == 64);
    CHECK(machine.flush(0, {{0, 1}}) == KIVI_OK);
    CHECK(machine.cache.length(0, 0).key_border == 160);
}

TEST_CASE("a backend that throws leaves lengths and blocks as they were") {
    Machine machine(machine_config());
    REQUIRE(machine.append(0, {{0, 150}}) == KIVI_OK);
    const int64_t used = machine.used();
    machine.backend->fail = KIVI_ERROR_OUT_OF_MEMORY;
    CHECK(machine.append(0, {{0, 300}, {1, 300}}) == KIVI_ERROR_OUT_OF_MEMORY);
    CHECK(machine.flush(-1, {{0, 1}}) == KIVI_ERROR_OUT_OF_MEMORY);
    CHECK(machine.cache.length(0, 0).length == 150);
    CHECK(machine.cache.length(0, 0).key_border == 32);
    CHECK(machine.cache.length(0, 1).length == 0);
    CHECK(machine.used() == used);
    CHECK_THROWS_AS(machine.cache.reserve(100000, nullptr), Error);
    CHECK(machine.cache.memory().blocks == kivi::estimate(machine.cache.model(), 1, 0).blocks);
    machine.backend->fail = KIVI_OK;
    CHECK(machine.append(0, {{0, 300}, {1, 300}}) == KIVI_OK);
}

TEST_CASE("after a device error the cache answers queries only") {
    Machine machine(machine_config());
    REQUIRE(machine.append(0, {{0, 10}}) == KIVI_OK);
    machine.backend->fail = KIVI_ERROR_DEVICE;
    CHECK(machine.append(0, {{0, 1}}) == KIVI_ERROR_DEVICE);
    machine.backend->fail = KIVI_OK;
    CHECK(machine.append(0, {{0, 1}}) == KIVI_ERROR_DEVICE);
    CHECK(contains(machine.sentence, "queries and destroy only"));
    CHECK_THROWS_AS(machine.cache.reset(nullptr), Error);
    CHECK(machine.cache.statistics(-1).device_error == 1);
    CHECK(machine.cache.length(0, 0).length == 10);
}

TEST_CASE("skipped rows are not seen, doubled ones are refused") {
    Machine machine(machine_config());
    REQUIRE(machine.append(0, {{-1, 5}, {2, 3}, {0, 0}, {-1, 0}, {1, 4}}) == KIVI_OK);
    const auto& rows = machine.backend->appends.back().rows;
    REQUIRE(rows.size() == 2);
    CHECK(rows[0].index == 1);
    CHECK(rows[0].sequence == 2);
    CHECK(rows[0].offset == 5);
    CHECK(rows[1].index == 4);
    CHECK(rows[1].offset == 8);
    CHECK(machine.append(0, {{1, 1}, {2, 1}, {1, 1}}) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(contains(machine.sentence, "batch.sequences[2] is 1, which stands in an earlier row"));
    CHECK(machine.cache.length(0, 1).length == 4);
    CHECK(machine.append(0, {{1, 1}, {1, 0}, {-1, 1}, {-1, 1}}) == KIVI_OK);
    CHECK(machine.append(0, {{-1, 5}, {0, 0}}) == KIVI_OK);
    CHECK(machine.append(0, {}) == KIVI_OK);
    CHECK(machine.backend->appends.size() == 2);
}

TEST_CASE("attend plans its rows in the caller's workspace, wherever it begins") {
    Machine machine(machine_config());
    REQUIRE(machine.append(0, {{0, 10}, {1, 200}}) == KIVI_OK);
    const size_t needed = machine.cache.attend_workspace(0, 2, 1);
    std::vector<uint8_t> memory(needed + 64, 0xAB);
    for (int shift = 0; shift < 64; shift += 7) {
        const kivi_status status = machine.run({{1, 1}, {-1, 1}, {0, 1}}, [&](const Batch& batch) {
            machine.cache.attend(0, batch, kivi::AttendRequest{}, memory.data() + shift, needed, nullptr);
        });
        CHECK(status == KIVI_OK);
        const auto& rows = machine.backend->attends.back().rows;
        REQUIRE(rows.size() == 2);
        CHECK(rows[0].sequence == 1);
        CHECK(rows[0].before.length == 200);
        CHECK(rows[0].before.key_border == 96);
        CHECK(rows[1].index == 2);
        CHECK(rows[1].sequence == 0);
    }
    const auto attend = [&](void* workspace, size_t bytes, std::vector<std::pair<int32_t, int32_t>> rows) {
        return machine.run(rows, [&](const Batch& batch) {
            machine.cache.attend(0, batch, kivi::AttendRequest{}, workspace, bytes, nullptr);
        });
    };
    // Fault 56: one byte less is refused.
    CHECK(attend(memory.data(), needed - 1, {{0, 1}, {1, 1}}) == KIVI_ERROR_BUFFER_TOO_SMALL);
    CHECK(contains(machine.sentence, std::to_string(needed)));
    CHECK(attend(nullptr, needed, {{0, 1}}) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(attend(memory.data(), needed, {{0, 1}, {0, 1}}) == KIVI_ERROR_INVALID_ARGUMENT);
    CHECK(attend(nullptr, 0, {{0, 0}, {-1, 3}}) == KIVI_OK);
    CHECK(machine.cache.attend_workspace(-1, 1000000, 1) == machine.cache.attend_workspace(0, 3, 1));
}

TEST_CASE("reserve enlarges the pool and the report") {
    Machine machine(machine_config(128));
    const kivi_memory before = machine.cache.memory();
    machine.cache.reserve(100, nullptr);
    CHECK(machine.backend->pool == 0);
    machine.cache.reserve(300, nullptr);
    CHECK(machine.backend->pool == 2);
    const kivi_memory after = machine.cache.memory();
    CHECK(after.blocks == 3);
    CHECK(after.page_bytes == 3 * after.block_bytes);
    CHECK(after.total_bytes == after.page_bytes + after.window_bytes + after.table_bytes +
                                   after.moment_bytes + after.scratch_bytes);
    CHECK(after.total_bytes > before.total_bytes);
    REQUIRE(machine.append(0, {{0, 200}, {1, 200}, {2, 200}}) == KIVI_OK);
    CHECK_THROWS_AS(machine.cache.reserve(-1, nullptr), Error);
    CHECK_THROWS_AS(machine.cache.reserve(INT64_MAX, nullptr), Error);
}

TEST_CASE("reset empties every sequence and publishes it") {
    Machine machine(machine_config());
    REQUIRE(machine.append(0, {{0, 300}, {2, 20}}) == KIVI_OK);
    machine.cache.reset(nullptr);
    CHECK(machine.used() == 0);
    CHECK(machine.cache.statistics(-1).tokens == 0);
    CHECK(machine.backend->published == std::vector<int32_t>{0, 1, 2});
}

TEST_CASE("layers that are not at the same length are not exported") {
    Machine machine(machine_config());
    REQUIRE(machine.append(0, {{0, 5}}) == KIVI_OK);
    CHECK_THROWS_AS(machine.cache.export_size(0), Error);
    REQUIRE(machine.append(1, {{0, 5}}) == KIVI_OK);
    CHECK(machine.cache.export_size(0) > 0);
}
