// What the fast kernels are compiled for (core/cuda/decode_instances.h), as tests ask for it.
#pragma once
#include "kivi/kivi.h"

namespace gpu_test {

struct Instance {
    const char* name;
    int dim, key_bits, value_bits, key_group, value_group;
};

const Instance kInstances[] = {
    {"2/2 g32", 128, 2, 2, 32, 32},
    {"2/2 g64", 128, 2, 2, 64, 64},
    {"2/2 g128", 128, 2, 2, 128, KIVI_GROUP_HEAD},
    {"3/2 g64", 128, 3, 2, 64, 64},
    {"3/2 g32", 128, 3, 2, 32, 32},
    {"4/2 g64", 128, 4, 2, 64, 64},
    {"4/2 g32", 128, 4, 2, 32, 32},
    {"4/4 g32", 128, 4, 4, 32, 32},
    {"2/2 g32 dim 64", 64, 2, 2, 32, 32},
    {"4/2 g64 dim 64", 64, 4, 2, 64, 64},
    {"4/4 g32 dim 64", 64, 4, 4, 32, 32},
    {"2/2 g32 dim 256", 256, 2, 2, 32, 32},
    {"3/2 g64 dim 256", 256, 3, 2, 64, 64},
    {"4/4 g32 dim 256", 256, 4, 4, 32, 32},
};

// Those of 16 bits, which have no groups; key_group is the unit of the windows that tests take.
const Instance kPlainInstances[] = {
    {"16/16", 128, 16, 16, 32, 0},
    {"16/16 dim 64", 64, 16, 16, 32, 0},
    {"16/16 dim 256", 256, 16, 16, 32, 0},
};

}  // namespace gpu_test
