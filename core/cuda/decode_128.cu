// The fast kernel for head dim 128 in f16.
#include "cuda/decode_kernels.cuh"

KIVI_DECODE_128(KIVI_COMPILE_INSTANCE, false)
