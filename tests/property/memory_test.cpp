// Reported bytes against the formulas of core/FORMAT.md, for random models.
#include <algorithm>

#include "property/random_case.h"

using namespace kivi_test;

TEST_CASE("estimate, report and statistics are the formula, byte for byte") {
    for (uint64_t seed = 0; seed < 150; ++seed) {
        const Case made(seed + 5000);
        INFO(made.text);
        Random random(seed);
        const kivi_config& with = made.config;
        kivi_memory estimate{};
        REQUIRE(kivi_cache_estimate(&with, &estimate, sizeof estimate) == KIVI_OK);
        const Cache cache(with);
        const kivi_memory report = cache.memory();
        CHECK(report.total_bytes == estimate.total_bytes);
        CHECK(report.layout_id == estimate.layout_id);

        const uint64_t element = element_bytes(with.window_dtype);
        uint64_t block = 0, windows = 0, moments = 0;
        for (const kivi_layer& layer : made.layers) {
            const uint64_t kv = uint64_t(layer.kv_heads);
            for (const bool key : {true, false}) {
                const int dim = key ? layer.key_dim : layer.value_dim;
                const int64_t capacity =
                    made.published() ? with.recent + (key ? 1 : 2) : with.recent + with.flush;
                block += kv * uint64_t(part_bytes(key ? layer.k : layer.v, dim, with.window_dtype));
                windows += kv * uint64_t(with.sink + capacity) * uint64_t(dim) * element *
                           uint64_t(with.max_sequences);
            }
            const uint64_t d = uint64_t(layer.key_dim);
            if (layer.k.rounding == KIVI_ROUND_QUERY_AWARE)
                moments += kv * (4 * d * d + 2 * d + 2 * d * (d - 1));
        }
        CHECK(report.block_bytes == block);
        CHECK(report.page_bytes == uint64_t(report.blocks) * block);
        CHECK(report.window_bytes == windows);
        CHECK(report.moment_bytes == moments);
        CHECK(report.total_bytes == report.page_bytes + report.window_bytes + report.table_bytes +
                                        report.moment_bytes + report.scratch_bytes);

        // The pool holds every sequence at its longest, and not a page more.
        const int64_t longest = (std::max<int64_t>(0, with.max_tokens - with.sink) + 127) / 128;
        CHECK(report.blocks <= with.max_sequences * longest);
        CHECK(report.blocks >= with.max_sequences * (longest - 1));

        // Live bytes: pages as far as they are filled, and rows.
        uint64_t live = 0;
        int64_t packed = 0, tokens = 0;
        for (int32_t sequence = 0; sequence < with.max_sequences; ++sequence) {
            const int64_t length = made.length(random);
            append_in_pieces(cache, sequence, random_history(made, random, length), 0, length, random);
            for (int index = 0; index < cache.layers(); ++index) {
                const kivi_layer& layer = cache.layer(index);
                const kivi_length at = cache.length(sequence, index);
                tokens += length;
                packed += at.key_border - at.sink;
                for (const bool key : {true, false}) {
                    const int dim = key ? layer.key_dim : layer.value_dim;
                    const int64_t stored = (key ? at.key_border : at.value_border) - at.sink;
                    live += uint64_t(layer.kv_heads) *
                            (uint64_t(part_bytes(key ? layer.k : layer.v, dim, with.window_dtype) * stored /
                                      128) +
                             uint64_t((length - stored) * dim) * element);
                }
            }
        }
        const kivi_statistics statistics = cache.statistics();
        CHECK(statistics.live_bytes == live);
        CHECK(statistics.tokens == tokens);
        CHECK(statistics.packed_tokens == packed);
        CHECK(statistics.blocks_used + statistics.blocks_free == report.blocks);
    }
}
