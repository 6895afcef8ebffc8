/* Opens the library where no GPU is to be seen: CUDA is refused with a status and a sentence, the CPU works,
 * and nothing is printed. Prints the first check that fails. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kivi/kivi.h"

static kivi_status (*device_count)(int32_t, int32_t *);
static kivi_status (*device_query)(int32_t, int32_t, kivi_device_info *, size_t);
static kivi_status (*config_init)(kivi_config *, size_t);
static kivi_status (*cache_create)(const kivi_config *, kivi_cache **);
static void (*cache_destroy)(kivi_cache *);
static const char *(*last_error)(void);

static void require(int holds, const char *what) {
    if (holds) return;
    printf("not so: %s\n", what);
    exit(1);
}

static void *find(void *library, const char *name) {
    void *symbol = dlsym(library, name);
    require(symbol != NULL, name);
    return symbol;
}

int main(int argc, char **argv) {
    require(argc == 2, "one argument, the path of the library");
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    require(library != NULL, "the library loads");
    *(void **)&device_count = find(library, "kivi_device_count");
    *(void **)&device_query = find(library, "kivi_device_query");
    *(void **)&config_init = find(library, "kivi_config_init");
    *(void **)&cache_create = find(library, "kivi_cache_create");
    *(void **)&cache_destroy = find(library, "kivi_cache_destroy");
    *(void **)&last_error = find(library, "kivi_last_error");

    int32_t count = -1;
    require(device_count(KIVI_CUDA, &count) == KIVI_OK && count == 0, "no CUDA device is counted");
    require(device_count(KIVI_CPU, &count) == KIVI_OK && count == 1, "one CPU is counted");

    kivi_device_info info;
    memset(&info, 0, sizeof info);
    const kivi_status queried = device_query(KIVI_CUDA, 0, &info, sizeof info);
    require(queried == KIVI_ERROR_NO_DEVICE || (queried == KIVI_OK && !info.available && info.reason[0]),
            "a query of CUDA device 0 gives a reason");
    require(queried == KIVI_OK || last_error()[0], "a refused query leaves a sentence");
    memset(&info, 0, sizeof info);
    require(device_query(KIVI_CPU, 0, &info, sizeof info) == KIVI_OK && info.available, "the CPU is available");

    kivi_config config;
    require(config_init(&config, sizeof config) == KIVI_OK, "config init");
    config.layer_count = 1;
    config.layer.q_heads = config.layer.kv_heads = 1;
    config.layer.key_dim = config.layer.value_dim = 64;
    config.max_sequences = 1;
    config.max_tokens = 256;
    kivi_cache *cache = NULL;
    config.device = KIVI_CUDA;
    const kivi_status created = cache_create(&config, &cache);
    require(created == KIVI_ERROR_NO_DEVICE || created == KIVI_ERROR_UNSUPPORTED, "a cache on CUDA is refused");
    require(cache == NULL && last_error()[0], "the refusal leaves NULL and a sentence");
    config.device = KIVI_CPU;
    require(cache_create(&config, &cache) == KIVI_OK && cache, "a cache on the CPU is created");
    cache_destroy(cache);
    require(dlclose(library) == 0, "the library unloads");
    return 0;
}
