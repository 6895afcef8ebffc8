// Page tables and lengths as the device keeps them: small kernels that publish what the host decided.
#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/launch.h"

namespace kivi::cuda {
namespace {

__global__ void bind_kernel(const __grid_constant__ BlockList list, int32_t* table, int64_t table_stride,
                            int32_t* bound) {
    for (int i = threadIdx.x; i < list.size; i += blockDim.x) {
        const BlockEntry entry = list.entries[i];
        table[entry.sequence * table_stride + entry.page] = entry.block;
        atomicMax(&bound[entry.sequence], entry.page + 1);
    }
}

__global__ void spans_kernel(const __grid_constant__ SpanList list, Span* spans, int32_t* bound, int32_t* full) {
    for (int i = threadIdx.x; i < list.layers; i += blockDim.x) {
        spans[static_cast<int64_t>(list.first_layer + i) * list.max_sequences + list.sequence] = list.spans[i];
    }
    if (threadIdx.x == 0 && list.first_layer == 0) {
        bound[list.sequence] = 0;
        full[list.sequence] = 0;
    }
}

}  // namespace

bool compiled_for_this_device() {
    cudaFuncAttributes attributes;
    const cudaError_t result = cudaFuncGetAttributes(&attributes, bind_kernel);
    if (result == cudaErrorNoKernelImageForDevice || result == cudaErrorInvalidDeviceFunction) {
        cudaGetLastError();
        return false;
    }
    check(result, "looking for code");
    return true;
}

void bind_blocks(const BlockList& list, int32_t* table, int64_t table_stride, int32_t* bound, Stream stream) {
    bind_kernel<<<1, 128, 0, stream>>>(list, table, table_stride, bound);
}

void set_spans(const SpanList& list, Span* spans, int32_t* bound, int32_t* full, Stream stream) {
    spans_kernel<<<1, 128, 0, stream>>>(list, spans, bound, full);
}

}  // namespace kivi::cuda
