// Strided memory with marks around and between the elements.
#include "support/tensor.h"

#include <algorithm>
#include <cstring>

namespace kivi_test {
namespace {

constexpr uint8_t kMark = 0xA5;
constexpr size_t kGuard = 256;  // bytes before and after, a multiple of every element size

std::vector<int64_t> dense_strides(const std::vector<int64_t>& shape) {
    std::vector<int64_t> stride(shape.size());
    int64_t step = 1;
    for (size_t i = shape.size(); i-- > 0;) {
        stride[i] = step;
        step *= shape[i];
    }
    return stride;
}

}  // namespace

// visit(byte offset, whether this element was met before through a stride of 0)
template <class Visit>
void Tensor::for_each(Visit&& visit) const {
    std::vector<int64_t> index(shape_.size(), 0);
    for (int64_t size : shape_) {
        if (size == 0) return;
    }
    const size_t width = element_bytes(view_.dtype);
    while (true) {
        int64_t at = 0;
        bool again = false;
        for (size_t i = 0; i < shape_.size(); ++i) {
            at += index[i] * stride_[i];
            again = again || (stride_[i] == 0 && index[i] > 0);
        }
        visit(begin_ + size_t(at) * width, again);
        size_t axis = shape_.size();
        while (axis > 0 && ++index[axis - 1] == shape_[axis - 1]) index[--axis] = 0;
        if (axis == 0) return;
    }
}

Tensor::Tensor(int32_t dtype, std::vector<int64_t> shape, const Floats& values)
    : Tensor(dtype, shape, dense_strides(shape), 0, values) {}

Tensor::Tensor(int32_t dtype, std::vector<int64_t> shape, std::vector<int64_t> stride, int64_t offset,
               const Floats& values)
    : shape_(shape), stride_(stride) {
    const size_t width = element_bytes(dtype);
    int64_t last = 0;
    for (size_t i = 0; i < shape.size(); ++i) {
        view_.shape[i] = shape[i];
        view_.stride[i] = stride[i];
        if (shape[i] > 0) last += (shape[i] - 1) * stride[i];
    }
    view_.dtype = dtype;
    view_.device = backend().device;
    view_.rank = int32_t(shape.size());
    begin_ = kGuard + size_t(offset) * width;
    bytes_ = begin_ + size_t(last + 1) * width + kGuard;
    before_.assign(bytes_, kMark);
    size_t next = 0;
    for_each([&](size_t at, bool again) {
        if (again || next >= values.size()) return;
        const uint32_t bits = bits_of(dtype, round_to(dtype, values[next++]));
        std::memcpy(&before_[at], &bits, width);  // little-endian, as every machine the library runs on
    });
    memory_ = static_cast<uint8_t*>(backend().allocate(bytes_));
    backend().upload(memory_, before_.data(), bytes_);
    view_.data = memory_ + begin_;
}

Tensor::~Tensor() { backend().release(memory_); }

Floats Tensor::read() const {
    Bytes now(bytes_);
    backend().download(now.data(), memory_, bytes_);
    Floats values;
    for_each([&](size_t at, bool) {
        uint32_t bits = 0;
        std::memcpy(&bits, &now[at], element_bytes(view_.dtype));
        values.push_back(value_of(view_.dtype, bits));
    });
    return values;
}

bool Tensor::marks_intact() const {
    Bytes now(bytes_);
    backend().download(now.data(), memory_, bytes_);
    for_each([&](size_t at, bool) { std::memset(&now[at], kMark, element_bytes(view_.dtype)); });
    return now == Bytes(bytes_, kMark);
}

Workspace::Workspace(size_t bytes)
    : bytes_(bytes), memory_(static_cast<uint8_t*>(backend().allocate(bytes + 2 * kGuard))) {
    const Bytes marks(kGuard + std::min(bytes, size_t{1} << 20), kMark);
    backend().upload(memory_, marks.data(), marks.size());
    backend().upload(data() + bytes_, marks.data(), kGuard);
}

uint8_t* Workspace::data() const { return memory_ + kGuard; }

bool Workspace::marks_intact() const {
    Bytes around(2 * kGuard);
    backend().download(around.data(), memory_, kGuard);
    backend().download(around.data() + kGuard, data() + bytes_, kGuard);
    return around == Bytes(2 * kGuard, kMark);
}

bool Tensor::untouched() const {
    Bytes now(bytes_);
    backend().download(now.data(), memory_, bytes_);
    return now == before_;
}

}  // namespace kivi_test
