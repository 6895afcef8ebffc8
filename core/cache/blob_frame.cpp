// Magic, mark, size and CRC of blobs.
#include "cache/blob_frame.h"

#include <cstring>

#include "format/checksum.h"

namespace kivi {
namespace {

constexpr uint32_t kByteOrder = 0x01020304;

}  // namespace

ByteWriter begin_blob(const BlobKind& kind, uint8_t* blob, size_t bytes) {
    ByteWriter to(blob);
    to.put_bytes(kind.magic, sizeof kind.magic);
    to.put(kind.version);
    to.put(kByteOrder);
    to.put(static_cast<uint64_t>(bytes));
    return to;
}

void seal_blob(uint8_t* blob, size_t bytes) {
    ByteWriter(blob + bytes - kBlobCrcBytes).put(crc32(blob, bytes - kBlobCrcBytes));
}

ByteReader open_blob(const BlobKind& kind, const uint8_t* blob, size_t bytes) {
    if (bytes < kind.header_bytes + kBlobCrcBytes) {
        refuse_corrupt(kind, "it has ", bytes, " bytes, fewer than a header");
    }
    if (std::memcmp(blob, kind.magic, sizeof kind.magic) != 0) {
        refuse_corrupt(kind, "it does not begin as one of its kind does");
    }
    ByteReader from(blob + sizeof kind.magic);
    const auto version = from.get<uint32_t>();
    if (from.get<uint32_t>() != kByteOrder) refuse_corrupt(kind, "its byte order mark is wrong");
    const auto size = from.get<uint64_t>();
    if (size != bytes) {
        refuse_corrupt(kind, "it says that it has ", size, " bytes, and ", bytes, " were given");
    }
    if (ByteReader(blob + bytes - kBlobCrcBytes).get<uint32_t>() != crc32(blob, bytes - kBlobCrcBytes)) {
        refuse_corrupt(kind, "its CRC does not fit its bytes");
    }
    if (version != kind.version) {
        refuse(KIVI_ERROR_MISMATCH, kind.name, "'s format version is ", version, "; this library reads ",
               kind.version);
    }
    return from;
}

}  // namespace kivi
