/* A decode loop over libkivi: create a cache, then one step for every token and layer. */
#include <stdio.h>
#include <stdlib.h>

#include "kivi/kivi.h"

enum { LAYERS = 2, Q_HEADS = 8, KV_HEADS = 2, HEAD_DIM = 64, TOKENS = 320 };

static void check(kivi_status status) {
    if (status == KIVI_OK) return;
    fprintf(stderr, "%s: %s\n", kivi_status_name(status), kivi_last_error());
    exit(1);
}

/* [rows, tokens, heads, dim] for one sequence and one token. */
static kivi_tensor one_token(float *data, int64_t heads) {
    kivi_tensor tensor = {data, KIVI_F32, KIVI_CPU, 0, 4, {1, 1, heads, HEAD_DIM}, {0, 0, HEAD_DIM, 1}};
    return tensor;
}

/* Stands in for the model, which would compute q, k and v of the token. */
static void project(float *values, int count) {
    for (int i = 0; i < count; ++i) values[i] = (float)rand() / (float)RAND_MAX - 0.5f;
}

int main(void) {
    kivi_config config;
    check(kivi_config_init(&config, sizeof config));
    check(kivi_config_preset(&config, "k3v2"));
    config.layer_count = LAYERS;
    config.layer.q_heads = Q_HEADS;
    config.layer.kv_heads = KV_HEADS;
    config.layer.key_dim = config.layer.value_dim = HEAD_DIM;
    config.max_sequences = 1;
    config.max_tokens = 4096;
    kivi_cache *cache;
    check(kivi_cache_create(&config, &cache));

    size_t bytes;
    check(kivi_attend_workspace(cache, -1, 1, 1, &bytes));
    void *workspace = malloc(bytes ? bytes : 1);
    if (!workspace) return 1;

    kivi_batch batch; /* one row: sequence 0 with one token */
    check(kivi_batch_init(&batch, sizeof batch));
    batch.rows = 1;
    batch.max_count = 1;

    float k[KV_HEADS * HEAD_DIM], v[KV_HEADS * HEAD_DIM], q[Q_HEADS * HEAD_DIM], out[Q_HEADS * HEAD_DIM];
    const kivi_tensor k_view = one_token(k, KV_HEADS), v_view = one_token(v, KV_HEADS);
    const kivi_tensor q_view = one_token(q, Q_HEADS), out_view = one_token(out, Q_HEADS);
    for (int token = 0; token < TOKENS; ++token) {
        for (int layer = 0; layer < LAYERS; ++layer) {
            project(q, Q_HEADS * HEAD_DIM);
            project(k, KV_HEADS * HEAD_DIM);
            project(v, KV_HEADS * HEAD_DIM);
            check(kivi_step(cache, layer, &batch, &q_view, &k_view, &v_view, &out_view, NULL, workspace, bytes, NULL));
        }
    }

    kivi_length length = {0};
    kivi_statistics statistics = {0};
    check(kivi_sequence_length(cache, 0, 0, &length, sizeof length));
    check(kivi_query_statistics(cache, -1, &statistics, sizeof statistics));
    printf("%lld tokens, %lld of them packed, %.1f bytes per token and layer (fp16: %d)\n", (long long)length.length,
           (long long)(length.key_border - length.sink),
           (double)statistics.live_bytes / (double)(length.length * LAYERS), 2 * KV_HEADS * HEAD_DIM * 2);
    kivi_cache_destroy(cache);
    free(workspace);
    return 0;
}
