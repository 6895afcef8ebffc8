// The fast kernel under the published schedule.
#include "cuda/decode_kernels.cuh"

KIVI_DECODE_PUBLISHED(KIVI_COMPILE_INSTANCE, false)
KIVI_DECODE_PUBLISHED(KIVI_COMPILE_INSTANCE, true)
