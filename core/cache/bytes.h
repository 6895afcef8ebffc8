// Numbers in blobs: little-endian, one after the other, any alignment. The machines that libkivi is built for
// are little-endian.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kivi {

class ByteWriter {
  public:
    explicit ByteWriter(uint8_t* at) : at_(at) {}
    template <class T>
    void put(T number) {
        put_bytes(&number, sizeof number);
    }
    void put_bytes(const void* from, size_t bytes) {
        if (bytes > 0) std::memcpy(at_, from, bytes);
        at_ += bytes;
    }
    void put_zeros(size_t bytes) {
        std::memset(at_, 0, bytes);
        at_ += bytes;
    }
    uint8_t* at() const { return at_; }

  private:
    uint8_t* at_;
};

class ByteReader {
  public:
    explicit ByteReader(const uint8_t* at) : at_(at) {}
    template <class T>
    T get() {
        T number;
        get_bytes(&number, sizeof number);
        return number;
    }
    void get_bytes(void* to, size_t bytes) {
        if (bytes > 0) std::memcpy(to, at_, bytes);
        at_ += bytes;
    }

  private:
    const uint8_t* at_;
};

}  // namespace kivi
