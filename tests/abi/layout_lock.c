/* The binary layout of kivi.h, number by number, as released: every size, offset and constant. A line that
 * no longer compiles is a break of the ABI. A struct that grows gets lines at its end and a new SIZE. */
#include "kivi/kivi.h"

#define LOCK(name, condition) typedef char lock_##name[(condition) ? 1 : -1]
#define SIZE(type, bytes) LOCK(type##_size, sizeof(type) == (bytes))
#define FIELD(type, field, offset, bytes) \
    LOCK(type##_##field, offsetof(type, field) == (offset) && sizeof(((type*)0)->field) == (bytes))
#define VALUE(constant, number) LOCK(constant, (constant) == (number))

SIZE(kivi_status, 4);
SIZE(kivi_stream, sizeof(void*));
LOCK(kivi_status_is_signed, (kivi_status)-1 < 0);

SIZE(kivi_tensor, 88);
FIELD(kivi_tensor, data, 0, 8);
FIELD(kivi_tensor, dtype, 8, 4);
FIELD(kivi_tensor, device, 12, 4);
FIELD(kivi_tensor, device_id, 16, 4);
FIELD(kivi_tensor, rank, 20, 4);
FIELD(kivi_tensor, shape, 24, 32);
FIELD(kivi_tensor, stride, 56, 32);

SIZE(kivi_batch, 48);
FIELD(kivi_batch, struct_size, 0, 8);
FIELD(kivi_batch, rows, 8, 4);
FIELD(kivi_batch, max_count, 12, 4);
FIELD(kivi_batch, sequences, 16, 8);
FIELD(kivi_batch, counts, 24, 8);
FIELD(kivi_batch, offsets, 32, 8);
FIELD(kivi_batch, device, 40, 4);
FIELD(kivi_batch, reserved0, 44, 4);

SIZE(kivi_spec, 64);
FIELD(kivi_spec, bits, 0, 4);
FIELD(kivi_spec, axis, 4, 4);
FIELD(kivi_spec, group, 8, 4);
FIELD(kivi_spec, range, 12, 4);
FIELD(kivi_spec, range_ratio, 16, 4);
FIELD(kivi_spec, param_dtype, 20, 4);
FIELD(kivi_spec, transform, 24, 4);
FIELD(kivi_spec, rounding, 28, 4);
FIELD(kivi_spec, reserved, 32, 32);

SIZE(kivi_layer, 160);
FIELD(kivi_layer, kv_heads, 0, 4);
FIELD(kivi_layer, q_heads, 4, 4);
FIELD(kivi_layer, key_dim, 8, 4);
FIELD(kivi_layer, value_dim, 12, 4);
FIELD(kivi_layer, k, 16, 64);
FIELD(kivi_layer, v, 80, 64);
FIELD(kivi_layer, reserved, 144, 16);

SIZE(kivi_config, 272);
FIELD(kivi_config, struct_size, 0, 8);
FIELD(kivi_config, device, 8, 4);
FIELD(kivi_config, device_id, 12, 4);
FIELD(kivi_config, window_dtype, 16, 4);
FIELD(kivi_config, max_sequences, 20, 4);
FIELD(kivi_config, max_tokens, 24, 8);
FIELD(kivi_config, pool_tokens, 32, 8);
FIELD(kivi_config, sink, 40, 4);
FIELD(kivi_config, recent, 44, 4);
FIELD(kivi_config, flush, 48, 4);
FIELD(kivi_config, schedule, 52, 4);
FIELD(kivi_config, layer_count, 56, 4);
FIELD(kivi_config, threads, 60, 4);
FIELD(kivi_config, layers, 64, 8);
FIELD(kivi_config, layer, 72, 160);
FIELD(kivi_config, flags, 232, 8);
FIELD(kivi_config, reserved, 240, 32);

SIZE(kivi_preset, 168);
FIELD(kivi_preset, struct_size, 0, 8);
FIELD(kivi_preset, name, 8, 8);
FIELD(kivi_preset, what, 16, 8);
FIELD(kivi_preset, k, 24, 64);
FIELD(kivi_preset, v, 88, 64);
FIELD(kivi_preset, sink, 152, 4);
FIELD(kivi_preset, recent, 156, 4);
FIELD(kivi_preset, flush, 160, 4);
FIELD(kivi_preset, schedule, 164, 4);

SIZE(kivi_device_info, 424);
FIELD(kivi_device_info, struct_size, 0, 8);
FIELD(kivi_device_info, device, 8, 4);
FIELD(kivi_device_info, device_id, 12, 4);
FIELD(kivi_device_info, available, 16, 4);
FIELD(kivi_device_info, threads, 20, 4);
FIELD(kivi_device_info, capability, 24, 4);
FIELD(kivi_device_info, reserved0, 28, 4);
FIELD(kivi_device_info, memory_bytes, 32, 8);
FIELD(kivi_device_info, name, 40, 128);
FIELD(kivi_device_info, reason, 168, 256);

SIZE(kivi_support, 544);
FIELD(kivi_support, struct_size, 0, 8);
FIELD(kivi_support, supported, 8, 4);
FIELD(kivi_support, attend_path, 12, 4);
FIELD(kivi_support, pack_path, 16, 4);
FIELD(kivi_support, reserved0, 20, 4);
FIELD(kivi_support, bits_per_element, 24, 8);
FIELD(kivi_support, reason, 32, 512);

SIZE(kivi_memory, 80);
FIELD(kivi_memory, struct_size, 0, 8);
FIELD(kivi_memory, total_bytes, 8, 8);
FIELD(kivi_memory, page_bytes, 16, 8);
FIELD(kivi_memory, window_bytes, 24, 8);
FIELD(kivi_memory, table_bytes, 32, 8);
FIELD(kivi_memory, moment_bytes, 40, 8);
FIELD(kivi_memory, scratch_bytes, 48, 8);
FIELD(kivi_memory, blocks, 56, 8);
FIELD(kivi_memory, block_bytes, 64, 8);
FIELD(kivi_memory, layout_id, 72, 8);

SIZE(kivi_length, 40);
FIELD(kivi_length, struct_size, 0, 8);
FIELD(kivi_length, length, 8, 8);
FIELD(kivi_length, sink, 16, 8);
FIELD(kivi_length, key_border, 24, 8);
FIELD(kivi_length, value_border, 32, 8);

SIZE(kivi_statistics, 80);
FIELD(kivi_statistics, struct_size, 0, 8);
FIELD(kivi_statistics, tokens, 8, 8);
FIELD(kivi_statistics, packed_tokens, 16, 8);
FIELD(kivi_statistics, blocks_used, 24, 8);
FIELD(kivi_statistics, blocks_free, 32, 8);
FIELD(kivi_statistics, saturated_rows, 40, 8);
FIELD(kivi_statistics, key_rounding, 48, 4);
FIELD(kivi_statistics, moments, 52, 4);
FIELD(kivi_statistics, moment_queries, 56, 8);
FIELD(kivi_statistics, device_error, 64, 4);
FIELD(kivi_statistics, reserved0, 68, 4);
FIELD(kivi_statistics, live_bytes, 72, 8);

SIZE(kivi_attend_params, 96);
FIELD(kivi_attend_params, struct_size, 0, 8);
FIELD(kivi_attend_params, scale, 8, 4);
FIELD(kivi_attend_params, soft_cap, 12, 4);
FIELD(kivi_attend_params, window_left, 16, 8);
FIELD(kivi_attend_params, k, 24, 8);
FIELD(kivi_attend_params, v, 32, 8);
FIELD(kivi_attend_params, learned_sinks, 40, 8);
FIELD(kivi_attend_params, lse, 48, 8);
FIELD(kivi_attend_params, flags, 56, 8);
FIELD(kivi_attend_params, reserved, 64, 32);

SIZE(kivi_probe_params, 480);
FIELD(kivi_probe_params, struct_size, 0, 8);
FIELD(kivi_probe_params, q, 8, 88);
FIELD(kivi_probe_params, k, 96, 88);
FIELD(kivi_probe_params, v, 184, 88);
FIELD(kivi_probe_params, k_spec, 272, 64);
FIELD(kivi_probe_params, v_spec, 336, 64);
FIELD(kivi_probe_params, sink, 400, 4);
FIELD(kivi_probe_params, recent, 404, 4);
FIELD(kivi_probe_params, flush, 408, 4);
FIELD(kivi_probe_params, schedule, 412, 4);
FIELD(kivi_probe_params, window_dtype, 416, 4);
FIELD(kivi_probe_params, scale, 420, 4);
FIELD(kivi_probe_params, soft_cap, 424, 4);
FIELD(kivi_probe_params, reserved0, 428, 4);
FIELD(kivi_probe_params, window_left, 432, 8);
FIELD(kivi_probe_params, moments, 440, 8);
FIELD(kivi_probe_params, reserved, 448, 32);

SIZE(kivi_probe_result, 72);
FIELD(kivi_probe_result, struct_size, 0, 8);
FIELD(kivi_probe_result, key_error, 8, 8);
FIELD(kivi_probe_result, value_error, 16, 8);
FIELD(kivi_probe_result, score_error, 24, 8);
FIELD(kivi_probe_result, attention_kl, 32, 8);
FIELD(kivi_probe_result, output_error, 40, 8);
FIELD(kivi_probe_result, output_error_key, 48, 8);
FIELD(kivi_probe_result, output_error_value, 56, 8);
FIELD(kivi_probe_result, sparsity, 64, 8);

VALUE(KIVI_OK, 0);
VALUE(KIVI_ERROR_INVALID_ARGUMENT, -1);
VALUE(KIVI_ERROR_UNSUPPORTED, -2);
VALUE(KIVI_ERROR_OUT_OF_MEMORY, -3);
VALUE(KIVI_ERROR_CAPACITY, -4);
VALUE(KIVI_ERROR_NO_DEVICE, -5);
VALUE(KIVI_ERROR_DEVICE, -6);
VALUE(KIVI_ERROR_STATE, -7);
VALUE(KIVI_ERROR_CORRUPT, -8);
VALUE(KIVI_ERROR_MISMATCH, -9);
VALUE(KIVI_ERROR_BUFFER_TOO_SMALL, -10);
VALUE(KIVI_ERROR_INTERNAL, -11);
VALUE(KIVI_F32, 1);
VALUE(KIVI_F16, 2);
VALUE(KIVI_BF16, 3);
VALUE(KIVI_CPU, 1);
VALUE(KIVI_CUDA, 2);
VALUE(KIVI_AXIS_CHANNEL, 1);
VALUE(KIVI_AXIS_TOKEN, 2);
VALUE(KIVI_GROUP_HEAD, -1);
VALUE(KIVI_RANGE_MINMAX, 0);
VALUE(KIVI_RANGE_RATIO, 1);
VALUE(KIVI_TRANSFORM_NONE, 0);
VALUE(KIVI_TRANSFORM_HADAMARD, 1);
VALUE(KIVI_ROUND_NEAREST, 0);
VALUE(KIVI_ROUND_QUERY_AWARE, 1);
VALUE(KIVI_SCHEDULE_ROLLING, 0);
VALUE(KIVI_SCHEDULE_PUBLISHED, 1);
VALUE(KIVI_CACHE_REFERENCE, 1);
VALUE(KIVI_PATH_NONE, 0);
VALUE(KIVI_PATH_REFERENCE, 1);
VALUE(KIVI_PATH_GENERAL, 2);
VALUE(KIVI_PATH_FAST, 3);
VALUE(KIVI_ATTEND_INVARIANT, 1);
VALUE(KIVI_STORED_BASIS, 1);

/* Signatures: a changed one no longer matches its pointer. */
int32_t (*lock_kivi_version)(void) = kivi_version;
const char* (*lock_kivi_version_string)(void) = kivi_version_string;
const char* (*lock_kivi_build_info)(void) = kivi_build_info;
const char* (*lock_kivi_status_name)(kivi_status status) = kivi_status_name;
const char* (*lock_kivi_last_error)(void) = kivi_last_error;
kivi_status (*lock_kivi_batch_init)(kivi_batch* batch, size_t struct_size) = kivi_batch_init;
kivi_status (*lock_kivi_config_init)(kivi_config* config, size_t struct_size) = kivi_config_init;
int32_t (*lock_kivi_preset_count)(void) = kivi_preset_count;
kivi_status (*lock_kivi_preset_at)(int32_t index, kivi_preset* preset, size_t struct_size) = kivi_preset_at;
kivi_status (*lock_kivi_config_preset)(kivi_config* config, const char* name) = kivi_config_preset;
kivi_status (*lock_kivi_device_count)(int32_t device, int32_t* count) = kivi_device_count;
kivi_status (*lock_kivi_device_query)(int32_t device, int32_t device_id, kivi_device_info* info,
                                      size_t struct_size) = kivi_device_query;
kivi_status (*lock_kivi_device_allocate)(int32_t device, int32_t device_id, size_t bytes,
                                         void** memory) = kivi_device_allocate;
kivi_status (*lock_kivi_device_free)(int32_t device, int32_t device_id, void* memory) = kivi_device_free;
kivi_status (*lock_kivi_device_copy)(int32_t device, int32_t device_id, void* to, const void* from, size_t bytes,
                                     kivi_stream stream) = kivi_device_copy;
kivi_status (*lock_kivi_query_support)(const kivi_config* config, int32_t layer, kivi_support* support,
                                       size_t struct_size) = kivi_query_support;
kivi_status (*lock_kivi_cache_estimate)(const kivi_config* config, kivi_memory* memory,
                                        size_t struct_size) = kivi_cache_estimate;
kivi_status (*lock_kivi_cache_create)(const kivi_config* config, kivi_cache** cache) = kivi_cache_create;
void (*lock_kivi_cache_destroy)(kivi_cache* cache) = kivi_cache_destroy;
kivi_status (*lock_kivi_cache_reset)(kivi_cache* cache, kivi_stream stream) = kivi_cache_reset;
kivi_status (*lock_kivi_reserve)(kivi_cache* cache, int64_t tokens, kivi_stream stream) = kivi_reserve;
kivi_status (*lock_kivi_cache_memory)(const kivi_cache* cache, kivi_memory* memory,
                                      size_t struct_size) = kivi_cache_memory;
kivi_status (*lock_kivi_sequence_reset)(kivi_cache* cache, int32_t sequence,
                                        kivi_stream stream) = kivi_sequence_reset;
kivi_status (*lock_kivi_sequence_length)(const kivi_cache* cache, int32_t layer, int32_t sequence,
                                         kivi_length* length, size_t struct_size) = kivi_sequence_length;
kivi_status (*lock_kivi_query_statistics)(const kivi_cache* cache, int32_t layer, kivi_statistics* statistics,
                                          size_t struct_size) = kivi_query_statistics;
kivi_status (*lock_kivi_append)(kivi_cache* cache, int32_t layer, const kivi_batch* batch,
                                const kivi_tensor* k, const kivi_tensor* v, kivi_stream stream) = kivi_append;
kivi_status (*lock_kivi_flush_residual)(kivi_cache* cache, int32_t layer, const kivi_batch* batch,
                                        kivi_stream stream) = kivi_flush_residual;
kivi_status (*lock_kivi_attend_params_init)(kivi_attend_params* params,
                                            size_t struct_size) = kivi_attend_params_init;
kivi_status (*lock_kivi_attend)(const kivi_cache* cache, int32_t layer, const kivi_batch* batch,
                                const kivi_tensor* q, const kivi_tensor* out,
                                const kivi_attend_params* params, void* workspace, size_t workspace_bytes,
                                kivi_stream stream) = kivi_attend;
kivi_status (*lock_kivi_step)(kivi_cache* cache, int32_t layer, const kivi_batch* batch, const kivi_tensor* q,
                              const kivi_tensor* k, const kivi_tensor* v, const kivi_tensor* out,
                              const kivi_attend_params* params, void* workspace, size_t workspace_bytes,
                              kivi_stream stream) = kivi_step;
kivi_status (*lock_kivi_attend_workspace)(const kivi_cache* cache, int32_t layer, int32_t rows,
                                          int32_t max_count, size_t* bytes) = kivi_attend_workspace;
kivi_status (*lock_kivi_merge)(int32_t parts, const kivi_tensor* outs, const kivi_tensor* lses,
                               const float* learned_sinks, const kivi_tensor* out, const kivi_tensor* lse,
                               kivi_stream stream) = kivi_merge;
kivi_status (*lock_kivi_dequantize)(const kivi_cache* cache, int32_t layer, int32_t sequence, int64_t begin,
                                    int64_t end, const kivi_tensor* k, const kivi_tensor* v, uint64_t flags,
                                    kivi_stream stream) = kivi_dequantize;
kivi_status (*lock_kivi_export_size)(const kivi_cache* cache, int32_t sequence,
                                     size_t* bytes) = kivi_export_size;
kivi_status (*lock_kivi_export)(const kivi_cache* cache, int32_t sequence, void* buffer, size_t bytes,
                                size_t* written, kivi_stream stream) = kivi_export;
kivi_status (*lock_kivi_import)(kivi_cache* cache, int32_t sequence, const void* buffer, size_t bytes,
                                kivi_stream stream) = kivi_import;
kivi_status (*lock_kivi_moments_accumulate)(kivi_cache* cache, int32_t layer, const kivi_batch* batch,
                                            const kivi_tensor* q,
                                            kivi_stream stream) = kivi_moments_accumulate;
kivi_status (*lock_kivi_moments_set)(kivi_cache* cache, int32_t layer, const kivi_tensor* m, uint64_t flags,
                                     kivi_stream stream) = kivi_moments_set;
kivi_status (*lock_kivi_moments_commit)(kivi_cache* cache, int32_t layer,
                                        kivi_stream stream) = kivi_moments_commit;
kivi_status (*lock_kivi_moments_export_size)(const kivi_cache* cache, int32_t layer,
                                             size_t* bytes) = kivi_moments_export_size;
kivi_status (*lock_kivi_moments_export)(const kivi_cache* cache, int32_t layer, void* buffer, size_t bytes,
                                        size_t* written) = kivi_moments_export;
kivi_status (*lock_kivi_moments_import)(kivi_cache* cache, int32_t layer, const void* buffer, size_t bytes,
                                        kivi_stream stream) = kivi_moments_import;
kivi_status (*lock_kivi_probe_params_init)(kivi_probe_params* params,
                                           size_t struct_size) = kivi_probe_params_init;
kivi_status (*lock_kivi_probe)(const kivi_probe_params* params, kivi_probe_result* total,
                               kivi_probe_result* per_head, size_t struct_size) = kivi_probe;

int main(void) { return 0; }
