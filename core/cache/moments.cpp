// Checks, basis and blob of query moments.
#include "cache/moments.h"

#include <algorithm>
#include <cmath>

#include "cache/blob_frame.h"
#include "cache/bytes.h"
#include "cache/refuse.h"
#include "format/checksum.h"
#include "format/hadamard.h"
#include "format/half.h"

namespace kivi {
namespace {

constexpr BlobKind kKind{"the moments blob", {'K', 'I', 'V', 'I', 'M', 'O', 'M', 0}, 1, 48};
constexpr double kSymmetry = 1e-4;  // of the geometric mean of the two diagonal entries

int64_t weight_count(int64_t dim) { return dim * (dim - 1) / 2; }
size_t head_bytes(int64_t dim) { return 4 * dim * dim + 2 * dim + 4 * weight_count(dim); }

// matrix <- H matrix H, in double.
void transform_both_sides(std::vector<double>& matrix, int dim) {
    std::vector<double> column(dim);
    for (int i = 0; i < dim; i++) hadamard(&matrix[static_cast<size_t>(i) * dim], dim);
    for (int j = 0; j < dim; j++) {
        for (int i = 0; i < dim; i++) column[i] = matrix[static_cast<size_t>(i) * dim + j];
        hadamard(column.data(), dim);
        for (int i = 0; i < dim; i++) matrix[static_cast<size_t>(i) * dim + j] = column[i];
    }
}

template <class... Parts>
[[noreturn]] void corrupt(const Parts&... parts) {
    refuse_corrupt(kKind, parts...);
}

}  // namespace

std::vector<float> moments_in_stored_basis(const View& m, const kivi_layer& layer, bool stored_basis) {
    const int dim = layer.key_dim;
    const size_t size = static_cast<size_t>(dim) * dim;
    std::vector<float> stored(layer.kv_heads * size);
    std::vector<double> given(size), matrix(size);
    for (int head = 0; head < layer.kv_heads; head++) {
        for (int i = 0; i < dim; i++) {
            for (int j = 0; j < dim; j++) {
                const double x = load_element(m.data, m.dtype, head * m.token_stride + i * m.head_stride + j);
                if (!std::isfinite(x))
                    refuse_argument("m[", head, "][", i, "][", j, "] is ", x, "; it must be finite");
                given[static_cast<size_t>(i) * dim + j] = x;
            }
        }
        for (int i = 0; i < dim; i++) {
            const double diagonal = given[static_cast<size_t>(i) * dim + i];
            if (!(diagonal > 0)) {
                refuse_argument("m[", head, "][", i, "][", i, "] is ", diagonal,
                                "; the diagonal must be positive");
            }
        }
        for (int i = 0; i < dim; i++) {
            for (int j = 0; j < dim; j++) {
                const double a = given[static_cast<size_t>(i) * dim + j],
                             b = given[static_cast<size_t>(j) * dim + i];
                const double scale = std::sqrt(given[static_cast<size_t>(i) * dim + i] *
                                               given[static_cast<size_t>(j) * dim + j]);
                if (std::fabs(a - b) > kSymmetry * scale) {
                    refuse_argument("m[", head, "][", i, "][", j, "] is ", a, " and m[", head, "][", j, "][",
                                    i, "] is ", b, "; the matrix must be symmetric");
                }
                matrix[static_cast<size_t>(i) * dim + j] = 0.5 * (a + b);
            }
        }
        if (layer.k.transform == KIVI_TRANSFORM_HADAMARD && !stored_basis) transform_both_sides(matrix, dim);
        // Both triangles from one, so that rounding leaves the matrix symmetric.
        for (int i = 0; i < dim; i++) {
            for (int j = 0; j <= i; j++) {
                const auto x = static_cast<float>(matrix[static_cast<size_t>(i) * dim + j]);
                stored[head * size + static_cast<size_t>(i) * dim + j] = x;
                stored[head * size + static_cast<size_t>(j) * dim + i] = x;
            }
        }
    }
    return stored;
}

std::vector<Feedback> make_tables(const std::vector<float>& means, const kivi_layer& layer) {
    const size_t size = static_cast<size_t>(layer.key_dim) * layer.key_dim;
    std::vector<Feedback> tables(layer.kv_heads);
    for (int head = 0; head < layer.kv_heads; head++) {
        const float* matrix = &means[head * size];
        if (!std::all_of(matrix, matrix + size, [](float x) { return std::isfinite(x); })) {
            refuse_argument("the moments of KV head ", head, " are not finite: a query held a NaN or an infinity");
        }
        if (!make_feedback(matrix, layer.key_dim, &tables[head])) {
            refuse_argument("the moments of KV head ", head, " are not positive definite after damping");
        }
    }
    return tables;
}

uint32_t tables_crc(const std::vector<Feedback>& heads) {
    uint32_t crc = 0;
    for (const Feedback& head : heads) {
        crc = crc32(head.order.data(), head.order.size() * sizeof(uint16_t), crc);
        crc = crc32(head.weights.data(), head.weights.size() * sizeof(float), crc);
    }
    return crc;
}

size_t moments_blob_bytes(const kivi_layer& layer) {
    return kKind.header_bytes + layer.kv_heads * head_bytes(layer.key_dim) + kBlobCrcBytes;
}

void write_moments_blob(const kivi_layer& layer, int64_t queries, const std::vector<float>& means,
                        const std::vector<Feedback>& heads, uint8_t* blob) {
    const size_t size = static_cast<size_t>(layer.key_dim) * layer.key_dim;
    const size_t bytes = moments_blob_bytes(layer);
    ByteWriter to = begin_blob(kKind, blob, bytes);
    to.put(layer.kv_heads);
    to.put(layer.key_dim);
    to.put(layer.k.transform);
    to.put(uint32_t{0});
    to.put(queries);
    for (int head = 0; head < layer.kv_heads; head++) {
        to.put_bytes(&means[head * size], size * sizeof(float));
        to.put_bytes(heads[head].order.data(), layer.key_dim * sizeof(uint16_t));
        to.put_bytes(heads[head].weights.data(), weight_count(layer.key_dim) * sizeof(float));
    }
    seal_blob(blob, bytes);
}

MomentTables read_moments_blob(const kivi_layer& layer, const uint8_t* blob, size_t bytes) {
    ByteReader from = open_blob(kKind, blob, bytes);
    const auto heads = from.get<int32_t>();
    const auto dim = from.get<int32_t>();
    const auto basis = from.get<int32_t>();
    const bool reserved = from.get<uint32_t>() != 0;
    MomentTables tables;
    tables.queries = from.get<int64_t>();
    const auto match = [](const char* what, int64_t blob_has, int64_t layer_has) {
        if (blob_has != layer_has) {
            refuse(KIVI_ERROR_MISMATCH, "the moments blob's ", what, " is ", blob_has, "; the layer has ",
                   layer_has);
        }
    };
    match("basis (transform of the keys)", basis, layer.k.transform);
    match("key_dim", dim, layer.key_dim);
    if (heads != 1) match("kv_heads", heads, layer.kv_heads);
    if (reserved) corrupt("reserved fields are not zero");
    if (tables.queries < 0) corrupt("its number of query rows is ", tables.queries);
    if (bytes != kKind.header_bytes + heads * head_bytes(dim) + kBlobCrcBytes)
        corrupt("its payload has the wrong size");

    const size_t matrix = static_cast<size_t>(dim) * dim;
    tables.means.resize(layer.kv_heads * matrix);
    tables.heads.resize(layer.kv_heads);
    for (int head = 0; head < heads; head++) {
        Feedback& table = tables.heads[head];
        table.dim = dim;
        table.order.resize(dim);
        table.weights.resize(weight_count(dim));
        from.get_bytes(&tables.means[head * matrix], matrix * sizeof(float));
        from.get_bytes(table.order.data(), table.order.size() * sizeof(uint16_t));
        from.get_bytes(table.weights.data(), table.weights.size() * sizeof(float));
        std::vector<bool> seen(dim);
        for (uint16_t channel : table.order) {
            if (channel >= dim || seen[channel])
                corrupt("the coding order of head ", head, " is not a permutation");
            seen[channel] = true;
        }
        const auto finite = [](float x) { return std::isfinite(x); };
        if (!std::all_of(&tables.means[head * matrix], &tables.means[head * matrix] + matrix, finite) ||
            !std::all_of(table.weights.begin(), table.weights.end(), finite)) {
            corrupt("a number of head ", head, " is not finite");
        }
    }
    for (int head = heads; head < layer.kv_heads; head++) {
        std::copy_n(tables.means.begin(), matrix, tables.means.begin() + head * matrix);
        tables.heads[head] = tables.heads[0];
    }
    return tables;
}

}  // namespace kivi
