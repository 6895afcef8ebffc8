// What the fast kernel is compiled for; each list below by a file decode_*.cu (decode_kernels.h). One line an instance:
//
//   X(window bf16, dim, key bits, value bits, key group, value group, query rows a KV head, warps, blocks a visit,
//     blocks a step[, published schedule])
//
// A visit is what a warp fetches at a time; a step is what it multiplies between two looks at the running maximum.
// Those of one spec stand in the order of their rows: the first with room for a call's rows is taken.
#pragma once

#define KIVI_DECODE_128(X, BF16)                                                   \
    X(BF16, 128, 2, 2, 32, 32, 4, 12, 2, 2) /* kivi2-sink */                       \
    X(BF16, 128, 2, 2, 32, 32, 8, 12, 2, 2)                                        \
    X(BF16, 128, 2, 2, 32, 32, 16, 8, 2, 1)                                        \
    X(BF16, 128, 2, 2, 64, 64, 8, 12, 2, 1) /* 2.5 bits */                         \
    X(BF16, 128, 2, 2, 64, 64, 16, 8, 2, 1)                                        \
    X(BF16, 128, 2, 2, 128, 128, 4, 12, 2, 2) /* the fewest bytes: whole-head values */ \
    X(BF16, 128, 2, 2, 128, 128, 8, 12, 2, 2)                                      \
    X(BF16, 128, 2, 2, 128, 128, 16, 8, 2, 1)                                      \
    X(BF16, 128, 3, 2, 64, 64, 4, 12, 2, 2) /* k3v2 */                             \
    X(BF16, 128, 3, 2, 64, 64, 8, 12, 2, 1)                                        \
    X(BF16, 128, 3, 2, 64, 64, 16, 8, 2, 1)                                        \
    X(BF16, 128, 3, 2, 32, 32, 8, 12, 2, 1) /* k3v2's bits in KIVI's groups */     \
    X(BF16, 128, 3, 2, 32, 32, 16, 8, 2, 1)                                        \
    X(BF16, 128, 4, 2, 64, 64, 4, 12, 2, 2) /* k4v2 */                             \
    X(BF16, 128, 4, 2, 64, 64, 8, 12, 2, 1)                                        \
    X(BF16, 128, 4, 2, 64, 64, 16, 8, 2, 1)                                        \
    X(BF16, 128, 4, 2, 32, 32, 4, 12, 2, 2) /* k4v2's bits in KIVI's groups */     \
    X(BF16, 128, 4, 2, 32, 32, 8, 12, 2, 1)                                        \
    X(BF16, 128, 4, 2, 32, 32, 16, 8, 2, 1)                                        \
    X(BF16, 128, 4, 4, 32, 32, 8, 12, 1, 1) /* kivi4 */                            \
    X(BF16, 128, 4, 4, 32, 32, 16, 8, 1, 1)

#define KIVI_DECODE_64(X, BF16)                                            \
    X(BF16, 64, 2, 2, 32, 32, 4, 12, 4, 2) /* kivi2-sink of small models */ \
    X(BF16, 64, 2, 2, 32, 32, 8, 12, 4, 2)                                 \
    X(BF16, 64, 2, 2, 32, 32, 16, 12, 2, 1)                                \
    X(BF16, 64, 3, 2, 64, 64, 4, 12, 4, 2) /* k3v2 of small models */      \
    X(BF16, 64, 3, 2, 64, 64, 8, 12, 4, 2)                                 \
    X(BF16, 64, 3, 2, 64, 64, 16, 12, 2, 1)                                \
    X(BF16, 64, 4, 2, 64, 64, 8, 12, 4, 2) /* k4v2 of small models */      \
    X(BF16, 64, 4, 2, 64, 64, 16, 12, 2, 1)                                \
    X(BF16, 64, 4, 4, 32, 32, 8, 12, 2, 2) /* kivi4 of small models */     \
    X(BF16, 64, 4, 4, 32, 32, 16, 12, 2, 1)

// Sixteen rows of 256 channels have no room in the registers.
#define KIVI_DECODE_256(X, BF16)                                           \
    X(BF16, 256, 2, 2, 32, 32, 4, 8, 2, 2) /* kivi2-sink of wide heads */  \
    X(BF16, 256, 2, 2, 32, 32, 8, 8, 1, 1)                                 \
    X(BF16, 256, 3, 2, 64, 64, 4, 8, 1, 1) /* k3v2 of wide heads */        \
    X(BF16, 256, 3, 2, 64, 64, 8, 8, 1, 1)                                 \
    X(BF16, 256, 4, 2, 64, 64, 4, 8, 1, 1) /* k4v2 of wide heads */        \
    X(BF16, 256, 4, 2, 64, 64, 8, 8, 1, 1)                                 \
    X(BF16, 256, 4, 4, 32, 32, 8, 8, 1, 1) /* kivi4 of wide heads */

// The preset f16: rows have no groups. One value group a head; hidden pages are skipped in steps of 32 tokens, the key group.
#define KIVI_DECODE_PLAIN(X, BF16)                \
    X(BF16, 64, 16, 16, 32, 64, 8, 12, 1, 1)      \
    X(BF16, 64, 16, 16, 32, 64, 16, 12, 1, 1)     \
    X(BF16, 128, 16, 16, 32, 128, 4, 12, 1, 1)    \
    X(BF16, 128, 16, 16, 32, 128, 8, 12, 1, 1)    \
    X(BF16, 128, 16, 16, 32, 128, 16, 8, 1, 1)    \
    X(BF16, 256, 16, 16, 32, 256, 8, 8, 1, 1)

// Under the published schedule.
#define KIVI_DECODE_PUBLISHED(X, BF16)                                     \
    X(BF16, 64, 2, 2, 32, 32, 4, 12, 4, 2, true)  /* kivi2-paper */        \
    X(BF16, 64, 2, 2, 32, 32, 8, 12, 4, 2, true)                           \
    X(BF16, 64, 2, 2, 32, 32, 16, 8, 2, 1, true)                           \
    X(BF16, 128, 2, 2, 32, 32, 4, 12, 2, 2, true)                          \
    X(BF16, 128, 2, 2, 32, 32, 8, 12, 2, 2, true)                          \
    X(BF16, 128, 2, 2, 32, 32, 16, 8, 2, 1, true)                          \
    X(BF16, 256, 2, 2, 32, 32, 4, 8, 1, 1, true)                           \
    X(BF16, 256, 2, 2, 32, 32, 8, 8, 1, 1, true)

#define KIVI_DECODE_INSTANCES(X)                        \
    KIVI_DECODE_128(X, false) KIVI_DECODE_128(X, true)  \
    KIVI_DECODE_64(X, false) KIVI_DECODE_64(X, true)    \
    KIVI_DECODE_256(X, false) KIVI_DECODE_256(X, true)  \
    KIVI_DECODE_PLAIN(X, false) KIVI_DECODE_PLAIN(X, true) \
    KIVI_DECODE_PUBLISHED(X, false) KIVI_DECODE_PUBLISHED(X, true)
