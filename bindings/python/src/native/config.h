// From the dataclasses of kivi/_config.py to the structs of the C API, and back.
#pragma once
#include <vector>

#include "errors.h"

namespace kivi_python {

// A kivi_config with the layer table that it points to.
struct Config {
    explicit Config(py::handle config);
    Config(const Config&) = delete;
    Config& operator=(const Config&) = delete;

    std::vector<kivi_layer> layers;
    kivi_config c;
};

kivi_spec spec_of(py::handle spec);
py::dict fields_of(const kivi_spec& spec);

}  // namespace kivi_python
