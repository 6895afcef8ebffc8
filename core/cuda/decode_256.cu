// The fast kernel for head dim 256.
#include "cuda/decode_kernels.cuh"

KIVI_DECODE_256(KIVI_COMPILE_INSTANCE, false)
KIVI_DECODE_256(KIVI_COMPILE_INSTANCE, true)
