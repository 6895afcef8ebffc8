// Copies between host arrays and their stand-ins, see staging.h.
#include "staging.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace kivi_python {
namespace {

bool is_dense(const kivi_tensor& tensor) {
    int64_t expected = 1;
    for (int axis = tensor.rank - 1; axis >= 0; --axis) {
        if (tensor.shape[axis] > 1 && tensor.stride[axis] != expected) {
            return false;
        }
        expected *= tensor.shape[axis];
    }
    return true;
}

// visit(offset in elements, count) for stretches without gaps, row by row, from `axis` on.
template <class Visit>
void for_each_stretch(const kivi_tensor& tensor, int axis, int64_t offset, const Visit& visit) {
    if (axis == tensor.rank) {
        visit(offset, int64_t{1});
    } else if (axis == tensor.rank - 1 && tensor.stride[axis] == 1) {
        visit(offset, tensor.shape[axis]);
    } else {
        for (int64_t i = 0; i < tensor.shape[axis]; ++i) {
            for_each_stretch(tensor, axis + 1, offset + i * tensor.stride[axis], visit);
        }
    }
}

}  // namespace

DeviceMemory::DeviceMemory(int32_t device, int32_t device_id, size_t bytes)
    : device_(device), device_id_(device_id), bytes_(bytes) {
    check(kivi_device_allocate(device, device_id, bytes, &data_));
}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(device_id_, other.device_id_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
}

DeviceMemory Pieces::take(int32_t device, int32_t device_id, size_t bytes) {
    const auto best = std::min_element(free_.begin(), free_.end(), [&](const DeviceMemory& a, const DeviceMemory& b) {
        return std::make_pair(a.bytes() < bytes, a.bytes()) < std::make_pair(b.bytes() < bytes, b.bytes());
    });
    if (best == free_.end() || best->bytes() < bytes) {
        return DeviceMemory(device, device_id, bytes);
    }
    DeviceMemory piece = std::move(*best);
    free_.erase(best);
    return piece;
}

Staging::~Staging() {
    for (Copy& copy : copies_) {
        pieces_.put(std::move(copy.piece));
    }
}

void Staging::place(const char* name, kivi_tensor& tensor, size_t element_bytes, Access access) {
    if (device_ == KIVI_CPU || tensor.device != KIVI_CPU) {
        return;
    }
    Copy copy{tensor, element_bytes, 0, access, {}, {}};
    int64_t elements = 1;
    for (int axis = tensor.rank - 1; axis >= 0; --axis) {
        if (access == Access::write && tensor.shape[axis] > 1 && tensor.stride[axis] == 0) {
            raise(KIVI_ERROR_INVALID_ARGUMENT, std::string(name) + ": an output cannot be broadcast");
        }
        tensor.stride[axis] = elements;
        elements *= tensor.shape[axis];
    }
    copy.bytes = static_cast<size_t>(elements) * element_bytes;
    copy.piece = pieces_.take(device_, device_id_, std::max<size_t>(copy.bytes, 1));
    if (!is_dense(copy.host)) {
        copy.dense.resize(copy.bytes);
    }
    tensor.data = copy.piece.data();
    tensor.device = device_;
    tensor.device_id = device_id_;
    copies_.push_back(std::move(copy));
}

// Outputs too: what the call does not write comes back as it was.
kivi_status Staging::upload() {
    for (Copy& copy : copies_) {
        const unsigned char* from = static_cast<const unsigned char*>(copy.host.data);
        if (!copy.dense.empty()) {
            unsigned char* to = copy.dense.data();
            for_each_stretch(copy.host, 0, 0, [&](int64_t offset, int64_t count) {
                const size_t some = static_cast<size_t>(count) * copy.element_bytes;
                std::memcpy(to, from + offset * static_cast<int64_t>(copy.element_bytes), some);
                to += some;
            });
            from = copy.dense.data();
        }
        const kivi_status status = kivi_device_copy(device_, device_id_, copy.piece.data(), from, copy.bytes, stream_);
        if (status != KIVI_OK) {
            return status;
        }
    }
    return KIVI_OK;
}

kivi_status Staging::download() {
    for (Copy& copy : copies_) {
        if (copy.access != Access::write) {
            continue;
        }
        unsigned char* const to = static_cast<unsigned char*>(copy.host.data);
        void* const dense = copy.dense.empty() ? to : copy.dense.data();
        const kivi_status status = kivi_device_copy(device_, device_id_, dense, copy.piece.data(), copy.bytes, stream_);
        if (status != KIVI_OK) {
            return status;
        }
        const unsigned char* from = copy.dense.data();
        if (!copy.dense.empty()) {
            for_each_stretch(copy.host, 0, 0, [&](int64_t offset, int64_t count) {
                const size_t some = static_cast<size_t>(count) * copy.element_bytes;
                std::memcpy(to + offset * static_cast<int64_t>(copy.element_bytes), from, some);
                from += some;
            });
        }
    }
    return KIVI_OK;
}

}  // namespace kivi_python
