// The loop of decode_loop.c with the owning types of kivi.hpp: two sequences of different lengths.
#include <cstdio>
#include <random>
#include <vector>

#include "kivi/kivi.hpp"

// Stands in for the model, which would compute q, k and v of the tokens.
static void project(std::vector<float>& values) {
    static std::mt19937 random(1);
    static std::normal_distribution<float> normal;
    for (float& value : values) value = normal(random);
}

int main() try {
    const int layers = 2, q_heads = 8, kv_heads = 2, dim = 64, prompt = 256, steps = 64;
    kivi::Config config("k3v2");
    config.layers(layers, q_heads, kv_heads, dim).capacity(/*sequences*/ 2, /*tokens*/ 4096);
    kivi::Cache cache(config);
    kivi::Workspace workspace = cache.workspace(/*rows*/ 2, /*max_count*/ prompt);

    // The prompts: sequence 0 brings 256 tokens, sequence 1 brings 100, packed without gaps.
    kivi::Batch prompts;
    prompts.add(0, prompt).add(1, 100);
    const int total = prompt + 100;
    std::vector<float> k(total * kv_heads * dim), v(k), q(total * q_heads * dim), out(q);
    for (int layer = 0; layer < layers; ++layer) {
        project(q), project(k), project(v);
        // The prompt attends to its own keys before they are packed.
        cache.step(layer, prompts, {q, {total, q_heads, dim}}, {k, {total, kv_heads, dim}}, {v, {total, kv_heads, dim}},
                   {out, {total, q_heads, dim}}, workspace);
    }

    // The steps: one token of each sequence.
    const kivi::Batch step(2, 1);
    k.resize(2 * kv_heads * dim), v.resize(k.size()), q.resize(2 * q_heads * dim), out.resize(q.size());
    for (int token = 0; token < steps; ++token)
        for (int layer = 0; layer < layers; ++layer) {
            project(q), project(k), project(v);
            cache.step(layer, step, {q, {2, 1, q_heads, dim}}, {k, {2, 1, kv_heads, dim}}, {v, {2, 1, kv_heads, dim}},
                       {out, {2, 1, q_heads, dim}}, workspace);
        }

    const kivi_statistics statistics = cache.statistics();
    std::printf("%lld and %lld tokens, %.1f bytes per token and layer (fp16: %d)\n",
                static_cast<long long>(cache.length(0, 0).length), static_cast<long long>(cache.length(0, 1).length),
                static_cast<double>(statistics.live_bytes) / static_cast<double>(statistics.tokens),
                2 * kv_heads * dim * 2);
    return 0;
} catch (const kivi::Error& error) {
    std::fprintf(stderr, "%s: %s\n", error.status_name(), error.what());
    return 1;
}
