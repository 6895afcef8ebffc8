// The fast kernel for pages of 16 bits.
#include "cuda/decode_kernels.cuh"

KIVI_DECODE_PLAIN(KIVI_COMPILE_INSTANCE, false)
KIVI_DECODE_PLAIN(KIVI_COMPILE_INSTANCE, true)
