// Structs that may grow: the caller's size is authoritative (kivi.h, "Structs"). Inputs are copied into the
// library's own full struct, outputs are written up to the caller's size.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cache/refuse.h"

namespace kivi {

// Size of each growable struct in the first release that had it. A struct that grows gets its old size
// written here as a number; until then it is the present one.
template <class T>
constexpr size_t first_released_size = sizeof(T);

// No release will pass this; a larger size is a caller that forgot to fill the field.
constexpr size_t kLargestStruct = 65536;

template <class T>
void check_struct_size(const char* name, size_t size) {
    if (size < first_released_size<T>) {
        refuse_argument(name, ": struct_size is ", size, ", below the first released size ",
                        first_released_size<T>, "; fill it with its init function");
    }
    if (size > kLargestStruct) {
        refuse_argument(name, ": struct_size is ", size, ", above the limit ", kLargestStruct,
                        "; fill it with its init function");
    }
}

inline void check_pointer(const char* name, const void* pointer, size_t alignment) {
    if (pointer == nullptr) refuse_argument(name, " is NULL");
    if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0) {
        refuse_argument(name, " is not aligned to ", alignment, " bytes");
    }
}

// Copy of an input struct.
template <class T>
T take_struct(const char* name, const T* from) {
    check_pointer(name, from, alignof(T));
    const size_t size = from->struct_size;
    check_struct_size<T>(name, size);
    T taken{};
    std::memcpy(&taken, from, std::min(size, sizeof(T)));
    const auto* bytes = reinterpret_cast<const unsigned char*>(from);
    for (size_t i = sizeof(T); i < size; i++) {
        if (bytes[i] != 0) {
            refuse(KIVI_ERROR_UNSUPPORTED, name, ": byte ", i, " of ", size,
                   " is not zero, and this library knows ", sizeof(T), " bytes; it is older than the caller");
        }
    }
    taken.struct_size = sizeof(T);
    return taken;
}

template <class T>
void check_output_struct(const char* name, const T* to, size_t size) {
    check_pointer(name, to, alignof(T));
    check_struct_size<T>(name, size);
}

// Writes an output struct; what the caller knows beyond this library becomes zero.
template <class T>
void put_struct(T* to, size_t size, T value) {
    value.struct_size = size;
    std::memcpy(static_cast<void*>(to), &value, std::min(size, sizeof(T)));
    if (size > sizeof(T)) std::memset(reinterpret_cast<unsigned char*>(to) + sizeof(T), 0, size - sizeof(T));
}

}  // namespace kivi
