// Shared by the benchmarks: options, data, caches built through kivi.h, timing in turns, results.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "kivi/kivi.h"

namespace bench {

struct Options {
    bool quick = false;
    double seconds = 0;    // a group of contenders; 0: the benchmark's own choice
    std::string json;      // file for JSON Lines, or empty
};

// What a program measures together, under a name. --quick leaves it out or, if `quick`, shortens it.
struct Listed {
    std::string name;
    bool quick;
    std::function<void(const Options&)> run;
};
// The main function of a benchmark: reads the options (--help names them and the groups) and runs what they want.
int run_listed(int argc, char** argv, const std::vector<Listed>& groups);

double now();  // seconds

// Ends the program with the library's sentence if status is not KIVI_OK.
void check(kivi_status status);

// Memory from the system in huge pages where it has them; kept until the program ends.
void* big_memory(size_t bytes);
size_t last_level_cache_bytes();

// What a case is, as the JSON output names it.
struct Case {
    int batch = 1, q_heads = 32, kv_heads = 8, head_dim = 128, q_len = 1, threads = 2;
    int64_t context = 4096;
    std::string backend = "cpu", dtype = "f16", preset = "f16", isa;
    int k_bits = 16, v_bits = 16, group = 0;
    bool hadamard = false;
};

// One thing that is timed. `run(round)` works on another set of data each round, so caches are cold.
struct Contender {
    std::string suite;
    Case what;
    double bytes = 0;
    std::function<void(int64_t round)> run;
    std::function<void(int64_t round)> prepare;  // not timed; may be empty
    std::vector<double> times;
    double median_us = 0, fast_us = 0, error = -1;  // fast_us: a tenth of the calls took less
    std::map<std::string, double> ratios;  // name -> how many times faster than that

    double gbps() const { return bytes / median_us / 1e3; }
};

// Runs the contenders in turns until `seconds` are over (each at least seven times) and fills in the medians.
void measure(std::vector<Contender>& contenders, double seconds);

void print_table(const std::string& title, const std::vector<Contender>& contenders);
void append_json(const std::string& file, const std::vector<Contender>& contenders);

// Keys with a scale and an offset of their own for each channel, values normal: [tokens][heads][dim], fp16.
struct Data {
    int64_t tokens;
    int heads, dim;
    std::vector<uint16_t> k, v;
    std::vector<float> q;  // [q_heads][dim]
};
Data make_data(int64_t tokens, int heads, int dim, int q_heads);

// A spec beside the presets' own: name, specs and windows.
struct Storage {
    std::string name;
    kivi_spec k{}, v{};
    int sink = 0, recent = 0, flush = 1;
};
Storage preset_storage(const std::string& name);
kivi_spec spec(int bits, int axis, int group, int transform);

// A cache with sequences that all hold the same tokens: enough of them to exceed the last-level cache four times.
class Cache {
  public:
    Cache(const Storage& storage, const Case& what, const Data& data, bool reference = false);
    ~Cache();
    Cache(const Cache&) = delete;

    // Attention of `batch` sequences, other ones each round; q and out f32.
    void attend(int64_t round, float* out);
    double bytes() const { return bytes_; }  // that one call reads
    int sets() const { return sets_; }
    kivi_cache* handle() { return cache_; }

  private:
    Case what_;
    kivi_cache* cache_ = nullptr;
    int sets_ = 0;
    double bytes_ = 0;
    std::vector<float> q_;
    std::vector<uint8_t> workspace_;
};

int sets_for(double bytes);  // of data, to exceed the last-level cache more than four times

}  // namespace bench
