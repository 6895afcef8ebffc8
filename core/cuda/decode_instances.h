// What the fast kernel is compiled for, 8 query rows a KV head. One line an instance:
//
//   X(window bf16, dim, key bits, value bits, key group, value group, warps, blocks a visit, blocks a step)
//
// A visit is what a warp fetches at a time; a step is what it multiplies between two looks at the running maximum.
#pragma once

#define KIVI_DECODE_INSTANCES(X)                                                        \
    X(false, 128, 2, 2, 32, 32, 12, 2, 2)   /* kivi2-sink */                            \
    X(false, 128, 2, 2, 64, 64, 12, 2, 1)   /* 2.5 bits */                              \
    X(false, 128, 2, 2, 128, 128, 12, 2, 2) /* the fewest bytes: whole-head values */   \
    X(false, 128, 3, 2, 64, 64, 12, 2, 1)   /* k3v2 */                                  \
    X(false, 128, 3, 2, 32, 32, 12, 2, 1)   /* k3v2's bits in KIVI's groups */          \
    X(false, 128, 4, 2, 64, 64, 12, 2, 1)   /* k4v2 */                                  \
    X(false, 128, 4, 2, 32, 32, 12, 2, 1)   /* k4v2's bits in KIVI's groups */          \
    X(false, 128, 4, 4, 32, 32, 12, 1, 1)   /* kivi4 */                                 \
    X(false, 64, 2, 2, 32, 32, 12, 2, 2)    /* kivi2-sink of small models */            \
    X(false, 64, 4, 2, 64, 64, 12, 2, 2)    /* k4v2 of small models */                  \
    X(false, 64, 4, 4, 32, 32, 12, 2, 2)    /* kivi4 of small models */
