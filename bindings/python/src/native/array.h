// Borrows Python arrays without copies: the buffer protocol (numpy), ml_dtypes bfloat16, and DLPack.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "errors.h"
#include "staging.h"

namespace kivi_python {

enum class Element { float32, float16, bfloat16, int32, int64, other };

// One Python array, held until this object goes. The order of intake: the buffer protocol where the type
// has it (it costs least and knows about read-only memory), then bfloat16 of ml_dtypes, which has no
// buffer format, then __dlpack__. `name` is the argument, for messages. `stream` is the consumer's stream
// and matters for CUDA arrays only.
class Array {
  public:
    Array(const char* name, py::handle array, Access access, void* stream = nullptr);
    ~Array();
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;

    static constexpr int kMaxRank = 4;

    const char* name;
    void* data = nullptr;
    Element element = Element::other;
    int64_t element_bytes = 0;
    int32_t device = KIVI_CPU;
    int32_t device_id = 0;
    int32_t rank = 0;
    int64_t shape[kMaxRank] = {};
    int64_t stride[kMaxRank] = {};  // in elements

    int64_t size() const;            // elements
    bool contiguous() const;         // row-major without gaps
    std::string dtype_text() const;  // for messages

  private:
    bool get_buffer(py::handle array, Access access);
    bool take_buffer(py::handle array, Access access);
    void take_dlpack(py::handle array, Access access, void* stream);
    void take_dlpack_tensor(const void* tensor);
    void set_rank(int64_t rank);
    void release() noexcept;

    Py_buffer buffer_ = {};    // buffer_.obj is null unless the buffer protocol was used
    void* managed_ = nullptr;  // the DLPack tensor to give back
    bool versioned_ = false;
    std::string dlpack_dtype_;  // of an element that is `other`
};

// An array of floats as the C API wants it; None is refused. With `staging`, on the device of a cache.
class Tensor {
  public:
    Tensor(const char* name, py::handle array, Access access, void* stream = nullptr);
    Tensor(const char* name, py::handle array, Access access, Staging& staging);
    const kivi_tensor* get() const { return &tensor_; }
    const kivi_tensor& operator*() const { return tensor_; }

  private:
    Array array_;
    kivi_tensor tensor_;
};

// The same, where None is allowed and becomes a null pointer.
class OptionalTensor {
  public:
    template <class Where>  // a stream or a Staging
    OptionalTensor(const char* name, py::handle array, Access access, Where&& where) {
        if (!array.is_none()) {
            tensor_.emplace(name, array, access, where);
        }
    }
    OptionalTensor(const char* name, py::handle array, Access access)
        : OptionalTensor(name, array, access, nullptr) {}
    const kivi_tensor* get() const { return tensor_ ? tensor_->get() : nullptr; }

  private:
    std::optional<Tensor> tensor_;
};

// `count` float32 values in a row (learned sinks), or a null pointer for None.
class OptionalFloats {
  public:
    template <class Where>  // a stream or a Staging
    OptionalFloats(const char* name, py::handle array, int64_t count, Where&& where)
        : tensor_(name, array, Access::read, where) {
        check_values(name, count);
    }
    const float* get() const { return tensor_.get() ? static_cast<const float*>(tensor_.get()->data) : nullptr; }

  private:
    void check_values(const char* name, int64_t count) const;

    OptionalTensor tensor_;
};

// Ids, counts or offsets from a sequence of ints or a one-dimensional int32 or int64 array.
template <class T>
std::vector<T> integers(const char* name, py::handle values);

// One integer in the range of T, with a message that names the argument.
template <class T>
T integer(const char* name, py::handle value);

}  // namespace kivi_python
