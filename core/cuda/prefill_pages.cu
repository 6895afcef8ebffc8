// Chooses the instance of the kernel of prefill_pages.cuh and launches it.
#include "cuda/prefill_pages.h"

#include "cuda/device.h"
#include "cuda/prefill_pages.cuh"

namespace kivi::cuda::prompt {
namespace {

// visit(Config) for the layer's instance, if there is one.
template <class Visit>
void with_config(const TensorStore& key, const Visit& visit) {
    const bool bf16 = key.window_dtype == KIVI_BF16;
    if (key.dim == 64) bf16 ? visit(PagesConfig<true, 64>{}) : visit(PagesConfig<false, 64>{});
    if (key.dim == 128) bf16 ? visit(PagesConfig<true, 128>{}) : visit(PagesConfig<false, 128>{});
}

}  // namespace

bool serves_pages(const TensorStore& key, int32_t capability) {
    bool served = false;
    with_config(key, [&](auto) { served = true; });
    return KIVI_SM90A && served && capability == 90;
}

void prepare_pages(const TensorStore& key) {
    with_config(key, [](auto config) {
        using C = decltype(config);
        prepare_kernel(prefill_pages_kernel<C>, sizeof(PagesStorage<C>));
    });
}

void attend_pages(const Args& args, Stream stream) {
    with_config(args.attend.layer.key, [&](auto config) {
        using C = decltype(config);
        static_assert(C::kRows == kPageRows);
        const dim3 grid(args.tiles * args.page_parts, args.attend.layer.key.heads, args.attend.batch.size);
        prefill_pages_kernel<C><<<grid, C::kThreads, sizeof(PagesStorage<C>), stream>>>(args);
    });
}

}  // namespace kivi::cuda::prompt
