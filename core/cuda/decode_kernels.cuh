// Compiles the fast kernel for a list of instances: for one file of decode_kernels.h.
#pragma once
#include "cuda/decode_config.h"
#include "cuda/decode_instances.h"
#include "cuda/decode_kernel.cuh"
#include "cuda/decode_kernels.h"

namespace kivi::cuda::fast {

template <class C>
DecodeKernel kernel_of() {
    return decode_kernel<C>;
}

}  // namespace kivi::cuda::fast

#define KIVI_COMPILE_INSTANCE(...) \
    template kivi::cuda::fast::DecodeKernel kivi::cuda::fast::kernel_of<kivi::cuda::fast::Config<__VA_ARGS__>>();
