// The structs that a DLPack capsule holds, as the DLPack 1.x specification lays them out
// (https://dmlc.github.io/dlpack/latest/c_api.html). Only what is exchanged is declared.
#pragma once
#include <cstdint>

namespace kivi_python::dlpack {

constexpr uint32_t kMajorVersion = 1;
constexpr uint32_t kMinorVersion = 0;  // what the intake asks for; later minors only add

enum DeviceType : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };
enum TypeCode : uint8_t { kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4 };
enum Flag : uint64_t { kReadOnly = 1, kIsCopied = 2 };

struct Device {
    int32_t type;
    int32_t id;
};

struct DataType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

struct Tensor {
    void* data;
    Device device;
    int32_t rank;
    DataType dtype;
    int64_t* shape;
    int64_t* strides;  // in elements; null: compact, row-major
    uint64_t byte_offset;
};

struct Version {
    uint32_t major;
    uint32_t minor;
};

// Capsule "dltensor", before version 1.
struct ManagedTensor {
    Tensor tensor;
    void* context;
    void (*deleter)(ManagedTensor*);
};

// Capsule "dltensor_versioned". Version, context and deleter stand first in every version to come.
struct ManagedTensorVersioned {
    Version version;
    void* context;
    void (*deleter)(ManagedTensorVersioned*);
    uint64_t flags;
    Tensor tensor;
};

}  // namespace kivi_python::dlpack
