/* The attend of bench_python.py called from C: one layer, one head of 64, one cached token, batch 1. */
#include <stdlib.h>
#include <time.h>

#include "kivi/kivi.h"

enum { DIM = 64 };

typedef struct attend_loop {
    kivi_cache *cache;
    kivi_tensor q, out;
    void *workspace;
    size_t workspace_bytes;
    float values[3][DIM];
} attend_loop;

static kivi_tensor view(float *data) {
    kivi_tensor tensor = {.data = data, .dtype = KIVI_F32, .device = KIVI_CPU, .rank = 4,
                          .shape = {1, 1, 1, DIM}, .stride = {DIM, DIM, DIM, 1}};
    return tensor;
}

static kivi_batch batch_of(const int32_t *sequences) {
    kivi_batch batch;
    kivi_batch_init(&batch, sizeof batch);
    batch.rows = 1;
    batch.max_count = 1;
    batch.sequences = sequences;
    return batch;
}

/* NULL if a call fails; kivi_last_error() then says why. */
attend_loop *attend_loop_new(void) {
    attend_loop *loop = calloc(1, sizeof *loop);
    kivi_config config;
    kivi_batch batch = batch_of(NULL);
    if (loop == NULL) return NULL;
    kivi_config_init(&config, sizeof config);
    config.layer_count = 1;
    config.layer.q_heads = config.layer.kv_heads = 1;
    config.layer.key_dim = config.layer.value_dim = DIM;
    config.max_sequences = 1;
    config.max_tokens = 256;
    config.threads = 1;
    loop->q = view(loop->values[0]);
    loop->out = view(loop->values[1]);
    for (int i = 0; i < DIM; ++i) loop->values[0][i] = loop->values[2][i] = 1.0f;
    kivi_tensor token = view(loop->values[2]);
    if (kivi_cache_create(&config, &loop->cache) != KIVI_OK ||
        kivi_append(loop->cache, 0, &batch, &token, &token, NULL) != KIVI_OK ||
        kivi_attend_workspace(loop->cache, -1, 1, 1, &loop->workspace_bytes) != KIVI_OK) {
        return NULL;
    }
    loop->workspace = malloc(loop->workspace_bytes + 1);
    return loop;
}

/* Seconds a call, over `calls` calls; negative after a failure. */
double attend_loop_run(attend_loop *loop, int calls) {
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int i = 0; i < calls; ++i) {
        kivi_batch batch = batch_of(NULL);
        if (kivi_attend(loop->cache, 0, &batch, &loop->q, &loop->out, NULL, loop->workspace,
                        loop->workspace_bytes, NULL) != KIVI_OK) {
            return -1.0;
        }
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    return ((double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec)) / calls;
}

void attend_loop_free(attend_loop *loop) {
    kivi_cache_destroy(loop->cache);
    free(loop->workspace);
    free(loop);
}
