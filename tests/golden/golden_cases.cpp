// Inputs and calls behind golden_cases.h.
#include "golden/golden_cases.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <exception>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>

namespace golden {

namespace {

// The inputs of restate.py, operation for operation.
uint32_t mix(std::initializer_list<uint32_t> fields) {
    uint32_t h = 0x811C9DC5u;
    for (uint32_t field : fields) {
        h = (h ^ field) * 0x9E3779B1u;
        h ^= h >> 15;
    }
    h *= 0x85EBCA6Bu;
    return h ^ (h >> 13);
}

float input(int layer, char part, int head, int64_t token, int channel) {
    const uint32_t h =
        mix({uint32_t(layer), part == 'v', uint32_t(head), uint32_t(token), uint32_t(channel)});
    const int sum = int(h & 255) + int(h >> 8 & 255) + int(h >> 16 & 255) + int(h >> 24);
    const int fine = int((h * 0xC2B2AE35u) >> 20) - 2048;
    const double noise = (sum - 510) / 64.0 + std::ldexp(fine, -18);
    return float(std::ldexp(noise, channel % 4 - 1) + (channel % 5 == 2 ? 10.0 : 0.0));
}

std::vector<float> moment(int layer, int head, int dim) {
    std::vector<double> sums(size_t(dim) * size_t(dim), 0.0);
    for (uint32_t row = 0; row < 96; ++row) {
        const int common = int(mix({uint32_t(layer), 3, uint32_t(head), row}) & 7) - 3;
        std::vector<int> q;
        for (int c = 0; c < dim; ++c) {
            q.push_back(int(mix({uint32_t(layer), 2, uint32_t(head), row, uint32_t(c)}) & 15) - 7 +
                        common * (c % 3));
        }
        for (size_t i = 0; i < sums.size(); ++i) sums[i] += q[i / size_t(dim)] * q[i % size_t(dim)];
    }
    std::vector<float> result;
    for (double sum : sums) result.push_back(float(sum / 64));
    return result;
}

int32_t dtype_of(const std::string& word) {
    return word == "f32" ? KIVI_F32 : word == "f16" ? KIVI_F16 : KIVI_BF16;
}

kivi_spec read_spec(std::istream& in) {
    kivi_spec spec{};
    std::string bar, axis, group, range, param, transform, rounding;
    in >> bar >> spec.bits;
    if (spec.bits == 16) {
        in >> transform;
    } else {
        in >> axis >> group >> range >> spec.range_ratio >> param >> transform >> rounding;
        spec.axis = axis == "channel" ? KIVI_AXIS_CHANNEL : KIVI_AXIS_TOKEN;
        spec.group = group == "head" ? int(KIVI_GROUP_HEAD) : std::stoi(group);
        spec.range = range == "ratio" ? KIVI_RANGE_RATIO : KIVI_RANGE_MINMAX;
        spec.param_dtype = dtype_of(param);
        spec.rounding = rounding == "query-aware" ? KIVI_ROUND_QUERY_AWARE : KIVI_ROUND_NEAREST;
    }
    spec.transform = transform == "hadamard" ? KIVI_TRANSFORM_HADAMARD : KIVI_TRANSFORM_NONE;
    return spec;
}

kivi_layer read_layer(std::istream& in) {
    kivi_layer layer{};
    in >> layer.kv_heads >> layer.q_heads >> layer.key_dim >> layer.value_dim;
    if (layer.kv_heads > 0) {
        layer.k = read_spec(in);
        layer.v = read_spec(in);
    }
    return layer;
}

Case read_case(std::istream& in) {
    Case c{};
    std::string word, dtype, schedule;
    kivi_config_init(&c.config, sizeof c.config);
    in >> c.name >> dtype >> word >> c.config.sink >> word >> c.config.recent >> word >> c.config.flush >>
        schedule >> word >> c.tokens >> word >> c.chunk;
    c.config.window_dtype = dtype_of(dtype);
    c.config.schedule = schedule == "published" ? KIVI_SCHEDULE_PUBLISHED : KIVI_SCHEDULE_ROLLING;
    c.config.max_sequences = 2;
    c.config.max_tokens = 1024;
    c.config.threads = 1;
    return c;
}

// [rows, dim] or more, contiguous.
kivi_tensor tensor(void* data, std::initializer_list<int64_t> shape) {
    kivi_tensor t{};
    t.data = data;
    t.dtype = KIVI_F32;
    t.device = KIVI_CPU;
    t.rank = int32_t(shape.size());
    int64_t stride = 1;
    for (int i = t.rank - 1; i >= 0; --i) {
        t.shape[i] = shape.begin()[i];
        t.stride[i] = stride;
        stride *= t.shape[i];
    }
    return t;
}

kivi_batch batch_of(int64_t count) {
    kivi_batch batch;
    check(kivi_batch_init(&batch, sizeof batch));
    batch.rows = 1;
    batch.max_count = int32_t(count);
    return batch;
}

std::vector<float> tokens_of(const Case& c, int layer, char part, int64_t begin, int64_t end) {
    const kivi_layer& shape = c.layers[size_t(layer)];
    const int dim = part == 'k' ? shape.key_dim : shape.value_dim;
    std::vector<float> x;
    for (int64_t token = begin; token < end; ++token) {
        for (int head = 0; head < shape.kv_heads; ++head) {
            for (int channel = 0; channel < dim; ++channel) {
                float value = input(layer, part, head, token, channel);
                for (const Put& put : c.puts) {
                    if (put.layer == layer && put.part == part && put.head == head && token >= put.first &&
                        token < put.last && (put.channel < 0 || put.channel == channel)) {
                        value = put.value;
                    }
                }
                x.push_back(value);
            }
        }
    }
    return x;
}

// The environment of `host` while it lives; throws if a call has changed it.
class HostScope {
  public:
    explicit HostScope(const Host& host) {
        std::fegetenv(&before_);
        std::fesetround(host.rounding);
#if defined(__SSE2__)
        if (host.flush_to_zero) _mm_setcsr(_mm_getcsr() | kFlushBits);
        control_ = _mm_getcsr() & ~kFlags;
#endif
        rounding_ = host.rounding;
    }
    ~HostScope() noexcept(false) {
        bool kept = std::fegetround() == rounding_;
#if defined(__SSE2__)
        kept = kept && (_mm_getcsr() & ~kFlags) == control_;
#endif
        std::fesetenv(&before_);
        if (!kept && std::uncaught_exceptions() == 0) {
            throw std::runtime_error("a call changed the host's floating-point environment");
        }
    }
    HostScope(const HostScope&) = delete;
    HostScope& operator=(const HostScope&) = delete;

  private:
    std::fenv_t before_;
    int rounding_;
#if defined(__SSE2__)
    static constexpr unsigned kFlushBits = 0x8040, kFlags = 0x3F;
    unsigned control_;
#endif
};

}  // namespace

void check(kivi_status status) {
    if (status != KIVI_OK)
        throw std::runtime_error(std::string(kivi_status_name(status)) + ": " + kivi_last_error());
}

Bytes read_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    if (!in) throw std::runtime_error("cannot read " + path);
    return Bytes(std::istreambuf_iterator<char>(in), {});
}

std::vector<Case> read_cases(const std::string& path) {
    std::vector<Case> cases;
    std::ifstream file(path);
    if (!file) throw std::runtime_error("cannot read " + path);
    for (std::string line; std::getline(file, line);) {
        std::istringstream in(line);
        std::string word, value;
        if (!(in >> word) || word[0] == '#') continue;
        if (word == "case" || word == "unstored") {
            cases.push_back(read_case(in));
            cases.back().stored = word == "case";
        } else if (word == "layer") {
            cases.back().layers.push_back(read_layer(in));
        } else if (word == "put") {
            Put put{};
            in >> put.layer >> put.part >> put.head >> put.first >> put.last >> put.channel >> value;
            put.value = float(std::stod(value));
            cases.back().puts.push_back(put);
        } else if (word == "flush") {
            cases.back().flush = true;
        } else {
            throw std::runtime_error("unknown line: " + line);
        }
    }
    return cases;
}

Cache::Cache(const Case& c) : case_(c) {
    kivi_config config = c.config;
    config.layer_count = int32_t(c.layers.size());
    config.layers = c.layers.data();
    check(kivi_cache_create(&config, &cache_));
}

void Cache::moments_set() const {
    for (int layer = 0; layer < int(case_.layers.size()); ++layer) {
        const kivi_layer& shape = case_.layers[size_t(layer)];
        if (shape.k.rounding != KIVI_ROUND_QUERY_AWARE) continue;
        std::vector<float> matrices;
        for (int head = 0; head < shape.kv_heads; ++head) {
            const std::vector<float> matrix = moment(layer, head, shape.key_dim);
            matrices.insert(matrices.end(), matrix.begin(), matrix.end());
        }
        const kivi_tensor m = tensor(matrices.data(), {shape.kv_heads, shape.key_dim, shape.key_dim});
        check(kivi_moments_set(cache_, layer, &m, KIVI_STORED_BASIS, nullptr));
        check(kivi_moments_commit(cache_, layer, nullptr));
    }
}

void Cache::fill(const Host& host) const {
    moments_set();
    for (int64_t begin = 0; begin < case_.tokens; begin += case_.chunk) {
        const int64_t end = std::min(begin + case_.chunk, case_.tokens);
        const kivi_batch batch = batch_of(end - begin);
        for (int layer = 0; layer < int(case_.layers.size()); ++layer) {
            const kivi_layer& shape = case_.layers[size_t(layer)];
            if (shape.kv_heads == 0) continue;
            std::vector<float> k = tokens_of(case_, layer, 'k', begin, end);
            std::vector<float> v = tokens_of(case_, layer, 'v', begin, end);
            const kivi_tensor keys = tensor(k.data(), {1, end - begin, shape.kv_heads, shape.key_dim});
            const kivi_tensor values = tensor(v.data(), {1, end - begin, shape.kv_heads, shape.value_dim});
            const HostScope scope(host);
            check(kivi_append(cache_, layer, &batch, &keys, &values, nullptr));
        }
    }
    if (case_.flush) {
        const kivi_batch batch = batch_of(1);
        const HostScope scope(host);
        check(kivi_flush_residual(cache_, -1, &batch, nullptr));
    }
}

Bytes Cache::export_sequence() const {
    size_t size = 0, written = 0;
    check(kivi_export_size(cache_, 0, &size));
    Bytes bytes(size);
    check(kivi_export(cache_, 0, bytes.data(), bytes.size(), &written, nullptr));
    if (written != size) throw std::runtime_error("kivi_export_size is not exact");
    return bytes;
}

Bytes Cache::moments_export(int layer) const {
    size_t size = 0, written = 0;
    check(kivi_moments_export_size(cache_, layer, &size));
    Bytes bytes(size);
    check(kivi_moments_export(cache_, layer, bytes.data(), bytes.size(), &written));
    if (written != size) throw std::runtime_error("kivi_moments_export_size is not exact");
    return bytes;
}

std::vector<float> Cache::dequantize(int layer, char part) const {
    const kivi_layer& shape = case_.layers[size_t(layer)];
    const int dim = part == 'k' ? shape.key_dim : shape.value_dim;
    std::vector<float> x(size_t(case_.tokens) * size_t(shape.kv_heads) * size_t(dim));
    const kivi_tensor out = tensor(x.data(), {case_.tokens, shape.kv_heads, dim});
    check(kivi_dequantize(cache_, layer, 0, 0, case_.tokens, part == 'k' ? &out : nullptr,
                          part == 'v' ? &out : nullptr, 0, nullptr));
    return x;
}

}  // namespace golden
