/* The way of a closed runtime: no link to libkivi, only its header. The library is opened at run time by
 * the path in the first argument, its version is checked, and then the decode loop runs. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "kivi/kivi.h"

enum { Q_HEADS = 4, KV_HEADS = 1, HEAD_DIM = 64, TOKENS = 256 };

/* The calls this client needs. */
static int32_t (*version)(void);
static const char *(*last_error)(void);
static kivi_status (*config_init)(kivi_config *, size_t);
static kivi_status (*config_preset)(kivi_config *, const char *);
static kivi_status (*cache_create)(const kivi_config *, kivi_cache **);
static void (*cache_destroy)(kivi_cache *);
static kivi_status (*batch_init)(kivi_batch *, size_t);
static kivi_status (*append)(kivi_cache *, int32_t, const kivi_batch *, const kivi_tensor *, const kivi_tensor *,
                             kivi_stream);
static kivi_status (*attend_workspace)(const kivi_cache *, int32_t, int32_t, int32_t, size_t *);
static kivi_status (*attend)(const kivi_cache *, int32_t, const kivi_batch *, const kivi_tensor *,
                             const kivi_tensor *, const kivi_attend_params *, void *, size_t, kivi_stream);

static void fail(const char *what, const char *why) {
    fprintf(stderr, "%s: %s\n", what, why ? why : "unknown");
    exit(1);
}

static void *find(void *library, const char *name) {
    void *symbol = dlsym(library, name);
    if (!symbol) fail(name, dlerror());
    return symbol;
}

/* POSIX lets a function pointer take what dlsym returns through this cast. */
static void load(void *library) {
    *(void **)&version = find(library, "kivi_version");
    *(void **)&last_error = find(library, "kivi_last_error");
    *(void **)&config_init = find(library, "kivi_config_init");
    *(void **)&config_preset = find(library, "kivi_config_preset");
    *(void **)&cache_create = find(library, "kivi_cache_create");
    *(void **)&cache_destroy = find(library, "kivi_cache_destroy");
    *(void **)&batch_init = find(library, "kivi_batch_init");
    *(void **)&append = find(library, "kivi_append");
    *(void **)&attend_workspace = find(library, "kivi_attend_workspace");
    *(void **)&attend = find(library, "kivi_attend");
}

static void check(kivi_status status) {
    if (status != KIVI_OK) fail("libkivi", last_error());
}

static kivi_tensor one_token(float *data, int64_t heads) {
    kivi_tensor tensor = {data, KIVI_F32, KIVI_CPU, 0, 4, {1, 1, heads, HEAD_DIM}, {0, 0, HEAD_DIM, 1}};
    return tensor;
}

int main(int argc, char **argv) {
    void *library = dlopen(argc > 1 ? argv[1] : "libkivi.so", RTLD_NOW | RTLD_LOCAL);
    if (!library) fail("dlopen", dlerror());
    load(library);
    /* Before 1.0 the minor version is the ABI. */
    if (version() / 100 != 100 * KIVI_VERSION_MAJOR + KIVI_VERSION_MINOR) fail("libkivi", "another ABI version");

    kivi_config config;
    check(config_init(&config, sizeof config));
    check(config_preset(&config, "kivi2-sink"));
    config.layer_count = 1;
    config.layer.q_heads = Q_HEADS;
    config.layer.kv_heads = KV_HEADS;
    config.layer.key_dim = config.layer.value_dim = HEAD_DIM;
    config.max_sequences = 1;
    config.max_tokens = TOKENS;
    kivi_cache *cache;
    check(cache_create(&config, &cache));
    size_t bytes;
    check(attend_workspace(cache, 0, 1, 1, &bytes));
    void *workspace = malloc(bytes ? bytes : 1);
    if (!workspace) fail("malloc", "out of memory");
    kivi_batch batch;
    check(batch_init(&batch, sizeof batch));
    batch.rows = 1;
    batch.max_count = 1;

    float k[HEAD_DIM * KV_HEADS], q[HEAD_DIM * Q_HEADS], out[HEAD_DIM * Q_HEADS];
    const kivi_tensor k_view = one_token(k, KV_HEADS), q_view = one_token(q, Q_HEADS),
                      out_view = one_token(out, Q_HEADS);
    for (int token = 0; token < TOKENS; ++token) {
        for (int i = 0; i < HEAD_DIM * KV_HEADS; ++i) k[i] = 1.0f;
        for (int i = 0; i < HEAD_DIM * Q_HEADS; ++i) q[i] = (float)(token % 7) - 3.0f;
        check(append(cache, 0, &batch, &k_view, &k_view, NULL));
        check(attend(cache, 0, &batch, &q_view, &out_view, NULL, workspace, bytes, NULL));
    }
    cache_destroy(cache);
    free(workspace);
    dlclose(library);

    /* Equal keys weigh alike, so the mean of the values, all 1, comes out. */
    for (int i = 0; i < HEAD_DIM * Q_HEADS; ++i)
        if (out[i] < 0.999f || out[i] > 1.001f) fail("attend", "the mean of ones is not one");
    printf("opened at run time, %d tokens, output as expected\n", TOKENS);
    return 0;
}
