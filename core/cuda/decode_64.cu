// The fast kernel for head dim 64.
#include "cuda/decode_kernels.cuh"

KIVI_DECODE_64(KIVI_COMPILE_INSTANCE, false)
KIVI_DECODE_64(KIVI_COMPILE_INSTANCE, true)
