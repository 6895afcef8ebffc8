// Shared by the benchmarks; see bench_common.h.
#include "bench_common.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <sys/mman.h>
#include <unistd.h>

#include "format/half.h"

namespace bench {

int run_listed(int argc, char** argv, const std::vector<Listed>& groups) {
    Options options;
    std::string only;
    for (int i = 1; i < argc; ++i) {
        const std::string arg = argv[i];
        const auto value = [&]() -> std::string {
            if (i + 1 < argc) return argv[++i];
            std::fprintf(stderr, "%s needs a value\n", arg.c_str());
            std::exit(2);
        };
        if (arg == "--quick") {
            options.quick = true;
        } else if (arg == "--seconds") {
            options.seconds = std::atof(value().c_str());
        } else if (arg == "--json") {
            options.json = value();
        } else if (arg == "--only") {
            only = value();
        } else {
            const bool asked = arg == "--help";
            FILE* to = asked ? stdout : stderr;
            std::fprintf(to,
                         "usage: %s [--quick] [--seconds S] [--only PART] [--json FILE]\n"
                         "  --quick      less time, fewer contenders, and only some groups\n"
                         "  --seconds S  for each group\n"
                         "  --only PART  groups whose name contains PART\n"
                         "  --json FILE  one object a case is added to FILE\n"
                         "groups:\n",
                         argv[0]);
            for (const Listed& group : groups) {
                std::fprintf(to, "  %s%s\n", group.name.c_str(), group.quick ? "" : " (left out by --quick)");
            }
            return asked ? 0 : 2;
        }
    }
    for (const Listed& group : groups) {
        if (group.name.find(only) == std::string::npos || (options.quick && !group.quick)) continue;
        group.run(options);
    }
    return 0;
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void check(kivi_status status) {
    if (status == KIVI_OK) return;
    std::fprintf(stderr, "%s\n", kivi_last_error());
    std::exit(1);
}

void* big_memory(size_t bytes) {
    constexpr size_t kHuge = size_t{2} << 20;
    bytes = (bytes + kHuge - 1) / kHuge * kHuge;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        std::perror("mmap");
        std::exit(1);
    }
    madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
}

// The cache that these cores share. sysconf adds up what other sockets and guests of the machine have, so Linux's
// own description of the first core comes first.
size_t last_level_cache_bytes() {
    if (FILE* size = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
        long kib = 0;
        const int read = std::fscanf(size, "%ldK", &kib);
        std::fclose(size);
        if (read == 1 && kib > 0) return static_cast<size_t>(kib) << 10;
    }
    const long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE), l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return static_cast<size_t>(std::max({l3, l2, 8L << 20}));
}

int sets_for(double bytes) {
    return std::max(2, static_cast<int>(std::ceil(4.2 * static_cast<double>(last_level_cache_bytes()) / bytes)) + 1);
}

// A turn is what a decode step is to a thread pool: calls one after the other, for layer after layer. The
// first call of a turn wakes the contender's threads and is not counted. Calls that must be prepared come alone.
void measure(std::vector<Contender>& contenders, double seconds) {
    constexpr int64_t kTurn = 5;
    const double end = now() + seconds;
    for (int64_t round = 0; round < 7 || now() < end; ++round) {
        for (Contender& c : contenders) {
            if (c.prepare) {
                c.prepare(round);
                const double start = now();
                c.run(round);
                c.times.push_back(now() - start);
                continue;
            }
            c.run(round * kTurn);
            for (int64_t call = 1; call < kTurn; ++call) {
                const double start = now();
                c.run(round * kTurn + call);
                c.times.push_back(now() - start);
            }
        }
    }
    for (Contender& c : contenders) {
        std::sort(c.times.begin(), c.times.end());
        c.median_us = c.times[c.times.size() / 2] * 1e6;
        c.fast_us = c.times[c.times.size() / 10] * 1e6;
    }
}

void print_table(const std::string& title, const std::vector<Contender>& contenders) {
    std::printf("\n%s\n", title.c_str());
    for (const Contender& c : contenders) {
        std::printf("  %-24s T %-6lld B %-2d threads %d  %9.1f us (p10 %9.1f) %6.2f GB/s", c.what.preset.c_str(),
                    static_cast<long long>(c.what.context), c.what.batch, c.what.threads, c.median_us, c.fast_us, c.gbps());
        for (const auto& [name, ratio] : c.ratios) std::printf("  %.2fx %s", ratio, name.c_str());
        if (c.error >= 0) std::printf("  error %.1e", c.error);
        std::printf("\n");
    }
    std::fflush(stdout);
}

void append_json(const std::string& file, const std::vector<Contender>& contenders) {
    if (file.empty()) return;
    FILE* to = std::fopen(file.c_str(), "a");
    if (to == nullptr) {
        std::perror(file.c_str());
        std::exit(1);
    }
    for (const Contender& c : contenders) {
        const Case& w = c.what;
        std::fprintf(to,
                     "{\"suite\": \"%s\", \"case\": {\"backend\": \"%s\", \"batch\": %d, \"q_heads\": %d, "
                     "\"kv_heads\": %d, \"head_dim\": %d, \"context\": %lld, \"q_len\": %d, \"dtype\": \"%s\", "
                     "\"preset\": \"%s\", \"k_bits\": %d, \"v_bits\": %d, \"group\": %d, \"threads\": %d, "
                     "\"isa\": \"%s\", \"hadamard\": %s}, \"median_us\": %.3f, \"bytes\": %.0f, \"gbps\": %.3f, \"llc_bytes\": %zu, ",
                     c.suite.c_str(), w.backend.c_str(), w.batch, w.q_heads, w.kv_heads, w.head_dim,
                     static_cast<long long>(w.context), w.q_len, w.dtype.c_str(), w.preset.c_str(), w.k_bits, w.v_bits,
                     w.group, w.threads, w.isa.c_str(), w.hadamard ? "true" : "false", c.median_us, c.bytes, c.gbps(),
                     last_level_cache_bytes());
        if (c.error >= 0) std::fprintf(to, "\"error\": %.3e, ", c.error);
        std::fprintf(to, "\"ratios\": {");
        const char* comma = "";
        for (const auto& [name, ratio] : c.ratios) {
            std::fprintf(to, "%s\"%s\": %.4f", comma, name.c_str(), ratio);
            comma = ", ";
        }
        std::fprintf(to, "}}\n");
    }
    std::fclose(to);
}

namespace {

// Normal numbers from a table: the data need not be good, but there is much of it.
class Normal {
  public:
    Normal() {
        constexpr double kTwoPi = 6.283185307179586;
        for (size_t i = 0; i < table_.size(); ++i) {
            table_[i] = static_cast<float>(std::sqrt(-2 * std::log(uniform())) * std::cos(kTwoPi * uniform()));
        }
    }
    float operator()() { return table_[next() >> 48]; }

  private:
    uint64_t next() { return state_ = state_ * 6364136223846793005ull + 1442695040888963407ull; }
    double uniform() { return (static_cast<double>(next() >> 11) + 0.5) / 9007199254740992.0; }

    uint64_t state_ = 7;
    std::vector<float> table_ = std::vector<float>(1 << 16);
};

}  // namespace

Data make_data(int64_t tokens, int heads, int dim, int q_heads) {
    Data data{tokens, heads, dim, {}, {}, {}};
    Normal normal;
    const int64_t channels = static_cast<int64_t>(heads) * dim;
    std::vector<float> scale(channels), offset(channels);
    for (float& x : scale) x = std::exp(0.5f * normal());
    for (float& x : offset) x = 1.5f * normal();
    data.k.resize(tokens * channels);
    data.v.resize(tokens * channels);
    for (int64_t i = 0; i < tokens * channels; ++i) {
        data.k[i] = kivi::f32_to_f16(normal() * scale[i % channels] + offset[i % channels]);
        data.v[i] = kivi::f32_to_f16(normal());
    }
    data.q.resize(static_cast<size_t>(q_heads) * dim);
    for (float& x : data.q) x = 0.7f * normal();
    return data;
}

kivi_spec spec(int bits, int axis, int group, int transform) {
    kivi_spec spec;
    std::memset(&spec, 0, sizeof spec);
    spec.bits = bits;
    spec.axis = axis;
    spec.group = group;
    spec.transform = transform;
    return spec;
}

Storage preset_storage(const std::string& name) {
    kivi_config config;
    check(kivi_config_init(&config, sizeof config));
    check(kivi_config_preset(&config, name.c_str()));
    return {name, config.layer.k, config.layer.v, config.sink, config.recent, config.flush};
}

Cache::Cache(const Storage& storage, const Case& what, const Data& data, bool reference) : what_(what) {
    kivi_config config;
    check(kivi_config_init(&config, sizeof config));
    config.layer.k = storage.k;
    config.layer.v = storage.v;
    config.sink = storage.sink;
    config.recent = storage.recent;
    config.flush = storage.flush;
    config.layer_count = 1;
    config.layer.q_heads = what.q_heads;
    config.layer.kv_heads = what.kv_heads;
    config.layer.key_dim = config.layer.value_dim = what.head_dim;
    config.max_tokens = data.tokens + 256;
    config.threads = what.threads;
    config.flags = reference ? KIVI_CACHE_REFERENCE : 0;
    config.max_sequences = 1;

    // Bytes of a sequence: estimated from the packed bits, exact later.
    kivi_support support;
    check(kivi_query_support(&config, 0, &support, sizeof support));
    const double elements = static_cast<double>(data.tokens) * what.kv_heads * what.head_dim * 2;
    sets_ = reference ? 1 : sets_for(elements * support.bits_per_element / 8 * what.batch);
    config.max_sequences = sets_ * what.batch;
    check(kivi_cache_create(&config, &cache_));

    kivi_tensor k{};
    k.data = const_cast<uint16_t*>(data.k.data());
    k.dtype = KIVI_F16;
    k.device = KIVI_CPU;
    k.rank = 3;
    k.shape[0] = data.tokens;
    k.shape[1] = data.heads;
    k.shape[2] = data.dim;
    k.stride[0] = static_cast<int64_t>(data.heads) * data.dim;
    k.stride[1] = data.dim;
    k.stride[2] = 1;
    kivi_tensor v = k;
    v.data = const_cast<uint16_t*>(data.v.data());
    kivi_batch batch;
    check(kivi_batch_init(&batch, sizeof batch));
    batch.rows = 1;
    const int32_t count = static_cast<int32_t>(data.tokens);
    batch.counts = &count;
    for (int32_t sequence = 0; sequence < config.max_sequences; ++sequence) {
        batch.sequences = &sequence;
        check(kivi_append(cache_, 0, &batch, &k, &v, nullptr));
    }
    kivi_statistics statistics;
    check(kivi_query_statistics(cache_, 0, &statistics, sizeof statistics));
    bytes_ = static_cast<double>(statistics.live_bytes) / sets_;
    for (int row = 0; row < what.batch; ++row) q_.insert(q_.end(), data.q.begin(), data.q.end());
    size_t bytes = 0;
    check(kivi_attend_workspace(cache_, 0, what.batch, 1, &bytes));
    workspace_.resize(bytes);
}

Cache::~Cache() { kivi_cache_destroy(cache_); }

void Cache::attend(int64_t round, float* out) {
    std::vector<int32_t> sequences(what_.batch);
    const int32_t first = static_cast<int32_t>(round % sets_) * what_.batch;
    for (int row = 0; row < what_.batch; ++row) sequences[row] = first + row;
    kivi_batch batch;
    check(kivi_batch_init(&batch, sizeof batch));
    batch.rows = what_.batch;
    batch.max_count = 1;
    batch.sequences = sequences.data();
    kivi_tensor q{};
    q.data = q_.data();
    q.dtype = KIVI_F32;
    q.device = KIVI_CPU;
    q.rank = 4;
    const int64_t shape[4] = {what_.batch, 1, what_.q_heads, what_.head_dim};
    int64_t stride = 1;
    for (int i = 3; i >= 0; --i) {
        q.shape[i] = shape[i];
        q.stride[i] = stride;
        stride *= shape[i];
    }
    kivi_tensor o = q;
    o.data = out;
    check(kivi_attend(cache_, 0, &batch, &q, &o, nullptr, workspace_.data(), workspace_.size(), nullptr));
}

}  // namespace bench
