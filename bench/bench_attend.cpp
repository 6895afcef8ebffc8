// Decode attention: presets beside our own fp16 attention, compiler-vectorised loops and the read bandwidth, all in
// turns, on cold caches.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
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

// A group of contenders that are measured together, with what they work on.
class Group {
  public:
    Group(std::string title, int64_t context, int head_dim = 128)
        : title_(std::move(title)), data_(make_data(context, 8, head_dim, 32)) {}

    // The library. `isa` other than the best is forced around each call.
    void add(const Storage& storage, int batch = 1, int threads = 2, Target isa = kivi::cpu::simd::best_target(),
             bool with_error = false) {
        Case what;
        what.batch = batch;
        what.threads = threads;
        what.head_dim = data_.dim;
        what.context = data_.tokens;
        what.preset = storage.name;
        what.k_bits = storage.k.bits;
        what.v_bits = storage.v.bits;
        what.group = storage.k.group;
        what.hadamard = storage.k.transform == H || storage.v.transform == H;
        what.isa = kivi::cpu::simd::target_name(isa);
        caches_.push_back(std::make_unique<Cache>(storage, what, data_));
        Cache* cache = caches_.back().get();
        out_.resize(std::max(out_.size(), data_.q.size() * batch));
        Contender contender;
        contender.suite = "attend";
        contender.what = what;
        contender.bytes = cache->bytes();
        contender.run = [this, cache, isa](int64_t round) {
            kivi::cpu::simd::force_target(isa);
            cache->attend(round, out_.data());
            kivi::cpu::simd::force_target(kivi::cpu::simd::best_target());
        };
        if (with_error) {
            Case one = what;
            one.batch = 1;
            Cache reference(storage, one, data_, true);
            std::vector<float> expected(data_.q.size());
            reference.attend(0, expected.data());
            contender.run(0);
            contender.error = relative_error({out_.begin(), out_.begin() + data_.q.size()}, expected);
        }
        contenders_.push_back(std::move(contender));
    }

    void add_plain(bool half) {
        const int64_t elements = data_.tokens * data_.heads * data_.dim;
        const size_t size = half ? 2 : 4;
        const double bytes = 2.0 * static_cast<double>(elements) * size;
        const int sets = sets_for(bytes);
        uint8_t* memory = static_cast<uint8_t*>(big_memory(static_cast<size_t>(bytes) * sets));
        for (int part = 0; part < 2; ++part) {
            const std::vector<uint16_t>& from = part == 0 ? data_.k : data_.v;
            uint8_t* to = memory + part * elements * size;
            for (int64_t i = 0; i < elements; ++i) {
                const int64_t t = i / data_.dim / data_.heads, h = i / data_.dim % data_.heads;
                const int64_t at = (h * data_.tokens + t) * data_.dim + i % data_.dim;
                if (half) {
                    reinterpret_cast<uint16_t*>(to)[at] = from[i];
                } else {
                    reinterpret_cast<float*>(to)[at] = kivi::f16_to_f32(from[i]);
                }
            }
        }
        for (int set = 1; set < sets; ++set) std::memcpy(memory + 2 * set * elements * size, memory, 2 * elements * size);
        scores_.resize(data_.tokens * pool_.threads());
        out_.resize(std::max(out_.size(), data_.q.size()));
        Contender contender;
        contender.suite = "attend";
        contender.what.preset = half ? "plain-f16" : "plain-f32";
        contender.what.dtype = half ? "f16" : "f32";
        contender.what.k_bits = contender.what.v_bits = half ? 16 : 32;
        contender.what.context = data_.tokens;
        contender.what.head_dim = data_.dim;
        contender.what.isa = "compiler";
        contender.bytes = bytes;
        contender.run = [this, memory, elements, size, sets, half](int64_t round) {
            const uint8_t* k = memory + 2 * (round % sets) * elements * size;
            const uint8_t* v = k + elements * size;
            pool_.parallel(32, [&](int64_t head, int thread) {
                const int64_t at = head / 4 * data_.tokens * data_.dim * static_cast<int64_t>(size);
                const float* q = data_.q.data() + head * data_.dim;
                float* scores = scores_.data() + thread * data_.tokens;
                float* out = out_.data() + head * data_.dim;
                if (half) {
                    plain_head_f16(reinterpret_cast<const uint16_t*>(k + at), reinterpret_cast<const uint16_t*>(v + at),
                                   data_.tokens, data_.dim, q, scores, out);
                } else {
                    plain_head_f32(reinterpret_cast<const float*>(k + at), reinterpret_cast<const float*>(v + at),
                                   data_.tokens, data_.dim, q, scores, out);
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
        contender.what.context = data_.tokens;
        contender.what.head_dim = data_.dim;
        contender.bytes = static_cast<double>(bytes);
        contender.run = [this, memory, bytes, sets](int64_t round) {
            const uint8_t* at = memory + round % sets * bytes;
            pool_.parallel(16, [&](int64_t item, int) {
                sink_ += sum(reinterpret_cast<const uint64_t*>(at + item * (bytes / 16)), bytes / 16 / 8);
            });
        };
        contenders_.push_back(std::move(contender));
    }

    // Every contender against those named `against`, time for time, per row of the batch.
    void run(const Options& options, const std::vector<std::string>& against) {
        const double seconds = options.seconds > 0 ? options.seconds : options.quick ? 1.5 : 6;
        measure(contenders_, seconds);
        for (Contender& c : contenders_) {
            if (c.what.preset == "read") continue;
            for (const Contender& other : contenders_) {
                if (&other == &c || std::find(against.begin(), against.end(), label(other)) == against.end()) continue;
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
    static std::string label(const Contender& c) {
        std::string name = c.what.preset;
        if (c.suite == "attend" && c.what.isa == "AVX2" && kivi::cpu::simd::best_target() != Target::avx2) {
            name += " AVX2";
        }
        return name;
    }

    std::string title_;
    Data data_;
    std::vector<std::unique_ptr<Cache>> caches_;
    std::vector<Contender> contenders_;
    kivi::cpu::ThreadPool pool_{2};
    std::vector<float> out_, scores_;
    std::atomic<uint64_t> sink_{0};
};

Storage named(std::string name, const kivi_spec& k, const kivi_spec& v, int sink, int recent, int flush) {
    return {std::move(name), k, v, sink, recent, flush};
}

}  // namespace

int main(int argc, char** argv) {
    const Options options = parse_options(argc, argv);
    const auto wanted = [&](const std::string& name) {
        return options.only.empty() || name.find(options.only) != std::string::npos;
    };
    const Storage f16 = preset_storage("f16"), g32 = preset_storage("kivi2-sink"), k3v2 = preset_storage("k3v2");
    const Storage g128 = named("2/2 g128", spec(2, C, 128, 0), spec(2, T, 128, 0), 128, 0, 128);
    const Target best = kivi::cpu::simd::best_target();

    for (int64_t context : {512, 4096, 32768}) {
        const std::string name = "context " + std::to_string(context);
        if (!wanted(name) || (options.quick && context > 4096)) continue;
        Group group(name, context);
        const bool error = context <= 4096;
        group.add(f16, 1, 2, best, error);
        group.add_read();
        group.add_plain(true);
        group.add_plain(false);
        group.add(g32, 1, 2, best, error);
        group.add(k3v2, 1, 2, best, error);
        if (!options.quick) {
            group.add(g128, 1, 2, best, error);
            group.add(preset_storage("k4v2"), 1, 2, best, error);
            group.add(preset_storage("kivi4"), 1, 2, best, error);
        }
        group.run(options, {"f16", "read", "plain-f16", "plain-f32"});
    }
    if (!options.quick && wanted("AVX2") && kivi::cpu::simd::runs_on(Target::avx2) && best != Target::avx2) {
        Group group("AVX2 only, context 4096", 4096);
        group.add(f16);
        group.add(f16, 1, 2, Target::avx2, true);
        group.add(g32, 1, 2, Target::avx2, true);
        group.add(g128, 1, 2, Target::avx2, true);
        group.add(k3v2, 1, 2, Target::avx2, true);
        group.add(preset_storage("kivi4"), 1, 2, Target::avx2, true);
        group.run(options, {"f16", "f16 AVX2"});
    }
    if (!options.quick && wanted("hadamard")) {
        Group group("Hadamard beside none, context 4096", 4096);
        group.add(named("k3v2 none", k3v2.k, spec(2, T, 64, 0), 64, 64, 64));
        group.add(k3v2);
        group.add(named("k3v2 K and V", spec(3, C, 64, H), spec(2, T, 64, H), 64, 64, 64));
        group.run(options, {"k3v2 none"});
    }
    if (!options.quick && wanted("dim")) {
        Group group("head dim 64, context 4096", 4096, 64);
        group.add(f16);
        group.add(g32);
        group.add(k3v2);
        group.run(options, {"f16"});
    }
    if (!options.quick && wanted("batch")) {
        Group group("batch, context 4096", 4096);
        group.add(g32);
        group.add(g32, 8);
        group.run(options, {"kivi2-sink"});
    }
    if (!options.quick && wanted("threads")) {
        Group group("threads, context 4096", 4096);
        group.add(f16, 1, 1);
        group.add(g32, 1, 1);
        group.add(g32);
        group.run(options, {"kivi2-sink", "f16"});
    }
    return 0;
}
