// Config, see config.h. Values are not judged here: the library refuses what it does not support.
#include "config.h"

#include "array.h"
#include "names.h"

namespace kivi_python {
namespace {

int32_t int32_field(py::handle object, const char* field) {
    return integer<int32_t>(field, object.attr(field));
}

int64_t int64_field(py::handle object, const char* field) {
    return integer<int64_t>(field, object.attr(field));
}

kivi_layer layer_of(py::handle layer) {
    kivi_layer result = {};
    result.kv_heads = int32_field(layer, "kv_heads");
    result.q_heads = int32_field(layer, "q_heads");
    result.key_dim = int32_field(layer, "key_dim");
    result.value_dim = int32_field(layer, "value_dim");
    result.k = spec_of(layer.attr("k"));
    result.v = spec_of(layer.attr("v"));
    return result;
}

}  // namespace

// None stands for the zeros of an absent layer; axis None and group 0 for those of a 16-bit tensor.
kivi_spec spec_of(py::handle spec) {
    kivi_spec result = {};
    if (spec.is_none()) {
        return result;
    }
    result.bits = int32_field(spec, "bits");
    const py::object axis = spec.attr("axis");
    result.axis = axis.is_none() ? 0 : number_of(kAxes, "axis", axis);
    const py::object group = spec.attr("group");
    result.group = py::isinstance<py::str>(group) && std::string(py::str(group)) == "head"
                       ? static_cast<int32_t>(KIVI_GROUP_HEAD)
                       : integer<int32_t>("group", group);
    result.range = number_of(kRanges, "range", spec.attr("range"));
    result.range_ratio = static_cast<float>(py::float_(spec.attr("range_ratio")));
    const py::object param_dtype = spec.attr("param_dtype");
    result.param_dtype = param_dtype.is_none() ? 0 : number_of(kDtypes, "param_dtype", param_dtype);
    result.transform = number_of(kTransforms, "transform", spec.attr("transform"));
    result.rounding = number_of(kRoundings, "rounding", spec.attr("rounding"));
    return result;
}

py::dict fields_of(const kivi_spec& spec) {
    py::dict fields;
    fields["bits"] = spec.bits;
    fields["axis"] = word_of(kAxes, spec.axis);
    fields["group"] = spec.group == KIVI_GROUP_HEAD ? py::object(py::str("head")) : py::int_(spec.group);
    fields["range"] = word_of(kRanges, spec.range);
    fields["range_ratio"] = spec.range_ratio;
    fields["param_dtype"] = word_of(kDtypes, spec.param_dtype);
    fields["transform"] = word_of(kTransforms, spec.transform);
    fields["rounding"] = word_of(kRoundings, spec.rounding);
    return fields;
}

Config::Config(py::handle config) : c() {
    check(kivi_config_init(&c, sizeof c));
    c.device = number_of(kDevices, "device", config.attr("device"));
    c.device_id = int32_field(config, "device_id");
    c.window_dtype = number_of(kDtypes, "window_dtype", config.attr("window_dtype"));
    c.max_sequences = int32_field(config, "max_sequences");
    c.max_tokens = int64_field(config, "max_tokens");
    c.pool_tokens = int64_field(config, "pool_tokens");
    c.sink = int32_field(config, "sink");
    c.recent = int32_field(config, "recent");
    c.flush = int32_field(config, "flush");
    c.schedule = number_of(kSchedules, "schedule", config.attr("schedule"));
    c.threads = int32_field(config, "threads");
    c.flags = py::cast<bool>(config.attr("reference")) ? KIVI_CACHE_REFERENCE : 0;
    for (py::handle layer : config.attr("layers")) {
        layers.push_back(layer_of(layer));
    }
    c.layer_count = static_cast<int32_t>(layers.size());
    c.layers = layers.data();
}

}  // namespace kivi_python
