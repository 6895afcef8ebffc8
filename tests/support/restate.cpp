// The formulas of core/FORMAT.md, plainly.
#include "support/restate.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace kivi_test {
namespace {

template <class T>
T load(const Bytes& bytes, size_t at) {
    T value;
    std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
}

void put_value(Bytes& to, int32_t dtype, float x) {
    const uint32_t bits = bits_of(dtype, x);
    for (size_t i = 0; i < element_bytes(dtype); ++i) to.push_back(uint8_t(bits >> (8 * i)));
}

int32_t param_dtype(const kivi_spec& spec) { return spec.param_dtype == KIVI_F32 ? KIVI_F32 : KIVI_F16; }
int group_size(const kivi_spec& spec, int dim) { return spec.group == KIVI_GROUP_HEAD ? dim : spec.group; }

float parameter(int32_t dtype, float x) {
    if (std::isnan(x)) return x;
    const float rounded = round_to(dtype, x);
    if (std::isinf(rounded)) return std::copysign(float(largest(dtype)), x);
    return rounded == 0 ? 0.0f : rounded;
}

int encode(float y, float scale, float min, int top) {
    if (scale == 0 || std::isnan(scale)) return 0;
    const float code = std::nearbyint((y - min) / scale);
    return std::isnan(code) ? 0 : int(std::clamp(code, 0.0f, float(top)));
}

}  // namespace

void hadamard(float* x, int dim) {
    int block = 1;
    while (dim % (2 * block) == 0) block *= 2;
    const float norm = float(1.0 / std::sqrt(double(block)));
    for (int base = 0; base < dim; base += block) {
        for (int h = 1; h < block; h *= 2) {
            for (int j = 0; j < block; ++j) {
                if (j & h) continue;
                const float a = x[base + j], b = x[base + j + h];
                x[base + j] = a + b;
                x[base + j + h] = a - b;
            }
        }
        for (int j = 0; j < block; ++j) x[base + j] *= norm;
    }
}

Floats stored_row(const float* x, int dim, int transform, int32_t window_dtype, bool* saturated) {
    Floats row(x, x + dim);
    float most = 0;
    bool finite = true;
    for (float value : row) {
        finite = finite && std::isfinite(value);
        most = std::max(most, std::fabs(value));
    }
    if (transform == KIVI_TRANSFORM_HADAMARD) {
        const bool huge = most > 0x1p118f;
        if (huge) {
            for (float& value : row) value *= 0x1p-10f;
        }
        hadamard(row.data(), dim);
        if (huge) {
            for (float& value : row) value *= 0x1p10f;
        }
    }
    for (float& value : row) {
        const float rounded = round_to(window_dtype, value);
        if (std::isinf(rounded) && (finite || std::isfinite(value))) {
            value = std::copysign(float(largest(window_dtype)), value);
            if (saturated) *saturated = true;
        } else {
            value = std::isnan(rounded) ? kNaN : rounded;
        }
    }
    return row;
}

std::vector<EncoderTable> tables_in(const Bytes& blob) {
    const int heads = load<int32_t>(blob, 24), dim = load<int32_t>(blob, 28);
    std::vector<EncoderTable> tables;
    size_t at = 48;
    for (int head = 0; head < heads; ++head) {
        at += size_t(dim) * size_t(dim) * 4;
        EncoderTable table;
        for (int j = 0; j < dim; ++j, at += 2) table.order.push_back(load<uint16_t>(blob, at));
        for (int i = 0; i < dim * (dim - 1) / 2; ++i, at += 4) table.weights.push_back(load<float>(blob, at));
        tables.push_back(table);
    }
    return tables;
}

std::vector<std::vector<double>> matrices_in(const Bytes& blob) {
    const int heads = load<int32_t>(blob, 24), dim = load<int32_t>(blob, 28);
    const size_t elements = size_t(dim) * size_t(dim);
    const size_t stride = 4 * elements + 2 * size_t(dim) + 2 * size_t(dim) * size_t(dim - 1);
    std::vector<std::vector<double>> matrices;
    for (int head = 0; head < heads; ++head) {
        std::vector<double> matrix;
        for (size_t i = 0; i < elements; ++i)
            matrix.push_back(load<float>(blob, 48 + size_t(head) * stride + 4 * i));
        matrices.push_back(matrix);
    }
    return matrices;
}

// By the inverse, which the library never forms: A^-1 = U' U with U upper triangular, W_jc = U_jc / U_jj.
EncoderTable table_from(const std::vector<double>& matrix, int dim) {
    const size_t n = size_t(dim);
    double mean = 0;
    for (size_t i = 0; i < n; ++i) mean += matrix[i * n + i] / double(n);
    EncoderTable table;
    table.order.resize(n);
    std::iota(table.order.begin(), table.order.end(), 0);
    std::stable_sort(table.order.begin(), table.order.end(),
                     [&](int a, int b) { return matrix[size_t(a) * (n + 1)] > matrix[size_t(b) * (n + 1)]; });
    std::vector<double> a(n * n), inverse(n * n, 0.0);
    for (size_t i = 0; i < n; ++i) {
        for (size_t j = 0; j < n; ++j) {
            a[i * n + j] =
                matrix[size_t(table.order[i]) * n + size_t(table.order[j])] / mean + (i == j ? 0.1 : 0.0);
        }
        inverse[i * n + i] = 1;
    }
    for (size_t p = 0; p < n; ++p) {  // Gauss-Jordan; A is positive definite, so every pivot is positive
        const double pivot = a[p * n + p];
        for (size_t j = 0; j < n; ++j) {
            a[p * n + j] /= pivot;
            inverse[p * n + j] /= pivot;
        }
        for (size_t i = 0; i < n; ++i) {
            const double factor = a[i * n + p];
            if (i == p || factor == 0) continue;
            for (size_t j = 0; j < n; ++j) {
                a[i * n + j] -= factor * a[p * n + j];
                inverse[i * n + j] -= factor * inverse[p * n + j];
            }
        }
    }
    // U from the first row down: U_jj^2 = what is left of the diagonal.
    for (size_t j = 0; j < n; ++j) {
        const double diagonal = inverse[j * n + j];
        for (size_t c = j + 1; c < n; ++c) table.weights.push_back(float(inverse[j * n + c] / diagonal));
        for (size_t r = j + 1; r < n; ++r) {
            for (size_t c = j + 1; c < n; ++c)
                inverse[r * n + c] -= inverse[j * n + r] * inverse[j * n + c] / diagonal;
        }
    }
    return table;
}

size_t Packed::group_of(int at_token, int at_channel) const {
    const int group = group_size(spec, dim);
    if (spec.axis == KIVI_AXIS_CHANNEL) return size_t(at_token / group) * size_t(dim) + size_t(at_channel);
    const int groups = (dim + group - 1) / group;
    return size_t(at_token) * size_t(groups) + size_t(at_channel / group);
}

Packed pack(const Floats& rows, int dim, const kivi_spec& spec, const EncoderTable* table) {
    Packed packed;
    packed.dim = dim;
    packed.tokens = int(rows.size() / size_t(dim));
    packed.spec = spec;
    packed.stored = rows;
    packed.decoded = rows;
    if (spec.bits == 16) return packed;

    const int top = (1 << spec.bits) - 1;
    const int32_t type = param_dtype(spec);
    // Range of every group.
    size_t groups = packed.tokens > 0 ? packed.group_of(packed.tokens - 1, dim - 1) + 1 : 0;
    Floats low(groups, kInfinity), high(groups, -kInfinity);
    std::vector<bool> damaged(groups, false);
    for (int t = 0; t < packed.tokens; ++t) {
        for (int c = 0; c < dim; ++c) {
            const size_t group = packed.group_of(t, c);
            const float y = rows[size_t(t) * size_t(dim) + size_t(c)];
            if (!std::isfinite(y)) damaged[group] = true;
            low[group] = std::min(low[group], y);
            high[group] = std::max(high[group], y);
        }
    }
    for (size_t group = 0; group < groups; ++group) {
        float from = std::clamp(low[group], -0x1p126f, 0x1p126f);
        float range = std::clamp(high[group], -0x1p126f, 0x1p126f) - from;
        if (spec.range == KIVI_RANGE_RATIO) {
            const float kept = range * spec.range_ratio;
            from = from + 0.5f * (range - kept);
            range = kept;
        }
        packed.scales.push_back(damaged[group] ? kNaN : parameter(type, range / float(top)));
        packed.mins.push_back(damaged[group] ? kNaN : parameter(type, from));
    }
    // Codes, token by token; with a table in its order, errors handed on.
    packed.codes.assign(rows.size(), 0);
    for (int t = 0; t < packed.tokens; ++t) {
        Floats y(rows.begin() + int64_t(t) * dim, rows.begin() + int64_t(t + 1) * dim);
        size_t weight = 0;
        for (int j = 0; j < dim; ++j) {
            const int c = table ? table->order[size_t(j)] : j;
            const size_t at = size_t(t) * size_t(dim) + size_t(c);
            const float scale = packed.scale_at(t, c), min = packed.min_at(t, c);
            packed.codes[at] = encode(y[size_t(c)], scale, min, top);
            packed.decoded[at] = std::isnan(scale) ? kNaN : std::fma(float(packed.codes[at]), scale, min);
            if (table == nullptr) continue;
            if (std::isnan(scale)) {
                weight += size_t(dim - 1 - j);
                continue;
            }
            const float e = y[size_t(c)] - packed.decoded[at];
            for (int later = j + 1; later < dim; ++later) {
                float& next = y[size_t(table->order[size_t(later)])];
                next = std::fma(-e, table->weights[weight++], next);
            }
        }
    }
    return packed;
}

Bytes canonical(const Packed& packed, int32_t window_dtype, int begin, int end) {
    Bytes bytes;
    const int dim = packed.dim;
    if (packed.spec.bits == 16) {
        for (int i = begin * dim; i < end * dim; ++i)
            put_value(bytes, window_dtype, packed.stored[size_t(i)]);
        return bytes;
    }
    const int bits = packed.spec.bits, group = group_size(packed.spec, dim);
    const auto put_stream = [&](const std::vector<int>& codes) {
        Bytes stream((codes.size() * size_t(bits) + 7) / 8, 0);
        for (size_t i = 0; i < codes.size(); ++i) {
            for (int b = 0; b < bits; ++b) {
                const size_t k = i * size_t(bits) + size_t(b);
                stream[k / 8] = uint8_t(stream[k / 8] | ((codes[i] >> b & 1) << (k % 8)));
            }
        }
        bytes.insert(bytes.end(), stream.begin(), stream.end());
    };
    std::vector<size_t> groups;
    if (packed.spec.axis == KIVI_AXIS_CHANNEL) {
        for (int block = begin; block < end; block += group) {
            for (int c = 0; c < dim; ++c) {
                std::vector<int> codes;
                for (int t = block; t < block + group; ++t)
                    codes.push_back(packed.codes[size_t(t * dim + c)]);
                put_stream(codes);
                groups.push_back(packed.group_of(block, c));
            }
        }
    } else {
        for (int t = begin; t < end; ++t) {
            for (int c = 0; c < dim; c += group) {
                const int stop = std::min(c + group, dim);
                put_stream({packed.codes.begin() + t * dim + c, packed.codes.begin() + t * dim + stop});
                groups.push_back(packed.group_of(t, c));
            }
        }
    }
    for (size_t g : groups) put_value(bytes, param_dtype(packed.spec), packed.scales[g]);
    for (size_t g : groups) put_value(bytes, param_dtype(packed.spec), packed.mins[g]);
    return bytes;
}

int64_t rolling_border(const kivi_config& config, int64_t length) {
    if (length < config.recent) return 0;
    const int64_t border = (length - config.recent) / config.flush * config.flush;
    return border > config.sink ? border : 0;
}

Bytes payload(const kivi_config& config, const kivi_layer& layer, const Tokens& tokens, int64_t length,
              int64_t key_border, int64_t value_border, const std::vector<EncoderTable>& tables) {
    Bytes bytes;
    const int64_t sink = std::min<int64_t>(config.sink, length);
    for (const bool key : {true, false}) {
        const kivi_spec& spec = key ? layer.k : layer.v;
        const int dim = key ? layer.key_dim : layer.value_dim;
        const int64_t border = std::max<int64_t>(key ? key_border : value_border, sink);
        const Floats& x = key ? tokens.k : tokens.v;
        for (int head = 0; head < layer.kv_heads; ++head) {
            Floats rows;
            for (int64_t t = 0; t < length; ++t) {
                const Floats row = stored_row(&x[size_t(t * layer.kv_heads + head) * size_t(dim)], dim,
                                              spec.transform, config.window_dtype);
                rows.insert(rows.end(), row.begin(), row.end());
            }
            const EncoderTable* const table =
                key && !tables.empty() ? &tables[size_t(head) % tables.size()] : nullptr;
            const Packed packed = pack(rows_of(rows, size_t(dim), sink, border), dim, spec, table);
            for (int64_t i = 0; i < sink * dim; ++i) put_value(bytes, config.window_dtype, rows[size_t(i)]);
            for (int64_t begin = 0; begin < packed.tokens; begin += 128) {
                const Bytes page = canonical(packed, config.window_dtype, int(begin),
                                             int(std::min<int64_t>(begin + 128, packed.tokens)));
                bytes.insert(bytes.end(), page.begin(), page.end());
            }
            for (int64_t i = border * dim; i < length * dim; ++i)
                put_value(bytes, config.window_dtype, rows[size_t(i)]);
        }
    }
    return bytes;
}

Bytes payload_in(const Bytes& blob, int layer) {
    const size_t record = 96 + 128 * size_t(layer);
    const auto begin = blob.begin() + int64_t(load<uint64_t>(blob, record + 104));
    return Bytes(begin, begin + int64_t(load<uint64_t>(blob, record + 112)));
}

int64_t part_bytes(const kivi_spec& spec, int dim, int32_t window_dtype) {
    if (spec.bits == 16) return 128 * dim * int64_t(element_bytes(window_dtype));
    const int64_t p = int64_t(element_bytes(param_dtype(spec))), group = group_size(spec, dim);
    const int64_t groups =
        spec.axis == KIVI_AXIS_CHANNEL ? 128 / group * dim : 128 * ((dim + group - 1) / group);
    return 16 * spec.bits * dim + 2 * p * groups;
}

}  // namespace kivi_test
