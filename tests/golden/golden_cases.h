// The cases of cases.txt, made with the library: inputs by formula, one cache, one sequence a case.
#pragma once
#include <cfenv>
#include <cstdint>
#include <string>
#include <vector>

#include "kivi/kivi.h"

namespace golden {

struct Put {
    int layer;
    char part;  // 'k' or 'v'
    int head, first, last, channel;
    float value;
};

struct Case {
    std::string name;
    kivi_config config;  // layers points into `layers`
    std::vector<kivi_layer> layers;
    int64_t tokens, chunk;
    std::vector<Put> puts;
    bool flush = false;
    bool stored = true;  // its blob is committed
};

std::vector<Case> read_cases(const std::string& path);

using Bytes = std::vector<uint8_t>;

// Floating-point environment that the library is called in.
struct Host {
    int rounding = FE_TONEAREST;
    bool flush_to_zero = false;  // and denormals are zero; x86 only
};

// Owner of a cache made for a case; calls that fail end the test with their sentence.
class Cache {
  public:
    explicit Cache(const Case& c);
    ~Cache() { kivi_cache_destroy(cache_); }
    Cache(const Cache&) = delete;
    Cache& operator=(const Cache&) = delete;

    kivi_cache* get() const { return cache_; }
    void moments_set() const;  // of every query-aware layer
    // moments_set, then append in chunks, then flush if the case says so
    void fill(const Host& host = {}) const;
    Bytes export_sequence() const;
    Bytes moments_export(int layer) const;
    std::vector<float> dequantize(int layer, char part) const;  // [tokens][heads][dim]

  private:
    const Case& case_;
    kivi_cache* cache_ = nullptr;
};

// Throws with the library's sentence unless the status is KIVI_OK.
void check(kivi_status status);

Bytes read_file(const std::string& path);  // throws if it cannot be read

}  // namespace golden
