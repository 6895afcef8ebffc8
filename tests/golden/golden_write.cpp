// golden_write CASES DIR: blobs of all cases as this library writes them, and the tokens it dequantises.
#include <cstdio>
#include <exception>
#include <fstream>
#include <stdexcept>

#include "golden/golden_cases.h"

namespace {

void write_file(const std::string& path, const void* data, size_t bytes) {
    std::ofstream out(path, std::ios::binary);
    out.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
    if (!out.flush()) throw std::runtime_error("cannot write " + path);
}

void write_case(const golden::Case& c, const std::string& stem) {
    const golden::Cache cache(c);
    cache.fill();
    const golden::Bytes blob = cache.export_sequence();
    write_file(stem + ".kivi", blob.data(), blob.size());
    for (int layer = 0; layer < int(c.layers.size()); ++layer) {
        const kivi_layer& shape = c.layers[size_t(layer)];
        if (shape.kv_heads == 0) continue;
        const std::string name = stem + "." + std::to_string(layer);
        if (shape.k.rounding == KIVI_ROUND_QUERY_AWARE) {
            const golden::Bytes moments = cache.moments_export(layer);
            write_file(name + ".moments", moments.data(), moments.size());
        }
        for (char part : {'k', 'v'}) {
            const std::vector<float> tokens = cache.dequantize(layer, part);
            write_file(name + "." + part + ".f32", tokens.data(), tokens.size() * sizeof(float));
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        std::fprintf(stderr, "usage: golden_write CASES DIR\n");
        return 2;
    }
    try {
        for (const golden::Case& c : golden::read_cases(argv[1]))
            write_case(c, std::string(argv[2]) + "/" + c.name);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
