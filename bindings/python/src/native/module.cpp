// The module kivi._native: names, signatures and docstrings. What they do is in the files beside this one.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <deque>
#include <optional>

#include "array.h"
#include "cache.h"
#include "config.h"
#include "errors.h"
#include "gil.h"
#include "names.h"

namespace kivi_python {
namespace {

using namespace pybind11::literals;

// A result struct of the C API as a read-only Python class with a readable repr.
template <class T>
class Record {
  public:
    Record(py::module_& module, const char* name, const char* doc) : class_(module, name, doc) {
        class_.def("__repr__", [](py::object self) {
            py::list parts;
            for (py::handle field : self.attr("_fields")) {
                parts.append(py::str("{}={!r}").format(field, self.attr(py::str(field))));
            }
            return py::str("{}({})").format(py::type::of(self).attr("__name__"),
                                            py::str(", ").attr("join")(parts));
        });
    }
    ~Record() { class_.attr("_fields") = py::tuple(fields_); }

    template <class Member>
    Record& field(const char* name, Member member, const char* doc) {
        class_.def_property_readonly(name, member, doc);
        fields_.append(name);
        return *this;
    }
    template <class Member>
    Record& field(const char* name, Member T::*member, const char* doc) {
        class_.def_readonly(name, member, doc);
        fields_.append(name);
        return *this;
    }

  private:
    py::class_<T> class_;
    py::list fields_;
};

void bind_records(py::module_& module) {
    Record<kivi_length>(module, "Length", "Tokens of one sequence in one layer, and where they are.")
        .field("length", &kivi_length::length, "tokens")
        .field("sink", &kivi_length::sink, "tokens in the sink window")
        .field("key_border", &kivi_length::key_border,
               "keys at sink .. key_border - 1 are packed, key_border .. length - 1 are in the tail")
        .field("value_border", &kivi_length::value_border, "likewise for values");

    using Statistics = kivi_statistics;
    Record<Statistics>(module, "Statistics", "What a layer, or the whole cache, holds.")
        .field("tokens", &Statistics::tokens, "over all sequences")
        .field("packed_tokens", &Statistics::packed_tokens, "keys packed, over all sequences")
        .field("blocks_used", &Statistics::blocks_used, "of the whole cache, whatever the layer")
        .field("blocks_free", &Statistics::blocks_free, "of the whole cache, whatever the layer")
        .field("saturated_rows", &Statistics::saturated_rows,
               "rows with finite values beyond the range of the window dtype, which were clamped")
        .field(
            "key_rounding", [](const Statistics& s) { return word_of(kRoundings, s.key_rounding); },
            "the rounding that packs keys now: 'nearest' or 'query_aware'")
        .field(
            "moments", [](const Statistics& s) { return word_of(kMomentStates, s.moments); },
            "'none', 'accumulated' or 'committed'")
        .field("moment_queries", &Statistics::moment_queries, "query rows accumulated for each KV head")
        .field(
            "device_error", [](const Statistics& s) { return s.device_error != 0; },
            "True after a device error: queries and close only")
        .field("live_bytes", &Statistics::live_bytes, "bytes of K and V that attend would read");

    Record<kivi_memory>(module, "Memory", "Bytes of a cache; total_bytes is the sum of the other bytes.")
        .field("total_bytes", &kivi_memory::total_bytes, "everything below")
        .field("page_bytes", &kivi_memory::page_bytes, "blocks * block_bytes")
        .field("window_bytes", &kivi_memory::window_bytes, "sink windows and tails")
        .field("table_bytes", &kivi_memory::table_bytes, "page tables, lengths, reference counts")
        .field("moment_bytes", &kivi_memory::moment_bytes, "query moments and the tables made from them")
        .field("scratch_bytes", &kivi_memory::scratch_bytes, "of all threads")
        .field("blocks", &kivi_memory::blocks, "page blocks; one is 128 tokens of all layers and heads")
        .field("block_bytes", &kivi_memory::block_bytes, "bytes of one block")
        .field("layout_id", &kivi_memory::layout_id, "names the byte order of the pages");

    Record<kivi_device_info>(module, "DeviceInfo", "A device that a cache could live on.")
        .field(
            "device", [](const kivi_device_info& d) { return word_of(kDevices, d.device); },
            "'cpu' or 'cuda'")
        .field("device_id", &kivi_device_info::device_id, "ordinal of the kind")
        .field(
            "available", [](const kivi_device_info& d) { return d.available != 0; },
            "whether a cache can be created there")
        .field("threads", &kivi_device_info::threads, "CPU: cores; CUDA: multiprocessors")
        .field("capability", &kivi_device_info::capability, "CUDA: 10 * major + minor; CPU: 0")
        .field("memory_bytes", &kivi_device_info::memory_bytes, "total")
        .field(
            "name", [](const kivi_device_info& d) { return py::str(d.name); },
            "product name; CPU: the instruction set in use")
        .field(
            "reason", [](const kivi_device_info& d) { return py::str(d.reason); },
            "why not available, or ''");

    Record<kivi_support>(module, "Support",
                         "What create would say to a layer, and which code would serve it.")
        .field(
            "supported", [](const kivi_support& s) { return s.supported != 0; }, "create accepts it")
        .field(
            "attend_path", [](const kivi_support& s) { return word_of(kPaths, s.attend_path); },
            "'fast', 'general', 'reference' or 'none'")
        .field(
            "pack_path", [](const kivi_support& s) { return word_of(kPaths, s.pack_path); },
            "'fast', 'general', 'reference' or 'none'")
        .field("bits_per_element", &kivi_support::bits_per_element,
               "of a packed token, scale and min included, mean over K and V")
        .field(
            "reason", [](const kivi_support& s) { return py::str(s.reason); },
            "why refused, or why not the fast path; '' if neither");

    using Probe = kivi_probe_result;
    Record<Probe>(module, "ProbeResult",
                  "Errors of a pair of specs. Relative errors are Frobenius norms |x' - x| / |x|.")
        .field("key_error", &Probe::key_error, "packed keys against the given ones")
        .field("value_error", &Probe::value_error, "packed values against the given ones")
        .field("score_error", &Probe::score_error, "scores centred per query")
        .field("attention_kl", &Probe::attention_kl, "KL(exact || quantised) of attention weights, nats")
        .field("output_error", &Probe::output_error, "K and V quantised")
        .field("output_error_key", &Probe::output_error_key, "only K quantised")
        .field("output_error_value", &Probe::output_error_value, "only V quantised")
        .field("sparsity", &Probe::sparsity, "share of exact weights below 1 % of their row's maximum");
}

void bind_cache(py::module_& module) {
    const py::object none = py::none();
    py::class_<Cache>(module, "Cache", "The handle behind kivi.Cache.")
        .def(py::init<py::handle>(), "config"_a)
        .def("close", &Cache::close, R"(
Frees the cache. Closing twice is allowed; every other call on a closed cache raises StateError.)")
        .def_property_readonly("closed", &Cache::closed, "True after close().")
        .def("append", &Cache::append, "layer"_a, "k"_a, "v"_a, py::kw_only(), "sequences"_a = none,
             "counts"_a = none, "offsets"_a = none, "stream"_a = none, R"(
Appends tokens to the sequences of the batch in one layer.

k: [rows, tokens, kv_heads, key_dim], or [tokens, kv_heads, key_dim] with offsets. float32, float16 or
    bfloat16, any strides whose innermost is 1, read without a copy.
v: the same with value_dim.
sequences: [rows] ids, -1 skips a row. None: row r is sequence r.
counts: [rows] tokens of each row. None: all tokens of k.
offsets: [rows] first token of each row, for the form without a row axis. None: one after the other.
stream: a cudaStream_t as an integer for a cache on a GPU; None on the CPU.

CapacityError if a sequence would pass max_tokens or the pool is exhausted; then nothing is appended.)")
        .def("flush_residual", &Cache::flush_residual, "layer"_a = -1, py::kw_only(), "sequences"_a = none,
             "stream"_a = none, R"(
Packs the tails of the sequences (None: all) up to the last multiple of the group unit. layer -1: every
layer. Twice equals once.)")
        .def("attend", &Cache::attend, "layer"_a, "q"_a, "out"_a = none, py::kw_only(), "sequences"_a = none,
             "counts"_a = none, "offsets"_a = none, "scale"_a = 0.0f, "soft_cap"_a = 0.0f,
             "window_left"_a = -1, "k"_a = none, "v"_a = none, "learned_sinks"_a = none, "lse"_a = none,
             "invariant"_a = false, "workspace"_a = none, "stream"_a = none, R"(
Attention of new queries over everything a layer holds, straight from the packed form. Returns out.

q: [rows, tokens, q_heads, key_dim], or [tokens, q_heads, key_dim]; the last query of a row stands at the
    sequence's last token (causal, bottom-right).
out: the same with value_dim, written in place. None: made of zeros, of q's library, dtype and device.
sequences, counts, offsets: as in append.
scale: of q . k; 0: 1 / sqrt(key_dim).
soft_cap: score = soft_cap * tanh(score / soft_cap) after scaling; 0: off.
window_left: keys left of the query itself that it sees; -1: all.
k, v: fresh keys and values, both or none, shaped as in append: tokens that are not appended yet, as many
    a row as queries, not quantised.
learned_sinks: [q_heads] float32 logits added to the softmax's denominator.
lse: out, float32 [rows, tokens, q_heads] or [tokens, q_heads]: natural log of the sum of exp(score),
    learned sinks left out.
invariant: bits of the result do not depend on batch, threads or capacity; always so on the CPU.
workspace: scratch memory of at least attend_workspace() bytes, on the cache's device. None: the cache keeps its own.
stream: a cudaStream_t as an integer for a cache on a GPU; None on the CPU.)")
        .def("step", &Cache::step, "layer"_a, "q"_a, "k"_a, "v"_a, "out"_a = none, py::kw_only(),
             "sequences"_a = none, "counts"_a = none, "offsets"_a = none, "scale"_a = 0.0f, "soft_cap"_a = 0.0f,
             "window_left"_a = -1, "learned_sinks"_a = none, "lse"_a = none, "invariant"_a = false,
             "workspace"_a = none, "stream"_a = none, R"(
One step of a layer: attend with the new keys and values k and v, then append of them, as one call. Returns out.

The results are those of the two calls, but on a GPU one launch does both where it can (kivi.h), which costs about 1 us
more than attend for up to eight sequences; and a step that is refused, as with CapacityError, has neither attended nor appended. Like append
it needs the cache to itself.

q, out: as in attend.
k, v: as in append, as many tokens a row as queries; attended to as in attend.
All else: as in attend.)")
        .def("attend_workspace", &Cache::attend_workspace, "layer"_a, "rows"_a, "max_count"_a, R"(
Bytes that suffice for any attend or step on `layer` (-1: any layer) of at most `rows` rows with at most
`max_count` queries each.)")
        .def("reset", &Cache::reset, py::kw_only(), "stream"_a = none,
             "Empties every sequence; committed moments stay.")
        .def("sequence_reset", &Cache::sequence_reset, "sequence"_a, py::kw_only(), "stream"_a = none,
             "Empties one sequence and returns its blocks to the pool.")
        .def("reserve", &Cache::reserve, "tokens"_a, py::kw_only(), "stream"_a = none,
             "Enlarges the pool to at least `tokens` packed tokens over all sequences.")
        .def("sequence_reserve", &Cache::sequence_reserve, "sequence"_a, "tokens"_a, py::kw_only(),
             "stream"_a = none,
             "Gives one sequence all blocks that it needs at a length of `tokens`, for captured graphs.")
        .def("synchronize", &Cache::synchronize, py::kw_only(), "stream"_a = none,
             "Waits for the stream and takes the lengths from the device. Does nothing on the CPU.")
        .def("length", &Cache::length, "layer"_a, "sequence"_a, "The Length of one sequence in one layer.")
        .def("statistics", &Cache::statistics, "layer"_a = -1,
             "The Statistics of one layer, or of all together (-1).")
        .def("memory", &Cache::memory, "The Memory that the cache holds, in bytes.")
        .def("dequantize", &Cache::dequantize, "layer"_a, "sequence"_a, "begin"_a = 0, "end"_a = none,
             py::kw_only(), "k"_a = none, "v"_a = none, "stored_basis"_a = false, "stream"_a = none, R"(
Tokens begin .. end - 1 (None: to the end) of one sequence as attend reads them. Returns (k, v).

k: out, [tokens, kv_heads, key_dim]; v: out, [tokens, kv_heads, value_dim]. With both None they are made
    as float32 numpy arrays; with one None only the other is written.
stored_basis: rows as they are stored, a Hadamard not undone.)")
        .def("export_sequence", &Cache::export_sequence, "sequence"_a, py::kw_only(), "stream"_a = none,
             "One sequence, all layers, as a self-describing, checksummed blob of bytes (kivi_export).")
        .def("import_sequence", &Cache::import_sequence, "sequence"_a, "blob"_a, py::kw_only(),
             "stream"_a = none, R"(
Replaces the contents of `sequence` with those of a blob of export_sequence. CorruptError for a damaged
blob, MismatchError for one of another layout, CapacityError if it does not fit; the old contents then
stay.)")
        .def("moments_accumulate", &Cache::moments_accumulate, "layer"_a, "q"_a, py::kw_only(),
             "counts"_a = none, "offsets"_a = none, "stream"_a = none, R"(
Adds queries to the layer's second moments, against which query-aware rounding minimises.

q: [rows, tokens, q_heads, key_dim] or [tokens, q_heads, key_dim], as attend would be given them.)")
        .def("moments_set", &Cache::moments_set, "layer"_a, "m"_a, py::kw_only(), "stored_basis"_a = false,
             "stream"_a = none, R"(
Sets the moments. m: [kv_heads, key_dim, key_dim] float32, symmetric, finite, with a positive diagonal, as
the caller's queries have them or in the stored basis.)")
        .def("moments_commit", &Cache::moments_commit, "layer"_a, py::kw_only(), "stream"_a = none, R"(
Factors the layer's moments and uses them from now on. StateError once anything of the layer is packed.)")
        .def("moments_export", &Cache::moments_export, "layer"_a, "Committed moments as a blob of bytes.")
        .def("moments_import", &Cache::moments_import, "layer"_a, "blob"_a, py::kw_only(), "stream"_a = none,
             "Commits a blob of moments_export, under the rule of moments_commit.");
}

py::dict preset_fields(const kivi_spec& k, const kivi_spec& v, int32_t sink, int32_t recent, int32_t flush,
                       int32_t schedule) {
    return py::dict("k"_a = fields_of(k), "v"_a = fields_of(v), "sink"_a = sink, "recent"_a = recent,
                    "flush"_a = flush, "schedule"_a = word_of(kSchedules, schedule));
}

py::dict preset(const char* name) {
    kivi_config config;
    check(kivi_config_init(&config, sizeof config));
    check(kivi_config_preset(&config, name));
    return preset_fields(config.layer.k, config.layer.v, config.sink, config.recent, config.flush,
                         config.schedule);
}

py::list presets() {
    py::list result;
    for (int32_t i = 0; i < kivi_preset_count(); ++i) {
        kivi_preset preset = {};
        check(kivi_preset_at(i, &preset, sizeof preset));
        py::dict fields =
            preset_fields(preset.k, preset.v, preset.sink, preset.recent, preset.flush, preset.schedule);
        fields["name"] = preset.name;
        fields["what"] = preset.what;
        result.append(fields);
    }
    return result;
}

py::list devices() {
    py::list result;
    for (int32_t kind : {KIVI_CPU, KIVI_CUDA}) {
        int32_t count = 0;
        check(kivi_device_count(kind, &count));
        for (int32_t id = 0; id < count; ++id) {
            kivi_device_info info = {};
            check(kivi_device_query(kind, id, &info, sizeof info));
            result.append(py::cast(info));
        }
    }
    return result;
}

kivi_memory estimate(py::handle config) {
    const Config read(config);
    kivi_memory memory = {};
    run_unlocked([&] { return kivi_cache_estimate(&read.c, &memory, sizeof memory); });
    return memory;
}

kivi_support query_support(py::handle config, int32_t layer) {
    const Config read(config);
    kivi_support support = {};
    run_unlocked([&] { return kivi_query_support(&read.c, layer, &support, sizeof support); });
    return support;
}

py::object merge(const py::sequence& outs, const py::sequence& lses, py::object out, py::object lse,
                 py::object learned_sinks, py::object stream) {
    void* const on = stream_of(stream);
    if (outs.size() == 0 || outs.size() != lses.size()) {
        raise(KIVI_ERROR_INVALID_ARGUMENT, "outs: " + std::to_string(outs.size()) + " parts with " +
                                               std::to_string(lses.size()) +
                                               " lses, must be as many, at least 1");
    }
    std::deque<Tensor> held;  // keeps the arrays; the C call wants plain tensors in a row
    std::vector<kivi_tensor> parts, weights;
    for (size_t i = 0; i < outs.size(); ++i) {
        parts.push_back(*held.emplace_back("outs", outs[i], Access::read, on));
        weights.push_back(*held.emplace_back("lses", lses[i], Access::read, on));
    }
    const kivi_tensor& like = parts[0];
    if (like.rank < 2) {
        raise(KIVI_ERROR_INVALID_ARGUMENT,
              "outs: " + std::to_string(like.rank) + " dimensions, must be [rows, tokens, q_heads, dim]");
    }
    if (out.is_none()) {
        out = zeros_like(outs[0], std::vector<int64_t>(like.shape, like.shape + like.rank));
    }
    const Tensor result("out", out, Access::write, on);
    const OptionalTensor log_sum("lse", lse, Access::write, on);
    const OptionalFloats sinks("learned_sinks", learned_sinks, like.shape[like.rank - 2], on);
    run_unlocked([&] {
        return kivi_merge(static_cast<int32_t>(parts.size()), parts.data(), weights.data(), sinks.get(),
                          result.get(), log_sum.get(), on);
    });
    return out;
}

// What is None keeps the default of kivi_probe_params_init.
py::tuple probe(py::object q, py::object k, py::object v, py::handle k_spec, py::handle v_spec,
                std::optional<int32_t> sink, std::optional<int32_t> recent, std::optional<int32_t> flush,
                py::object schedule, py::object window_dtype, float scale, float soft_cap, int64_t window_left,
                py::object moments) {
    const Tensor queries("q", q, Access::read);
    const Tensor keys("k", k, Access::read);
    const Tensor values("v", v, Access::read);
    const OptionalTensor given("moments", moments, Access::read);
    if (keys.get()->rank != 3) {
        raise(KIVI_ERROR_INVALID_ARGUMENT,
              "k: " + std::to_string(keys.get()->rank) + " dimensions, must be [tokens, kv_heads, key_dim]");
    }
    kivi_probe_params params;
    check(kivi_probe_params_init(&params, sizeof params));
    params.q = *queries;
    params.k = *keys;
    params.v = *values;
    if (!k_spec.is_none()) {
        params.k_spec = spec_of(k_spec);
    }
    if (!v_spec.is_none()) {
        params.v_spec = spec_of(v_spec);
    }
    params.sink = sink.value_or(params.sink);
    params.recent = recent.value_or(params.recent);
    params.flush = flush.value_or(params.flush);
    if (!schedule.is_none()) {
        params.schedule = number_of(kSchedules, "schedule", schedule);
    }
    if (!window_dtype.is_none()) {
        params.window_dtype = number_of(kDtypes, "window_dtype", window_dtype);
    }
    params.scale = scale;
    params.soft_cap = soft_cap;
    params.window_left = window_left;
    params.moments = given.get();
    kivi_probe_result total = {};
    std::vector<kivi_probe_result> heads(static_cast<size_t>(params.k.shape[1]));
    run_unlocked([&] { return kivi_probe(&params, &total, heads.data(), sizeof total); });
    return py::make_tuple(total, heads);
}

void bind_functions(py::module_& module) {
    const py::object none = py::none();
    module.def("version", &kivi_version_string, "Version of the library that runs, 'major.minor.patch'.");
    module.def("build_info", &kivi_build_info, "One line about the build of the library.");
    module.def("status_name", &kivi_status_name, "status"_a,
               "The C name of a status number, such as 'KIVI_ERROR_CAPACITY'.");
    module.def("preset", &preset, "name"_a, "Fields of one preset.");
    module.def("presets", &presets, "Fields of every preset, with name and what.");
    module.def("devices", &devices, "The DeviceInfo of every device that the library sees.");
    module.def("estimate", &estimate, "config"_a,
               "The Memory that a Cache of this Config would take, in bytes, without making it.");
    module.def(
        "query_support", &query_support, "config"_a, "layer"_a = 0,
        "The Support that a layer of this Config has: whether create takes it, and the reason if not.");
    module.def("merge", &merge, "outs"_a, "lses"_a, "out"_a = none, py::kw_only(), "lse"_a = none,
               "learned_sinks"_a = none, "stream"_a = none, R"(
Combines partial results of the same queries over disjoint keys. Returns out.

outs: arrays [rows, tokens, q_heads, dim] or [tokens, q_heads, dim], one a part.
lses: their float32 log-sums, without the last size.
out: None: made like outs[0]; it may be one of outs.
lse: out, float32, the log-sum of all parts; None: not wanted.
learned_sinks: [q_heads] float32, for the last merge only.)");
    module.def("probe", &probe, "q"_a, "k"_a, "v"_a, "k_spec"_a = none, "v_spec"_a = none, py::kw_only(),
               "sink"_a = none, "recent"_a = none, "flush"_a = none, "schedule"_a = none, "window_dtype"_a = none,
               "scale"_a = 0.0f, "soft_cap"_a = 0.0f, "window_left"_a = -1, "moments"_a = none, R"(
Error of a pair of specs on a model's own q, k, v, where it is consumed, in double precision. Returns
(total, heads): one ProbeResult over everything, and a list with one of each KV head.

q: [queries, q_heads, key_dim], the last `queries` positions of the sequence.
k: [tokens, kv_heads, key_dim]; v: [tokens, kv_heads, value_dim].
k_spec, v_spec: the Spec of each; None: those of the preset k3v2.
sink, recent, flush, schedule: windows in tokens, as in Config; None: those of the preset k3v2.
window_dtype: of the windows, as in Config; None: "float16".
scale, soft_cap, window_left: as in Cache.attend.
moments: [kv_heads, key_dim, key_dim] float32; None: from q itself if a spec asks for them.)");
}

}  // namespace
}  // namespace kivi_python

PYBIND11_MODULE(_native, module) {
    module.doc() = "The C API of libkivi for Python. Import kivi instead.";
    kivi_python::bind_errors(module);
    kivi_python::bind_records(module);
    kivi_python::bind_cache(module);
    kivi_python::bind_functions(module);
}
