// Decode attention: presets beside our own fp16 attention, compiler-vectorised loops and the read bandwidth, all in
// turns, on cold caches.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bench_common.h"
#include "cpu/simd.h"
#include "cpu/thread_pool.h"
#include "format/half.h"
#include "plain.h"

using namespace bench;
using kivi::cpu::simd::Target;

namespace {

constexpr int C = KIVI_AXIS_CHANNEL, T = KIVI_AXIS_TOKEN, H = KIVI_TRANSFORM_HADAMARD;

double relative_error(const std::vector<float>& x, const std::vector<float>& y) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < x.size(); ++i) {
        error += (x[i] - y[i]) * static_cast<double>(x[i] - y[i]);
        norm += static_cast<double>(y[i]) * y[i];
    }
    return std::sqrt(error / norm);
}

// How the library is called.
struct How {
    int batch = 1, threads = 2, head_dim = 128;
    Target isa = kivi::cpu::simd::best_target();  // another is forced around each call
    bool error = false;                           // compare with the double-precision path
};

// A group of contenders that are measured together, with what they work on.
class Group {
  public:
    Group(std::string title, int64_t context) : title_(std::move(title)), context_(context) {}

    // The library.
    void add(const Storage& storage, const How& how = {}) {
        const Data& data = data_of(how.head_dim);
        const Target isa = how.isa;
        Case what;
        what.batch = how.batch;
        what.threads = how.threads;
        what.head_dim = data.dim;
        what.context = data.tokens;
        what.preset = storage.name;
        what.k_bits = storage.k.bits;
        what.v_bits = storage.v.bits;
        what.group = storage.k.group;
        what.hadamard = storage.k.transform == H || storage.v.transform == H;
        what.isa = kivi::cpu::simd::target_name(isa);
        caches_.push_back(std::make_unique<Cache>(storage, what, data));
        Cache* cache = caches_.back().get();
        out_.resize(std::max(out_.size(), data.q.size() * how.batch));
        Contender contender;
        contender.suite = "attend";
        contender.what = what;
        contender.bytes = cache->bytes();
        contender.run = [this, cache, isa](int64_t round) {
            kivi::cpu::simd::force_target(isa);
            cache->attend(round, out_.data());
            kivi::cpu::simd::force_target(kivi::cpu::simd::best_target());
        };
        if (how.error) {
            Case one = what;
            one.batch = 1;
            Cache reference(storage, one, data, true);
            std::vector<float> expected(data.q.size());
            reference.attend(0, expected.data());
            contender.run(0);
            contender.error = relative_error({out_.begin(), out_.begin() + data.q.size()}, expected);
        }
        contenders_.push_back(std::move(contender));
    }

    void add_plain(bool half) {
        const Data& data = data_of(128);
        const int64_t elements = data.tokens * data.heads * data.dim;
        const size_t size = half ? 2 : 4;
        const double bytes = 2.0 * static_cast<double>(elements) * size;
        const int sets = sets_for(bytes);
        uint8_t* memory = static_cast<uint8_t*>(big_memory(static_cast<size_t>(bytes) * sets));
        for (int part = 0; part < 2; ++part) {
            const std::vector<uint16_t>& from = part == 0 ? data.k : data.v;
            uint8_t* to = memory + part * elements * size;
            for (int64_t i = 0; i < elements; ++i) {
                const int64_t t = i / data.dim / data.heads, h = i / data.dim % data.heads;
                const int64_t at = (h * data.tokens + t) * data.dim + i % data.dim;
                if (half) {
                    reinterpret_cast<uint16_t*>(to)[at] = from[i];
                } else {
                    reinterpret_cast<float*>(to)[at] = kivi::f16_to_f32(from[i]);
                }
            }
        }
        for (int set = 1; set < sets; ++set) std::memcpy(memory + 2 * set * elements * size, memory, 2 * elements * size);
        scores_.resize(data.tokens * pool_.threads());
        out_.resize(std::max(out_.size(), data.q.size()));
        Contender contender;
        contender.suite = "attend";
        contender.what.preset = half ? "plain-f16" : "plain-f32";
        contender.what.dtype = half ? "f16" : "f32";
        contender.what.k_bits = contender.what.v_bits = half ? 16 : 32;
        contender.what.context = data.tokens;
        contender.what.head_dim = data.dim;
        contender.what.isa = "compiler";
        contender.bytes = bytes;
        contender.run = [this, &data, memory, elements, size, sets, half](int64_t round) {
            const uint8_t* k = memory + 2 * (round % sets) * elements * size;
            const uint8_t* v = k + elements * size;
            pool_.parallel(32, [&](int64_t head, int thread) {
                const int64_t at = head / 4 * data.tokens * data.dim * static_cast<int64_t>(size);
                const float* q = data.q.data() + head * data.dim;
                float* scores = scores_.data() + thread * data.tokens;
                float* out = out_.data() + head * data.dim;
                if (half) {
                    plain_head_f16(reinterpret_cast<const uint16_t*>(k + at), reinterpret_cast<const uint16_t*>(v + at),
                                   data.tokens, data.dim, q, scores, out);
                } else {
                    plain_head_f32(reinterpret_cast<const float*>(k + at), reinterpret_cast<const float*>(v + at),
                                   data.tokens, data.dim, q, scores, out);
                }
            });
        };
        contenders_.push_back(std::move(contender));
    }

    // Reading as much memory as the first contender does, with both threads: what no attention can beat.
    void add_read() {
        const int64_t bytes = static_cast<int64_t>(contenders_.front().bytes) / 512 * 512;
        const int sets = sets_for(static_cast<double>(bytes));
        uint8_t* memory = static_cast<uint8_t*>(big_memory(bytes * sets));
        std::memset(memory, 1, bytes * sets);
        Contender contender;
        contender.suite = "read";
        contender.what.preset = "read";
        contender.what.context = context_;
        contender.bytes = static_cast<double>(bytes);
        contender.run = [this, memory, bytes, sets](int64_t round) {
            const uint8_t* at = memory + round % sets * bytes;
            pool_.parallel(16, [&](int64_t item, int) {
                sink_ += sum(reinterpret_cast<const uint64_t*>(at + item * (bytes / 16)), bytes / 16 / 8);
            });
        };
        contenders_.push_back(std::move(contender));
    }

    // Every contender against those named `against`, time for time, per row of the batch; and what has another head
    // dim than 128 also against the same preset at 128, byte for byte.
    void run(const Options& options, const std::vector<std::string>& against) {
        const double seconds = options.seconds > 0 ? options.seconds : options.quick ? 1.5 : 6;
        measure(contenders_, seconds);
        for (Contender& c : contenders_) {
            if (c.what.preset == "read") continue;
            for (const Contender& other : contenders_) {
                if (c.what.head_dim != 128 && other.what.head_dim == 128 && other.what.preset == c.what.preset) {
                    c.ratios["head dim 128, per byte"] = c.gbps() / other.gbps();
                }
                if (&other == &c || other.what.head_dim != c.what.head_dim ||
                    std::find(against.begin(), against.end(), label(other)) == against.end()) {
                    continue;
                }
                if (other.what.preset == "read") {
                    c.ratios["read"] = c.gbps() / other.gbps();
                } else {
                    c.ratios[label(other)] = other.median_us / other.what.batch / (c.median_us / c.what.batch);
                }
            }
        }
        print_table(title_, contenders_);
        append_json(options.json, contenders_);
    }

  private:
    const Data& data_of(int head_dim) {
        const auto at = data_.find(head_dim);
        if (at != data_.end()) return at->second;
        return data_.emplace(head_dim, make_data(context_, 8, head_dim, 32)).first->second;
    }

    static std::string label(const Contender& c) {
        std::string name = c.what.preset;
        if (c.suite == "attend" && c.what.isa == "AVX2" && kivi::cpu::simd::best_target() != Target::avx2) {
            name += " AVX2";
        }
        return name;
    }

    std::string title_;
    int64_t context_;
    std::map<int, Data> data_;  // by head dim
    std::vector<std::unique_ptr<Cache>> caches_;
    std::vector<Contender> contenders_;
    kivi::cpu::ThreadPool pool_{2};
    std::vector<float> out_, scores_;
    std::atomic<uint64_t> sink_{0};
};

Storage named(std::string name, const kivi_spec& k, const kivi_spec& v, int sink, int recent, int flush) {
    return {std::move(name), k, v, sink, recent, flush};
}

const Storage f16 = preset_storage("f16"), g32 = preset_storage("kivi2-sink"), k3v2 = preset_storage("k3v2");
const Storage g128 = named("2/2 g128", spec(2, C, 128, 0), spec(2, T, 128, 0), 128, 0, 128);

void at_context(const Options& options, int64_t context) {
    Group group("context " + std::to_string(context), context);
    How how;
    how.error = context <= 4096;
    group.add(f16, how);
    group.add_read();
    group.add_plain(true);
    group.add_plain(false);
    group.add(g32, how);
    group.add(k3v2, how);
    if (!options.quick) {
        group.add(g128, how);
        group.add(preset_storage("k4v2"), how);
        group.add(preset_storage("kivi4"), how);
    }
    group.run(options, {"f16", "read", "plain-f16", "plain-f32"});
}

void avx2_only(const Options& options) {
    if (!kivi::cpu::simd::runs_on(Target::avx2) || kivi::cpu::simd::best_target() == Target::avx2) return;
    Group group("AVX2 only, context 4096", 4096);
    How avx2;
    avx2.isa = Target::avx2;
    avx2.error = true;
    group.add(f16);
    group.add(f16, avx2);
    group.add(g32, avx2);
    group.add(g128, avx2);
    group.add(k3v2, avx2);
    group.add(preset_storage("kivi4"), avx2);
    group.run(options, {"f16", "f16 AVX2"});
}

void with_hadamard(const Options& options) {
    Group group("Hadamard beside none, context 4096", 4096);
    group.add(named("k3v2 none", k3v2.k, spec(2, T, 64, 0), 64, 64, 64));
    group.add(k3v2);
    group.add(named("k3v2 K and V", spec(3, C, 64, H), spec(2, T, 64, H), 64, 64, 64));
    group.run(options, {"k3v2 none"});
}

void head_dims(const Options& options) {
    Group group("head dim 64 beside 128, context 4096", 4096);
    for (const int head_dim : {128, 64}) {
        How how;
        how.head_dim = head_dim;
        group.add(f16, how);
        group.add(g32, how);
        group.add(k3v2, how);
    }
    group.run(options, {"f16"});
}

void batches(const Options& options) {
    Group group("batch, context 4096", 4096);
    How eight;
    eight.batch = 8;
    group.add(g32);
    group.add(g32, eight);
    group.run(options, {"kivi2-sink"});
}

void thread_counts(const Options& options) {
    Group group("threads, context 4096", 4096);
    How alone;
    alone.threads = 1;
    group.add(f16, alone);
    group.add(g32, alone);
    group.add(g32);
    group.run(options, {"kivi2-sink", "f16"});
}

}  // namespace

int main(int argc, char** argv) {
    const auto context = [](int64_t tokens) {
        return [tokens](const Options& options) { at_context(options, tokens); };
    };
    return run_listed(argc, argv,
                      {{"context 512", true, context(512)},
                       {"context 4096", true, context(4096)},
                       {"context 32768", false, context(32768)},
                       {"AVX2", false, avx2_only},
                       {"hadamard", false, with_hadamard},
                       {"head dim", false, head_dims},
                       {"batch", false, batches},
                       {"threads", false, thread_counts}});
}
