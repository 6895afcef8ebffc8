// Intake of Python arrays, see array.h.
#include "array.h"

#include <limits>

#include "dlpack_abi.h"

namespace kivi_python {
namespace {

[[noreturn]] void refuse(const char* name, const std::string& why) {
    raise(KIVI_ERROR_INVALID_ARGUMENT, std::string(name) + ": " + why);
}

[[noreturn]] void refuse_type(const char* name, const std::string& why) {
    throw py::type_error(std::string(name) + ": " + why);
}

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

// The element behind a buffer format, one letter of the struct module in native or little-endian order.
Element element_of_format(const char* format, int64_t bytes) {
    if (format == nullptr) {
        return Element::other;  // plain bytes
    }
    if (*format == '@' || *format == '=' || *format == '<') {
        ++format;
    }
    if (format[0] == '\0' || format[1] != '\0') {
        return Element::other;
    }
    switch (format[0]) {
        case 'f': return Element::float32;
        case 'e': return Element::float16;
        case 'i':
        case 'l':
        case 'q': return bytes == 4 ? Element::int32 : bytes == 8 ? Element::int64 : Element::other;
        default: return Element::other;
    }
}

Element element_of_dlpack(dlpack::DataType type) {
    if (type.lanes != 1) {
        return Element::other;
    }
    switch (type.code) {
        case dlpack::kFloat:
            return type.bits == 32 ? Element::float32 : type.bits == 16 ? Element::float16 : Element::other;
        case dlpack::kBfloat: return type.bits == 16 ? Element::bfloat16 : Element::other;
        case dlpack::kInt:
            return type.bits == 32 ? Element::int32 : type.bits == 64 ? Element::int64 : Element::other;
        default: return Element::other;
    }
}

// ml_dtypes adds bfloat16 to numpy, but the buffer protocol has no format for it.
bool is_numpy_bfloat16(py::handle array) {
    if (!py::hasattr(array, "__array_interface__")) {
        return false;
    }
    const py::object dtype = py::getattr(array, "dtype", py::none());
    return std::string(py::str(py::getattr(dtype, "name", py::none()))) == "bfloat16";
}

// The capsule of object.__dlpack__: version 1 and no hidden copy if the producer knows these arguments.
py::object dlpack_capsule(py::handle array, bool cuda, void* stream) {
    py::dict arguments;
    if (cuda) {
        // CUDA: 1 is the legacy default stream, any other number is the consumer's stream itself.
        const auto handle = reinterpret_cast<intptr_t>(stream);
        arguments["stream"] = py::int_(handle == 0 ? 1 : handle);
    }
    const py::object method = array.attr("__dlpack__");
    try {
        return method(**arguments,
                      py::arg("max_version") = py::make_tuple(dlpack::kMajorVersion, dlpack::kMinorVersion),
                      py::arg("copy") = false);
    } catch (py::error_already_set& error) {
        if (!error.matches(PyExc_TypeError)) {
            throw;
        }
    }
    return method(**arguments);
}

}  // namespace

Array::Array(const char* name, py::handle array, Access access, void* stream) : name(name) {
    try {
        if (!take_buffer(array, access)) {
            take_dlpack(array, access, stream);
        }
    } catch (...) {
        release();
        throw;
    }
}

Array::~Array() { release(); }

void Array::release() noexcept {
    if (buffer_.obj != nullptr) {
        PyBuffer_Release(&buffer_);
    }
    if (managed_ == nullptr) {
        return;
    }
    if (versioned_) {
        auto* managed = static_cast<dlpack::ManagedTensorVersioned*>(managed_);
        if (managed->deleter != nullptr) {
            managed->deleter(managed);
        }
    } else {
        auto* managed = static_cast<dlpack::ManagedTensor*>(managed_);
        if (managed->deleter != nullptr) {
            managed->deleter(managed);
        }
    }
    managed_ = nullptr;
}

void Array::set_rank(int64_t given) {
    if (given > kMaxRank) {
        refuse(name,
               std::to_string(given) + " dimensions, at most " + std::to_string(kMaxRank) + " are taken");
    }
    rank = static_cast<int32_t>(given);
}

bool Array::get_buffer(py::handle array, Access access) {
    const int flags = access == Access::write ? PyBUF_RECORDS : PyBUF_RECORDS_RO;
    if (PyObject_GetBuffer(array.ptr(), &buffer_, flags) == 0) {
        return true;
    }
    PyErr_Clear();
    return false;
}

// False if the object has no buffer to give and DLPack should be tried.
bool Array::take_buffer(py::handle array, Access access) {
    if (!PyObject_CheckBuffer(array.ptr())) {
        return false;
    }
    py::object source = py::reinterpret_borrow<py::object>(array);
    bool bfloat16 = false;
    if (!get_buffer(source, access)) {
        bfloat16 = is_numpy_bfloat16(array);
        if (bfloat16) {
            source = array.attr("view")("uint16");  // same memory, a type that has a buffer format
        }
        if (!bfloat16 || !get_buffer(source, access)) {
            if (access == Access::write && get_buffer(source, Access::read)) {
                refuse(name, "the array is read-only");
            }
            return false;
        }
    }
    element_bytes = buffer_.itemsize;
    element = bfloat16 ? Element::bfloat16 : element_of_format(buffer_.format, buffer_.itemsize);
    data = buffer_.buf;
    set_rank(buffer_.ndim);
    for (int i = 0; i < rank; ++i) {
        shape[i] = buffer_.shape[i];
        stride[i] = buffer_.strides[i] / buffer_.itemsize;
        if (stride[i] * buffer_.itemsize != buffer_.strides[i]) {
            refuse(name, "stride of " + std::to_string(buffer_.strides[i]) + " bytes in dimension " +
                             std::to_string(i) + " is no multiple of the element's " +
                             std::to_string(buffer_.itemsize));
        }
    }
    return true;
}

void Array::take_dlpack(py::handle array, Access access, void* stream) {
    if (!py::hasattr(array, "__dlpack__") || !py::hasattr(array, "__dlpack_device__")) {
        refuse_type(name, "'" + type_name(array) + "' is no array: neither a buffer nor __dlpack__");
    }
    const auto [type, id] = py::cast<std::pair<int32_t, int32_t>>(array.attr("__dlpack_device__")());
    const bool cuda = type == dlpack::kCuda || type == dlpack::kCudaManaged;
    if (!cuda && type != dlpack::kCpu && type != dlpack::kCudaHost) {
        refuse(name, "DLPack device type " + std::to_string(type) + " is neither CPU nor CUDA");
    }
    device = cuda ? KIVI_CUDA : KIVI_CPU;
    device_id = cuda ? id : 0;

    const py::object capsule = dlpack_capsule(array, cuda, stream);
    if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
        auto* managed = static_cast<dlpack::ManagedTensorVersioned*>(
            PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
        if (managed->version.major != dlpack::kMajorVersion) {
            throw py::buffer_error(std::string(name) + ": DLPack version " +
                                   std::to_string(managed->version.major) + ", this build reads version 1");
        }
        PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
        managed_ = managed;
        versioned_ = true;
        if (access == Access::write && (managed->flags & dlpack::kReadOnly) != 0) {
            refuse(name, "the array is read-only");
        }
        if (access == Access::write && (managed->flags & dlpack::kIsCopied) != 0) {
            refuse(name, "the producer handed out a copy, results written to it would be lost");
        }
        take_dlpack_tensor(&managed->tensor);
    } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
        auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
        PyCapsule_SetName(capsule.ptr(), "used_dltensor");
        managed_ = managed;
        take_dlpack_tensor(&managed->tensor);
    } else {
        refuse_type(name, "__dlpack__ returned no unused DLPack capsule");
    }
}

void Array::take_dlpack_tensor(const void* pointer) {
    const auto& tensor = *static_cast<const dlpack::Tensor*>(pointer);
    element = element_of_dlpack(tensor.dtype);
    element_bytes = (static_cast<int64_t>(tensor.dtype.bits) * tensor.dtype.lanes + 7) / 8;
    if (element == Element::other) {
        dlpack_dtype_ = "DLPack type code " + std::to_string(tensor.dtype.code) + " of " +
                        std::to_string(tensor.dtype.bits) + " bits, " + std::to_string(tensor.dtype.lanes) +
                        " lanes";
    }
    set_rank(tensor.rank);
    int64_t compact = 1;
    for (int i = rank - 1; i >= 0; --i) {
        shape[i] = tensor.shape[i];
        stride[i] = tensor.strides != nullptr ? tensor.strides[i] : compact;
        compact *= shape[i];
    }
    data = tensor.data == nullptr ? nullptr : static_cast<char*>(tensor.data) + tensor.byte_offset;
}

int64_t Array::size() const {
    int64_t product = 1;
    for (int i = 0; i < rank; ++i) {
        product *= shape[i];
    }
    return product;
}

bool Array::contiguous() const {
    int64_t expected = 1;
    for (int i = rank - 1; i >= 0; --i) {
        if (shape[i] > 1 && stride[i] != expected) {
            return false;
        }
        expected *= shape[i];
    }
    return true;
}

std::string Array::dtype_text() const {
    switch (element) {
        case Element::float32: return "float32";
        case Element::float16: return "float16";
        case Element::bfloat16: return "bfloat16";
        case Element::int32: return "int32";
        case Element::int64: return "int64";
        default: break;
    }
    if (buffer_.obj != nullptr) {
        return "buffer format '" + std::string(buffer_.format == nullptr ? "B" : buffer_.format) + "'";
    }
    return dlpack_dtype_;
}

Tensor::Tensor(const char* name, py::handle array, Access access, void* stream)
    : array_(name, array, access, stream) {
    switch (array_.element) {
        case Element::float32: tensor_.dtype = KIVI_F32; break;
        case Element::float16: tensor_.dtype = KIVI_F16; break;
        case Element::bfloat16: tensor_.dtype = KIVI_BF16; break;
        default: refuse_type(name, array_.dtype_text() + " is not taken, only float32, float16 and bfloat16");
    }
    tensor_.data = array_.data;
    tensor_.device = array_.device;
    tensor_.device_id = array_.device_id;
    tensor_.rank = array_.rank;
    for (int i = 0; i < Array::kMaxRank; ++i) {
        tensor_.shape[i] = array_.shape[i];
        tensor_.stride[i] = array_.stride[i];
    }
}

Tensor::Tensor(const char* name, py::handle array, Access access, Staging& staging)
    : Tensor(name, array, access, staging.stream()) {
    staging.place(name, tensor_, static_cast<size_t>(array_.element_bytes), access);
}

void OptionalFloats::check_values(const char* name, int64_t count) const {
    const kivi_tensor* const tensor = tensor_.get();
    if (tensor == nullptr) {
        return;
    }
    if (tensor->dtype != KIVI_F32) {
        refuse_type(name, std::string(tensor->dtype == KIVI_F16 ? "float16" : "bfloat16") +
                              " is not taken, only float32");
    }
    if (tensor->rank != 1 || tensor->shape[0] != count || (count > 1 && tensor->stride[0] != 1)) {
        refuse(name, "must be " + std::to_string(count) + " float32 values in a row, one a query head");
    }
}

template <class T>
T integer(const char* name, py::handle value) {
    int overflow = 0;
    const py::object index = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
    if (!index) {
        PyErr_Clear();
        refuse_type(name, "'" + type_name(value) + "' is no integer");
    }
    const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (overflow != 0 || number < std::numeric_limits<T>::min() || number > std::numeric_limits<T>::max()) {
        refuse(name,
               std::string(py::str(index)) + " does not fit " + std::to_string(8 * sizeof(T)) + " bits");
    }
    return static_cast<T>(number);
}

template <class T>
std::vector<T> integers(const char* name, py::handle values) {
    std::vector<T> result;
    if (PyList_Check(values.ptr()) || PyTuple_Check(values.ptr()) || PyRange_Check(values.ptr())) {
        for (py::handle value : values) {
            result.push_back(integer<T>(name, value));
        }
        return result;
    }
    const Array array(name, values, Access::read);
    if (array.device != KIVI_CPU) {
        refuse(name, "device arrays are not taken, pass a list or a host array");
    }
    if (array.element != Element::int32 && array.element != Element::int64) {
        refuse_type(name, array.dtype_text() + " is not taken, only int32 and int64");
    }
    if (array.rank != 1) {
        refuse(name, std::to_string(array.rank) + " dimensions, must be 1");
    }
    for (int64_t i = 0; i < array.shape[0]; ++i) {
        const int64_t at = i * array.stride[0];
        const int64_t number = array.element == Element::int32 ? static_cast<const int32_t*>(array.data)[at]
                                                               : static_cast<const int64_t*>(array.data)[at];
        if (number < std::numeric_limits<T>::min() || number > std::numeric_limits<T>::max()) {
            refuse(name, std::to_string(number) + " does not fit " + std::to_string(8 * sizeof(T)) + " bits");
        }
        result.push_back(static_cast<T>(number));
    }
    return result;
}

template int32_t integer<int32_t>(const char*, py::handle);
template int64_t integer<int64_t>(const char*, py::handle);
template std::vector<int32_t> integers<int32_t>(const char*, py::handle);
template std::vector<int64_t> integers<int64_t>(const char*, py::handle);

}  // namespace kivi_python
