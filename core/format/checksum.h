// CRC-32 of blobs: polynomial 0x04C11DB7 reflected, as in zlib, PNG and IEEE 802.3.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kivi {

// Of `bytes` bytes that follow those whose checksum is `before`.
uint32_t crc32(const void* data, size_t bytes, uint32_t before = 0);

}  // namespace kivi
