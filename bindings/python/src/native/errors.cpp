// The exception classes. Each is a kivi.Error and also the built-in class that Python code would expect.
#include "errors.h"

namespace kivi_python {
namespace {

struct ErrorClass {
    kivi_status status;
    const char* name;
    PyObject** builtin;  // filled in by the interpreter before the module is
    const char* doc;
};

const ErrorClass kClasses[] = {
    {KIVI_ERROR_INVALID_ARGUMENT, "InvalidArgumentError", &PyExc_ValueError,
     "The caller's mistake: out of range, wrong shape, read-only output. Also a ValueError."},
    {KIVI_ERROR_UNSUPPORTED, "UnsupportedError", &PyExc_NotImplementedError,
     "Well-formed, but this build or device does not do it. Also a NotImplementedError."},
    {KIVI_ERROR_OUT_OF_MEMORY, "OutOfMemoryError", &PyExc_MemoryError,
     "Host or device memory is exhausted. Also a MemoryError."},
    {KIVI_ERROR_CAPACITY, "CapacityError", &PyExc_RuntimeError,
     "The cache or a sequence is full; nothing was appended. Also a RuntimeError."},
    {KIVI_ERROR_NO_DEVICE, "NoDeviceError", &PyExc_RuntimeError,
     "No driver or no such device. Also a RuntimeError."},
    {KIVI_ERROR_DEVICE, "DeviceError", &PyExc_RuntimeError,
     "A device call failed; the cache then answers queries only. Also a RuntimeError."},
    {KIVI_ERROR_STATE, "StateError", &PyExc_RuntimeError,
     "Not allowed now: closed cache, conflicting use by two threads, frozen moments. Also a RuntimeError."},
    {KIVI_ERROR_CORRUPT, "CorruptError", &PyExc_ValueError, "A blob is damaged. Also a ValueError."},
    {KIVI_ERROR_MISMATCH, "MismatchError", &PyExc_ValueError,
     "A sound blob of another layout, spec or encoder table. Also a ValueError."},
    {KIVI_ERROR_BUFFER_TOO_SMALL, "BufferTooSmallError", &PyExc_BufferError,
     "A workspace or export buffer is too small. Also a BufferError."},
    {KIVI_ERROR_INTERNAL, "InternalError", &PyExc_RuntimeError,
     "A fault of the library. Also a RuntimeError."},
};
constexpr size_t kClassCount = sizeof kClasses / sizeof kClasses[0];

// Live as long as the process: exceptions may still be raised while the interpreter shuts down.
PyObject* base_class;
PyObject* classes[kClassCount];

PyObject* make_class(const char* name, const char* doc, py::handle bases, py::dict attributes) {
    const std::string qualified = std::string("kivi.") + name;
    PyObject* made = PyErr_NewExceptionWithDoc(qualified.c_str(), doc, bases.ptr(), attributes.ptr());
    if (made == nullptr) {
        throw py::error_already_set();
    }
    return made;
}

PyObject* class_of(kivi_status status) {
    for (size_t i = 0; i < kClassCount; ++i) {
        if (kClasses[i].status == status) {
            return classes[i];
        }
    }
    return base_class;
}

}  // namespace

void bind_errors(py::module_& module) {
    py::dict attributes;
    attributes["status"] = py::none();
    base_class =
        make_class("Error", "Base of every error that libkivi reports. `status` is the number of the C API.",
                   py::handle(PyExc_Exception), attributes);
    module.attr("Error") = py::handle(base_class);
    for (size_t i = 0; i < kClassCount; ++i) {
        const ErrorClass& entry = kClasses[i];
        py::dict own;
        own["status"] = entry.status;
        const py::tuple bases = py::make_tuple(py::handle(base_class), py::handle(*entry.builtin));
        classes[i] = make_class(entry.name, entry.doc, bases, own);
        module.attr(entry.name) = py::handle(classes[i]);
    }
}

void raise(kivi_status status, const std::string& text) {
    PyErr_SetString(class_of(status), text.c_str());
    throw py::error_already_set();
}

void check(kivi_status status) {
    if (status != KIVI_OK) {
        raise(status, kivi_last_error());
    }
}

}  // namespace kivi_python
