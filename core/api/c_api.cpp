// The entry points of the C API: each checks, translates and calls the core, in a few lines.
#include "kivi/kivi.h"

#include <cstdio>
#include <string>

#include "api/batch_check.h"
#include "api/handle.h"
#include "api/merge_check.h"
#include "api/probe_check.h"
#include "api/status.h"
#include "api/struct_size.h"
#include "api/tensor_check.h"
#include "api/value_check.h"
#include "backend/registry.h"
#include "cache/cache.h"
#include "cache/config.h"
#include "cache/presets.h"
#include "cache/refuse.h"
#include "format/layout.h"

using namespace kivi;

namespace {

#define KIVI_TEXT_(x) #x
#define KIVI_TEXT(x) KIVI_TEXT_(x)
#define KIVI_VERSION_TEXT \
    KIVI_TEXT(KIVI_VERSION_MAJOR) "." KIVI_TEXT(KIVI_VERSION_MINOR) "." KIVI_TEXT(KIVI_VERSION_PATCH)

#if defined(__clang__)
#define KIVI_COMPILER "Clang " __clang_version__
#else
#define KIVI_COMPILER "GCC " __VERSION__
#endif

// Made once, without allocating: the call that returns it cannot fail.
struct BuildInfo {
    char line[256];
    BuildInfo() {
        std::snprintf(line, sizeof line, "libkivi %s, %s, %s", KIVI_VERSION_TEXT, KIVI_COMPILER,
                      build_targets());
    }
};

void check_device_kind(int32_t device) {
    if (device != KIVI_CPU && device != KIVI_CUDA) {
        refuse_argument("device is ", device, "; supported are 1 (CPU) and 2 (CUDA)");
    }
}

const BackendKind& backend_for(int32_t device) {
    check_device_kind(device);
    const BackendKind* const kind = find_backend(device);
    if (kind == nullptr)
        refuse(KIVI_ERROR_UNSUPPORTED, "device is ", device, " (CUDA), which this build does not have");
    return *kind;
}

void check_device_id(const BackendKind* kind, int32_t device_id) {
    if (device_id < 0) refuse_argument("device_id is ", device_id, "; it must not be negative");
    if (kind == nullptr) return;
    const int32_t count = kind->count();
    if (device_id >= count) {
        refuse(KIVI_ERROR_NO_DEVICE, "device_id is ", device_id, "; there are ", count, " devices of this kind");
    }
}

const BackendKind& existing_device(int32_t device, int32_t device_id) {
    const BackendKind& kind = backend_for(device);
    check_device_id(&kind, device_id);
    return kind;
}

kivi_config take_config(const kivi_config* config) { return take_struct("config", config); }

// The model, and the word of the backend that it serves every layer.
Model accepted_model(const kivi_config& config, const BackendKind& kind) {
    Model model = make_model(config);
    for (const kivi_layer& layer : model.layers) {
        if (layer.kv_heads == 0) continue;
        const PathInfo path = kind.path(model, layer);
        if (path.attend_path == KIVI_PATH_NONE) refuse(KIVI_ERROR_UNSUPPORTED, path.reason);
    }
    return model;
}

kivi_memory memory_of(const Model& model, const BackendKind& kind) {
    return estimate(model, kind.layout_version(model), kind.scratch_bytes(model));
}

// A blob buffer may have any alignment; a NULL one must be empty.
void check_buffer(const void* buffer, size_t bytes) {
    if (buffer == nullptr && bytes > 0) refuse_argument("buffer is NULL, but bytes is ", bytes);
}

template <class T>
void init_struct(const char* name, T* to, size_t struct_size, T defaults) {
    check_output_struct(name, to, struct_size);
    put_struct(to, struct_size, defaults);
}

kivi_attend_params attend_defaults() {
    kivi_attend_params defaults{};
    defaults.window_left = -1;
    return defaults;
}

kivi_attend_params take_attend_params(const kivi_attend_params* from) {
    if (from == nullptr) return attend_defaults();
    const kivi_attend_params params = take_struct("params", from);
    check_reserved("params", params.reserved);
    return params;
}

// Keys and values that the batch's rows bring.
View check_keys(const char* name, const kivi_tensor* k, const kivi_layer& shape, Batch& batch, Place place) {
    return check_batch_tensor(k, {name, shape.kv_heads, shape.key_dim}, batch, place);
}
View check_values(const char* name, const kivi_tensor* v, const kivi_layer& shape, Batch& batch, Place place) {
    return check_batch_tensor(v, {name, shape.kv_heads, shape.value_dim}, batch, place);
}

// All that attend is asked but for fresh keys and values.
AttendRequest check_attend(const kivi_tensor* q, const kivi_tensor* out, const kivi_attend_params& params,
                           const kivi_layer& shape, Batch& batch, Place place) {
    AttendRequest request;
    request.q = check_batch_tensor(q, {"q", shape.q_heads, shape.key_dim}, batch, place);
    request.out = check_batch_tensor(out, {"out", shape.q_heads, shape.value_dim, true}, batch, place);
    request.scale = checked_finite("params.scale", params.scale);
    request.soft_cap = checked_soft_cap("params.soft_cap", params.soft_cap);
    request.window_left = checked_window_left("params.window_left", params.window_left);
    request.flags = checked_flags(params.flags, KIVI_ATTEND_INVARIANT);
    if (params.learned_sinks != nullptr) {
        check_pointer("params.learned_sinks", params.learned_sinks, alignof(float));
        request.learned_sinks = params.learned_sinks;
    }
    if (params.lse != nullptr) {
        request.lse = check_batch_tensor(params.lse, {"params.lse", shape.q_heads, 0, true, KIVI_F32}, batch,
                                         place);
    }
    return request;
}

void apply_preset(const kivi_preset& preset, kivi_config* config) {
    config->layer.k = preset.k;
    config->layer.v = preset.v;
    config->sink = preset.sink;
    config->recent = preset.recent;
    config->flush = preset.flush;
    config->schedule = preset.schedule;
}

void copy_text(char* to, size_t size, const std::string& text) {
    std::snprintf(to, size, "%s", text.c_str());
}

}  // namespace

// ---- Version and status ----------------------------------------------------------------------------------

int32_t kivi_version(void) {
    return 10000 * KIVI_VERSION_MAJOR + 100 * KIVI_VERSION_MINOR + KIVI_VERSION_PATCH;
}
const char* kivi_version_string(void) { return KIVI_VERSION_TEXT; }
const char* kivi_build_info(void) {
    static const BuildInfo info;
    return info.line;
}
const char* kivi_status_name(kivi_status status) { return status_name(status); }
const char* kivi_last_error(void) { return last_error(); }

// ---- Structs and presets ----------------------------------------------------------------------------------

kivi_status kivi_batch_init(kivi_batch* batch, size_t struct_size) {
    return guarded([&] { init_struct("batch", batch, struct_size, kivi_batch{}); });
}

kivi_status kivi_config_init(kivi_config* config, size_t struct_size) {
    return guarded([&] {
        kivi_config defaults{};
        defaults.device = KIVI_CPU;
        defaults.window_dtype = KIVI_F16;
        apply_preset(*find_preset("k3v2"), &defaults);
        init_struct("config", config, struct_size, defaults);
    });
}

kivi_status kivi_attend_params_init(kivi_attend_params* params, size_t struct_size) {
    return guarded([&] {
        init_struct("params", params, struct_size, attend_defaults());
    });
}

kivi_status kivi_probe_params_init(kivi_probe_params* params, size_t struct_size) {
    return guarded([&] {
        kivi_probe_params defaults{};
        const kivi_preset& preset = *find_preset("k3v2");
        defaults.k_spec = preset.k;
        defaults.v_spec = preset.v;
        defaults.sink = preset.sink;
        defaults.recent = preset.recent;
        defaults.flush = preset.flush;
        defaults.schedule = preset.schedule;
        defaults.window_dtype = KIVI_F16;
        defaults.window_left = -1;
        init_struct("params", params, struct_size, defaults);
    });
}

int32_t kivi_preset_count(void) { return preset_count(); }

kivi_status kivi_preset_at(int32_t index, kivi_preset* preset, size_t struct_size) {
    return guarded([&] {
        check_output_struct("preset", preset, struct_size);
        if (index < 0 || index >= preset_count()) {
            refuse_argument("index is ", index, "; it must be from 0 to ", preset_count() - 1);
        }
        put_struct(preset, struct_size, preset_at(index));
    });
}

kivi_status kivi_config_preset(kivi_config* config, const char* name) {
    return guarded([&] {
        take_config(config);
        if (name == nullptr) refuse_argument("name is NULL");
        const kivi_preset* const preset = find_preset(name);
        if (preset == nullptr) refuse_argument("name is \"", name, "\"; presets are ", preset_names());
        apply_preset(*preset, config);
    });
}

// ---- Devices and capabilities -----------------------------------------------------------------------------

kivi_status kivi_device_count(int32_t device, int32_t* count) {
    return guarded([&] {
        check_pointer("count", count, alignof(int32_t));
        check_device_kind(device);
        const BackendKind* const kind = find_backend(device);
        *count = kind ? kind->count() : 0;
    });
}

kivi_status kivi_device_query(int32_t device, int32_t device_id, kivi_device_info* info, size_t struct_size) {
    return guarded([&] {
        check_output_struct("info", info, struct_size);
        check_device_kind(device);
        const BackendKind* const kind = find_backend(device);
        check_device_id(kind, device_id);
        kivi_device_info answer{};
        if (kind != nullptr) {
            answer = kind->query(device_id);
        } else {
            copy_text(answer.reason, sizeof answer.reason, "this build has no CUDA");
        }
        answer.device = device;
        answer.device_id = device_id;
        put_struct(info, struct_size, answer);
    });
}

kivi_status kivi_device_allocate(int32_t device, int32_t device_id, size_t bytes, void** memory) {
    return guarded([&] {
        check_pointer("memory", memory, alignof(void*));
        *memory = nullptr;
        const BackendKind& kind = existing_device(device, device_id);
        if (bytes > 0) *memory = kind.allocate(device_id, bytes);
    });
}

kivi_status kivi_device_free(int32_t device, int32_t device_id, void* memory) {
    return guarded([&] {
        const BackendKind& kind = existing_device(device, device_id);
        if (memory != nullptr) kind.free(device_id, memory);
    });
}

kivi_status kivi_device_copy(int32_t device, int32_t device_id, void* to, const void* from, size_t bytes,
                             kivi_stream stream) {
    return guarded([&] {
        const BackendKind& kind = existing_device(device, device_id);
        if (device == KIVI_CPU && stream != nullptr) refuse_argument("stream is ", stream, "; the CPU takes NULL only");
        if (bytes == 0) return;
        check_pointer("to", to, 1);
        check_pointer("from", from, 1);
        kind.copy(device_id, to, from, bytes, stream);
    });
}

kivi_status kivi_query_support(const kivi_config* from, int32_t layer, kivi_support* support,
                               size_t struct_size) {
    return guarded([&] {
        check_output_struct("support", support, struct_size);
        const kivi_config config = take_config(from);
        if (layer < 0 || layer >= config.layer_count) {
            refuse_argument("layer is ", layer, "; it must be from 0 to ", config.layer_count - 1);
        }
        kivi_support answer{};
        try {
            const BackendKind& kind = backend_for(config.device);
            const Model model = accepted_model(config, kind);
            check_device_id(&kind, config.device_id);
            const kivi_device_info device = kind.query(config.device_id);
            if (!device.available) refuse(KIVI_ERROR_UNSUPPORTED, device.reason);
            answer.supported = 1;
            if (model.has(layer)) {
                const PathInfo path = kind.path(model, model.layers[layer]);
                answer.attend_path = path.attend_path;
                answer.pack_path = path.pack_path;
                answer.bits_per_element = bits_per_element(model.layers[layer], model.window_dtype);
                copy_text(answer.reason, sizeof answer.reason, path.reason);
            } else {
                copy_text(answer.reason, sizeof answer.reason, "the layer keeps nothing here (kv_heads 0)");
            }
        } catch (const Error& refusal) {
            answer = kivi_support{};
            copy_text(answer.reason, sizeof answer.reason, refusal.what());
        }
        put_struct(support, struct_size, answer);
    });
}

// ---- Cache ------------------------------------------------------------------------------------------------

kivi_status kivi_cache_estimate(const kivi_config* from, kivi_memory* memory, size_t struct_size) {
    return guarded([&] {
        check_output_struct("memory", memory, struct_size);
        const kivi_config config = take_config(from);
        const BackendKind& kind = backend_for(config.device);
        put_struct(memory, struct_size, memory_of(accepted_model(config, kind), kind));
    });
}

kivi_status kivi_cache_create(const kivi_config* from, kivi_cache** cache) {
    return guarded([&] {
        check_pointer("cache", cache, alignof(kivi_cache*));
        *cache = nullptr;
        const kivi_config config = take_config(from);
        const BackendKind& kind = backend_for(config.device);
        const Model model = accepted_model(config, kind);
        const kivi_memory memory = memory_of(model, kind);
        *cache = make_handle(std::make_unique<Cache>(model, kind.create(model), memory));
    });
}

void kivi_cache_destroy(kivi_cache* cache) {
    guarded([&] { destroy_handle(cache); });
}

kivi_status kivi_cache_reset(kivi_cache* handle, kivi_stream stream) {
    return guarded([&] { ExclusiveUse(handle)->reset(stream); });
}

kivi_status kivi_reserve(kivi_cache* handle, int64_t tokens, kivi_stream stream) {
    return guarded([&] { ExclusiveUse(handle)->reserve(tokens, stream); });
}

kivi_status kivi_cache_memory(const kivi_cache* handle, kivi_memory* memory, size_t struct_size) {
    return guarded([&] {
        check_output_struct("memory", memory, struct_size);
        put_struct(memory, struct_size, SharedUse(handle)->memory());
    });
}

kivi_status kivi_synchronize(kivi_cache* handle, kivi_stream stream) {
    return guarded([&] { ExclusiveUse(handle)->synchronize(stream); });
}

// ---- Sequences --------------------------------------------------------------------------------------------

kivi_status kivi_sequence_reset(kivi_cache* handle, int32_t sequence, kivi_stream stream) {
    return guarded([&] { ExclusiveUse(handle)->reset_sequence(sequence, stream); });
}

kivi_status kivi_sequence_reserve(kivi_cache* handle, int32_t sequence, int64_t tokens, kivi_stream stream) {
    return guarded([&] { ExclusiveUse(handle)->reserve_sequence(sequence, tokens, stream); });
}

kivi_status kivi_sequence_length(const kivi_cache* handle, int32_t layer, int32_t sequence,
                                 kivi_length* length, size_t struct_size) {
    return guarded([&] {
        check_output_struct("length", length, struct_size);
        const SharedUse cache(handle);
        cache->layer(layer);
        cache->check_sequence(sequence);
        put_struct(length, struct_size, cache->length(layer, sequence));
    });
}

kivi_status kivi_query_statistics(const kivi_cache* handle, int32_t layer, kivi_statistics* statistics,
                                  size_t struct_size) {
    return guarded([&] {
        check_output_struct("statistics", statistics, struct_size);
        const SharedUse cache(handle);
        if (layer != -1) cache->layer(layer);
        put_struct(statistics, struct_size, cache->statistics(layer));
    });
}

// ---- Work -------------------------------------------------------------------------------------------------

kivi_status kivi_append(kivi_cache* handle, int32_t layer, const kivi_batch* rows, const kivi_tensor* k,
                        const kivi_tensor* v, kivi_stream stream) {
    return guarded([&] {
        const ExclusiveUse cache(handle);
        const kivi_layer& shape = cache->layer(layer);
        const Place place = place_of(cache->model());
        Batch batch = check_batch(rows, cache->model());
        const View keys = check_keys("k", k, shape, batch, place);
        const View values = check_values("v", v, shape, batch, place);
        cache->append(layer, batch, keys, values, stream);
    });
}

kivi_status kivi_flush_residual(kivi_cache* handle, int32_t layer, const kivi_batch* rows,
                                kivi_stream stream) {
    return guarded([&] {
        const ExclusiveUse cache(handle);
        if (layer != -1) cache->layer(layer);
        cache->flush(layer, check_batch(rows, cache->model(), BatchUse::sequences), stream);
    });
}

kivi_status kivi_attend(const kivi_cache* handle, int32_t layer, const kivi_batch* rows, const kivi_tensor* q,
                        const kivi_tensor* out, const kivi_attend_params* from, void* workspace,
                        size_t workspace_bytes, kivi_stream stream) {
    return guarded([&] {
        const SharedUse cache(handle);
        const kivi_layer& shape = cache->layer(layer);
        const Place place = place_of(cache->model());
        Batch batch = check_batch(rows, cache->model());
        const kivi_attend_params params = take_attend_params(from);
        AttendRequest request = check_attend(q, out, params, shape, batch, place);
        if ((params.k == nullptr) != (params.v == nullptr)) {
            refuse_argument("params.", params.k ? "v" : "k",
                            " is NULL; fresh keys and values come together");
        }
        if (params.k != nullptr) {
            request.k = check_keys("params.k", params.k, shape, batch, place);
            request.v = check_values("params.v", params.v, shape, batch, place);
        }
        cache->attend(layer, batch, request, workspace, workspace_bytes, stream);
    });
}

kivi_status kivi_step(kivi_cache* handle, int32_t layer, const kivi_batch* rows, const kivi_tensor* q,
                      const kivi_tensor* k, const kivi_tensor* v, const kivi_tensor* out,
                      const kivi_attend_params* from, void* workspace, size_t workspace_bytes,
                      kivi_stream stream) {
    return guarded([&] {
        const ExclusiveUse cache(handle);
        const kivi_layer& shape = cache->layer(layer);
        const Place place = place_of(cache->model());
        Batch batch = check_batch(rows, cache->model());
        const kivi_attend_params params = take_attend_params(from);
        AttendRequest request = check_attend(q, out, params, shape, batch, place);
        if (params.k != nullptr || params.v != nullptr) {
            refuse_argument("params.", params.k ? "k" : "v",
                            " is set; it must be NULL, since kivi_step takes k and v itself");
        }
        request.k = check_keys("k", k, shape, batch, place);
        request.v = check_values("v", v, shape, batch, place);
        cache->step(layer, batch, request, workspace, workspace_bytes, stream);
    });
}

kivi_status kivi_attend_workspace(const kivi_cache* handle, int32_t layer, int32_t rows, int32_t max_count,
                                  size_t* bytes) {
    return guarded([&] {
        check_pointer("bytes", bytes, alignof(size_t));
        const SharedUse cache(handle);
        if (layer != -1) cache->layer(layer);
        if (rows < 0) refuse_argument("rows is ", rows, "; it must not be negative");
        if (max_count < 0) refuse_argument("max_count is ", max_count, "; it must not be negative");
        *bytes = cache->attend_workspace(layer, rows, max_count);
    });
}

kivi_status kivi_merge(int32_t parts, const kivi_tensor* outs, const kivi_tensor* lses,
                       const float* learned_sinks, const kivi_tensor* out, const kivi_tensor* lse,
                       kivi_stream stream) {
    return guarded([&] {
        MergeCall call = check_merge(parts, outs, lses, learned_sinks, out, lse);
        if (out->device == KIVI_CPU && stream != nullptr) {
            refuse_argument("stream is ", stream, "; tensors on the CPU take NULL only");
        }
        call.stream = stream;
        backend_for(out->device).merge(call);
    });
}

// ---- Reading back, moving ---------------------------------------------------------------------------------

kivi_status kivi_dequantize(const kivi_cache* handle, int32_t layer, int32_t sequence, int64_t begin,
                            int64_t end, const kivi_tensor* k, const kivi_tensor* v, uint64_t flags,
                            kivi_stream stream) {
    return guarded([&] {
        const SharedUse cache(handle);
        const kivi_layer& shape = cache->layer(layer);
        const Place place = place_of(cache->model());
        cache->check_sequence(sequence);
        const int64_t length = cache->length(layer, sequence).length;
        if (begin < 0 || begin > length)
            refuse_argument("begin is ", begin, "; it must be from 0 to ", length);
        if (end < begin || end > length)
            refuse_argument("end is ", end, "; it must be from ", begin, " to ", length);
        View keys, values;
        if (k) keys = check_tokens_tensor(k, {"k", shape.kv_heads, shape.key_dim, true}, end - begin, place);
        if (v)
            values = check_tokens_tensor(v, {"v", shape.kv_heads, shape.value_dim, true}, end - begin, place);
        const bool stored = checked_flags(flags, KIVI_STORED_BASIS) != 0;
        cache->dequantize(layer, sequence, begin, end, keys, values, stored, stream);
    });
}

kivi_status kivi_export_size(const kivi_cache* handle, int32_t sequence, size_t* bytes) {
    return guarded([&] {
        check_pointer("bytes", bytes, alignof(size_t));
        const SharedUse cache(handle);
        cache->check_sequence(sequence);
        *bytes = cache->export_size(sequence);
    });
}

kivi_status kivi_export(const kivi_cache* handle, int32_t sequence, void* buffer, size_t bytes,
                        size_t* written, kivi_stream stream) {
    return guarded([&] {
        check_pointer("written", written, alignof(size_t));
        check_buffer(buffer, bytes);
        const SharedUse cache(handle);
        cache->check_sequence(sequence);
        *written = cache->export_sequence(sequence, buffer, bytes, stream);
    });
}

kivi_status kivi_import(kivi_cache* handle, int32_t sequence, const void* buffer, size_t bytes,
                        kivi_stream stream) {
    return guarded([&] {
        check_buffer(buffer, bytes);
        const ExclusiveUse cache(handle);
        cache->check_sequence(sequence);
        cache->import_sequence(sequence, buffer, bytes, stream);
    });
}

// ---- Moments ----------------------------------------------------------------------------------------------

kivi_status kivi_moments_accumulate(kivi_cache* handle, int32_t layer, const kivi_batch* rows,
                                    const kivi_tensor* q, kivi_stream stream) {
    return guarded([&] {
        const ExclusiveUse cache(handle);
        const kivi_layer& shape = cache->query_aware_layer(layer);
        const Place place = place_of(cache->model());
        Batch batch = check_batch(rows, cache->model(), BatchUse::counts);
        const View queries = check_batch_tensor(q, {"q", shape.q_heads, shape.key_dim}, batch, place);
        cache->accumulate_moments(layer, batch, queries, stream);
    });
}

kivi_status kivi_moments_set(kivi_cache* handle, int32_t layer, const kivi_tensor* m, uint64_t flags,
                             kivi_stream stream) {
    return guarded([&] {
        const ExclusiveUse cache(handle);
        const kivi_layer& shape = cache->query_aware_layer(layer);
        const Place place = place_of(cache->model());
        const View moments = check_tokens_tensor(m, {"m", shape.key_dim, shape.key_dim, false, KIVI_F32},
                                                 shape.kv_heads, place);
        cache->set_moments(layer, moments, checked_flags(flags, KIVI_STORED_BASIS) != 0, stream);
    });
}

kivi_status kivi_moments_commit(kivi_cache* handle, int32_t layer, kivi_stream stream) {
    return guarded([&] {
        const ExclusiveUse cache(handle);
        cache->query_aware_layer(layer);
        cache->commit_moments(layer, stream);
    });
}

kivi_status kivi_moments_export_size(const kivi_cache* handle, int32_t layer, size_t* bytes) {
    return guarded([&] {
        check_pointer("bytes", bytes, alignof(size_t));
        const SharedUse cache(handle);
        cache->query_aware_layer(layer);
        *bytes = cache->moments_export_size(layer);
    });
}

kivi_status kivi_moments_export(const kivi_cache* handle, int32_t layer, void* buffer, size_t bytes,
                                size_t* written) {
    return guarded([&] {
        check_pointer("written", written, alignof(size_t));
        check_buffer(buffer, bytes);
        const SharedUse cache(handle);
        cache->query_aware_layer(layer);
        *written = cache->export_moments(layer, buffer, bytes);
    });
}

kivi_status kivi_moments_import(kivi_cache* handle, int32_t layer, const void* buffer, size_t bytes,
                                kivi_stream stream) {
    return guarded([&] {
        check_buffer(buffer, bytes);
        const ExclusiveUse cache(handle);
        cache->query_aware_layer(layer);
        cache->import_moments(layer, buffer, bytes, stream);
    });
}

// ---- Probe ------------------------------------------------------------------------------------------------

kivi_status kivi_probe(const kivi_probe_params* params, kivi_probe_result* total, kivi_probe_result* per_head,
                       size_t struct_size) {
    return guarded([&] {
        check_output_struct("total", total, struct_size);
        if (per_head != nullptr) check_output_struct("per_head", per_head, struct_size);
        if (struct_size % alignof(kivi_probe_result) != 0) {
            refuse_argument("struct_size is ", struct_size,
                            "; it must be the size of a struct of numbers of 8 bytes");
        }
        const ProbeAnswer answer = probe(check_probe(take_struct("params", params)));
        put_struct(total, struct_size, answer.total);
        auto* at = reinterpret_cast<unsigned char*>(per_head);
        for (size_t head = 0; per_head != nullptr && head < answer.heads.size(); head++, at += struct_size) {
            put_struct(reinterpret_cast<kivi_probe_result*>(at), struct_size, answer.heads[head]);
        }
    });
}
