// After a device error a cache answers queries and destroy only. The error ruins the process's context, so this
// is a program of its own.
#define DOCTEST_CONFIG_IMPLEMENT
#include <cmath>

#include "gpu_support.h"

using namespace gpu_test;

TEST_CASE("a sticky device error") {
    kivi_spec spec{};
    spec.bits = 4;
    spec.axis = KIVI_AXIS_TOKEN;
    spec.group = 32;
    Cache gpu(config_of(spec, spec, {}, 0, 32, 32), KIVI_CUDA);
    Numbers numbers(6);
    Floats k(numbers.rows(2, 64));
    const int32_t id = 0;
    const kivi_batch batch = batch_of(1, &id, nullptr, 1);
    kivi_tensor keys = k.view(KIVI_CUDA, {1, 1, 2, 64});
    keys.stride[2] = int64_t{1} << 42;  // the second head stands where no memory is
    kivi_append(gpu, 0, &batch, &keys, &keys, nullptr);
    CHECK(kivi_synchronize(gpu, nullptr) == KIVI_ERROR_DEVICE);
    CHECK(std::string(kivi_last_error()).size() > 10);
    keys = k.view(KIVI_CUDA, {1, 1, 2, 64});
    CHECK(kivi_append(gpu, 0, &batch, &keys, &keys, nullptr) == KIVI_ERROR_DEVICE);
    CHECK(kivi_sequence_reset(gpu, 0, nullptr) == KIVI_ERROR_DEVICE);
    kivi_statistics statistics{};
    KIVI_OK_(kivi_query_statistics(gpu, -1, &statistics, sizeof statistics));
    CHECK(statistics.device_error == 1);
    CHECK(gpu.length(0) >= 0);
}

int main(int argc, char** argv) {
    if (!gpu_there()) return kSkipped;
    return doctest::Context(argc, argv).run();
}
