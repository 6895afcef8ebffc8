// The write side: packing a prompt beside copying its bytes, and one token of a decode step beside that step's
// attention.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bench_common.h"

using namespace bench;

namespace {

constexpr int kKvHeads = 8, kQHeads = 32, kHeadDim = 128;
constexpr int64_t kTokens = 4096;        // of the prompt, and the length at which a step is timed
constexpr int kSequences = 4;            // that are written in turns
constexpr int kStepTokens = 64;  // a multiple of every preset's flush unit: each run has its share of flushes

kivi_tensor view(const uint16_t* data, int64_t tokens, int heads) {
    kivi_tensor tensor{};
    tensor.data = const_cast<uint16_t*>(data);
    tensor.dtype = KIVI_F16;
    tensor.device = KIVI_CPU;
    tensor.rank = 3;
    tensor.shape[0] = tokens;
    tensor.shape[1] = heads;
    tensor.shape[2] = kHeadDim;
    tensor.stride[0] = static_cast<int64_t>(heads) * kHeadDim;
    tensor.stride[1] = kHeadDim;
    tensor.stride[2] = 1;
    return tensor;
}

// The same prompt many times over, so that each round finds its input in memory and not in a cache.
class Prompts {
  public:
    explicit Prompts(const Data& data)
        : elements_(data.k.size()), sets_(sets_for(2.0 * static_cast<double>(elements_) * sizeof(uint16_t))) {
        memory_ = static_cast<uint16_t*>(big_memory(2 * elements_ * sets_ * sizeof(uint16_t)));
        for (int set = 0; set < sets_; ++set) {
            std::copy(data.k.begin(), data.k.end(), memory_ + 2 * set * elements_);
            std::copy(data.v.begin(), data.v.end(), memory_ + (2 * set + 1) * elements_);
        }
    }
    const uint16_t* k(int64_t round) const { return memory_ + 2 * (round % sets_) * elements_; }
    const uint16_t* v(int64_t round) const { return k(round) + elements_; }
    size_t bytes() const { return 2 * elements_ * sizeof(uint16_t); }  // of K and V
    int sets() const { return sets_; }

  private:
    size_t elements_;
    int sets_;
    uint16_t* memory_;
};

// A cache that is written to.
class Writer {
  public:
    Writer(const Storage& storage, int64_t max_tokens, int sequences, const Data* moments) {
        kivi_config config;
        check(kivi_config_init(&config, sizeof config));
        config.layer.k = storage.k;
        config.layer.v = storage.v;
        if (moments != nullptr) config.layer.k.rounding = KIVI_ROUND_QUERY_AWARE;
        config.sink = storage.sink;
        config.recent = storage.recent;
        config.flush = storage.flush;
        config.layer_count = 1;
        config.layer.q_heads = kQHeads;
        config.layer.kv_heads = kKvHeads;
        config.layer.key_dim = config.layer.value_dim = kHeadDim;
        config.max_tokens = max_tokens;
        config.max_sequences = sequences;
        config.threads = 1;
        check(kivi_cache_create(&config, &cache_));
        if (moments != nullptr) commit_moments(*moments);
    }
    ~Writer() { kivi_cache_destroy(cache_); }
    Writer(const Writer&) = delete;

    void reset(int32_t sequence) { check(kivi_sequence_reset(cache_, sequence, nullptr)); }
    void append(int32_t sequence, const uint16_t* k, const uint16_t* v, int64_t tokens) {
        kivi_batch batch;
        check(kivi_batch_init(&batch, sizeof batch));
        batch.rows = 1;
        batch.max_count = static_cast<int32_t>(tokens);
        batch.sequences = &sequence;
        const kivi_tensor key = view(k, tokens, kKvHeads), value = view(v, tokens, kKvHeads);
        check(kivi_append(cache_, 0, &batch, &key, &value, nullptr));
    }
    int64_t length(int32_t sequence) const {
        kivi_length length;
        check(kivi_sequence_length(cache_, 0, sequence, &length, sizeof length));
        return length.length;
    }

  private:
    // The keys serve as queries: what they are does not change the time.
    void commit_moments(const Data& data) {
        std::vector<uint16_t> q;
        const int64_t tokens = 64;
        for (int i = 0; i < kQHeads / kKvHeads; ++i) {
            q.insert(q.end(), data.k.begin(), data.k.begin() + tokens * kKvHeads * kHeadDim);
        }
        kivi_batch batch;
        check(kivi_batch_init(&batch, sizeof batch));
        batch.rows = 1;
        batch.max_count = tokens;
        const kivi_tensor queries = view(q.data(), tokens, kQHeads);
        check(kivi_moments_accumulate(cache_, 0, &batch, &queries, nullptr));
        check(kivi_moments_commit(cache_, 0, nullptr));
    }

    kivi_cache* cache_ = nullptr;
};

Case case_of(const Storage& storage, int64_t context, int threads) {
    Case what;
    what.q_heads = kQHeads;
    what.kv_heads = kKvHeads;
    what.head_dim = kHeadDim;
    what.context = context;
    what.threads = threads;
    what.preset = storage.name;
    what.k_bits = storage.k.bits;
    what.v_bits = storage.v.bits;
    what.group = storage.k.group;
    what.hadamard = storage.k.transform != 0 || storage.v.transform != 0;
    return what;
}

std::vector<Storage> storages() {
    Storage g128{"2/2 g128", spec(2, KIVI_AXIS_CHANNEL, 128, 0), spec(2, KIVI_AXIS_TOKEN, 128, 0), 128, 0, 128};
    return {preset_storage("kivi2-sink"), preset_storage("k3v2"), preset_storage("kivi4"), g128,
            preset_storage("f16")};
}

void prompt(const Options& options) {
    const Data data = make_data(kTokens, kKvHeads, kHeadDim, kQHeads);
    const Prompts prompts(data);
    std::vector<std::unique_ptr<Writer>> writers;
    std::vector<Contender> contenders(1);

    Contender& copy = contenders.front();
    copy.suite = "prompt";
    copy.what = case_of(preset_storage("f16"), kTokens, 1);
    copy.what.preset = "memcpy";
    copy.bytes = static_cast<double>(prompts.bytes());
    uint8_t* to = static_cast<uint8_t*>(big_memory(prompts.bytes() * kSequences));
    std::memset(to, 1, prompts.bytes() * kSequences);
    copy.run = [&prompts, to](int64_t round) {
        std::memcpy(to + round % kSequences * prompts.bytes(), prompts.k(round), prompts.bytes());
    };

    const auto add = [&](Storage storage, bool query_aware) {
        writers.push_back(std::make_unique<Writer>(storage, kTokens, kSequences, query_aware ? &data : nullptr));
        Writer* writer = writers.back().get();
        if (query_aware) storage.name += " query-aware";
        Contender contender;
        contender.suite = "prompt";
        contender.what = case_of(storage, kTokens, 1);
        contender.bytes = static_cast<double>(prompts.bytes());
        contender.prepare = [writer](int64_t round) { writer->reset(static_cast<int32_t>(round % kSequences)); };
        contender.run = [writer, &prompts](int64_t round) {
            writer->append(static_cast<int32_t>(round % kSequences), prompts.k(round), prompts.v(round), kTokens);
        };
        for (int32_t s = 0; s < kSequences; ++s) writer->append(s, prompts.k(0), prompts.v(0), kTokens);
        contenders.push_back(std::move(contender));
    };
    for (const Storage& storage : storages()) add(storage, false);
    for (const Storage& storage : storages()) {
        if (storage.k.bits < 16) add(storage, true);
    }
    measure(contenders, options.seconds > 0 ? options.seconds : options.quick ? 2 : 8);
    const double copy_us = contenders.front().median_us;
    for (Contender& c : contenders) c.ratios["memcpy"] = copy_us / c.median_us;
    print_table("packing a prompt, fp16 in, one thread; GB/s of input", contenders);
    append_json(options.json, contenders);
}

void step(const Options& options) {
    constexpr int64_t room = kTokens + 64 * kStepTokens;
    const Data data = make_data(kTokens, kKvHeads, kHeadDim, kQHeads);
    std::vector<std::unique_ptr<Writer>> writers;
    std::vector<std::unique_ptr<Cache>> caches;
    std::vector<Contender> contenders;
    std::vector<float> out(static_cast<size_t>(kQHeads) * kHeadDim);

    for (const Storage& storage : storages()) {
        const Case what = case_of(storage, kTokens, 2);
        caches.push_back(std::make_unique<Cache>(storage, what, data));
        Cache* cache = caches.back().get();
        Contender attend;
        attend.suite = "attend";
        attend.what = what;
        attend.bytes = cache->bytes();
        attend.run = [cache, &out](int64_t round) { cache->attend(round, out.data()); };
        contenders.push_back(std::move(attend));

        writers.push_back(std::make_unique<Writer>(storage, room, kSequences, nullptr));
        Writer* writer = writers.back().get();
        Contender append;
        append.suite = "append";
        append.what = what;
        append.what.threads = 1;
        append.what.preset = storage.name + " append";
        append.bytes = 2.0 * kKvHeads * kHeadDim * sizeof(uint16_t) * kStepTokens;
        append.prepare = [writer, &data](int64_t round) {
            const int32_t sequence = static_cast<int32_t>(round % kSequences);
            const int64_t length = writer->length(sequence);
            if (length > 0 && length + kStepTokens <= room) return;
            writer->reset(sequence);
            writer->append(sequence, data.k.data(), data.v.data(), kTokens);
        };
        append.run = [writer, &data](int64_t round) {
            for (int64_t t = 0; t < kStepTokens; ++t) {
                const int64_t at = t * kKvHeads * kHeadDim;
                writer->append(static_cast<int32_t>(round % kSequences), data.k.data() + at, data.v.data() + at, 1);
            }
        };
        contenders.push_back(std::move(append));
    }
    measure(contenders, options.seconds > 0 ? options.seconds : options.quick ? 2 : 8);
    for (size_t i = 0; i < contenders.size(); i += 2) {
        Contender& append = contenders[i + 1];
        append.median_us /= kStepTokens;
        append.bytes /= kStepTokens;
        append.ratios["attend"] = contenders[i].median_us / append.median_us;
    }
    print_table("one token appended (mean of 64 steps, flushes included) beside attend at 4096", contenders);
    append_json(options.json, contenders);
}

}  // namespace

int main(int argc, char** argv) { return run_listed(argc, argv, {{"prompt", true, prompt}, {"step", true, step}}); }
