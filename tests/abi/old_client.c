/* A program of the first release: compiled against the frozen header, run with the library of today. It uses
 * every growable struct with the size it had then, and checks that nothing beyond that size is written. */
#include "kivi-0.1.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, kivi_last_error()); \
            exit(1);                                                                       \
        }                                                                                  \
    } while (0)

/* A struct with a canary behind it. */
#define WITH_CANARY(type, name)   \
    struct {                      \
        type it;                  \
        unsigned char canary[64]; \
    } name;                       \
    memset(&name, 0xA5, sizeof name)

static void check_canary(const unsigned char* canary) {
    int i;
    for (i = 0; i < 64; i++) CHECK(canary[i] == 0xA5);
}

enum { TOKENS = 200, HEADS = 2, DIM = 64 };

static kivi_tensor tensor(float* data, int64_t tokens, int64_t heads) {
    kivi_tensor t;
    memset(&t, 0, sizeof t);
    t.data = data;
    t.dtype = KIVI_F32;
    t.device = KIVI_CPU;
    t.rank = 3;
    t.shape[0] = tokens;
    t.shape[1] = heads;
    t.shape[2] = DIM;
    t.stride[0] = heads * DIM;
    t.stride[1] = DIM;
    t.stride[2] = 1;
    return t;
}

int main(void) {
    static float kv[TOKENS * HEADS * DIM], q[2 * HEADS * DIM], out[2 * HEADS * DIM];
    kivi_cache* cache = NULL;
    kivi_tensor k = tensor(kv, TOKENS, HEADS), queries = tensor(q, 1, 2 * HEADS),
                result = tensor(out, 1, 2 * HEADS);
    size_t bytes = 0, i;
    void* workspace;

    WITH_CANARY(kivi_config, config);
    WITH_CANARY(kivi_batch, batch);
    WITH_CANARY(kivi_attend_params, params);
    WITH_CANARY(kivi_memory, memory);
    WITH_CANARY(kivi_length, length);
    WITH_CANARY(kivi_statistics, statistics);
    WITH_CANARY(kivi_support, support);
    WITH_CANARY(kivi_device_info, info);
    WITH_CANARY(kivi_preset, preset);
    WITH_CANARY(kivi_probe_params, probe);
    WITH_CANARY(kivi_probe_result, errors);

    CHECK(kivi_version() >= 100);
    CHECK(kivi_config_init(&config.it, sizeof config.it) == KIVI_OK);
    CHECK(kivi_config_preset(&config.it, "kivi2-sink") == KIVI_OK);
    config.it.layer_count = 1;
    config.it.layer.q_heads = 2 * HEADS;
    config.it.layer.kv_heads = HEADS;
    config.it.layer.key_dim = config.it.layer.value_dim = DIM;
    config.it.max_sequences = 1;
    config.it.max_tokens = 1000;
    CHECK(kivi_query_support(&config.it, 0, &support.it, sizeof support.it) == KIVI_OK);
    CHECK(support.it.supported == 1);
    CHECK(kivi_cache_estimate(&config.it, &memory.it, sizeof memory.it) == KIVI_OK);
    CHECK(kivi_cache_create(&config.it, &cache) == KIVI_OK);

    for (i = 0; i < sizeof kv / sizeof kv[0]; i++) kv[i] = (float)((i * 37) % 101) / 50 - 1;
    for (i = 0; i < sizeof q / sizeof q[0]; i++) q[i] = (float)((i * 53) % 97) / 48 - 1;
    CHECK(kivi_batch_init(&batch.it, sizeof batch.it) == KIVI_OK);
    batch.it.rows = 1;
    batch.it.max_count = TOKENS;
    CHECK(kivi_append(cache, 0, &batch.it, &k, &k, NULL) == KIVI_OK);
    CHECK(kivi_attend_params_init(&params.it, sizeof params.it) == KIVI_OK);
    CHECK(kivi_attend_workspace(cache, 0, 1, 1, &bytes) == KIVI_OK);
    workspace = malloc(bytes);
    batch.it.max_count = 1;
    CHECK(kivi_attend(cache, 0, &batch.it, &queries, &result, &params.it, workspace, bytes, NULL) == KIVI_OK);
    CHECK(out[0] == out[0] && out[0] != 0);
    CHECK(kivi_sequence_length(cache, 0, 0, &length.it, sizeof length.it) == KIVI_OK);
    CHECK(length.it.length == TOKENS && length.it.sink == 32 && length.it.key_border == 96);
    CHECK(kivi_query_statistics(cache, 0, &statistics.it, sizeof statistics.it) == KIVI_OK);
    CHECK(statistics.it.tokens == TOKENS);
    CHECK(kivi_device_query(KIVI_CPU, 0, &info.it, sizeof info.it) == KIVI_OK);
    CHECK(info.it.available == 1);
    CHECK(kivi_preset_at(0, &preset.it, sizeof preset.it) == KIVI_OK);
    CHECK(kivi_probe_params_init(&probe.it, sizeof probe.it) == KIVI_OK);
    probe.it.q = queries;
    probe.it.k = probe.it.v = k;
    CHECK(kivi_probe(&probe.it, &errors.it, NULL, sizeof errors.it) == KIVI_OK);

    check_canary(config.canary);
    check_canary(batch.canary);
    check_canary(params.canary);
    check_canary(memory.canary);
    check_canary(length.canary);
    check_canary(statistics.canary);
    check_canary(support.canary);
    check_canary(info.canary);
    check_canary(preset.canary);
    check_canary(probe.canary);
    check_canary(errors.canary);
    free(workspace);
    kivi_cache_destroy(cache);
    return 0;
}
