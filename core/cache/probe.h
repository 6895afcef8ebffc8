// The probe: errors of a spec measured where keys and values are consumed, in double precision (kivi_probe).
#pragma once
#include <vector>

#include "backend/backend.h"
#include "format/model.h"

namespace kivi {

struct ProbeCall {
    kivi_layer layer{};  // heads, dims and checked specs
    Windows windows;
    int32_t window_dtype = KIVI_F16;
    int64_t queries = 0, tokens = 0;
    View q, k, v;
    View moments;  // or empty
    double scale = 1;
    double soft_cap = 0;  // 0: off
    int64_t window_left = -1;
};

// Result of each KV head, then of all of them together; struct_size is not filled in.
struct ProbeAnswer {
    std::vector<kivi_probe_result> heads;
    kivi_probe_result total;
};

ProbeAnswer probe(const ProbeCall& call);

}  // namespace kivi
