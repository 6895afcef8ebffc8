/* libkivi: attention keys and values in 2 to 4 bits, and attention straight from them.
 *
 * This file is the whole C API. It needs C99 and nothing but stddef.h and stdint.h.
 *
 *   kivi_config config;                              one cache holds all layers of a model
 *   kivi_config_init(&config, sizeof config);        and many sequences
 *   kivi_config_preset(&config, "k3v2");
 *   config.layer_count = 32;
 *   config.layer.q_heads = 32; config.layer.kv_heads = 8;
 *   config.layer.key_dim = config.layer.value_dim = 128;
 *   config.max_sequences = 4; config.max_tokens = 32768;
 *   kivi_cache_create(&config, &cache);
 *   for each token, for each layer:
 *     kivi_step(cache, layer, &batch, &q, &k, &v, &out, NULL, workspace, bytes, stream);
 *   kivi_cache_destroy(cache);
 *
 * Rules that hold for every call, unless its own text says otherwise
 *
 *   Failure    Every call that can fail returns a kivi_status: 0 is success, failures are negative.
 *              [FAIL-1] A failed call changes neither the cache nor its outputs. [FAIL-2] The thread's
 *              kivi_last_error() then holds one sentence that names the argument, its value and the
 *              limit. The library prints nothing, never aborts and throws nothing.
 *   Structs    A struct that begins with struct_size may grow at its end. Fill it with its init function
 *              (or zero it), which takes the size that the caller was compiled with. [GROW-1] A size
 *              below the first released one is refused; [GROW-2] a larger one is taken if the bytes that
 *              the library does not know are zero. [GROW-3] Reserved fields must be zero.
 *   Ownership  Whatever is passed in stays the caller's. Host arrays (ids, counts, structs) are copied
 *              before the call returns. Tensor memory must stay valid until the stream has passed the
 *              call; on the CPU that is until the call returns.
 *   Streams    kivi_stream is a cudaStream_t on CUDA; work is enqueued there and nowhere else. [STREAM-1] A
 *              cache may move from stream to stream; its calls are then put in order by the caller's events.
 *              On the CPU it must be NULL and every call is complete on return.
 *   Threads    Different caches are independent. One cache: calls that take a const kivi_cache may run
 *              together (attend: each with its own workspace); every other call needs the cache to
 *              itself. [THREAD-1] A call that finds the cache in conflicting use returns
 *              KIVI_ERROR_STATE and does nothing.
 *              [FORK-1] The child of a fork() has caches of the CPU of its own, without their threads; one
 *              that another thread was changing meanwhile answers KIVI_ERROR_STATE there until it is destroyed.
 *   Hot path   append, flush, attend and step never allocate, never wait for the device and read no device
 *              memory on the host. [HOT-1]
 *
 * Shapes are written [rows, tokens, heads, dim]; sizes and strides count elements, memory counts bytes.
 * Positions count from 0, per sequence. SPDX-License-Identifier: Apache-2.0
 */
#ifndef KIVI_KIVI_H
#define KIVI_KIVI_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define KIVI_API __declspec(dllimport)
#elif defined(__GNUC__)
#define KIVI_API __attribute__((visibility("default")))
#else
#define KIVI_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Version ----------------------------------------------------------------------------------- */

#define KIVI_VERSION_MAJOR 0
#define KIVI_VERSION_MINOR 1
#define KIVI_VERSION_PATCH 0

/* 10000 * major + 100 * minor + patch of the library that runs. */
KIVI_API int32_t kivi_version(void);
/* "major.minor.patch", static. */
KIVI_API const char *kivi_version_string(void);
/* One line about the build: compiler, instruction sets, CUDA architectures or "no CUDA". Static. */
KIVI_API const char *kivi_build_info(void);

/* ---- Status ------------------------------------------------------------------------------------ */

typedef int32_t kivi_status;

enum kivi_status_code {
    KIVI_OK = 0,
    KIVI_ERROR_INVALID_ARGUMENT = -1, /* the caller's mistake: null, out of range, wrong shape */
    KIVI_ERROR_UNSUPPORTED = -2,      /* well-formed, but this build or device does not do it */
    KIVI_ERROR_OUT_OF_MEMORY = -3,    /* host or device memory */
    KIVI_ERROR_CAPACITY = -4,         /* the cache or a sequence is full */
    KIVI_ERROR_NO_DEVICE = -5,        /* no driver or no such device */
    KIVI_ERROR_DEVICE = -6,           /* a device call failed; the cache then answers queries only */
    KIVI_ERROR_STATE = -7,            /* not allowed now: dead handle, conflicting use, frozen moments */
    KIVI_ERROR_CORRUPT = -8,          /* a blob is damaged */
    KIVI_ERROR_MISMATCH = -9,         /* a sound blob of another layout, spec or encoder table */
    KIVI_ERROR_BUFFER_TOO_SMALL = -10,/* workspace or export buffer */
    KIVI_ERROR_INTERNAL = -11         /* a fault of the library */
};

/* "KIVI_OK", "KIVI_ERROR_CAPACITY", ...; "KIVI_ERROR_UNKNOWN" for any other number. Static. */
KIVI_API const char *kivi_status_name(kivi_status status);
/* The sentence of this thread's last failed call; "" before the first. Never NULL; valid until the next
 * failing call on this thread. */
KIVI_API const char *kivi_last_error(void);

/* ---- Tensors ----------------------------------------------------------------------------------- */

enum kivi_dtype { KIVI_F32 = 1, KIVI_F16 = 2, KIVI_BF16 = 3 };
enum kivi_device { KIVI_CPU = 1, KIVI_CUDA = 2 }; /* the numbers of DLPack */

typedef void *kivi_stream;

/* A borrowed view of the caller's memory. This struct is frozen. [TENSOR-1] The innermost stride must be
 * 1 where the innermost size is above 1; other strides are free, 64-bit and not negative. [TENSOR-2]
 * Stride 0 (broadcast) is accepted for inputs and refused for outputs. [TENSOR-3] The base address must
 * be a multiple of the element size; nothing more is asked. A tensor without elements may have data NULL. */
typedef struct kivi_tensor {
    void *data;
    int32_t dtype;     /* enum kivi_dtype */
    int32_t device;    /* enum kivi_device */
    int32_t device_id; /* CUDA ordinal; 0 on the CPU */
    int32_t rank;      /* entries of shape and stride in use: 2, 3 or 4 */
    int64_t shape[4];
    int64_t stride[4]; /* in elements */
} kivi_tensor;

/* Which sequences a work call is about, and how many tokens each brings. Row r of the batch is sequence
 * sequences[r] with counts[r] tokens.
 *
 *   rank-4 tensors  [rows, tokens, heads, dim]: row r uses the first counts[r] of its tokens
 *   rank-3 tensors  [tokens, heads, dim]: row r uses counts[r] tokens from offsets[r] on; without
 *                   offsets the rows follow one another without gaps
 *
 * [BATCH-1] A row with id -1 or count 0 is skipped: nothing is read or written for it; its count moves the rows
 * behind it all the same. [BATCH-2] A sequence may stand in one row only. [BATCH-3] What breaks these rules is
 * refused in host arrays. In device arrays an id that is out of range counts as -1, a count below 0 or above
 * max_count as 0; a row is skipped too if a rank-3 tensor does not have all of its tokens, by kivi_append if its
 * sequence stands in an earlier row with a count, and by kivi_flush_residual, which has none, if in any earlier row.
 * All zero after init: fill rows and what differs from the defaults. */
typedef struct kivi_batch {
    size_t struct_size;
    int32_t rows;
    int32_t max_count;        /* counts of every row where counts is NULL; else an upper bound of counts,
                                 needed only for device arrays (0: taken from the host array) */
    const int32_t *sequences; /* [rows]; NULL: row r is sequence r */
    const int32_t *counts;    /* [rows]; NULL: max_count for every row */
    const int64_t *offsets;   /* [rows]; rank-3 tensors only; NULL: running sum of counts */
    int32_t device;           /* where the three arrays live; 0 or KIVI_CPU: host memory; KIVI_CUDA: the cache's
                                 device. Then they are read when the stream gets there, and lengths are known
                                 after kivi_synchronize */
    int32_t reserved0;
} kivi_batch;

/* All zero, but for the size. */
KIVI_API kivi_status kivi_batch_init(kivi_batch *batch, size_t struct_size);

/* ---- How keys and values are stored -------------------------------------------------------------- */

enum kivi_axis {
    KIVI_AXIS_CHANNEL = 1, /* a group is one channel over `group` consecutive tokens */
    KIVI_AXIS_TOKEN = 2    /* a group is one token over `group` consecutive channels */
};
enum { KIVI_GROUP_HEAD = -1 }; /* token axis: one group spans the whole head dim */
enum kivi_range {
    KIVI_RANGE_MINMAX = 0, /* min and max of the group */
    KIVI_RANGE_RATIO = 1   /* the min-max range shrunk about its centre by range_ratio */
};
enum kivi_transform {
    KIVI_TRANSFORM_NONE = 0,
    KIVI_TRANSFORM_HADAMARD = 1 /* orthonormal, over the head dim; diagonal blocks of its largest
                                   power-of-two factor. Applied after RoPE, to what append is given */
};
enum kivi_rounding {
    KIVI_ROUND_NEAREST = 0,
    KIVI_ROUND_QUERY_AWARE = 1 /* keys on the channel axis with min-max ranges; nearest until moments are
                                  committed (kivi_statistics says which was used) */
};

/* How one tensor (K or V) of a layer is stored. Frozen; core/FORMAT.md gives the bytes. Reserved zeros
 * stand for: pre-RoPE keys, key bias, dense transform, token norms, protected tokens, code tables. */
typedef struct kivi_spec {
    int32_t bits;        /* 2, 3, 4, 8, or 16 (stored as window_dtype; the fields below must be 0) */
    int32_t axis;        /* enum kivi_axis */
    int32_t group;       /* 32, 64, 128, or KIVI_GROUP_HEAD on the token axis; at most the head dim there,
                            where the last group of a row may be short */
    int32_t range;       /* enum kivi_range */
    float range_ratio;   /* KIVI_RANGE_RATIO: above 0, at most 1; else 0 */
    int32_t param_dtype; /* of scale and min: 0 or KIVI_F16, or KIVI_F32 */
    int32_t transform;   /* enum kivi_transform; allowed at 16 bits too */
    int32_t rounding;    /* enum kivi_rounding */
    int32_t reserved[8];
} kivi_spec;

/* One layer of the model (or of this rank's shard of it). Frozen. */
typedef struct kivi_layer {
    int32_t kv_heads;  /* 0: the layer keeps nothing here, calls on it are refused */
    int32_t q_heads;   /* a multiple of kv_heads; any ratio */
    int32_t key_dim;   /* a multiple of 8, at most 512 */
    int32_t value_dim; /* likewise; may differ from key_dim */
    kivi_spec k;
    kivi_spec v;
    int32_t reserved[4];
} kivi_layer;

enum kivi_schedule {
    KIVI_SCHEDULE_ROLLING = 0,  /* sink, recent and flush as described at kivi_config */
    KIVI_SCHEDULE_PUBLISHED = 1 /* KIVI as published (arXiv 2402.02750), R = recent: at length n keys are
                                   packed up to R * floor((n - 1) / R), values up to n - 1 - R */
};

enum kivi_cache_flags {
    KIVI_CACHE_REFERENCE = 1 /* CPU only: plain double-precision code, slow; the oracle of the tests */
};

/* Everything about a cache, read once by create and never kept.
 *
 *   position   0 ......... sink | ............ packed ............ | ....... tail ....... n
 *              first tokens     | pages of 128 tokens, 2..8 bits   | newest tokens
 *              window_dtype     | border is a multiple of flush    | window_dtype
 *
 * [WINDOW-1] After an append that ends at length n the packed border is
 * max(border before, sink, flush * floor((n - recent) / flush)): the tail holds recent to
 * recent + flush - 1 tokens. sink and flush are multiples of the least common multiple of all
 * channel-axis groups of all layers (1 if there are none); recent is any number from 0.
 * [WINDOW-2] Codes never depend on how tokens were split over appends, on the batch or on the page. */
typedef struct kivi_config {
    size_t struct_size;
    int32_t device;            /* enum kivi_device; init: KIVI_CPU */
    int32_t device_id;
    int32_t window_dtype;      /* KIVI_F16 (init) or KIVI_BF16 or KIVI_F32: sink window, tail, 16-bit specs */
    int32_t max_sequences;     /* slots: sequence ids are 0 .. max_sequences - 1 */
    int64_t max_tokens;        /* longest sequence */
    int64_t pool_tokens;       /* packed tokens that all sequences share; 0: enough for every sequence at
                                  max_tokens. kivi_reserve enlarges it */
    int32_t sink;              /* S: first tokens kept in window_dtype */
    int32_t recent;            /* R: newest tokens kept at least */
    int32_t flush;             /* F: tokens packed at a time */
    int32_t schedule;          /* enum kivi_schedule */
    int32_t layer_count;
    int32_t threads;           /* CPU: threads of the cache, the caller's included; 0: one for each core
                                  that the thread which creates it may run on */
    const kivi_layer *layers;  /* [layer_count]; NULL: every layer is `layer` */
    kivi_layer layer;
    uint64_t flags;            /* enum kivi_cache_flags */
    void *reserved[4];         /* the caller's allocator and parallel-for, later */
} kivi_config;

/* Defaults: CPU, f16 windows, preset k3v2; layer_count, the layer's shape, max_sequences and max_tokens
 * stay 0 and must be set. */
KIVI_API kivi_status kivi_config_init(kivi_config *config, size_t struct_size);

/* A preset is a named, versioned pair of specs with windows. */
typedef struct kivi_preset {
    size_t struct_size;
    const char *name; /* static */
    const char *what; /* one line, static */
    kivi_spec k;
    kivi_spec v;
    int32_t sink, recent, flush, schedule;
} kivi_preset;

/* Presets of this library, and number `index` of them, from 0 on. */
KIVI_API int32_t kivi_preset_count(void);
KIVI_API kivi_status kivi_preset_at(int32_t index, kivi_preset *preset, size_t struct_size);
/* Sets config->layer.k, config->layer.v and the windows from the preset `name`: k3v2, kivi2-sink, k4v2,
 * kivi4, kivi2-paper, f16. A caller with a layer table copies config->layer.k and .v into it. */
KIVI_API kivi_status kivi_config_preset(kivi_config *config, const char *name);

/* ---- Devices and capabilities -------------------------------------------------------------------- */

typedef struct kivi_device_info {
    size_t struct_size;
    int32_t device, device_id;
    int32_t available;     /* 1 if a cache can be created there */
    int32_t threads;       /* CPU: cores that the calling thread may run on; CUDA: multiprocessors */
    int32_t capability;    /* CUDA: 10 * major + minor, 90 for sm_90; CPU: 0 */
    int32_t reserved0;
    uint64_t memory_bytes; /* total */
    char name[128];        /* product name; CPU: the instruction set in use */
    char reason[256];      /* why not available, or "" */
} kivi_device_info;

/* Devices of one kind; 1 for KIVI_CPU, 0 for KIVI_CUDA without driver or in a build without CUDA. */
KIVI_API kivi_status kivi_device_count(int32_t device, int32_t *count);
/* KIVI_ERROR_NO_DEVICE if device_id is not below that count. For KIVI_CUDA in a build without CUDA: KIVI_OK
 * with available 0 and the reason. */
KIVI_API kivi_status kivi_device_query(int32_t device, int32_t device_id, kivi_device_info *info,
                                       size_t struct_size);

/* Memory of a device, for callers who have no runtime of their own for it: programs with cudaMalloc need none of these
 * three. Not for the hot path. It begins at a multiple of 64 bytes, contents undefined; *memory is NULL after a
 * failure, and for 0 bytes. */
KIVI_API kivi_status kivi_device_allocate(int32_t device, int32_t device_id, size_t bytes, void **memory);
/* Gives memory of kivi_device_allocate back, of the same device; NULL is accepted. On CUDA waits for the device. */
KIVI_API kivi_status kivi_device_free(int32_t device, int32_t device_id, void *memory);
/* Copies between host and device, or within either; the two stretches do not overlap. [COPY-1] Comes after what is
 * queued on the stream and is complete on return. */
KIVI_API kivi_status kivi_device_copy(int32_t device, int32_t device_id, void *to, const void *from, size_t bytes,
                                      kivi_stream stream);

enum kivi_path {
    KIVI_PATH_NONE = 0,     /* refused */
    KIVI_PATH_REFERENCE = 1,
    KIVI_PATH_GENERAL = 2,  /* right for everything, unpacks before it multiplies */
    KIVI_PATH_FAST = 3      /* a kernel made for this spec, multiplies the codes themselves */
};

typedef struct kivi_support {
    size_t struct_size;
    int32_t supported;   /* 1: create accepts this layer under this config */
    int32_t attend_path; /* enum kivi_path */
    int32_t pack_path;   /* enum kivi_path; of prompts */
    int32_t reserved0;
    double bits_per_element; /* of a packed token, scale and min included, mean over K and V */
    char reason[512];    /* why refused, or why not the fast path; "" if neither */
} kivi_support;

/* What create would say to `layer` of this config and which code would serve it. [SUPPORT-1] Returns
 * KIVI_OK with supported 0 and the reason for a well-formed config that create refuses. On CUDA the fast path
 * serves calls whose q and out (and fresh k and v) are of window_dtype with rows on multiples of 16 bytes.
 * Other calls on the layer take the general one; with 16 bits so do those with more than 16 (at head dim 256,
 * 8) queries times query heads a KV head, or with fresh k and v and a window_left below the most queries that
 * this leaves room for. */
KIVI_API kivi_status kivi_query_support(const kivi_config *config, int32_t layer, kivi_support *support,
                                        size_t struct_size);

/* ---- Cache ----------------------------------------------------------------------------------------- */

typedef struct kivi_cache kivi_cache;

/* Bytes of a cache. [MEMORY-1] total_bytes is the sum of the parts, equals what create allocates for
 * contents, and is exact before create. Host bookkeeping of a few KiB a sequence is in table_bytes. */
typedef struct kivi_memory {
    size_t struct_size;
    uint64_t total_bytes;
    uint64_t page_bytes;    /* blocks * block_bytes */
    uint64_t window_bytes;  /* sink windows and tails */
    uint64_t table_bytes;   /* page tables, lengths, reference counts */
    uint64_t moment_bytes;  /* query moments and the tables made from them */
    uint64_t scratch_bytes; /* per thread */
    int64_t blocks;         /* page blocks in the pool; a block is 128 tokens of all layers and heads */
    uint64_t block_bytes;
    uint64_t layout_id;     /* names the byte order of pages: backend, specs, dims, sink */
} kivi_memory;

/* What create would take for this config. Refuses what create refuses. */
KIVI_API kivi_status kivi_cache_estimate(const kivi_config *config, kivi_memory *memory, size_t struct_size);

/* [CREATE-1] Anything that is not supported is refused here with a sentence that names the rule; nothing
 * is refused later for its configuration. The memory of kivi_cache_estimate is allocated here:
 * KIVI_ERROR_OUT_OF_MEMORY if there is not enough; KIVI_ERROR_NO_DEVICE if device_id does not exist. *cache is
 * the caller's, who destroys it; NULL after a failure. */
KIVI_API kivi_status kivi_cache_create(const kivi_config *config, kivi_cache **cache);
/* Accepts NULL. [DESTROY-1] A handle that was destroyed before is ignored. Waits for calls in progress; may
 * wait for queued work. */
KIVI_API void kivi_cache_destroy(kivi_cache *cache);
/* Empties every sequence; committed moments stay. */
KIVI_API kivi_status kivi_cache_reset(kivi_cache *cache, kivi_stream stream);
/* Enlarges the pool to at least `tokens` packed tokens over all sequences. May allocate and copy. */
KIVI_API kivi_status kivi_reserve(kivi_cache *cache, int64_t tokens, kivi_stream stream);
/* Waits for the work queued on `stream` and takes the lengths from the device: after replays of a captured
 * graph, and after calls with device arrays, those that the library knows are behind until then.
 * [SYNC-1] KIVI_ERROR_CAPACITY, with the lengths taken, names a sequence in which an append found no room
 * on the device and wrote nothing; so until that sequence is reset or replaced. Does nothing on the CPU. */
KIVI_API kivi_status kivi_synchronize(kivi_cache *cache, kivi_stream stream);
/* As estimated, plus what kivi_reserve has added. */
KIVI_API kivi_status kivi_cache_memory(const kivi_cache *cache, kivi_memory *memory, size_t struct_size);

/* ---- Sequences ------------------------------------------------------------------------------------- */

/* Empties one sequence and returns its blocks. */
KIVI_API kivi_status kivi_sequence_reset(kivi_cache *cache, int32_t sequence, kivi_stream stream);

/* Gives the sequence all blocks that it needs at a length of `tokens`, so that appends up to there, and
 * flushes, take none: what a captured graph needs before its replays. [RESERVE-1] Nothing else changes, and
 * the blocks stay until the sequence is reset. KIVI_ERROR_CAPACITY if tokens pass max_tokens or the pool is
 * exhausted. kivi_reserve moves pages: graphs captured before it must not be replayed. */
KIVI_API kivi_status kivi_sequence_reserve(kivi_cache *cache, int32_t sequence, int64_t tokens,
                                           kivi_stream stream);

typedef struct kivi_length {
    size_t struct_size;
    int64_t length;       /* tokens */
    int64_t sink;         /* tokens in the sink window: min(length, S) */
    int64_t key_border;   /* keys at sink .. key_border - 1 are packed, key_border .. length - 1 are tail */
    int64_t value_border; /* likewise for values; equals key_border but for KIVI_SCHEDULE_PUBLISHED */
} kivi_length;

/* Lengths are kept per layer: within a step the layers advance one after the other. */
KIVI_API kivi_status kivi_sequence_length(const kivi_cache *cache, int32_t layer, int32_t sequence,
                                          kivi_length *length, size_t struct_size);

typedef struct kivi_statistics {
    size_t struct_size;
    int64_t tokens;          /* over all sequences */
    int64_t packed_tokens;   /* keys packed, over all sequences */
    int64_t blocks_used;     /* of the whole cache, whatever the layer */
    int64_t blocks_free;
    int64_t saturated_rows;  /* rows with finite values beyond the range of window_dtype, clamped */
    int32_t key_rounding;    /* enum kivi_rounding that packs now: nearest until moments are committed */
    int32_t moments;         /* 0 none, 1 accumulated, 2 committed */
    int64_t moment_queries;  /* query rows accumulated for each KV head */
    int32_t device_error;    /* 1 after a device error: queries and destroy only */
    int32_t reserved0;
    uint64_t live_bytes;     /* bytes of K and V that attend would read: pages and windows, all sequences */
} kivi_statistics;

/* layer -1: sums over all layers; key_rounding and moments are then the lowest of any layer. On CUDA it waits
 * for the device, so that the rows of queued appends are counted; after a device error, or while the thread
 * captures a graph, saturated_rows is as last known. */
KIVI_API kivi_status kivi_query_statistics(const kivi_cache *cache, int32_t layer,
                                           kivi_statistics *statistics, size_t struct_size);

/* ---- Work: append, flush, attend ------------------------------------------------------------------- */

/* Appends counts[r] tokens to each sequence of the batch. k [rows, tokens, kv_heads, key_dim],
 * v [rows, tokens, kv_heads, value_dim], any dtype, converted to window_dtype with ties to even; finite
 * values beyond its range, before or after a Hadamard, are clamped to it and their rows counted.
 * KIVI_ERROR_CAPACITY if a sequence would pass max_tokens or the pool is exhausted: nothing is appended
 * to any row. [APPEND-1] The first layer that appends a token reserves the blocks of all layers.
 * [APPEND-2] NaN and infinities damage their own token and its groups only. */
KIVI_API kivi_status kivi_append(kivi_cache *cache, int32_t layer, const kivi_batch *batch,
                                 const kivi_tensor *k, const kivi_tensor *v, kivi_stream stream);

/* Packs each tail of the batch's sequences up to the last multiple of the unit (see kivi_config); the
 * rest stays in full precision and a later append continues it. counts are not used. layer -1: every
 * layer. [FLUSH-1] Twice equals once. Refused for KIVI_SCHEDULE_PUBLISHED. */
KIVI_API kivi_status kivi_flush_residual(kivi_cache *cache, int32_t layer, const kivi_batch *batch,
                                         kivi_stream stream);

enum kivi_attend_flags {
    KIVI_ATTEND_INVARIANT = 1 /* bits of the result do not depend on batch, threads, page placement or
                                 capacity; always so on the CPU */
};

typedef struct kivi_attend_params {
    size_t struct_size;
    float scale;               /* of q . k; 0: 1 / sqrt(key_dim) */
    float soft_cap;            /* score = soft_cap * tanh(score / soft_cap) after scaling; 0: off */
    int64_t window_left;       /* keys left of the query itself that it sees; -1: all (init) */
    const kivi_tensor *k;      /* fresh keys and values, both or none: tokens that are not appended yet, */
    const kivi_tensor *v;      /* shaped as in append, as many a row as queries; not quantised. On CUDA a single token
                                  a row may be read as the windows would hold it: transformed, and then rounded to
                                  their type and clamped to its range (not counted as saturated) */
    const float *learned_sinks;/* [q_heads] logits added to the softmax's denominator, memory of the
                                  cache's device; not part of the LSE. NULL: none */
    const kivi_tensor *lse;    /* out, f32: natural log of the sum of exp(score), [rows, tokens, q_heads] or
                                  [tokens, q_heads]; NULL: not wanted */
    uint64_t flags;            /* enum kivi_attend_flags */
    const void *reserved[4];   /* masks, ALiBi slopes, position shift, later */
} kivi_attend_params;

/* Defaults: window_left -1, all else 0. */
KIVI_API kivi_status kivi_attend_params_init(kivi_attend_params *params, size_t struct_size);

/* Attention of counts[r] queries a row over sink window, pages and tail in one softmax.
 * q [rows, tokens, q_heads, key_dim], out [rows, tokens, q_heads, value_dim], any dtypes. Query head h reads
 * KV head h / (q_heads / kv_heads). [ATTEND-1] Causal, bottom-right: with n cached tokens and c queries,
 * query i stands at position n - c + i (n + i with fresh keys) and sees positions up to its own. [ATTEND-2]
 * A query that sees nothing gives 0 and LSE -infinity. [ATTEND-3] The sink window obeys window_left.
 * [ATTEND-4] A head that sees a non-finite key gives NaN for the queries that see it and nothing else changes. A
 * non-finite value damages its channel of them, in a page those of its group; where V is transformed every channel, but
 * of a fresh value perhaps its own alone. params NULL: defaults. workspace: any alignment, `workspace_bytes` at least
 * kivi_attend_workspace of these shapes, else KIVI_ERROR_BUFFER_TOO_SMALL. Agrees with double precision on the
 * dequantised cache, and on fresh tokens as they are read, within 1e-3 (CPU), 3e-3 (CUDA) of the output's norm while
 * scaled scores stay below about 1000; larger ones lose the digits of their differences, since scores are fp32.
 * Products beyond the range of fp32 (keys, values or queries near 1e38) give infinities or NaN, as the formula does in
 * fp32. */
KIVI_API kivi_status kivi_attend(const kivi_cache *cache, int32_t layer, const kivi_batch *batch,
                                 const kivi_tensor *q, const kivi_tensor *out,
                                 const kivi_attend_params *params, void *workspace, size_t workspace_bytes,
                                 kivi_stream stream);

/* One step of a layer: the batch's queries attend to the cache and to the new tokens k and v, which are then
 * appended. [STEP-1] out, LSE and all that the cache then holds are bit for bit those of kivi_attend with
 * params->k = k and params->v = v followed by kivi_append, both of this batch; but as one call: what either
 * would refuse is refused before anything is done. params->k and params->v must be NULL; params NULL:
 * defaults. workspace as for kivi_attend. Any number of tokens a row.
 * On CUDA one launch does both where the layer has the fast kernel, codes (not 16 bits) with min-max ranges, the
 * rolling schedule with a recent window, and nearest rounding, each row brings one token, rows are aligned and of the
 * windows' type, and KIVI_ATTEND_INVARIANT is not asked for (host batches above 64 rows: one for each 64). Elsewhere
 * it makes the launches of both calls and costs what they cost; on the CPU it is a convenience. */
KIVI_API kivi_status kivi_step(kivi_cache *cache, int32_t layer, const kivi_batch *batch,
                               const kivi_tensor *q, const kivi_tensor *k, const kivi_tensor *v,
                               const kivi_tensor *out, const kivi_attend_params *params, void *workspace,
                               size_t workspace_bytes, kivi_stream stream);

/* Bytes that suffice for any attend or step on `layer` (-1: any layer) of at most `rows` rows with at most
 * `max_count` queries each, at any length the cache can hold. Memory of the cache's device; calls that follow
 * each other can share it. On CUDA it grows with rows, queries and capacity: from a few MB to 100 MB or so. */
KIVI_API kivi_status kivi_attend_workspace(const kivi_cache *cache, int32_t layer, int32_t rows,
                                           int32_t max_count, size_t *bytes);

/* Combines `parts` partial results of the same queries over disjoint keys: out = sum w_i out_i with
 * w_i = exp(lse_i) / sum_j exp(lse_j), computed without overflow. outs[i] [rows, tokens, q_heads, dim]
 * or [tokens, q_heads, dim]; lses[i] f32 without the last size. learned_sinks [q_heads] or NULL belongs to
 * the last merge only. lse may be NULL. Empty parts (LSE -infinity) do not contribute; all empty: 0 and
 * -infinity. out may be one of outs. All tensors are on one device, whose `stream` it is. [MERGE-1] With one
 * empty part the other returns bit for bit. */
KIVI_API kivi_status kivi_merge(int32_t parts, const kivi_tensor *outs, const kivi_tensor *lses,
                                const float *learned_sinks, const kivi_tensor *out, const kivi_tensor *lse,
                                kivi_stream stream);

/* ---- Reading back, moving -------------------------------------------------------------------------- */

enum kivi_dequantize_flags {
    KIVI_STORED_BASIS = 1 /* rows as they are stored, a Hadamard not undone */
};

/* Writes tokens begin .. end - 1 of one sequence as attend reads them. k [tokens, kv_heads, key_dim],
 * v [tokens, kv_heads, value_dim], end - begin tokens, any dtype; either may be NULL. Not for the hot
 * path. */
KIVI_API kivi_status kivi_dequantize(const kivi_cache *cache, int32_t layer, int32_t sequence, int64_t begin,
                                     int64_t end, const kivi_tensor *k, const kivi_tensor *v, uint64_t flags,
                                     kivi_stream stream);

/* One sequence, all layers, as a self-describing, versioned, checksummed blob in the canonical order of
 * core/FORMAT.md: the same bytes from every backend. The buffers are host memory; both calls wait for the
 * stream. [EXPORT-1] kivi_export_size is exact; a larger buffer is filled as far as that, and *written says
 * it. KIVI_ERROR_BUFFER_TOO_SMALL for a smaller one, KIVI_ERROR_STATE unless all layers have the same
 * length. */
KIVI_API kivi_status kivi_export_size(const kivi_cache *cache, int32_t sequence, size_t *bytes);
KIVI_API kivi_status kivi_export(const kivi_cache *cache, int32_t sequence, void *buffer, size_t bytes,
                                 size_t *written, kivi_stream stream);
/* Replaces the contents of `sequence`. KIVI_ERROR_CORRUPT for a damaged blob, KIVI_ERROR_MISMATCH if
 * specs, dims, windows or the encoder's tables differ, KIVI_ERROR_CAPACITY if it does not fit; the old
 * contents then stay. */
KIVI_API kivi_status kivi_import(kivi_cache *cache, int32_t sequence, const void *buffer, size_t bytes,
                                 kivi_stream stream);

/* ---- Moments: what query-aware rounding minimises against ------------------------------------------- */

/* Adds the queries q [rows, tokens, q_heads, key_dim] (or rank 3), as attend would be given them, to the
 * layer's second moments: per KV head the mean of q q' over its query heads, in the stored basis. Any
 * text of the model's kind serves; a few hundred tokens give most of the gain. Only for layers with
 * KIVI_ROUND_QUERY_AWARE. The batch's sequences are not looked at, only counts and offsets. None of the calls
 * with moments is for the hot path: they may allocate, and wait for the stream or the device.
 * [MOMENTS-2] Accumulating or setting after a commit asks for another commit, and is refused with
 * KIVI_ERROR_STATE while something is packed with the committed moments. */
KIVI_API kivi_status kivi_moments_accumulate(kivi_cache *cache, int32_t layer, const kivi_batch *batch,
                                             const kivi_tensor *q, kivi_stream stream);
/* Sets the moments: m [kv_heads, key_dim, key_dim], f32, symmetric, finite, positive diagonal, as the
 * caller's queries have them (0) or in the stored basis (KIVI_STORED_BASIS). */
KIVI_API kivi_status kivi_moments_set(kivi_cache *cache, int32_t layer, const kivi_tensor *m,
                                      uint64_t flags, kivi_stream stream);
/* Factors the layer's moments (in double, on the host) and uses them from now on. [MOMENTS-1] Only while
 * nothing of the layer is packed; KIVI_ERROR_STATE after that, or without moments. Waits for the stream. */
KIVI_API kivi_status kivi_moments_commit(kivi_cache *cache, int32_t layer, kivi_stream stream);
/* Committed moments as a blob in host memory: basis, matrices, coding order and feedback table. The size is
 * exact. KIVI_ERROR_STATE without committed moments, KIVI_ERROR_BUFFER_TOO_SMALL for a smaller buffer. */
KIVI_API kivi_status kivi_moments_export_size(const kivi_cache *cache, int32_t layer, size_t *bytes);
KIVI_API kivi_status kivi_moments_export(const kivi_cache *cache, int32_t layer, void *buffer, size_t bytes,
                                         size_t *written);
/* Commits a blob, under the rule of kivi_moments_commit. KIVI_ERROR_MISMATCH if basis or dims differ;
 * a blob of one KV head serves a layer of any number of replicated heads. */
KIVI_API kivi_status kivi_moments_import(kivi_cache *cache, int32_t layer, const void *buffer, size_t bytes,
                                         kivi_stream stream);

/* ---- Probe: error where it is consumed --------------------------------------------------------------- */

/* A model's own q, k, v of one layer, and the specs to try on them. Host memory, any dtype. */
typedef struct kivi_probe_params {
    size_t struct_size;
    kivi_tensor q; /* [queries, q_heads, key_dim]: the last `queries` positions of the sequence */
    kivi_tensor k; /* [tokens, kv_heads, key_dim] */
    kivi_tensor v; /* [tokens, kv_heads, value_dim] */
    kivi_spec k_spec;
    kivi_spec v_spec;
    int32_t sink, recent, flush, schedule;
    int32_t window_dtype;
    float scale;             /* 0: 1 / sqrt(key_dim) */
    float soft_cap;          /* 0: off */
    int32_t reserved0;
    int64_t window_left;     /* -1: all (init) */
    const kivi_tensor *moments; /* as for kivi_moments_set; NULL: from q itself if the spec asks for them */
    const void *reserved[4];
} kivi_probe_params;

/* Relative errors are Frobenius norms over all rows: |x' - x| / |x|. Means weigh every query alike. Each
 * query sees what a decode step at its position would show it: sink window and tail exact, the border
 * moving with the flush rule. */
typedef struct kivi_probe_result {
    size_t struct_size;
    double key_error;          /* packed keys against the given ones */
    double value_error;
    double score_error;        /* scores centred per query */
    double attention_kl;       /* KL(exact || quantised) of attention weights, nats */
    double output_error;       /* K and V quantised */
    double output_error_key;   /* only K quantised */
    double output_error_value; /* only V quantised */
    double sparsity;           /* share of exact weights below 1 % of their row's maximum */
} kivi_probe_result;

/* Defaults: specs and windows of the preset k3v2, f16 windows, window_left -1, all else 0. */
KIVI_API kivi_status kivi_probe_params_init(kivi_probe_params *params, size_t struct_size);
/* Double precision on the CPU, in the calling thread. total, and per_head [kv_heads] (NULL: not wanted), are
 * arrays of structs of `struct_size` bytes each. */
KIVI_API kivi_status kivi_probe(const kivi_probe_params *params, kivi_probe_result *total,
                                kivi_probe_result *per_head, size_t struct_size);

#ifdef __cplusplus
}
#endif
#endif /* KIVI_KIVI_H */
