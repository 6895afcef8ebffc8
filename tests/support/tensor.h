// Tensors in the backend's memory, with a mark in every byte that is not an element.
#pragma once
#include <cstdint>
#include <vector>

#include "support/backend.h"
#include "support/numbers.h"

namespace kivi_test {

class Tensor {
  public:
    // Contiguous, elements from `values` (rounded to the dtype) or, without them, marks.
    Tensor(int32_t dtype, std::vector<int64_t> shape, const Floats& values = {});
    // Any strides, beginning `offset` elements into the memory. Stride 0 broadcasts: `values` then holds the
    // elements that are stored, in the order of the other axes.
    Tensor(int32_t dtype, std::vector<int64_t> shape, std::vector<int64_t> stride, int64_t offset,
           const Floats& values = {});
    ~Tensor();
    Tensor(const Tensor&) = delete;
    Tensor& operator=(const Tensor&) = delete;

    operator const kivi_tensor*() const { return &view_; }
    kivi_tensor& view() { return view_; }
    Floats read() const;        // elements, in order of the shape
    bool marks_intact() const;  // nothing but elements was written
    bool untouched() const;     // nothing at all was written
    const void* data() const { return view_.data; }

  private:
    template <class Visit>
    void for_each(Visit&& visit) const;

    kivi_tensor view_{};
    std::vector<int64_t> shape_, stride_;
    uint8_t* memory_ = nullptr;  // the backend's
    size_t bytes_ = 0, begin_ = 0;
    Bytes before_;
};

// Workspace of the backend for calls of kivi_attend. It begins with marks and has some around it; the rest is as it comes.
class Workspace {
  public:
    explicit Workspace(size_t bytes);
    ~Workspace() { backend().release(memory_); }
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;
    uint8_t* data() const;
    size_t size() const { return bytes_; }
    bool marks_intact() const;  // those around it

  private:
    size_t bytes_;
    uint8_t* memory_;
};

}  // namespace kivi_test
