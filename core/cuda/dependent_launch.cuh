// Programmatic dependent launch: while the kernel before it in the stream still runs, a kernel's blocks take the places
// that those which have ended leave free, and do what needs nothing of it. From compute capability 9.0 on.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/device.h"
#include "cuda/launch.h"

namespace kivi::cuda {

// Every thread of a kernel that was launched so waits here before it reads what an earlier kernel may have written, and
// before it writes to memory: from here on all kernels before it have ended. Those that end without it would let the
// next kernel overtake the one before them. Sooner a kernel reads only what is settled (launch_order.h), and past L1.
__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Allows the next kernel's blocks, if it is launched so, to start once all blocks of this one are there.
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// The first access to each line of the parameters is a trip to memory: here all are made at once, of the first BYTES.
// The instruction is there for the sake of the accesses, which would be left out.
template <size_t BYTES, class Parameters>
__device__ __forceinline__ void touch_parameters(const Parameters& parameters) {
    constexpr size_t kLine = 64;
    uint32_t words = 0;
#pragma unroll
    for (size_t at = 0; at < BYTES; at += kLine) words ^= reinterpret_cast<const uint32_t*>(&parameters)[at / 4];
    asm volatile("{\n.reg .pred never;\nsetp.eq.u32 never, %0, 0x9E3779B9;\n@never nanosleep.u32 0;\n}" ::"r"(words));
}

// A launch of a kernel that does so.
struct Launch {
    dim3 grid;
    unsigned threads;
    size_t shared_bytes;
    Stream stream = nullptr;
    unsigned cluster_blocks = 1;

    // Calls use(cudaLaunchConfig_t).
    template <class Use>
    cudaError_t with_config(const Use& use) const {
        cudaLaunchAttribute attributes[2]{};
        attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[0].val.programmaticStreamSerializationAllowed = 1;
        attributes[1].id = cudaLaunchAttributeClusterDimension;
        attributes[1].val.clusterDim = {cluster_blocks, 1, 1};
        cudaLaunchConfig_t config{};
        config.gridDim = grid;
        config.blockDim = threads;
        config.dynamicSmemBytes = shared_bytes;
        config.stream = stream;
        config.attrs = attributes;
        config.numAttrs = cluster_blocks > 1 ? 2 : 1;
        return use(config);
    }
};
template <class... Parameters>
void launch_dependent(void (*kernel)(Parameters...), const Launch& launch, const Parameters&... parameters) {
    // An error is what cudaGetLastError gives next, as of <<< >>>.
    launch.with_config(
        [&](const cudaLaunchConfig_t& config) { return cudaLaunchKernelEx(&config, kernel, parameters...); });
}
// How many clusters of such a launch can run at the same time.
template <class... Parameters>
int32_t most_clusters(void (*kernel)(Parameters...), const Launch& launch) {
    int count = 0;
    check(launch.with_config([&](const cudaLaunchConfig_t& config) {
        return cudaOccupancyMaxActiveClusters(&count, kernel, &config);
    }),
          "clusters of a kernel");
    return count;
}

}  // namespace kivi::cuda
