// A random model, cache and history, all from one seed, and the words to tell a failing one.
#pragma once
#include <string>
#include <vector>

#include "support/cache.h"
#include "support/restate.h"

namespace kivi_test {

struct Case {
    uint64_t seed = 0;
    kivi_config config{};
    std::vector<kivi_layer> layers;  // config.layers points here
    std::string text;

    explicit Case(uint64_t seed);
    Case(const Case&) = delete;
    Case& operator=(const Case&) = delete;

    bool published() const { return config.schedule == KIVI_SCHEDULE_PUBLISHED; }
    int64_t unit() const;                  // least common multiple of the channel-axis groups
    int64_t length(Random& random) const;  // of a sequence: few tokens, or some pages
};

// Queries of a layer that make some channels matter more than others.
Floats random_queries(Random& random, const kivi_layer& layer, int64_t tokens);

// Gives every query-aware layer moments of random queries, and tells its tables; empty for other layers.
std::vector<std::vector<EncoderTable>> commit_moments(const Cache& cache, Random& random);

// Appends tokens begin .. end - 1 of each layer in random pieces, layer after layer.
void append_in_pieces(const Cache& cache, int32_t sequence, const std::vector<Tokens>& tokens, int64_t begin,
                      int64_t end, Random& random);

std::vector<Tokens> random_history(const Case& made, Random& random, int64_t length);

}  // namespace kivi_test
