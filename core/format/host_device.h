// Marks a function as one that both the processor and a GPU run: the bottom layer's formulas have one source.
#pragma once

#if defined(__CUDACC__)
#define KIVI_HOST_DEVICE __host__ __device__
#else
#define KIVI_HOST_DEVICE
#endif
