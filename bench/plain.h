// Attention as a compiler vectorises it: one loop over query heads, no blocking, no sharing of loads. The peers
// of the benchmark. k and v are [kv_heads][tokens][dim].
#pragma once
#include <cstdint>

namespace bench {

// Query head `head` of a call; scores is working memory of `tokens` floats.
void plain_head_f32(const float* k, const float* v, int64_t tokens, int dim, const float* q, float* scores, float* out);
void plain_head_f16(const uint16_t* k, const uint16_t* v, int64_t tokens, int dim, const float* q, float* scores,
                    float* out);

// Sum of an array, to keep the reads alive: the read-bandwidth probe.
uint64_t sum(const uint64_t* data, int64_t count);

}  // namespace bench
