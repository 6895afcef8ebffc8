// A cache of the backend under test, and short words for what the cases do with it.
#pragma once
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "support/backend.h"
#include "support/numbers.h"
#include "support/tensor.h"

namespace kivi_test {

// ---- Specs and configs

kivi_spec channel(int bits, int group);  // min-max, nearest, f16 parameters
kivi_spec token(int bits, int group);
kivi_spec full();  // 16 bits
kivi_spec rotated(kivi_spec spec);
kivi_spec query_aware(kivi_spec spec);
kivi_spec ratio(kivi_spec spec, float of_range);
kivi_spec wide(kivi_spec spec);  // f32 parameters

struct Heads {
    int kv = 1, q = 1, key_dim = 64, value_dim = 64;
};
struct Span {
    int64_t sink = 0, recent = 0, flush = 32;
};

// One layer, one sequence of up to 1024 tokens, f16 windows, two threads; the case changes what it is about.
kivi_config config(kivi_spec k, kivi_spec v, Heads heads, Span windows);
kivi_config preset(const char* name, Heads heads);
kivi_config published(kivi_spec k, kivi_spec v, Heads heads, int residual);

std::string error();  // of this thread's last failure
bool says(const std::string& what);

// ---- Work

struct Row {
    int32_t sequence = 0;
    int32_t count = 1;
};
using Rows = std::vector<Row>;

// A kivi_batch with its arrays.
class Batch {
  public:
    explicit Batch(const Rows& rows, std::vector<int64_t> offsets = {});
    operator const kivi_batch*() const { return &batch_; }
    kivi_batch& get() { return batch_; }
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;

  private:
    std::vector<int32_t> sequences_, counts_;
    std::vector<int64_t> offsets_;
    kivi_batch batch_;
};

// What attend is asked, beside the queries.
struct Ask {
    float scale = 0, soft_cap = 0;
    int64_t window_left = -1;
    Floats sinks;             // learned, [q_heads]
    Floats fresh_k, fresh_v;  // [tokens][kv_heads][dim]
    int32_t q_dtype = KIVI_F32, out_dtype = KIVI_F32;
    int32_t kv_dtype = KIVI_F32;  // of the fresh ones
    uint64_t flags = KIVI_ATTEND_INVARIANT;
};

struct Answer {
    Floats out;  // [tokens][q_heads][value_dim]
    Floats lse;  // [tokens][q_heads]
};

// Keys and values of some tokens, [tokens][kv_heads][dim].
struct Tokens {
    Floats k, v;
};

class Cache {
  public:
    explicit Cache(const kivi_config& config);
    ~Cache() { kivi_cache_destroy(cache_); }
    Cache(const Cache&) = delete;
    Cache& operator=(const Cache&) = delete;
    operator kivi_cache*() const { return cache_; }

    const kivi_config& config() const { return config_; }
    const kivi_layer& layer(int index = 0) const;
    int layers() const { return config_.layer_count; }

    // Rows one after the other in `tokens`; the status is the library's.
    kivi_status try_append(const Rows& rows, const Tokens& tokens, int layer = 0,
                           int32_t dtype = KIVI_F32) const;
    void append(const Rows& rows, const Tokens& tokens, int layer = 0, int32_t dtype = KIVI_F32) const;
    // Tokens begin .. end - 1 of `tokens` onto one sequence, `chunk` at a time (0: all at once).
    void append(int32_t sequence, const Tokens& tokens, int64_t begin, int64_t end, int64_t chunk = 0,
                int layer = 0, int32_t dtype = KIVI_F32) const;
    void flush(int32_t sequence = 0, int layer = -1) const;
    void reset() const;

    Answer attend(const Rows& rows, const Floats& q, const Ask& ask = {}, int layer = 0) const;
    // kivi_step, with the fresh keys and values of `ask`.
    Answer step(const Rows& rows, const Floats& q, const Ask& ask, int layer = 0) const;
    Tokens dequantize(int32_t sequence = 0, int layer = 0, uint64_t flags = 0) const;
    Tokens dequantize(int32_t sequence, int layer, int64_t begin, int64_t end, uint64_t flags) const;

    kivi_length length(int32_t sequence = 0, int layer = 0) const;
    kivi_statistics statistics(int layer = -1) const;
    kivi_memory memory() const;
    Bytes blob(int32_t sequence = 0) const;
    kivi_status import(int32_t sequence, const Bytes& blob) const;
    Bytes moments_blob(int layer = 0) const;

  private:
    Answer answer(const Rows& rows, const Floats& q, const Ask& ask, int layer, bool step) const;

    kivi_config config_;
    std::vector<kivi_layer> layers_;
    kivi_cache* cache_ = nullptr;
};

// Status and sentence of create with this config; a cache that comes to be is destroyed.
kivi_status create_status(const kivi_config& config);

// Keys like those of models and normal values for `tokens` tokens of a layer.
Tokens random_tokens(Random& random, const kivi_layer& layer, int64_t tokens);
Tokens slice(const Tokens& tokens, const kivi_layer& layer, int64_t begin, int64_t end);
// [begin, end) of rows of `width` numbers.
Floats rows_of(const Floats& x, size_t width, int64_t begin, int64_t end);

bool bit_equal(const Floats& a, const Floats& b);
bool bit_equal(const Answer& a, const Answer& b);

}  // namespace kivi_test
