// From kivi_status to Python exceptions: one class a status, all under kivi.Error.
#pragma once
#include <pybind11/pybind11.h>

#include <string>

#include "kivi/kivi.h"

namespace kivi_python {

namespace py = pybind11;

// Makes the classes and adds them to the module.
void bind_errors(py::module_& module);

// Raises the class of `status` with `text`. Used by the binding for what it finds itself.
[[noreturn]] void raise(kivi_status status, const std::string& text);

// Raises the class of `status` with kivi_last_error(), unless it is KIVI_OK.
void check(kivi_status status);

}  // namespace kivi_python
